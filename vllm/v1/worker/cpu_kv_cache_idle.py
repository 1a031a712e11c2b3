# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Give memory of the KV cache back once an engine on CPU has been idle for long.

The engine core knows which blocks are needed, and its workers have the memory.
"""

import queue
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_sleep import buffers_of, give_back, refuse_if_registered

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine.core import EngineCoreProc

logger = init_logger(__name__)

Range = tuple[int, int]  # from a first block or byte to the one after the last


class IdlePeriod:
    """A time in which an engine core has no work and waits for requests."""

    def __init__(self, engine: "EngineCoreProc") -> None:
        self.engine = engine
        self.seconds = envs.VLLM_CPU_KVCACHE_IDLE_SECONDS
        self.since = time.monotonic()
        self.is_over = not self.seconds

    def wait(self, block: bool) -> Any:
        """Return what comes next from the queue of requests.

        The first call that lasts until the idle time is over gives memory back, and
        the queue is then waited for without an end: nothing is polled.

        Raises:
            queue.Empty: There is nothing, and `block` is false.

        """
        if block and not self.is_over:
            left = self.since + self.seconds - time.monotonic()
            try:
                return self.engine.input_queue.get(timeout=max(0.0, left))
            except queue.Empty:
                self.is_over = True
                release_idle_kv_cache(self.engine)
        return self.engine.input_queue.get(block=block)


def release_idle_kv_cache(engine: "EngineCoreProc") -> None:
    """Give back the KV cache of an engine without requests, or what is unused of it.

    Unused is a block that holds no cached prefix. With
    VLLM_CPU_KVCACHE_IDLE_RELEASE=all the cached prefixes go too.
    """
    # What a paused engine keeps is resumed with, and a sleeping one holds none.
    if engine.is_sleeping():
        return
    everything = envs.VLLM_CPU_KVCACHE_IDLE_RELEASE == "all"
    if everything and not engine.reset_prefix_cache():
        return  # a connector still reads some blocks
    start = time.perf_counter()
    blocks = list(unused_blocks(engine.scheduler.kv_cache_manager.block_pool.blocks))
    try:
        engine.collective_rpc("discard_kv_cache_blocks", args=(blocks,))
    except (OSError, RuntimeError) as error:
        logger.warning("Idle for too long, yet memory is kept: %s", error)
        return
    logger.info(
        "Gave back the memory of %d of %d KV cache blocks in %.3f s after %g s without "
        "a request.",
        sum(end - first for first, end in blocks),
        engine.vllm_config.cache_config.num_gpu_blocks,
        time.perf_counter() - start,
        envs.VLLM_CPU_KVCACHE_IDLE_SECONDS,
    )


def unused_blocks(blocks: Iterable["KVCacheBlock"]) -> Iterator[Range]:
    """Yield the ranges of blocks that no request and no cached prefix needs."""
    free = [
        block.block_id
        for block in blocks
        if block.ref_cnt == 0 and block.block_hash is None and not block.is_null
    ]
    for _, run in groupby(enumerate(free), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1] + 1


def discard_blocks(
    kv_caches: Iterable[torch.Tensor], config: KVCacheConfig, blocks: list[Range]
) -> None:
    """Give back the memory of some blocks of the KV cache of a worker.

    Raises:
        RuntimeError: A KV connector registered the KV cache.

    """
    refuse_if_registered()
    for buffer in buffers_of(kv_caches):
        for start, end in byte_ranges(config, blocks):
            give_back(buffer.data_ptr() + start, end - start)


def byte_ranges(config: KVCacheConfig, blocks: list[Range]) -> set[Range]:
    """Return where blocks lie in the KV cache, in bytes.

    `KVCacheTensor` says how it is laid out: by layer and in each by block, or by block
    and in each by layer.
    """
    ranges = set()
    for tensor in config.kv_cache_tensors:
        by_block = tensor.block_stride > tensor.layer_stride
        for layer in range(1 if by_block else len(tensor.layers)):
            first = 0 if by_block else tensor.offset + layer * tensor.layer_stride
            ranges |= {
                (first + start * tensor.block_stride, first + end * tensor.block_stride)
                for start, end in blocks
            }
    return ranges
