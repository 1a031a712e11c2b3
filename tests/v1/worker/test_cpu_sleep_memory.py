# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The memory that a CPU worker gives back and takes again.

Each test runs in a forked child, where no earlier test has left memory.
"""

import mmap
from pathlib import Path

import pytest
import torch

from vllm.platforms import current_platform
from vllm.utils.memory_limits import MemoryLimit
from vllm.v1.worker import cpu_sleep
from vllm.v1.worker.cpu_sleep import (
    buffers_of,
    commit_kv_cache,
    discard_kv_cache,
    give_back,
)

pytestmark = [
    pytest.mark.forked,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="requires a CPU platform"),
]

MiB = 1 << 20
PAGE = mmap.PAGESIZE


def rss_anon() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def untouched_zeros(num_bytes: int) -> torch.Tensor:
    """A private mapping, of which no page takes memory yet."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.int8)


def malloced_ones(num_bytes: int) -> torch.Tensor:
    """Memory of an allocator, which may share its first and last page."""
    return torch.ones(num_bytes, dtype=torch.int8)


def mapped_ones(num_bytes: int) -> torch.Tensor:
    return untouched_zeros(num_bytes).fill_(1)


@pytest.mark.parametrize("ones", [malloced_ones, mapped_ones])
@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, 3 * PAGE + 5, 64 * MiB + 1])
def test_discarded_memory_reads_as_zeros(ones, num_bytes: int) -> None:
    around = torch.ones(3, num_bytes, dtype=torch.int8)
    for buffer, untouched in ((ones(num_bytes), None), (around[1], around[::2])):
        before, address = rss_anon(), buffer.data_ptr()
        if untouched is None:
            discard_kv_cache([buffer[: num_bytes // 2], buffer])
            assert not buffer.any()
        else:
            give_back(address, num_bytes)
            assert bool((untouched == 1).all())
        assert buffer.data_ptr() == address
        assert rss_anon() <= before - num_bytes + 8 * MiB
        buffer.fill_(1)
        assert bool((buffer == 1).all())


def test_pages_that_the_kernel_keeps_are_an_error() -> None:
    with pytest.raises(OSError, match="keeps the pages"):
        give_back(PAGE, PAGE)  # nothing is mapped at so low an address


def test_commit_takes_all_at_once() -> None:
    cache = untouched_zeros(64 * MiB)
    before = rss_anon()

    commit_kv_cache([cache])

    assert rss_anon() > before + 60 * MiB


def test_commit_of_more_than_is_left_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = MemoryLimit("host", 1 << 30, 96 * MiB, "this host")
    monkeypatch.setattr(cpu_sleep, "host_limit", lambda: left)
    caches = [untouched_zeros(64 * MiB) for _ in range(2)]
    before = rss_anon()

    with pytest.raises(
        RuntimeError,
        match=r"needs 128\.0 MiB to wake up, but 96\.0 MiB .* \(host\)",
    ):
        commit_kv_cache(caches)

    assert rss_anon() < before + MiB


def test_a_buffer_is_found_once() -> None:
    memory = mapped_ones(4 * MiB)

    (buffer,) = buffers_of([*memory.view(torch.bfloat16).chunk(2), torch.empty(0)])

    assert buffer.data_ptr() == memory.data_ptr()
    assert len(buffer) == 4 * MiB
