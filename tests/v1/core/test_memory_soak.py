# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Random limits, usage, page cache and budgets, in real control groups.

Nothing that the accounting lets through may be killed, and nothing that it refuses may
fit with 5 % to spare. The second is tried, not computed: after a refusal the process
allocates a twentieth more than it was refused, and the kernel decides.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.v1.core.control_groups import (
    GiB,
    MiB,
    control_group,
    engine_in,
    fill_page_cache,
    needs_groups,
)
from tests.v1.core.kv_budget_models import qwen3, write_model
from vllm.utils import memory_limits

pytestmark = [pytest.mark.cgroup_test, pytest.mark.slow_test, needs_groups]

COMBINATIONS = 200
FILE_SIZE = 512 * MiB

# Loads the module alone: importing vllm would take minutes for all of these.
ALLOCATOR = """
import ctypes, importlib.util, json, mmap, sys
spec = importlib.util.spec_from_file_location("memory_limits", sys.argv[1])
memory_limits = sys.modules["memory_limits"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory_limits)
case = json.loads(sys.argv[2])

def hold(size):
    if not size:
        return None
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), 1, size)
    return mapping

usage = hold(case["usage"])
buffer = bytearray(1 << 20)
for _ in range(case["reads"]):
    with open(case["file"], "rb", buffering=0) as file:
        for _ in range(case["cache"] >> 20):
            file.readinto(buffer)
available = min(limit.available for limit in memory_limits.limits_of_node(0))
print("AVAILABLE", available, flush=True)
if case["budget"] <= available:
    cache = hold(case["budget"])
    print("KEPT", flush=True)
else:
    print("REFUSED", flush=True)
    cache = hold(int(case["budget"] / 0.95))
    print("FITTED", flush=True)
"""


def random_case(number: int, file: Path) -> dict[str, Any]:
    """Budgets are near what is left, where it is hard to decide."""
    rng = random.Random(number)
    limit = rng.randrange(128 * MiB, FILE_SIZE)
    usage = int(limit * rng.uniform(0, 0.7))
    return {
        "limit": limit,
        "usage": usage,
        "reads": rng.choice((0, 1, 2)),
        "cache": int(limit * rng.uniform(0, 1.2)) % FILE_SIZE,
        "budget": int((limit - usage) * rng.uniform(0.8, 1.05)),
        "file": str(file),
    }


@pytest.fixture
def big_file(tmp_path: Path) -> Iterator[Path]:
    """A file that does not stay, as pytest keeps the folders of three runs."""
    yield tmp_path / "checkpoint"
    (tmp_path / "checkpoint").unlink(missing_ok=True)


def drop_page_cache(file: Path) -> None:
    """Forget a file, so that the group that reads it next is charged for it."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_nothing_is_killed_and_nothing_refused_that_fits(big_file: Path) -> None:
    file = big_file
    subprocess.run(["sh", "-c", f"head -c {FILE_SIZE} /dev/zero > {file}"], check=True)
    subprocess.run(["sync", str(file)], check=True)
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for number in range(COMBINATIONS):
        case = random_case(number, file)
        drop_page_cache(file)
        with control_group(limit=case["limit"]) as group:
            arguments = ("-c", ALLOCATOR, memory_limits.__file__, json.dumps(case))
            result = subprocess.run(
                group.command(sys.executable, *arguments),
                capture_output=True,
                text=True,
                check=False,
            )
            assert "AVAILABLE" in result.stdout, result.stderr
            words = " ".join(result.stdout.split()[2:])
            killed = group.kills() > 0
        outcomes.setdefault(f"{words} {'killed' if killed else ''}".strip(), []).append(
            case | {"available": int(result.stdout.split()[1])}
        )
    print({outcome: len(cases) for outcome, cases in outcomes.items()})
    # What is let through is kept; what is refused is killed if it is tried.
    assert outcomes.keys() == {"KEPT", "REFUSED killed"}, outcomes


@pytest.mark.parametrize("number", range(6))
def test_engines_are_not_killed(tmp_path: Path, big_file: Path, number: int) -> None:
    """The same for engines: 1 to 3 GiB, of which an engine itself takes 0.5."""
    model = write_model(tmp_path / "model", qwen3(layers=28))
    rng = random.Random(number)
    limit = rng.randrange(GiB, 3 * GiB)
    budget = int((limit - 512 * MiB) * rng.uniform(0.7, 1.3))
    with control_group(limit=limit) as group:
        fill_page_cache(group, big_file, int(limit * rng.uniform(0, 1)))

        outcome = engine_in(
            group,
            model,
            max_model_len=128,
            max_num_batched_tokens=128,
            kv_cache_memory_bytes=budget,
        )

        print(limit, budget, outcome)
        assert group.kills() == 0
        assert outcome.status == 0
        assert outcome.num_blocks or "Available memory" in outcome.error
