# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which limit the KV caches of ranks exceed together, and what is said of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.utils.memory_limits import MemoryLimit
from vllm.v1.core import memory_check
from vllm.v1.core.memory_check import RankMemory, Shortage, find_shortage

pytestmark = pytest.mark.cpu_test

MiB = 1 << 20
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


def engine(size: int | None = 512 * MiB, override: int | None = None) -> Any:
    """A configuration with 4 requests of 1,024 tokens."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            kv_cache_memory_bytes=size, num_gpu_blocks_override=override
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=1024),
    )


@pytest.mark.parametrize(
    ("variable", "size", "override", "setting"),
    [
        ("0.5", 512 * MiB, 40, "--num-gpu-blocks-override=40"),
        ("4", 512 * MiB, None, "--kv-cache-memory-bytes=536870912"),
        (
            *("0.5", 512 * MiB, None),
            "VLLM_CPU_KVCACHE_SPACE=0.5 (--kv-cache-memory-bytes=536870912)",
        ),
        ("", None, None, "--gpu-memory-utilization"),
    ],
)
def test_setting_that_decides_is_named(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    size: int | None,
    override: int | None,
    setting: str,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)

    assert memory_check.deciding_setting(engine(size, override)) == setting


ROOM = "of max_model_len=1024 at once"
FEWER = "--max-num-seqs 3 or --max-model-len 1008 none is preempted"


@pytest.mark.parametrize(
    ("num_blocks", "override", "advice"),
    [
        (257, None, f"{{}} would fit, for 4 request(s) {ROOM}."),
        (257, 512, f"{{}} would fit, for 4 request(s) {ROOM}."),
        (256, None, f"{{}} would fit, for 3 request(s) {ROOM}; with {FEWER}."),
        (64, None, "{} with --max-model-len 1008 would fit."),
        (1, None, "No KV cache of this model fits."),
    ],
)
def test_line_says_whose_limit_and_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, override: int | None, advice: str
) -> None:
    """A block is 1 MiB and 16 tokens, and the null block is one more."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "")
    for name, planned in (
        ("_max_memory_usage_bytes_from_groups", lambda *_: 64 * MiB),
        ("_estimate_max_model_len_from_groups", lambda *args: args[-1] // MiB * 16),
    ):
        monkeypatch.setattr(memory_check, name, planned)
    config: Any = SimpleNamespace(
        num_blocks=512,
        kv_cache_tensors=[SimpleNamespace(size=512 * MiB)],
        kv_cache_groups=[],
    )
    shortage = Shortage(limit("a place", 600 * MiB), 2, GiB, num_blocks)
    option, unit = "--num-gpu-blocks-override", 1
    if override is None:
        option, unit = "--kv-cache-memory-bytes", MiB

    line = memory_check.describe_shortage(engine(override=override), [config], shortage)

    assert line == (
        "Available memory (600.0 MiB of 8.0 GiB, a limit) is less than the KV cache "
        f"takes (1.0 GiB for 2 rank(s), 512 blocks per rank, from "
        f"{option}={512 * unit}). {advice.format(f'{option}={num_blocks * unit}')}"
    )
