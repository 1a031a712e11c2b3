# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

import pytest

from vllm import envs
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform

MiB = 1 << 20
GiB = 1 << 30


def _kv_cache_memory_bytes(
    monkeypatch: pytest.MonkeyPatch, variable: str, explicit: int | None = None
) -> int | None:
    monkeypatch.setattr("vllm.platforms._current_platform", CpuPlatform())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    cache_config = CacheConfig(kv_cache_memory_bytes=explicit)
    VllmConfig(cache_config=cache_config, device_config=DeviceConfig("cpu"))
    return cache_config.kv_cache_memory_bytes


@pytest.mark.parametrize(
    ("variable", "explicit", "expected"),
    [
        pytest.param("4", 128 * MiB, 128 * MiB, id="explicit-wins"),
        pytest.param("4", None, 4 * GiB, id="whole-GiB"),
        pytest.param(" 0.125\n", None, 128 * MiB, id="fraction"),
        pytest.param("0", None, None, id="zero"),
        pytest.param("", None, None, id="empty"),
    ],
)
def test_budget(
    monkeypatch: pytest.MonkeyPatch, variable: str, explicit: int, expected: int
) -> None:
    assert _kv_cache_memory_bytes(monkeypatch, variable, explicit) == expected


@pytest.mark.parametrize("variable", ["-1", "1GiB", "nan", "1e300", "1_0", "\u0661"])
def test_invalid_kv_cache_space_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with pytest.raises(ValueError, match="Invalid VLLM_CPU_KVCACHE_SPACE="):
        _kv_cache_memory_bytes(monkeypatch, variable)


@pytest.mark.parametrize("explicit", [0, -1])
def test_invalid_kv_cache_memory_bytes_is_rejected(explicit: int) -> None:
    with pytest.raises(ValueError, match=f"Invalid kv_cache_memory_bytes={explicit}:"):
        CacheConfig(kv_cache_memory_bytes=explicit)


def test_variable_is_read_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    envs.enable_envs_cache()  # as the first engine of a process does
    try:
        assert _kv_cache_memory_bytes(monkeypatch, "0.125") == 128 * MiB
        assert _kv_cache_memory_bytes(monkeypatch, "1") == GiB
    finally:
        envs.disable_envs_cache()
