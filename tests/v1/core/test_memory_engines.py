# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that share a host know what all of them are about to allocate."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from vllm.utils.memory_limits import MemoryLimit
from vllm.v1.core import memory_check
from vllm.v1.core.memory_check import LocalEngines, RankMemory

pytestmark = pytest.mark.cpu_test

GiB = 1 << 30


def plan(file: str, index: int, out: Connection) -> None:
    memory_check.join_local_engines(LocalEngines(file, 2, index))
    limit = MemoryLimit("a node", 8 * GiB, 2 * GiB, "host node 0")
    own = [RankMemory(10, (index + 1) * GiB, [limit])]
    ranks = memory_check._with_local_engines(own)
    out.send((ranks, memory_check.find_shortage(ranks)))


def test_engines_of_a_front_end_find_the_same_shortage(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ends = []
    for index in range(2):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (str(tmp_path / "store"), index, sender)
        context.Process(target=plan, args=arguments, daemon=True).start()
        ends.append(receiver)

    assert all(end.poll(60) for end in ends)
    first, second = (end.recv() for end in ends)

    assert first == second
    ranks, shortage = first
    assert [rank.num_bytes for rank in ranks] == [GiB, 2 * GiB]
    assert (shortage.num_ranks, shortage.num_bytes) == (2, 3 * GiB)


def test_engine_names_those_that_it_waits_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0")
    engines = LocalEngines(str(tmp_path / "store"), 3, 1)
    monkeypatch.setattr(memory_check, "_local_engines", engines)

    with pytest.raises(TimeoutError, match=r"engine\(s\) 0, 2 of 3 .* within 0 s"):
        memory_check._with_local_engines([])
