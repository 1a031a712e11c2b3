# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that sleeps gives the memory of its KV cache back, and wakes up."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="requires a CPU platform"
)

BUDGET = 256 << 20


def _rss_anon() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def _tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    prompt = {"prompt_token_ids": list(range(1, 101))}
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.forked
def test_kv_cache_is_given_back_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    ).save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_memory_bytes=BUDGET,
        enable_sleep_mode=True,
    )
    tokens, awake = _tokens(llm), _rss_anon()

    llm.sleep(level=1)
    asleep = _rss_anon()
    llm.wake_up()

    assert asleep < awake - 0.9 * BUDGET
    assert _rss_anon() > asleep + 0.9 * BUDGET
    assert _tokens(llm) == tokens
