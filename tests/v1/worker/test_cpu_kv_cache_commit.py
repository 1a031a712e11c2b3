# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When the KV cache of an engine on CPU takes memory: at start-up or on use.

Each engine is a real one with dummy weights, in a process of its own.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.cpu_kv_cache_child import in_child
from tests.platforms.cpu_kv_cache_utils import REFERENCE_ARGUMENTS, REFERENCE_MODEL
from tests.v1.worker.cpu_kv_cache_report import (
    BLOCK,
    BLOCKS,
    WHOLE_POOL,
    report,
    rss_anon,
)
from vllm import LLM, SamplingParams, envs
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, VllmConfig
from vllm.v1.worker.cpu_kv_cache_memory import on_use_setting

MiB = 1 << 20
GiB = 1 << 30
ROOT = Path(__file__).parents[3]
COMMITS = ("startup", "on-use")
CORES = sorted(os.sched_getaffinity(0))
needs_flag = pytest.mark.skipif(
    not hasattr(CacheConfig, "enable_extensible_kv_cache"),
    reason="--enable-extensible-kv-cache came with 0.34.0",
)


def config_with(
    monkeypatch: pytest.MonkeyPatch, value: str | None, **cache: Any
) -> VllmConfig:
    if value is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_COMMIT", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_COMMIT", value)
    envs.disable_envs_cache()
    return VllmConfig(
        cache_config=CacheConfig(kv_cache_memory_bytes=GiB, **cache),
        device_config=DeviceConfig("cpu"),
    )


