# SPDX-License-Identifier: Apache-2.0
"""The stored results of benchmarks, and the plots of them."""

import hashlib
import json
import subprocess
import sys

import pytest

from cpu_wheel.paths import ROOT

RAW = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "results"


@pytest.mark.parametrize(
    ("module", "page"),
    [
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


def test_plot_shows_the_stored_results() -> None:
    """`python -m benchmarks.memory --show --plot` draws it again."""
    records = json.loads((RAW / "memory.json").read_text())["memory"]["records"]
    stored = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()

    assert f"<dc:identifier>{stored}<" in (PAGES / "memory.svg").read_text()
