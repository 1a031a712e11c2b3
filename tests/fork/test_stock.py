# SPDX-License-Identifier: Apache-2.0
"""The regression tests catch the bug: which of them fail on stock vLLM."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cpu_wheel import install, steps
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release

WITHOUT_AN_ENGINE = (
    "tests/model_executor/test_cpu_x86_kernels.py",
    "tests/platforms/test_cpu_kv_cache_budget.py",
    "tests/platforms/test_cpu_kv_cache_capacity.py",
)
WITH_ENGINES = (
    "tests/platforms/test_cpu_kv_cache_allocation.py",
    "tests/platforms/test_cpu_kv_cache_messages.py",
    "tests/v1/worker/test_cpu_sleep.py",
    # Of the entry points, those that one process takes: the others take minutes.
    *(
        f"tests/platforms/test_cpu_kv_cache_entry_points.py::{test}"
        for test in (
            "test_speculative_decoding_with_ngram",
            "test_speculative_decoding_with_a_draft_model",
            "test_whole_blocks_of_the_budget_are_held",
        )
    ),
)
IN_CONTROL_GROUPS = (
    "tests/v1/core/test_memory_control_groups.py",
    "tests/v1/worker/test_cpu_sleep_shared.py",
)
FAILS_ON_STOCK = Path(__file__).with_name("fails_on_stock.txt")


@pytest.fixture(scope="module")
def stock(release: Release, native_wheel: Path) -> dict[str, str]:
    """The environment in which `import vllm` is the native wheel as published."""
    folder = steps.stock_folder(release)
    install.unpack_wheel(native_wheel, folder)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_stock_is_what_was_published(stock: dict[str, str]) -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__file__)"],
        cwd=ROOT,
        env=stock,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found[-1] == f"{stock['PYTHONPATH']}/vllm/__init__.py"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(WITHOUT_AN_ENGINE, id="configuration"),
        pytest.param(WITH_ENGINES, id="engines", marks=pytest.mark.slow_test),
        pytest.param(
            IN_CONTROL_GROUPS,
            id="control-groups",
            marks=[pytest.mark.slow_test, pytest.mark.cgroup_test],
        ),
    ],
)
def test_which_regression_tests_fail_on_stock(
    stock: dict[str, str], tmp_path: Path, tests: tuple[str, ...]
) -> None:
    """To renew the list: write the `failed` that this test reports into the file."""
    report = tmp_path / "report.xml"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no"),
            *(
                "-m",
                "not slow_test",
                "--quiet",
                f"--junitxml={report}",
                *tests,
            ),
        ],
        cwd=ROOT,
        env=stock,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr[-2000:]

    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[f"{file}.py::{case.attrib['name']}"] = "/".join(sorted(bad))
    assert set(outcomes.values()) == {"", "failure"}
    failed = sorted(name for name, outcome in outcomes.items() if outcome)

    files = tuple(test.partition("::")[0] for test in tests)
    assert failed == [
        name
        for name in FAILS_ON_STOCK.read_text().splitlines()
        if name.startswith(files)
    ]
