# SPDX-License-Identifier: Apache-2.0
"""`make upstream-tests`: upstream's own suites on stock and on patched vLLM.

The tests are those of the sdist on both sides, in a copy of its tree that has no
vllm/, so that only the build decides what is imported. Stock is the native wheel as
published; of a release that has none yet, the sdist's Python tree stands on the one
side and the patched tree on the other. 0.34.0 stops on x86 without triton-cpu, so its
stock tree has the one patch that lets it run.
"""

import argparse
import collections
import concurrent.futures
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checks import report
from checks.junit import (
    Outcome,
    compare,
    count,
    regressions,
    run_pytest,
)
from cpu_wheel import install, source, steps
from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.files import making, sha256
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings

RESULTS = ROOT / "benchmarks" / "results" / "upstream-tests.json"
WORK = BUILD / "upstream-tests"
TIMEOUT = 120
RELEASES = ("0.32.0", "0.34.0")
RUNS_WITHOUT_TRITON = "Run-on-x86-without-Triton"
# What the patches touch, by globs of upstream's tree, less those that begin with "!";
# not every release has each.
SUITES = {
    "platforms": ["tests/platforms"],
    "envs": ["tests/test_envs.py"],
    "config": ["tests/config"],
    "engine arguments": ["tests/engine/test_arg_utils.py"],
    "KV cache": ["tests/v1/core/test_*kv*.py"],
    "scheduler": ["tests/v1/core/**/test_*.py", "!tests/v1/core/test_*kv*.py"],
    "CPU worker": ["tests/v1/worker/test_cpu*.py"],
    "worker memory": [
        "tests/v1/worker/test_worker_memory_snapshot.py",
        "tests/v1/worker/test_kv_cache_allocation_scope.py",
        "tests/utils_/test_mem_utils.py",
    ],
    "executor": [
        "tests/v1/executor/test_executor.py",
        "tests/v1/executor/test_*multiproc_executor*.py",
    ],
    "argument parser": ["tests/utils_/test_argparse_utils.py"],
    "render server": [
        "tests/entrypoints/launchers/render",
        "tests/entrypoints/launchers/test_launch_cli.py",
        "tests/entrypoints/scale_out/render",
    ],
}


def unpack_tests(sdist: Path, folder: Path, patches: Iterable[Path]) -> None:
    """Make a copy of an sdist's tree without the package, if it is not there.

    Args:
        sdist: The sdist.
        folder: The copy; the package is put beside it.
        patches: What the package needs to run at all.
    """
    if not folder.exists():
        with making(folder) as scratch:
            source.unpack(sdist, scratch)
            source.apply_patches(scratch, patches, allow_offset=True)
            (scratch / "vllm").rename(scratch.parent / f"{folder.name}-vllm")


def link(package: Path, folder: Path) -> Path:
    """Return a folder that holds nothing but a link to a package vllm."""
    link = folder / "vllm"
    if not link.is_symlink() or link.readlink() != package:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        link.symlink_to(package)
    return folder


def sides(settings: Settings, tests: Path) -> tuple[str, dict[str, Path]]:
    """Return what is compared, and the folder that holds each side's vLLM."""
    release = load_release(settings.release)
    work = WORK / release.version
    if release.published_native_wheel is None:
        stock = tests.with_name(f"{tests.name}-vllm")
        patched = steps.make_source(settings) / "vllm"
        what = "Python trees, no native code"
    else:
        native_wheel = fetch(release.native_wheel, settings.cache)
        wheel = steps.make_wheel(settings, ROOT / "dist")
        stock = work / f"stock-{sha256(native_wheel)[:12]}"
        patched = work / f"wheel-{sha256(wheel)[:12]}"
        install.unpack_wheel(native_wheel, stock)
        install.unpack_wheel(wheel, patched)
        stock, patched = stock / "vllm", patched / "vllm"
        what = "native wheel as published, wheel built here"
    return what, {
        "stock": link(stock, work / "stock"),
        "patched": link(patched, work / "patched"),
    }


def run(
    tests: Path, builds: dict[str, Path], name: str, arguments: list[str]
) -> dict[str, dict[str, Outcome]]:
    """Run the same tests on both sides and return the outcomes by side."""
    print(f"upstream-tests: {name} ...", file=sys.stderr, flush=True)

    def one(side: str) -> dict[str, Outcome]:
        junit = builds[side].parent / f"{name.replace(' ', '-')}-{side}.xml"
        return run_pytest(
            ["--continue-on-collection-errors", *arguments],
            builds[side],
            tests,
            junit,
            TIMEOUT,
            also=[tests / "tests" / "vllm_test_utils"],  # a package of its own
        )

    # Side by side: a suite keeps one core busy.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(builds, pool.map(one, builds), strict=True))