@pytest.mark.parametrize("value", [None, *COMMITS])
def test_value(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    config_with(monkeypatch, value)

    assert (value or "startup") == envs.VLLM_CPU_KVCACHE_COMMIT


@pytest.mark.parametrize("value", ["", "onuse", "ON-USE", "0", "lazy"])
def test_bad_value_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_COMMIT") as error:
        config_with(monkeypatch, value)

    assert f"'{value}'" in str(error.value)
    assert "'startup'" in str(error.value)
    assert "'on-use'" in str(error.value)


@needs_flag
@pytest.mark.parametrize(
    ("flag", "variable", "setting"),
    [
        (True, "startup", "--enable-extensible-kv-cache"),
        (False, "on-use", None),
        (None, "on-use", "VLLM_CPU_KVCACHE_COMMIT=on-use"),
        (None, "startup", None),
    ],
)
def test_flag_takes_precedence_over_the_variable(
    monkeypatch: pytest.MonkeyPatch,
    flag: bool | None,
    variable: str,
    setting: str | None,
) -> None:
    config = config_with(monkeypatch, variable, enable_extensible_kv_cache=flag)

    assert on_use_setting(config) == setting
    assert config.cache_config.kv_cache_memory_bytes == GiB


def test_compiled_code_does_not_depend_on_it() -> None:
    assert "VLLM_CPU_KVCACHE_COMMIT" not in envs.compile_factors()


def write_model(folder: Path, budget: int, **arguments: Any) -> dict[str, Any]:
    """Write the reference model and return the arguments of an engine on it."""
    (folder / "config.json").write_text(json.dumps(REFERENCE_MODEL))
    model = {"model": str(folder), "kv_cache_memory_bytes": budget}
    return model | REFERENCE_ARGUMENTS | arguments


def with_commit(commit: str, function: Callable[[], Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_COMMIT"] = commit
    envs.disable_envs_cache()
    return function()


def forked_report(
    folder: Path, commit: str, budget: int, rounds: int = 0, **arguments: Any
) -> dict[str, Any]:
    """Report on an engine within a forked child."""
    arguments = write_model(folder, budget, **arguments)
    function = partial(report, arguments, rounds)
    return in_child(with_commit, commit=commit, function=function)


def test_memory_after_startup(tmp_path: Path) -> None:
    """The engine's own memory is that of one with a small cache, less the cache."""
    small = forked_report(tmp_path, "startup", WHOLE_POOL)
    own = small["rss_anon"][0] - WHOLE_POOL

    startup = forked_report(tmp_path, "startup", GiB)
    on_use = forked_report(tmp_path, "on-use", GiB)

    assert startup["rss_anon"][0] > own + 0.99 * GiB
    assert startup["rss_anon"][0] > GiB
    assert on_use["rss_anon"][0] < own + GiB // 4
    (line,) = (line for line in on_use["lines"] if "KV cache per rank: " in line)
    assert "1.0 GiB (1073741824 bytes)" in line
    (line,) = (line for line in on_use["lines"] if "committed on use" in line)
    assert "(VLLM_CPU_KVCACHE_COMMIT=on-use)" in line
    assert not any("committed on use" in line for line in startup["lines"])


@needs_flag
def test_flag_commits_on_use(tmp_path: Path) -> None:
    startup = forked_report(tmp_path, "startup", GiB)
    flag = forked_report(tmp_path, "startup", GiB, enable_extensible_kv_cache=True)

    assert flag["rss_anon"][0] < startup["rss_anon"][0] - 0.75 * GiB
    (line,) = (line for line in flag["lines"] if "committed on use" in line)
    assert "(--enable-extensible-kv-cache)" in line
    (line,) = (line for line in flag["lines"] if "KV cache per rank: " in line)
    assert "1.0 GiB (1073741824 bytes)" in line


@pytest.mark.parametrize("caching", [False, True], ids=["no-prefix", "prefix"])
def test_same_tokens_while_every_block_is_refilled(
    tmp_path: Path, caching: bool
) -> None:
    startup, on_use = (
        forked_report(
            tmp_path, commit, WHOLE_POOL, rounds=2, enable_prefix_caching=caching
        )
        for commit in COMMITS
    )

    (first,), (second,) = on_use["blocks"]
    assert len(first) == BLOCKS
    # Block 0 is the null block, which no request writes.
    assert first[0] == second[0] == hashlib.sha256(bytes(BLOCK)).hexdigest()
    assert first[0] not in first[1:], "not all were filled"
    assert not set(first[1:]) & set(second[1:]), "not all were filled again"
    assert on_use["outputs"][0] != on_use["outputs"][1]
    assert on_use["outputs"] == startup["outputs"]
    assert on_use["blocks"] == startup["blocks"]


def connected_report(arguments: dict[str, Any], store: Path) -> dict[str, Any]:
    """Start an engine with a KV connector; report its memory and two requests.

    Returns:
        tokens, loaded: of each request, what it generated and how many tokens of its
        prompt the connector loaded. rss_anon: bytes after both. saved: the SHA-256 of
        each file in the store.
    """
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(store)},
    )
    engine = LLM(**arguments, enable_prefix_caching=False, kv_transfer_config=connector)
    result = {"tokens": [], "loaded": []}
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False
    )
    for first_token in (1, 101):
        prompt = [(first_token + 7 * i) % 500 for i in range(400)]
        (output,) = engine.generate({"prompt_token_ids": prompt}, params)
        result["tokens"].append(list(output.outputs[0].token_ids))
        result["loaded"].append(output.num_cached_tokens)
    result["rss_anon"] = rss_anon()
    result["saved"] = {
        str(file.relative_to(store)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in store.rglob("*.safetensors")
    }
    return result


def test_a_connector_saves_and_loads_the_same(tmp_path: Path) -> None:
    """A connector reads and writes blocks by itself, pages never touched among them."""
    # The connector saves prompts that one step computes.
    arguments = write_model(tmp_path, GiB, max_num_batched_tokens=512)
    stores = {commit: tmp_path / commit for commit in COMMITS}
    for store in stores.values():
        store.mkdir()

    def run(commit: str, store: str) -> dict[str, Any]:
        function = partial(connected_report, arguments, stores[store])
        return in_child(with_commit, commit=commit, function=function)

    startup = run("startup", "startup")
    on_use = run("on-use", "on-use")
    loading = run("on-use", "startup")

    assert startup["loaded"] == on_use["loaded"] == [0, 0]
    assert len(startup["saved"]) == 2 * REFERENCE_MODEL["num_hidden_layers"]
    assert on_use["saved"] == startup["saved"]
    assert loading["loaded"] == [3 * 128, 3 * 128]
    assert startup["tokens"] == on_use["tokens"] == loading["tokens"]
    # The connector touches no blocks but those of the requests.
    for found in (on_use, loading):
        assert found["rss_anon"] < startup["rss_anon"] - 0.75 * GiB


def tokens_of(found: dict[str, Any]) -> list[Any]:
    return [[[t for t, _ in o] for o in outputs] for outputs in found["outputs"]]


@pytest.mark.slow_test
@pytest.mark.skipif(len(CORES) < 2, reason="two ranks on two cores")
def test_same_tokens_on_two_ranks(tmp_path: Path) -> None:
    """Two worker processes, with half the heads and so twice the blocks each."""
    reports = []
    for commit in COMMITS:
        arguments = write_model(tmp_path, GiB, tensor_parallel_size=2)
        result = subprocess.run(
            [
                *(sys.executable, "-m", "tests.v1.worker.cpu_kv_cache_report"),
                *(json.dumps(arguments), "2"),
            ],
            cwd=ROOT,
            env=os.environ
            | {
                "VLLM_CPU_KVCACHE_COMMIT": commit,
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])),
                # What a worker holds is asked by sending it a function.
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        (line,) = re.findall(r"^RESULT (.*)$", result.stdout, re.M)
        reports.append(json.loads(line))

    startup, on_use = reports
    for committed, reserved in zip(
        startup["rss_anon"], on_use["rss_anon"], strict=True
    ):
        assert committed > GiB
        assert reserved < committed - 0.75 * GiB
    # When the second request reaches the engine decides how prompts are cut, and so
    # the last bits of log-probabilities and which block holds what.
    assert tokens_of(on_use) == tokens_of(startup)
