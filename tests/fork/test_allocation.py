# SPDX-License-Identifier: Apache-2.0
"""The table that `make` prints comes from the engine, and its status is honest."""

import json
from typing import Any

import pytest

from benchmarks.allocation import ROWS, Row, as_expected
from cpu_wheel.paths import ROOT
from tests.fork.conftest import Run


@pytest.mark.slow_test
@pytest.mark.timeout(1200)
def test_table(run: Run) -> None:
    result = run("python", "-m", "benchmarks.allocation", "--json", cwd=ROOT)

    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["stock"].get("tokens") for row in rows] == [
        *(17881, 71527, 17881, 71527, None, None, None)
    ]
    assert [row["fork"].get("tokens") for row in rows[:5]] == [
        *(17881, 71527, 2231, 2231, 2231)
    ]
    assert rows[5]["fork"]["bytes"] is None
    assert rows[6]["fork"]["tokens"] == 2231
    assert all(row["as expected"] for row in rows)
    assert "int()" in rows[4]["stock"]["error"]
    assert "No available memory" in rows[5]["stock"]["error"]
    assert {row["stock"]["vllm"] for row in rows}.isdisjoint(
        {row["fork"]["vllm"] for row in rows}
    )


@pytest.mark.parametrize(
    ("row", "result"),
    [
        pytest.param(ROWS[2], {"tokens": 17881, "bytes": 1 << 30}, id="stock's"),
        pytest.param(ROWS[2], {"error": "no memory"}, id="error"),
        pytest.param(ROWS[5], {"tokens": 17881, "bytes": 1 << 30}, id="budget-set"),
        pytest.param(ROWS[5], {"error": "no memory"}, id="no-engine"),
    ],
)
def test_what_is_not_as_expected(row: Row, result: dict[str, Any]) -> None:
    assert not as_expected(row, result)