def judge(tests: Path, builds: dict[str, Path], suite: str) -> dict[str, Any]:
    """Run a suite on both sides, what differs once more, and compare.

    Returns:
        Counts by side; "regressions", which pass on stock both times and on patched
        never; "flaky", which differed in one run only; "other differences"; and why
        what does not pass on either side does not.
    """
    found: set[Path] = set()
    for pattern in SUITES[suite]:
        if pattern.startswith("!"):
            found -= set(tests.glob(pattern[1:]))
        else:
            found |= set(tests.glob(pattern))
    paths = sorted(str(path.relative_to(tests)) for path in found)
    if not paths:
        return {"not run": "this release has no such tests"}
    start = time.monotonic()
    first = run(tests, builds, suite, paths)
    again = {}
    if differences := compare(first["stock"], first["patched"]):
        second = run(tests, builds, f"{suite} again", list(differences))
        again = compare(second["stock"], second["patched"])
    constant = {t: pair for t, pair in differences.items() if t in again}
    regressed = regressions(constant)
    reasons = collections.Counter(
        outcome.reason
        for test, outcome in first["stock"].items()
        if outcome.result == "failed"
        and first["patched"].get(test, outcome).result == "failed"
    )
    return {
        "seconds": round(time.monotonic() - start),
        **{side: count(outcomes.values()) for side, outcomes in first.items()},
        "regressions": {test: show(constant[test]) for test in regressed},
        "flaky": {t: show(p) for t, p in differences.items() if t not in again},
        "other differences": {
            t: show(p) for t, p in constant.items() if t not in regressed
        },
        "failed on both": dict(reasons.most_common()),
    }


def show(pair: tuple[Outcome, Outcome]) -> str:
    stock, patched = (" ".join(filter(None, outcome)) for outcome in pair)
    return f"stock: {stock}; patched: {patched}"


def table(releases: dict[str, Any]) -> str:
    """Return the counts as a table, release by suite."""
    rows = []
    for version, release in releases.items():
        for suite, result in release["suites"].items():
            if "not run" in result:
                cells = [f"– ({result['not run']})"] + ["–"] * 4
            else:
                cells = [
                    f"{result[side]['passed']} of {sum(result[side].values())}"
                    for side in ("stock", "patched")
                ]
                cells.append(str(sum(result["failed on both"].values())))
                cells += [str(len(result[key])) for key in ("flaky", "regressions")]
            rows.append((version, suite, *cells))
    head = ("release", "suite", "stock", "patched")
    return report.table((*head, "failed on both", "flaky", "regressions"), rows)


def reasons(releases: dict[str, Any]) -> str:
    """Return why tests fail on both sides: how often, and the reason's first line."""
    counts: collections.Counter[str] = collections.Counter()
    for release in releases.values():
        for result in release["suites"].values():
            counts.update(result.get("failed on both", {}))
    return "\n".join(f"{n:5} {reason}" for reason, n in counts.most_common())


def good(result: dict[str, Any]) -> bool:
    """Return whether a suite has tests that pass on stock, and no regression."""
    if "not run" in result:
        return True
    return not result["regressions"] and result["stock"]["passed"] > 0


def store(version: str, release: dict[str, Any]) -> None:
    """Put the results of a release into the stored ones; other suites' stay."""
    stored = report.stored(RESULTS)
    before = stored.get(version, {"suites": {}})
    suites = before["suites"] | release["suites"]
    ordered = {suite: suites[suite] for suite in SUITES if suite in suites}
    stored[version] = release | {"suites": ordered}
    report.store(RESULTS, dict(sorted(stored.items())))


def check(version: str, suites: list[str]) -> dict[str, Any]:
    """Compare suites on a release, storing each result as soon as it is there."""
    # Another release's archives or tree would be of no use.
    settings = Settings(release=version, cache=Settings.from_environment().cache)
    release = load_release(version)
    tests = WORK / version / f"tests-{release.sdist.sha256[:12]}"
    needed = [patch for patch in release.series if RUNS_WITHOUT_TRITON in patch.name]
    unpack_tests(fetch(release.sdist, settings.cache), tests, needed)
    what, builds = sides(settings, tests)
    what += f", {needed[0].name} on both" if needed else ""
    results: dict[str, Any] = {}
    compared = {"compared": what}
    for suite in suites:
        result = judge(tests, builds, suite)
        key = steps.source_key(release)
        results[suite] = {"source": key, **report.place(), **result}
        store(version, compared | {"suites": dict(results)})
    return compared | {"suites": results}


def page(stored: dict[str, Any]) -> str:
    """Return docs/results/upstream-tests.md."""
    releases = stored["releases"]
    compared = "\n".join(
        f"- {version}: {release['compared']}." for version, release in releases.items()
    )
    suites = [s for release in releases.values() for s in release["suites"].values()]
    places = "\n".join(
        sorted({f"- {suite['date']}, {suite['machine']}" for suite in suites})
    )
    return f"""# Upstream's own tests, stock and patched

`python -m checks.upstream_tests --show` prints this page; `make upstream-tests`
measures it. The tests are those of the sdist, the same on both sides, compared one by
one. A regression passes on stock and fails on patched, in two runs; a flaky test
differs in one run only. Measured on:

{places}

{table(releases)}

{compared}

Why tests fail on both sides, by the first line of the reason:

```
{reasons(releases)}
```
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="checks.upstream_tests",
        description="Compare upstream's own tests on stock and patched vLLM.",
        epilog="Exit status 1 when a test that passes on stock does not on patched.",
    )
    parser.add_argument("--release", choices=RELEASES, action="append")
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print docs/results/upstream-tests.md from what is stored",
    )
    arguments = parser.parse_args()
    if arguments.show:
        print(page(json.loads(RESULTS.read_text())), end="")
        return 0
    releases: dict[str, dict[str, Any]] = {}
    try:
        for version in arguments.release or RELEASES:
            releases[version] = check(version, arguments.suite or list(SUITES))
    except BuildError as error:
        sys.exit(f"upstream-tests: {error}")
    print(table(releases), reasons(releases), sep="\n\nfailed on both sides:\n")
    results = [r for release in releases.values() for r in release["suites"].values()]
    for result in results:
        for key in ("regressions", "flaky", "other differences"):
            for test, words in result.get(key, {}).items():
                print(f"{key}: {test}: {words}")
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
