# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An idle engine on CPU gives memory of its KV cache back by itself."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.platforms.cpu_kv_cache_server import (
    Server,
    anonymous_memory,
    as_flags,
    serve,
)
from tests.platforms.cpu_kv_cache_utils import (
    llama,
    process_environment,
    write_model,
)
from tests.v1.worker.cpu_kv_cache_report import rss_anon
from vllm import envs
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.worker.cpu_kv_cache_idle import byte_ranges, discard_blocks, unused_blocks
from vllm.v1.worker.cpu_kv_cache_memory import zeros_committed_on_use

MiB = 1 << 20
IDLE = 4  # seconds
BLOCK = 14 * MiB
FLAGS = as_flags(
    {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": 128,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": "1G",
    }
)


def config_with(
    monkeypatch: pytest.MonkeyPatch,
    cache: dict[str, Any] | None = None,
    **variables: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"VLLM_CPU_KVCACHE_{name}", value)
    envs.disable_envs_cache()
    VllmConfig(
        cache_config=CacheConfig(kv_cache_memory_bytes=1 << 30, **(cache or {})),
        device_config=DeviceConfig("cpu"),
    )


@pytest.mark.parametrize(
    ("value", "seconds"), [("", 0), ("0", 0), ("2.5", 2.5), ("600", 600)]
)
def test_idle_seconds(
    monkeypatch: pytest.MonkeyPatch, value: str, seconds: float
) -> None:
    config_with(monkeypatch, COMMIT="on-use", IDLE_SECONDS=value)

    assert seconds == envs.VLLM_CPU_KVCACHE_IDLE_SECONDS
    assert envs.VLLM_CPU_KVCACHE_IDLE_RELEASE == "unused"


@pytest.mark.parametrize("value", ["1m", "1_0", "-1", "nan", "inf", "1e99"])
def test_bad_idle_seconds_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_IDLE_SECONDS") as error:
        config_with(monkeypatch, COMMIT="on-use", IDLE_SECONDS=value)

    assert f"{value!r}" in str(error.value)


def test_idle_time_is_refused_at_startup_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match=r"IDLE_SECONDS=60 needs .*COMMIT=on-use"):
        config_with(monkeypatch, IDLE_SECONDS="60")


@pytest.mark.skipif(
    not hasattr(CacheConfig, "enable_extensible_kv_cache"),
    reason="--enable-extensible-kv-cache came with 0.34.0",
)
def test_idle_time_follows_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "enable_extensible_kv_cache"
    config_with(monkeypatch, {flag: True}, IDLE_SECONDS="60")
    with pytest.raises(ValueError, match="IDLE_SECONDS=60 needs"):
        config_with(monkeypatch, {flag: False}, COMMIT="on-use", IDLE_SECONDS="60")


@pytest.mark.parametrize("value", ["", "unused", "all", "ALL"])
def test_what_is_released(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    if value in ("unused", "all"):
        config_with(monkeypatch, IDLE_RELEASE=value)
        assert value == envs.VLLM_CPU_KVCACHE_IDLE_RELEASE
        return
    with pytest.raises(ValueError, match=r"IDLE_RELEASE.*\['unused', 'all'\]"):
        config_with(monkeypatch, IDLE_RELEASE=value)


def test_compiled_code_does_not_depend_on_it() -> None:
    factors = envs.compile_factors()

    assert "VLLM_CPU_KVCACHE_IDLE_SECONDS" not in factors
    assert "VLLM_CPU_KVCACHE_IDLE_RELEASE" not in factors


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


@pytest.mark.forked
@pytest.mark.parametrize("block_outermost", [True, False])
def test_discarded_blocks(block_outermost: bool) -> None:
    cache = zeros_committed_on_use(32 * MiB).fill_(1)
    config = layout(block_outermost, num_blocks=32)
    before = rss_anon()

    discard_blocks([cache], config, [(1, 3), (30, 32)])

    assert rss_anon() < before - 3 * MiB
    half = cache.view(32, 2, -1) if block_outermost else cache.view(2, 32, -1)
    blocks = (half if block_outermost else half.transpose(0, 1)).reshape(32, -1)
    gone = [block for block in range(32) if not blocks[block].any()]
    assert gone == [1, 2, 30, 31]
    assert int(blocks.sum(dtype=torch.int64)) == 28 * MiB
    assert len(byte_ranges(config, [(1, 3)])) == (1 if block_outermost else 2)


def test_unused_blocks() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=128)
    one, two, three, *_ = pool.get_new_blocks(5)
    assert [one.block_id, two.block_id, three.block_id] == [1, 2, 3]
    three.set_block_hash(make_block_hash_with_group_id(BlockHash(b"prefix"), 0))
    pool.free_blocks([one, three])

    # 0 is the null block, 2, 4 and 5 are in use, 3 has a cached prefix.
    assert list(unused_blocks(pool.blocks)) == [(1, 2), (6, 10)]


def engine_of(server: Server) -> psutil.Process:
    """The process that holds the KV cache."""
    return max(server.members(), key=anonymous_memory)


def complete(server: Server, seed: int) -> tuple[list[int], int]:
    """Write three blocks, of which two can be cached; return tokens and hits."""
    body = {
        "prompt": [(seed + 7 * i) % 500 for i in range(376)],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    answer = json.loads(server.ask("/v1/completions", body))
    usage = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], usage.get("cached_tokens", 0)


def cpu_seconds(server: Server) -> float:
    """What the engine core and its worker used, less the threads of gloo, which poll.

    There are a dozen of those, with and without an idle time: 0.02 s of CPU a second.
    """
    seconds = 0.0
    for process in server.members()[1:]:
        for thread in process.threads():
            comm = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text()
            if not comm.startswith("gloo"):
                seconds += thread.user_time + thread.system_time
    return seconds


@pytest.mark.slow_test
@pytest.mark.parametrize("release", ["unused", "all", None])
def test_served(tmp_path: Path, release: str | None) -> None:
    """Once idle, what no cached prefix needs is given back, or all of it."""
    variables = {"VLLM_CPU_KVCACHE_COMMIT": "on-use"}
    if release is not None:
        variables["VLLM_CPU_KVCACHE_IDLE_SECONDS"] = str(IDLE)
        variables["VLLM_CPU_KVCACHE_IDLE_RELEASE"] = release
    model = write_model(tmp_path / "model", llama(28, 8, 128))
    with serve(
        *(tmp_path, "serve", model, *FLAGS, "--enable-prompt-tokens-details"),
        environment=process_environment(None, **variables),
    ) as server:
        complete(server, 1)
        engine = engine_of(server)
        tokens = complete(server, 2)[0]
        busy = anonymous_memory(engine)
        time.sleep(IDLE + 1)
        idle = anonymous_memory(engine)
        before = cpu_seconds(server)
        time.sleep(3 * IDLE)
        spent = cpu_seconds(server) - before
        again = complete(server, 2)
        log = server.log.read_text()
        server.stop()

    # Each of the two requests left two blocks with a cached prefix; the third block
    # of the first was used by the second too.
    given_back = {None: 0, "unused": 1, "all": 5}[release] * BLOCK
    assert abs(busy - idle - given_back) < 4 * MiB, log[-3000:]
    assert again == (tokens, 0 if release == "all" else 256)
    assert log.count("Gave back the memory of") == (0 if release is None else 1)
    # Of 12 s, in steps of 0.01 s.
    assert spent < 0.05
