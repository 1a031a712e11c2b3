# SPDX-License-Identifier: Apache-2.0
"""`make matrix`: the KV cache tests on every release of upstream.toml.

A release that has a native wheel is built, and its wheel unpacked into a folder of
its own that is put before .venv's packages; of one that has none yet the patched
tree stands in, for what needs no native code. What needs it is run where the release
was compiled (`make test RELEASE=X`), and --compiled takes the report of that.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from checks import report
from checks.junit import Outcome, count, read, run_pytest
from cpu_wheel import install, steps
from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import load_release, read_pins
from cpu_wheel.settings import Settings

RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
WORK = BUILD / "matrix"
TIMEOUT = 300
# A group, its tests, and whether they start an engine.
GROUPS = (
    ("configuration", "tests/platforms/test_cpu_kv_cache_budget.py", False),
    ("allocation", "tests/platforms/test_cpu_kv_cache_allocation.py", True),
)


def build(settings: Settings) -> tuple[Path, bool]:
    """Return a folder that holds the patched vLLM of a release.

    Returns:
        The folder, and whether its native code is there.
    """
    release = load_release(settings.release)
    if release.published_native_wheel is None:
        return steps.make_source(settings), False
    wheel = steps.make_wheel(settings, ROOT / "dist")
    folder = WORK / f"vllm-{release.version}-{sha256(wheel)[:12]}"
    install.unpack_wheel(wheel, folder)
    return folder, True


def check(version: str) -> dict[str, Any]:
    """Build a release and run what can be run of it."""
    # Another release's archives or tree would be of no use.
    settings = Settings(release=version, cache=Settings.from_environment().cache)
    result: dict[str, Any] = {"source": steps.source_key(load_release(version))}
    try:
        folder, native = build(settings)
        result["built"] = "wheel" if native else "tree"
        for group, tests, needs_engine in GROUPS:
            if needs_engine and not native:
                result[group] = compiled(version, group)
            else:
                result[group] = run_group(version, group, tests, folder)
    except BuildError as error:
        return {"error": str(error)}
    return result


def compiled(version: str, group: str) -> dict[str, Any]:
    """Return the stored result of a group where the release was compiled, if any."""
    result: dict[str, Any] = report.stored(RESULTS).get(version, {}).get(group, {})
    if "where" in result:
        return result
    return {"not run": "no native wheel is published"}


def take_report(version: str, junit: Path, where: str) -> None:
    """Store the tests of a release that was compiled, from their report.

    The allocation tests go into the table of releases, and all tests into one by file.

    Args:
        version: The release, which is among the stored ones.
        junit: A junit XML file.
        where: Where it was compiled and run, for the table.

    Raises:
        BuildError: The report has no such tests.
    """
    group, tests, _ = GROUPS[-1]
    if not junit.is_file():
        raise BuildError(f"{junit}: no such report")
    by_file: dict[str, dict[str, Outcome]] = {}
    for test, outcome in read(junit).items():
        file, _, name = test.partition("::")
        by_file.setdefault(file, {})[name] = outcome
    outcomes = by_file.get(tests, {})
    if not outcomes:
        raise BuildError(f"{junit} has no outcome of {tests}")
    stored = report.stored(RESULTS)[version]
    words = {test: " ".join(filter(None, o)) for test, o in outcomes.items()}
    stored[group] = count(outcomes.values()) | {"where": where, "tests": words}
    stored["files"] = {
        file: count(found.values())
        | {"not passed": [" ".join(o) for o in found.values() if o.result != "passed"]}
        for file, found in sorted(by_file.items())
    }
    store(version, stored)


def run_group(version: str, group: str, tests: str, folder: Path) -> dict[str, Any]:
    """Run the tests of a group and return counts, seconds and outcomes by test."""
    print(f"matrix: {version} {group} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    junit = WORK / version / f"{group}.xml"
    outcomes = run_pytest([tests], folder, ROOT, junit, TIMEOUT)
    return {
        **count(outcomes.values()),
        "seconds": round(time.monotonic() - start),
        "tests": {
            test.partition("::")[2]: " ".join(filter(None, outcome))
            for test, outcome in outcomes.items()
        },
    }


def store(version: str, result: dict[str, Any]) -> None:
    """Put the result of a release into the stored ones, newest release first."""
    stored = report.stored(RESULTS) | {version: result}
    report.store(RESULTS, {v: stored[v] for v in read_pins()["release"] if v in stored})


def passed(result: dict[str, Any]) -> bool:
    """Return whether everything passed that was to run."""
    groups = [result.get(group, {}) for group, _, _ in GROUPS]
    return "error" not in result and all(
        "not run" in group or (group["passed"] > 0 and group["failed"] == 0)
        for group in groups
    )


def show(result: dict[str, Any], group: str) -> str:
    """Return a cell of the table."""
    if "error" in result:
        return result["error"] if group == GROUPS[0][0] else "–"
    cell = result[group]
    if "not run" in cell:
        return f"– ({cell['not run']})"
    skipped = f", {cell['skipped']} skipped" if cell["skipped"] else ""
    where = f" ({cell['where']})" if "where" in cell else ""
    return f"{cell['passed']} passed, {cell['failed']} failed{skipped}{where}"


def table(results: dict[str, Any]) -> str:
    """Return the results as a table, release by test group."""
    groups = [group for group, _, _ in GROUPS]
    return report.table(
        ("release", "built", *groups),
        (
            (version, result.get("built", "–"), *(show(result, g) for g in groups))
            for version, result in results.items()
        ),
    )


def files(version: str, result: dict[str, Any]) -> str:
    """Return the tests of a compiled release by file, and why some did not pass."""
    found = result["files"]
    counts = ("passed", "failed", "skipped")
    rows = [(f"`{file}`", *(found[file][c] for c in counts)) for file in found]
    total = [sum(f[c] for f in found.values()) for c in counts]
    reasons = Counter(reason for f in found.values() for reason in f["not passed"])
    lines = [f"- {number} {reason}" for reason, number in reasons.most_common()]
    return f"""
