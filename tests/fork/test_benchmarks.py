# SPDX-License-Identifier: Apache-2.0
"""The stored results of benchmarks."""

import subprocess
import sys

import pytest

from cpu_wheel.paths import ROOT

PAGES = ROOT / "docs" / "results"


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("benchmarks.generation", "generation.md"),
        ("benchmarks.memory", "memory.md"),
        ("checks.matrix", "matrix.md"),
        ("checks.upstream_tests", "upstream-tests.md"),
    ],
)
def test_page_shows_the_stored_results(module: str, page: str) -> None:
    """`python -m MODULE --show > docs/results/PAGE` writes it again."""
    shown = subprocess.run(
        [sys.executable, "-m", module, "--show"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )

    assert shown.stdout == (PAGES / page).read_text()
