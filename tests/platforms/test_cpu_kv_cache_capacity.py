# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

try:
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import (
        get_kv_cache_config_builder as get_builder,
    )
except ImportError:  # up to 0.32.0, where these functions take no builder
    planning, get_builder = kv_cache_utils, None


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms._current_platform", CpuPlatform())
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def capacity_config(**kwargs: Any) -> VllmConfig:
    """A configuration of 2,048 tokens a request, for the sizing functions alone."""
    config = VllmConfig(
        cache_config=CacheConfig(**kwargs), device_config=DeviceConfig("cpu")
    )
    config.model_config = SimpleNamespace(  # type: ignore[assignment]
        max_model_len=2048, original_max_model_len=None
    )
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def one_group() -> list[KVCacheGroupSpec]:
    """A full attention layer: 16 blocks of 128 tokens a request."""
    spec = FullAttentionSpec(
        block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    return [KVCacheGroupSpec(["layer"], spec)]


def call(function: str, config: VllmConfig, *arguments: Any) -> Any:
    """Call a function of planning, with its builder if it takes one."""
    builder = [get_builder(config)] if get_builder else []
    return getattr(planning, function)(*builder, config, *arguments)


def test_capacity_leaves_out_the_null_block(monkeypatch: pytest.MonkeyPatch) -> None:
    config = capacity_config()
    cache = KVCacheConfig(
        num_blocks=32, kv_cache_tensors=[], kv_cache_groups=one_group()
    )
    lines: list[str] = []
    monkeypatch.setattr(
        kv_cache_utils.logger, "info_once", lambda line, *a: lines.append(line % a)
    )

    kv_cache_utils.update_kv_cache_capacity(config, cache)

    assert config.cache_config.kv_cache_max_concurrency == 31 / 16
    assert config.cache_config.kv_cache_size_tokens == 32 * 128
    (line,) = lines
    assert line.endswith(
        "4,096 tokens, 3,968 of them for requests, "
        "Maximum concurrency for 2,048 tokens per request: 1.94x"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_size_that_fits_is_named_on_cpu_alone(device: str) -> None:
    """On CUDA mm_ipc_gpu_memory_gb is taken out of it, so it would not be enough."""
    config = capacity_config(kv_cache_memory_bytes=1 << 20)
    config.device_config.device_type = device  # type: ignore[assignment]

    budget = call("_get_fitting_budget", config, [one_group()])

    needed = 17 * 128 * 64 * 2 * 2
    assert (budget is None) == (device == "cuda")
    if budget:
        assert f"`--kv-cache-memory-bytes={needed}`" in budget


def test_failed_automatic_length_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    config = capacity_config(kv_cache_memory_bytes=1)

    def fail(*args: Any) -> None:
        raise RuntimeError("no size")

    monkeypatch.setattr(planning, "_get_fitting_budget", fail)
    with pytest.raises(RuntimeError, match="no size"):
        call("_auto_fit_max_model_len", config, [one_group()], [1])

    assert config.model_config.max_model_len == 2048
