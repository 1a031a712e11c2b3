# SPDX-License-Identifier: Apache-2.0
"""The plot of benchmarks/results/memory.json that docs/memory.md shows.

Only this needs matplotlib: `pip install -c constraints.txt --group plot`.
"""

import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

MiB = 1 << 20
POINTS = ("started", "one request", "burst", "idle")
# Colours of Okabe and Ito's palette; marker and line tell the modes apart too.
STYLES: dict[str, dict[str, Any]] = {
    "startup": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "on-use": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
}
# Letters as outlines look the same wherever they are shown; without the salt the
# names within the file would differ each time.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "memory",
    "font.size": 9,
}


def digest(records: Sequence[dict[str, Any]]) -> str:
    """Return a hash of records, by which a plot says what it was drawn from."""
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()


def draw(stored: dict[str, Any], target: Path) -> None:
    """Draw the part "memory" of the results; the same results give the same bytes.

    A column is a budget, a row prefix caching. A point is the median of the rounds,
    its bar goes from the least to the most. The name of the target says the format.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = make_figure(stored)
        metadata = {"Date": None, "Identifier": digest(stored["records"])}
        figure.savefig(target, metadata=metadata if target.suffix == ".svg" else None)
    if target.suffix == ".svg":
        # One line instead of one for each point.
        target.write_text(" ".join(target.read_text().split()) + "\n")


def make_figure(stored: dict[str, Any]) -> Figure:
    records = stored["records"]
    budgets = sorted({record["budget"] for record in records})
    figure = Figure(figsize=(2.6 * len(budgets) + 0.6, 5.4), layout="constrained")
    grid = figure.subplots(2, len(budgets), sharex=True, sharey="col", squeeze=False)
    for row, caching in zip(grid, (False, True), strict=True):
        for axis, budget in zip(row, budgets, strict=True):
            cell = (budget, caching)
            fill_cell(
                axis,
                [r for r in records if (r["budget"], r["prefix caching"]) == cell],
                top=1.25 * (budget / MiB + 500),
            )
            if not caching:
                axis.set_title(f"budget {budget // MiB:,} MiB", fontsize=10)
        row[0].set_ylabel(f"prefix caching {'on' if caching else 'off'}\nRssAnon, MiB")
    lines, names = grid[0][0].get_legend_handles_labels()
    figure.legend(
        lines, names, loc="outside upper center", ncols=2, frameon=False, fontsize=10
    )
    rounds = len({record["round"] for record in records})
    figure.supxlabel(
        f"{stored['machine']}, {stored['date']}; "
        f"median of {rounds} rounds, bars from least to most",
        fontsize=8,
    )
    return figure


def fill_cell(axis: Any, records: Sequence[dict[str, Any]], top: float) -> None:
    """Draw both modes, and write the first and the last figure beside them."""
    axis.set_ylim(0, top)
    medians: dict[str, list[float]] = {}
    for mode, style in STYLES.items():
        chosen = [record for record in records if record["mode"] == mode]
        if not chosen:
            continue
        values = [[record[point] / MiB for record in chosen] for point in POINTS]
        medians[mode] = middle = [statistics.median(found) for found in values]
        bars = [
            [value - min(found) for value, found in zip(middle, values, strict=True)],
            [max(found) - value for value, found in zip(middle, values, strict=True)],
        ]
        axis.errorbar(
            POINTS, middle, bars, label=mode, markersize=4, capsize=3, **style
        )
        for point in (0, len(POINTS) - 1):
            above = medians[next(iter(medians))][point] - middle[point]
            below = 0 < above < top / 5  # where another line or its figure is
            axis.annotate(
                f"{middle[point]:,.0f}",
                (point, middle[point]),
                xytext=(0, -5 if below else 5),
                textcoords="offset points",
                ha="center",
                va="top" if below else "bottom",
                color=style["color"],
            )
    axis.margins(x=0.15)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", rotation=30)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
