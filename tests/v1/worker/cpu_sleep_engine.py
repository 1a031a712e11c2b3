# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine on CPU that sleeps, with a checkpoint that it can load again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.platforms.cpu_kv_cache_child import in_child
from tests.platforms.cpu_kv_cache_utils import llama, write_checkpoint
from vllm import LLM, SamplingParams, envs

MiB = 1 << 20
COMMITS = ("startup", "on-use")
BUDGET = 256 * MiB
LAYERS, KV_HEADS, HEAD_DIM = 8, 16, 256
BLOCK = 16 * MiB  # 128 tokens of 8 layers x 16 heads x 256 x K and V in bfloat16
VOCABULARY, HIDDEN = 262144, 64
WEIGHTS = 2 * VOCABULARY * HIDDEN * 2  # those that read tokens, and that write them

ARGUMENTS: dict[str, Any] = {
    "kv_cache_memory_bytes": BUDGET,
    "enable_sleep_mode": True,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": 128,
    "max_model_len": 640,
    "max_num_batched_tokens": 640,
    "max_num_seqs": 3,
}


def checkpoint(folder: Path, tied: bool) -> str:
    config = llama(LAYERS, KV_HEADS, HEAD_DIM) | {"tie_word_embeddings": tied}
    return write_checkpoint(
        folder, config | {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    )


def with_variables(function: Callable[[], Any], **variables: str) -> Any:
    os.environ |= variables
    envs.disable_envs_cache()
    return function()


def in_engine_child(commit: str, function: Callable[[], Any], core: str = "0") -> Any:
    """Return what a function returns that starts an engine in a forked child.

    Args:
        commit: The value of VLLM_CPU_KVCACHE_COMMIT.
        function: The function.
        core: "1" for an engine core in a process of its own.

    """
    return in_child(
        with_variables,
        function=function,
        VLLM_CPU_KVCACHE_COMMIT=commit,
        VLLM_ENABLE_V1_MULTIPROCESSING=core,
        # What a worker holds is asked by sending it a function.
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
        HF_HUB_OFFLINE="1",
    )


def generate(engine: LLM, budget: int = BUDGET) -> tuple[list[list[int]], int]:
    """Fill every block of a budget; return tokens and how many were cached."""
    requests = [
        {"prompt_token_ids": [(1 + n + 7 * i) % 500 for i in range(630)]}
        for n in range((budget // BLOCK - 1) // 5)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(requests, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(output.num_cached_tokens for output in outputs)


def kv_cache_of(worker: Any) -> tuple[list[int], bool]:
    """The addresses of a worker's KV cache, and whether anything is in it."""
    caches = worker.model_runner.kv_caches
    return [c.data_ptr() for c in caches], any(bool(c.any()) for c in caches)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def start(model: str, **arguments: Any) -> LLM:
    """Start an engine; give back what the forked process had freed before.

    Sleep gives it back too, and a test would count it as memory of the engine.
    """
    engine = LLM(model, **(ARGUMENTS | arguments))
    from vllm.v1.worker.cpu_sleep import trim_heap  # not in stock vLLM

    trim_heap()
    return engine


def is_sleeping(engine: LLM) -> bool:
    return engine.llm_engine.is_sleeping()
