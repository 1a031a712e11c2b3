# SPDX-License-Identifier: Apache-2.0
"""The stored results of benchmarks, and the plots of them."""

import hashlib
import json

from cpu_wheel.paths import ROOT

RESULTS = ROOT / "docs" / "results"


def test_plot_shows_the_stored_results() -> None:
    """`python -m benchmarks.memory --show --plot` draws it again."""
    records = json.loads((RESULTS / "memory.json").read_text())["memory"]["records"]
    stored = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()

    assert f"<dc:identifier>{stored}<" in (RESULTS / "memory.svg").read_text()
