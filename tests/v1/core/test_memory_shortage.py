# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which limit the KV caches of ranks exceed together, and what is said of it."""

import pytest

from vllm.utils.memory_limits import MemoryLimit
from vllm.v1.core.memory_check import RankMemory, find_shortage

pytestmark = pytest.mark.cpu_test

GiB = 1 << 30
HOST = 8 * GiB


def rank(size: int, *limits: MemoryLimit, blocks: int = 10) -> RankMemory:
    return RankMemory(blocks, size, list(limits))


def limit(place: str | None, available: int, name: str = "a limit") -> MemoryLimit:
    return MemoryLimit(name, HOST, available, place)


def test_ranks_that_share_a_limit_are_added_up() -> None:
    shared = limit("host 1 node 0", 3 * GiB)

    assert find_shortage([rank(GiB, shared)] * 3) is None
    shortage = find_shortage([rank(GiB, shared)] * 4)

    assert shortage is not None
    assert (shortage.limit, shortage.num_ranks) == (shared, 4)
    assert shortage.num_bytes == 4 * GiB
    # A thirty-second less than 3 GiB, for four ranks with 10 blocks a GiB.
    assert shortage.num_blocks == int(3 * GiB * 31 / 32 / 4 / (GiB / 10))


def test_ranks_of_two_hosts_are_not_added_up() -> None:
    """Each host has a memory node 0."""
    hosts = [
        limit(f"host {number} node 0", 3 * GiB, "memory node 0") for number in "12"
    ]

    assert find_shortage([rank(2 * GiB, hosts[0]), rank(2 * GiB, hosts[1])]) is None


def test_limit_of_a_process_counts_for_its_rank_alone() -> None:
    address_space = limit(None, 3 * GiB)

    assert find_shortage([rank(2 * GiB, address_space)] * 2) is None
    assert find_shortage([rank(4 * GiB, address_space)] * 2) is not None


def test_least_that_any_rank_saw_counts() -> None:
    """Ranks look one after the other, while memory is taken."""
    early, late = limit("group", 4 * GiB), limit("group", 2 * GiB)

    shortage = find_shortage([rank(3 * GiB // 2, early), rank(3 * GiB // 2, late)])

    assert shortage is not None and shortage.limit is late


def test_worst_shortage_is_named_and_all_limits_are_kept() -> None:
    narrow = limit("group", GiB, "the group")
    narrower = limit("node", GiB // 2, "the node")

    shortage = find_shortage([rank(2 * GiB, narrow, narrower)])

    assert shortage is not None
    assert shortage.limit.name == "the node"
    assert shortage.num_blocks * 2 * GiB // 10 <= GiB // 2
