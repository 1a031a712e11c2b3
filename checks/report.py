# SPDX-License-Identifier: Apache-2.0
"""How results are shown, and where they were measured."""

import json
import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def stored(path: Path) -> dict[str, Any]:
    """Return the results of a file, by release; none if there is no file."""
    if not path.exists():
        return {}
    results: dict[str, Any] = json.loads(path.read_text())["releases"]
    return results


def store(path: Path, releases: dict[str, Any]) -> None:
    """Write the results of all releases, with the date and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(place() | {"releases": releases}, depth=4) + "\n")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def dump(value: Any, depth: int) -> str:
    """Return JSON that has each item on a line down to a depth, and none below."""
    if depth == 0 or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(dump(item, depth - 1) for item in value) + "\n]"
    items = (f"{json.dumps(key)}: {dump(v, depth - 1)}" for key, v in value.items())
    return "{\n" + ",\n".join(items) + "\n}"


def place() -> dict[str, str]:
    """Return the date, and the machine that results were measured on."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpu)
    flags = set(cpu.split())
    best = next(
        (
            name
            for flag, name in (
                ("amx_bf16", "AMX"),
                ("avx512_bf16", "AVX512-BF16"),
                ("avx512f", "AVX512"),
                ("avx2", "AVX2"),
            )
            if flag in flags
        ),
        "",
    )
    name = (model[1].strip() if model else platform.machine()) + f" with {best}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {name.strip()}, {memory} GiB",
    }
