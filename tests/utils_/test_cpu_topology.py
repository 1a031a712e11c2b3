# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPUs and memory nodes where nothing shows them, as in slim images and sandboxes."""

import os
import subprocess
from unittest import mock

import pytest

from vllm.utils import cpu_resource_utils


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("lscpu"),
        subprocess.CalledProcessError(1, "lscpu", stderr="no topology"),
    ],
    ids=["missing", "fails"],
)
def test_no_topology_is_one_node(error: Exception) -> None:
    with mock.patch.object(subprocess, "check_output", side_effect=error):
        cpus = cpu_resource_utils.get_allowed_cpu_list()

    assert {found.id for found in cpus} == os.sched_getaffinity(0)
    assert {found.numa_node for found in cpus} == {0}


def test_no_memory_nodes_is_node_0() -> None:
    """As in sandboxes: no Mems_allowed_list."""
    with mock.patch("builtins.open", mock.mock_open(read_data="Name:\tpython\n")):
        assert cpu_resource_utils.get_memory_affinity() == [0]
