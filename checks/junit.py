# SPDX-License-Identifier: Apache-2.0
"""Run pytest on a build of vLLM, and read and compare what came out."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cpu_wheel import host
from cpu_wheel.errors import BuildError
from cpu_wheel.settings import inherited

TAGS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
MISSING = "missing"
WHERE = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"


class Outcome(NamedTuple):
    """What came out of a test.

    Attributes:
        result: "passed", "failed" (an error of a fixture too), "skipped" or, where
            two runs are compared and one does not have the test, "missing".
        reason: The first line of why it did not pass.
    """

    result: str
    reason: str = ""


def run_pytest(
    arguments: Iterable[str],
    build: Path,
    folder: Path,
    report: Path,
    timeout: int,
    also: Iterable[Path] = (),
) -> dict[str, Outcome]:
    """Run pytest on a build and return what came out, by test.

    Args:
        arguments: Tests and options for pytest.
        build: The folder that holds the package vllm.
        folder: Where pytest runs.
        report: The file that takes the junit XML; the output goes beside it.
        timeout: Seconds that a test may take.
        also: Other folders to import from.

    Returns:
        Outcomes by node id; what a crash cut short is not among them.

    Raises:
        BuildError: Another vLLM than that of the build would be tested.
    """
    environment = inherited("VLLM_") | {
        "HF_HUB_OFFLINE": "1",
        # Tests of servers start the command vllm.
        "PATH": host.search_path(),
        "PYTHONPATH": os.pathsep.join(map(str, [build, *also])),
        "PYTHONDONTWRITEBYTECODE": "1",
        # A tree without native code has no version that says so.
        "VLLM_TARGET_DEVICE": "cpu",
    }
    found = subprocess.run(
        [sys.executable, "-c", WHERE],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    ).stdout.strip()
    if found != str(build / "vllm" / "__init__.py"):
        raise BuildError(f"vllm is {found or 'not found'}, expected that of {build}")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-q"]
    options += ["-o", "junit_family=xunit1", f"--timeout={timeout}", "--color=no"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    with report.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:
            # Servers and engines that a test left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return read(report) if report.exists() else {}


def read(report: Path) -> dict[str, Outcome]:
    """Return the outcomes of a junit XML file of the family xunit1, by node id."""
    outcomes: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = Outcome("passed")
        for child in case:
            if child.tag in TAGS and outcome.result != "failed":
                text = child.get("message") or ""
                if text == "collection failure":
                    errors = re.findall(r"^E +(.+)", child.text or "", re.MULTILINE)
                    text = errors[-1] if errors else text
                outcome = Outcome(TAGS[child.tag], first_line(text))
        test = node_id(case)
        # A test that fails and whose teardown fails too is there twice.
        if test not in outcomes or outcomes[test].result != "failed":
            outcomes[test] = outcome
    return outcomes


def first_line(text: str) -> str:
    """Return the first line of a reason, without what differs between two runs."""
    line = (text.strip().splitlines() or [""])[0]
    return re.sub(r"0x[0-9a-f]+|/\S*/(?=\S)", "…", line)[:200]


def node_id(case: ElementTree.Element) -> str:
    """Return what pytest takes to run a test case again."""
    file, classes = case.get("file", ""), case.get("classname", "")
    if not classes:  # a file that cannot be collected
        return file
    module = file.removesuffix(".py").replace("/", ".")
    inner = classes.removeprefix(module).strip(".").split(".")
    return "::".join(filter(None, [file, *inner, case.get("name", "")]))


def compare(
    stock: dict[str, Outcome], patched: dict[str, Outcome]
) -> dict[str, tuple[Outcome, Outcome]]:
    """Return the tests whose result differs, and both outcomes."""
    absent = Outcome(MISSING)
    pairs = {
        test: (stock.get(test, absent), patched.get(test, absent))
        for test in sorted(stock | patched)
    }
    return {test: pair for test, pair in pairs.items() if pair[0][0] != pair[1][0]}


def regressions(differences: dict[str, tuple[Outcome, Outcome]]) -> list[str]:
    """Return the tests that pass on stock and do not on patched."""
    return [test for test, (stock, _) in differences.items() if stock[0] == "passed"]


def count(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return how many passed, failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in outcomes:
        counts[outcome.result] += 1
    return counts
