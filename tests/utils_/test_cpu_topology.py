# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPUs and memory nodes where nothing shows them, as in slim images and sandboxes."""

import os
from pathlib import Path

import pytest

from vllm.utils import cpu_resource_utils


@pytest.mark.parametrize(
    "tools",
    [
        pytest.param({}, id="missing"),
        pytest.param({"lscpu": "echo no topology >&2; exit 1"}, id="fails"),
    ],
)
def test_no_topology_is_one_node(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tools: dict[str, str],
) -> None:
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    cpus = cpu_resource_utils.get_allowed_cpu_list()

    assert {found.id for found in cpus} == os.sched_getaffinity(0)
    assert {found.numa_node for found in cpus} == {0}


def test_no_memory_nodes_is_node_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in sandboxes: no Mems_allowed_list."""
    real_open = open
    status = tmp_path / "status"
    status.write_text("Name:\tpython\n")
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *arguments, **options: real_open(
            status if str(path).endswith("/status") else path, *arguments, **options
        ),
    )

    assert cpu_resource_utils.get_visible_memory_node() == [0]
