# SPDX-License-Identifier: Apache-2.0
"""What the engine allocates for a budget: stock vLLM beside this fork.

`python -m benchmarks.allocation` starts the real engine twice a row, once with the
native wheel as published and once with what is installed, and prints both. Each
build is imported once and each row runs in a forked child of it.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from checks.report import table
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings, inherited
from cpu_wheel.steps import make_stock
from tests.platforms.cpu_kv_cache_child import in_child

VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
MiB = 1 << 20
GiB = 1 << 30


class Row(NamedTuple):
    """A budget and the cache tokens that the fork must allocate for it.

    Attributes:
        variable: VLLM_CPU_KVCACHE_SPACE.
        explicit: kv_cache_memory_bytes.
        tokens: None means: sized from gpu_memory_utilization.
    """

    variable: str
    explicit: int | None
    tokens: int | None


ROWS = (
    Row("1", None, 17881),
    Row("4", None, 71527),
    Row("1", 128 * MiB, 2231),
    Row("4", 128 * MiB, 2231),
    Row("0.125", None, 2231),
    Row("0", None, None),
    Row("", 128 * MiB, 2231),
)


def allocate(row: Row) -> dict[str, Any]:
    """Start an engine with a row's budget; return what it allocated, or its error."""
    from tests.platforms.cpu_kv_cache_utils import (
        reference_engine,
        share_of_memory,
    )

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = row.variable
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine = reference_engine(
                Path(folder),
                kv_cache_memory_bytes=row.explicit,
                gpu_memory_utilization=share_of_memory(3 * GiB),
            )
        cache_config = engine.llm_engine.vllm_config.cache_config
        return {
            "tokens": cache_config.kv_cache_size_tokens,
            "blocks": cache_config.num_gpu_blocks,
            "bytes": cache_config.kv_cache_memory_bytes,
        }
    except Exception as error:
        # A pydantic ValidationError adds lines around the message.
        details: list[Any] = getattr(error, "errors", list)()
        message = details[0]["msg"] if details else str(error)
        return {"error": message.splitlines()[0].split(". ")[0]}


def measure(results: int) -> None:
    """Run every row in a forked child and write a JSON line each.

    Args:
        results: The file descriptor that takes the lines; standard output and
            error are the engine's.
    """
    import vllm  # imported once, before the forks

    with os.fdopen(results, "w") as out:
        for row in ROWS:
            try:
                result = in_child(allocate, row=row)
            except RuntimeError as error:
                result = {"error": str(error)}
            print(json.dumps(result | {"vllm": vllm.__file__}), file=out, flush=True)


def run(build: str, folder: Path | None, log: Path) -> list[dict[str, Any]]:
    """Measure a build in a process of its own.

    Args:
        build: What to call it.
        folder: Where its vLLM is, None for what is installed.
        log: The file that takes the engines' output.

    Returns:
        What was allocated, or the error, by row.
    """
    environment = inherited("VLLM_", "PYTHONPATH")
    # With a thread for each core, two engines at once would wait for each other.
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if folder:
        environment["PYTHONPATH"] = str(folder)
    reader, writer = os.pipe()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.allocation", "--results", str(writer)],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writer],
        )
    os.close(writer)
    results = []
    with os.fdopen(reader) as lines:
        for number, line in enumerate(lines, start=1):
            results.append(json.loads(line))
            print(f"{build}: {number} of {len(ROWS)} engines", file=sys.stderr)
    if process.wait() != 0 or len(results) != len(ROWS):
        sys.exit(f"allocation: {build} ended with {process.returncode}, see {log}")
    return results


def show(result: dict[str, Any]) -> str:
    """Return a cell of the table."""
    if "error" in result:
        return f"error: {result['error'][:60]}"
    if result["bytes"] is None:
        return f"{result['tokens']:,}, sized from gpu_memory_utilization"
    return f"{result['tokens']:,}"


def as_expected(row: Row, result: dict[str, Any]) -> bool:
    """Return whether the fork allocated what the row says."""
    if row.tokens is None:
        return result.get("bytes", 0) is None and result["tokens"] > 0
    return result.get("tokens") == row.tokens


def measure_all(
    builds: dict[str, Path | None], logs: Path
) -> list[tuple[dict[str, Any], ...]]:
    """Measure all builds, and return their results by row."""
    # Side by side, where two engines with the largest budget fit.
    fits = psutil.virtual_memory().available > 12 * GiB
    with concurrent.futures.ThreadPoolExecutor(2 if fits else 1) as pool:
        files = [logs / f"allocation-{build}.log" for build in builds]
        return list(zip(*pool.map(run, builds, builds.values(), files), strict=True))


def render(builds: Iterable[str], results: list[tuple[dict[str, Any], ...]]) -> str:
    """Return the results as a table."""
    cells = (
        (
            row.variable or "(empty)",
            f"{row.explicit // MiB} MiB" if row.explicit else "–",
            *map(show, result),
        )
        for row, result in zip(ROWS, results, strict=True)
    )
    return table((VARIABLE, "kv_cache_memory_bytes", *builds), cells)


def compare(builds: dict[str, Path | None], logs: Path) -> str:
    """Measure builds, of which the last must allocate what is asked for.

    Returns:
        A table of what each allocated.
    """
    results = measure_all(builds, logs)
    for row, result in zip(ROWS, results, strict=True):
        if not as_expected(row, result[-1]):
            sys.exit(f"allocation: {row}: {result[-1]}, see {logs}")
    return render(builds, results)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.allocation",
        description="Show what the engine allocates for a budget, stock and fork.",
        epilog="Exit status 1 when the fork allocates anything else than it must.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--results", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.results is not None:
        measure(arguments.results)
        return 0

    settings = Settings.from_environment()
    release = load_release(settings.release)
    builds: dict[str, Path | None] = {}
    if release.published_native_wheel:
        builds["stock"] = make_stock(settings)
    else:
        print(
            f"allocation: no native wheel of vLLM {release.version} is published, so "
            "there is no stock build beside it",
            file=sys.stderr,
        )
    builds["fork"] = None
    results = measure_all(builds, BUILD)
    rows: list[dict[str, Any]] = [
        {
            "VLLM_CPU_KVCACHE_SPACE": row.variable,
            "kv_cache_memory_bytes": row.explicit,
            **dict(zip(builds, result, strict=True)),
            "as expected": as_expected(row, result[-1]),
        }
        for row, result in zip(ROWS, results, strict=True)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(render(builds, results))
    wrong = [
        row.variable
        for row, result in zip(ROWS, rows, strict=True)
        if not result["as expected"]
    ]
    for variable in wrong:
        print(f"allocation: not as expected: {variable!r}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
