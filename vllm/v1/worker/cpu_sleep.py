# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Give the memory of a CPU worker back to the system, and take it again.

Tensors and their addresses stay: the kernel drops the pages behind them, and a page
reads as zeros and takes memory again once it is written.
"""

import ctypes
import mmap
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from vllm.config import LoadConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.logger import init_logger
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.utils.mem_utils import format_size

logger = init_logger(__name__)


def give_back(address: int, num_bytes: int) -> None:
    """Drop the pages that lie whole within a range of private memory.

    Raises:
        OSError: The kernel refuses, as for memory that is locked.

    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start >= end:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(start, end - start, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the kernel keeps the pages of a range")


def trim_heap() -> None:
    """Give back the pages that the allocator keeps of memory that was freed.

    Only glibc's is asked: another one that is preloaded has its own ways.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def buffers_of(kv_caches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the allocations behind the KV caches of layers, each once, as bytes."""
    storages = [cache.untyped_storage() for cache in kv_caches]
    found = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
    return [torch.tensor([], dtype=torch.int8).set_(s) for s in found.values()]


def refuse_if_registered() -> None:
    """Refuse to drop pages of a KV cache that a connector was given.

    A device or another process may have those pages, and would not see new ones.

    Raises:
        RuntimeError: A KV connector registered the KV cache.

    """
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    for one in getattr(connector, "_connectors", [connector]):
        if type(one).register_kv_caches is not KVConnectorBase_V1.register_kv_caches:
            raise RuntimeError(
                f"The KV cache cannot be given back: {type(one).__name__} has "
                "registered its memory."
            )


def discard_kv_cache(kv_caches: Iterable[torch.Tensor]) -> int:
    """Give back the memory of the whole KV cache, which then reads as zeros.

    Returns:
        Its size in bytes.

    Raises:
        RuntimeError: A KV connector registered the KV cache.

    """
    refuse_if_registered()
    buffers = buffers_of(kv_caches)
    for buffer in buffers:
        give_back(buffer.data_ptr(), len(buffer))
        # What shares a page with other memory.
        for edge in (buffer[: mmap.PAGESIZE], buffer[-mmap.PAGESIZE :]):
            if edge.any():
                edge.zero_()
    return sum(map(len, buffers))


class Need(NamedTuple):
    """What a rank needs to wake up, and where."""

    host: str
    memory_node: int
    num_bytes: int
    available: int


def commit_kv_cache(
    kv_caches: Iterable[torch.Tensor], ranks: GroupCoordinator | None = None
) -> None:
    """Take the memory of the whole KV cache at once, by writing zeros.

    Args:
        kv_caches: The KV caches of the layers of this rank.
        ranks: The ranks that call this together, None for this one alone.

    Raises:
        RuntimeError: The ranks of a memory node need more than it has available. All
            ranks raise, and none of them takes memory.

    """
    buffers = buffers_of(kv_caches)
    node = get_allowed_cpu_list()[0].numa_node
    available = get_memory_node_info(node).available_memory
    own = Need(socket.gethostname(), node, sum(map(len, buffers)), available)
    needs = [own]
    if ranks is not None:
        needs *= ranks.world_size
        # No rank writes before each has seen what is available.
        torch.distributed.all_gather_object(needs, own, group=ranks.cpu_group)
    for place in {need[:2] for need in needs}:
        there = [need for need in needs if need[:2] == place]
        needed = sum(need.num_bytes for need in there)
        available = min(need.available for need in there)
        if needed > available:
            raise RuntimeError(
                f"The KV cache needs {format_size(needed)} to wake up, but memory node "
                f"{place[1]} of {place[0]} has {format_size(available)} available. "
                "The engine sleeps on: stop other processes and wake it up again."
            )
    for buffer in buffers:
        buffer.zero_()


def _pack_again(
    layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Stand in for the packed weight of a layer, until loading packs it anew.

    Loading does not do so for a layer that shares its weight with another, as tied
    embeddings do; the weight that it keeps for that is packed here.
    """
    if not layer.weight.numel():
        raise RuntimeError(
            "The weights were given back by sleep(level=2) and not loaded again: "
            "call reload_weights after wake_up."
        )
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear(x, weight, bias)


def discard_weights(
    model: nn.Module, load_config: LoadConfig, preserved: Iterable[str]
) -> bool:
    """Give back the memory of the weights, if `reload_weights` can load them again.

    Buffers stay, as do parameters with a name that `preserved` has a pattern of.

    Returns:
        Whether they were given back.

    """
    if not hasattr(get_model_loader(load_config), "get_all_weights"):
        logger.warning(
            "The weights stay in memory: load_format=%s cannot load them again.",
            load_config.load_format,
        )
        return False

    def is_preserved(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in preserved)

    given_back, kept = {}, [*model.buffers()]
    for name, parameter in model.named_parameters():
        if is_preserved(name):
            kept.append(parameter)
        else:
            given_back[parameter.untyped_storage().data_ptr()] = parameter
    for tensor in kept:
        given_back.pop(tensor.untyped_storage().data_ptr(), None)
    for address, tensor in given_back.items():
        give_back(address, tensor.untyped_storage().nbytes())
    for name, module in model.named_modules():
        # It holds a packed copy of the weight.
        if "cpu_linear" in vars(module) and not is_preserved(f"{name}.weight"):
            module.cpu_linear = partial(_pack_again, module)
    return True
