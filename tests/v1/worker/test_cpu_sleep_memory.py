# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The memory that a CPU worker gives back and takes again.

Each test runs in a forked child, where no earlier test has left memory.
"""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from tests.v1.worker.test_cpu_kv_cache_memory import kv_cache, memory
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.worker.cpu_kv_cache_idle import byte_ranges, discard_blocks, unused_blocks
from vllm.v1.worker.cpu_kv_cache_memory import zeros_committed_on_use
from vllm.v1.worker.cpu_sleep import (
    buffers_of,
    commit_kv_cache,
    discard_kv_cache,
    give_back,
)

pytestmark = pytest.mark.forked

MiB = 1 << 20
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)


def malloced_ones(num_bytes: int) -> torch.Tensor:
    """Memory of an allocator, which may share its first and last page."""
    return torch.ones(num_bytes, dtype=torch.int8)


def mapped_ones(num_bytes: int) -> torch.Tensor:
    return zeros_committed_on_use(num_bytes).fill_(1)


@pytest.mark.parametrize("ones", [malloced_ones, mapped_ones])
@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, 3 * PAGE + 5, 64 * MiB + 1])
def test_discarded_memory_reads_as_zeros(ones, num_bytes: int) -> None:
    around = torch.ones(3, num_bytes, dtype=torch.int8)
    for buffer, untouched in ((ones(num_bytes), None), (around[1], around[::2])):
        before, address = memory("RssAnon"), buffer.data_ptr()
        if untouched is None:
            discard_kv_cache([buffer[: num_bytes // 2], buffer])
            assert not buffer.any()
        else:
            give_back(address, num_bytes)
            assert bool((untouched == 1).all())
        assert buffer.data_ptr() == address
        assert memory("RssAnon") <= before - num_bytes + 8 * MiB
        buffer.fill_(1)
        assert bool((buffer == 1).all())


def test_locked_memory_is_not_silently_kept() -> None:
    ones = mapped_ones(MiB)
    assert LIBC.mlock(ctypes.c_void_p(ones.data_ptr()), ctypes.c_size_t(MiB)) == 0

    with pytest.raises(OSError, match="keeps the pages"):
        discard_kv_cache([ones])


def test_commit_takes_all_at_once() -> None:
    cache = zeros_committed_on_use(64 * MiB)
    before = memory("RssAnon")

    commit_kv_cache([cache])

    assert memory("RssAnon") > before + 60 * MiB


def test_commit_of_more_than_is_free_is_refused() -> None:
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10
    caches = [zeros_committed_on_use(free * 3 // 4) for _ in range(2)]
    before = memory("RssAnon")

    with pytest.raises(RuntimeError, match=r"needs .*GiB to wake up, .*GiB available"):
        commit_kv_cache(caches)

    assert memory("RssAnon") < before + MiB


def test_a_buffer_is_found_once() -> None:
    caches = kv_cache(num_blocks=4)

    (buffer,) = buffers_of([*caches.values(), torch.empty(0)])

    assert len(buffer) == 4 * MiB


def layout(block_outermost: bool, num_blocks: int) -> KVCacheConfig:
    """Four layers in two groups, which overlay each other; 1 MiB a block."""
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    groups = [["a.0", "a.1"], ["b.0", "b.1"]]
    strides = (page, 2 * page) if block_outermost else (num_blocks * page, page)
    tensors = [KVCacheTensor(num_blocks * MiB, layers, *strides) for layers in groups]
    specs = [KVCacheGroupSpec(layers, spec) for layers in groups]
    return KVCacheConfig(num_blocks, tensors, specs)


@pytest.mark.parametrize("block_outermost", [True, False])
def test_discarded_blocks(block_outermost: bool) -> None:
    cache = mapped_ones(32 * MiB)
    config = layout(block_outermost, num_blocks=32)
    before = memory("RssAnon")

    discard_blocks([cache], config, [(1, 3), (30, 32)])

    assert memory("RssAnon") < before - 3 * MiB
    half = cache.view(32, 2, -1) if block_outermost else cache.view(2, 32, -1)
    blocks = (half if block_outermost else half.transpose(0, 1)).reshape(32, -1)
    gone = [block for block in range(32) if not blocks[block].any()]
    assert gone == [1, 2, 30, 31]
    assert int(blocks.sum(dtype=torch.int64)) == 28 * MiB
    assert len(byte_ranges(config, [(1, 3)])) == (1 if block_outermost else 2)


def test_unused_blocks() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=128)
    one, two, three, *_ = pool.get_new_blocks(5)
    assert [one.block_id, two.block_id, three.block_id] == [1, 2, 3]
    three.set_block_hash(make_block_hash_with_group_id(BlockHash(b"prefix"), 0))
    pool.free_blocks([one, three])

    # 0 is the null block, 2, 4 and 5 are in use, 3 has a cached prefix.
    assert list(unused_blocks(pool.blocks)) == [(1, 2), (6, 10)]
