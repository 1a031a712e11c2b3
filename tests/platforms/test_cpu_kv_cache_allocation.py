# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How many KV cache tokens an engine allocates from a budget on CPU.

Each test starts an engine with dummy weights in a forked child, as an engine
takes memory and threads that it does not give back.

The model has 28 full attention and 7 sliding window layers in groups of 7: a
block of 128 tokens takes 1.75 MiB, a request of 2,048 tokens 67 blocks.
"""

from pathlib import Path

import pytest

from tests.platforms.cpu_kv_cache_utils import (
    REFERENCE_TOKENS,
    GiB,
    MiB,
    reference_engine,
    set_variable,
    share_of_memory,
)
from vllm import SamplingParams


@pytest.mark.forked
@pytest.mark.parametrize(
    ("variable", "explicit", "budget"),
    [
        pytest.param("1", None, GiB, id="variable-1"),
        pytest.param("4", None, 4 * GiB, id="variable-4"),
        pytest.param(None, 128 * MiB, 128 * MiB, id="explicit-alone"),
        pytest.param("1", 128 * MiB, 128 * MiB, id="explicit-over-1"),
        pytest.param("4", 128 * MiB, 128 * MiB, id="explicit-over-4"),
        pytest.param("0.125", None, 128 * MiB, id="variable-fraction"),
        pytest.param("0", 128 * MiB, 128 * MiB, id="explicit-over-zero"),
        pytest.param("", 128 * MiB, 128 * MiB, id="explicit-over-empty"),
    ],
)
def test_allocated_tokens(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    explicit: int | None,
    budget: int,
) -> None:
    set_variable(monkeypatch, variable)

    engine = reference_engine(tmp_path, kv_cache_memory_bytes=explicit)

    cache_config = engine.llm_engine.vllm_config.cache_config
    assert cache_config.kv_cache_size_tokens == REFERENCE_TOKENS[budget]
    assert cache_config.kv_cache_memory_bytes == budget


@pytest.mark.forked
@pytest.mark.parametrize("variable", [None, "", "0"], ids=["unset", "empty", "zero"])
def test_without_a_budget_memory_utilization_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None
) -> None:
    set_variable(monkeypatch, variable)

    engine = reference_engine(tmp_path, gpu_memory_utilization=share_of_memory(3 * GiB))

    cache_config = engine.llm_engine.vllm_config.cache_config
    assert cache_config.kv_cache_memory_bytes is None
    assert 0 < cache_config.kv_cache_size_tokens < REFERENCE_TOKENS[4 * GiB]


@pytest.mark.forked
def test_number_of_blocks_overrides_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_variable(monkeypatch, "1")

    engine = reference_engine(
        tmp_path, kv_cache_memory_bytes=256 * MiB, num_gpu_blocks_override=80
    )

    assert engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == 80


@pytest.mark.forked
def test_generation_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_variable(monkeypatch, "4")
    engine = reference_engine(tmp_path, kv_cache_memory_bytes=128 * MiB)

    (output,) = engine.generate(
        {"prompt_token_ids": list(range(1, 20))},
        SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False),
    )

    assert len(output.outputs[0].token_ids) == 8
    assert (
        engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
        == REFERENCE_TOKENS[128 * MiB]
    )