## {version}, {result["allocation"]["where"]}

{report.table(("file", *counts), [*rows, ("all", *total)])}

Not passed, and why:

{chr(10).join(lines) or "nothing"}
"""


def page(stored: dict[str, Any]) -> str:
    """Return docs/results/matrix.md."""
    releases = stored["releases"].items()
    compiled = "".join(files(v, result) for v, result in releases if "files" in result)
    return f"""# Our tests on each release

`python -m checks.matrix --show` prints this page; `make matrix` measures it.
{stored["date"]}, {stored["machine"]}:

{table(stored["releases"])}
{compiled}"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="checks.matrix",
        description="Build every release of upstream.toml and test what can be run.",
        epilog="Exit status 1 when a release cannot be built or a test fails.",
    )
    parser.add_argument(
        "releases",
        nargs="*",
        metavar="X",
        help="only these; the others keep what is stored",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print docs/results/matrix.md from what is stored",
    )
    parser.add_argument(
        "--compiled",
        nargs=3,
        metavar=("X", "REPORT", "WHERE"),
        help="store the tests of release X from the junit REPORT, which was made WHERE "
        "it was compiled",
    )
    arguments = parser.parse_args()
    if arguments.compiled:
        version, junit, where = arguments.compiled
        try:
            take_report(version, Path(junit), where)
        except BuildError as error:
            sys.exit(f"matrix: {error}")
    if arguments.show or arguments.compiled:
        print(page(json.loads(RESULTS.read_text())), end="")
        return 0
    chosen = arguments.releases
    results = {}
    for version in chosen or read_pins()["release"]:
        results[version] = check(version)
        store(version, results[version])
    print(table(results))
    return 0 if all(map(passed, results.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
