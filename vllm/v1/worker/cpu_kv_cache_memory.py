# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory for a KV cache on CPU that follows use."""

import ctypes
import mmap

import torch

from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.utils.numa_utils import get_libnuma

logger = init_logger(__name__)

MAX_NODES = 1024  # the most that Linux can be built for


def on_use_setting(config: VllmConfig | None) -> str | None:
    """Return the setting that commits the KV cache on use, None if none does."""
    # --enable-extensible-kv-cache, from 0.34.0 on, in the configuration of the worker
    flag = getattr(config and config.cache_config, "_cpu_commit_on_use", None)
    if flag is not None:
        return "--enable-extensible-kv-cache" if flag else None
    on_use = envs.VLLM_CPU_KVCACHE_COMMIT == "on-use"
    return "VLLM_CPU_KVCACHE_COMMIT=on-use" if on_use else None


def kv_cache_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the memory of a KV cache, on CPU committed as the user asks for.

    Args:
        num_bytes: The exact size of the storage, more than 0.
        device: Where the KV cache is.

    Returns:
        A tensor of int8, all zeros.

    """
    setting = on_use_setting(get_current_vllm_config_or_none())
    if device.type != "cpu" or setting is None:
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    logger.info(
        "The KV cache is reserved now and committed on use (%s).",
        setting,
    )
    return zeros_committed_on_use(num_bytes)


def zeros_committed_on_use(num_bytes: int) -> torch.Tensor:
    """Reserve zeros, of which each page takes memory once it is first written.

    The tensor is a private anonymous mapping of its own, unmapped with the last
    tensor that shares its storage. A page that was only read takes no memory.

    Args:
        num_bytes: The exact size of the storage, more than 0.

    Returns:
        A tensor of int8 on CPU, aligned to a page.

    Raises:
        OSError: The kernel refuses to reserve that much.

    """
    # Shared, which is Python's default, would make it a file in memory.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(mapping, dtype=torch.int8)  # keeps the mapping alive
    _bind_as_this_thread(zeros.data_ptr(), num_bytes)
    return zeros


def _bind_as_this_thread(address: int, num_bytes: int) -> None:
    """Give pages the NUMA policy of this thread, whichever thread touches them."""
    libnuma = get_libnuma()
    if libnuma is None or libnuma.numa_available() < 0:
        return  # then no thread has a policy either
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * (MAX_NODES // 64))()
    size = ctypes.c_ulong(MAX_NODES)
    if libnuma.get_mempolicy(
        ctypes.byref(mode), nodes, size, None, ctypes.c_ulong(0)
    ) or libnuma.mbind(
        ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), mode, nodes, size, 0
    ):
        logger.warning("Could not bind the KV cache to the memory node of its worker.")
