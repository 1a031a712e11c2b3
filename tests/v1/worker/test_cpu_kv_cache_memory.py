# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The memory behind a KV cache on CPU that is committed on use.

Each test runs in a forked child, where no earlier test has left memory.
"""

import bisect
import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch

from vllm import envs
from vllm.utils.numa_utils import get_libnuma
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.cpu_kv_cache_memory import zeros_committed_on_use
from vllm.v1.worker.utils import allocate_kv_cache

pytestmark = pytest.mark.forked

MiB = 1 << 20
PAGE = 4096
LAYERS = 2


def memory(name: str) -> int:
    """A figure of this process in bytes: RssAnon, RssShmem or VmSize."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) << 10


def kv_cache(num_blocks: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """A KV cache of two layers, as the model runner asks for it; 1 MiB a block."""
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes * LAYERS == MiB
    layers = [f"layer.{layer}" for layer in range(LAYERS)]
    tensor = KVCacheTensor(
        size=num_blocks * MiB,
        layers=layers,
        layer_stride=num_blocks * spec.page_size_bytes,
        block_stride=spec.page_size_bytes,
    )
    config = KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(layers, spec)])
    return allocate_kv_cache(config, torch.device(device), KVCacheLayout.LBHNC)


@pytest.fixture
def on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_COMMIT", "on-use")
    envs.disable_envs_cache()


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 7 * MiB + 12345])
def test_exact_size_of_zeros_on_a_page_of_their_own(num_bytes: int) -> None:
    zeros = zeros_committed_on_use(num_bytes)

    assert zeros.dtype == torch.int8
    assert zeros.shape == (num_bytes,)
    assert zeros.untyped_storage().nbytes() == num_bytes
    assert zeros.data_ptr() % PAGE == 0
    assert not zeros.any()


def test_pages_take_memory_once_written() -> None:
    zeros = zeros_committed_on_use(256 * MiB)
    before, shared = memory("RssAnon"), memory("RssShmem")

    assert int(zeros.sum()) == 0
    assert memory("RssAnon") - before < 8 * MiB, "reading takes memory"

    zeros[: 64 * MiB] = 1
    assert 60 * MiB < memory("RssAnon") - before < 72 * MiB
    assert memory("RssShmem") == shared


def test_memory_goes_with_the_last_tensor_on_it() -> None:
    size = memory("VmSize")
    zeros = zeros_committed_on_use(64 * MiB)
    view = zeros[8 * MiB : 16 * MiB].view(torch.bfloat16).view(2, -1)
    zeros.fill_(1)
    filled = memory("RssAnon")

    del zeros
    assert memory("RssAnon") > filled - 8 * MiB
    assert bool((view.view(torch.int8) == 1).all())

    del view
    assert memory("RssAnon") < filled - 56 * MiB
    assert memory("VmSize") < size + 56 * MiB


def test_no_leak_over_fifty_caches(on_use: None) -> None:
    sizes = []
    for _ in range(50):
        caches = kv_cache(num_blocks=32)
        for cache in caches.values():
            cache.fill_(1)
        del cache, caches
        sizes.append((memory("RssAnon"), memory("VmSize")))

    # After the first ones, which start threads.
    for before, after in zip(sizes[2], sizes[-1], strict=True):
        assert after - before < 8 * MiB


def test_cache_is_committed_on_use(on_use: None) -> None:
    before = memory("RssAnon")

    caches = kv_cache(num_blocks=256)
    assert memory("RssAnon") - before < 32 * MiB

    storages = {cache.untyped_storage().data_ptr() for cache in caches.values()}
    assert len(storages) == 1
    assert caches["layer.0"].untyped_storage().nbytes() == 256 * MiB
    for cache in caches.values():
        assert cache.shape[0] == 256
        cache[:64].fill_(1)
    assert 60 * MiB < memory("RssAnon") - before < 96 * MiB


@pytest.mark.parametrize("value", [None, "startup"])
def test_cache_is_committed_at_startup(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_COMMIT", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_COMMIT", value)
    envs.disable_envs_cache()
    before = memory("RssAnon")

    caches = kv_cache(num_blocks=256)

    assert memory("RssAnon") - before > 250 * MiB
    assert caches["layer.0"].untyped_storage().nbytes() == 256 * MiB


def test_other_devices_are_left_alone(on_use: None) -> None:
    assert kv_cache(num_blocks=2, device="meta")["layer.0"].device.type == "meta"


def test_memory_node_is_that_of_the_thread_that_reserves() -> None:
    """numa_maps shows the policy of a mapping, or else that of the main thread."""
    libnuma = get_libnuma()
    if libnuma is None or libnuma.numa_available() < 0:
        pytest.skip("this machine or container has no NUMA policies")
    libnuma.numa_parse_nodestring.restype = ctypes.c_void_p
    found = []

    def reserve() -> None:
        node = ctypes.c_void_p(libnuma.numa_parse_nodestring(b"0"))
        libnuma.numa_set_membind(node)
        found.append(zeros_committed_on_use(MiB))

    worker = threading.Thread(target=reserve)
    worker.start()
    worker.join()
    found[0].fill_(1)  # by another thread

    (line,) = re.findall(
        rf"^{found[0].data_ptr():x} .*$", Path("/proc/self/numa_maps").read_text(), re.M
    )
    assert line.split()[1] == "bind:0"
    assert {word for word in line.split() if re.match(r"N\d+=", word)} == {"N0=256"}


def test_without_a_policy_none_is_set() -> None:
    zeros = zeros_committed_on_use(MiB)
    zeros.fill_(1)

    # The kernel may have joined it to a mapping below: there is one line for both.
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    addresses = [int(line.split()[0], 16) for line in maps]
    line = maps[bisect.bisect(addresses, zeros.data_ptr()) - 1]
    assert line.split()[1] == "default"
