# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start an engine on a dummy model, run requests in it and count its blocks."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.v1.core.kv_budget_models import (
    MODELS,
    WITH_TOKENIZER,
    qwen3,
    write_model,
    write_tokenizer,
)
from vllm import LLM, PoolingParams, SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.kv_budget import Plan, make_plan

# Engine arguments beside a model's name, for kinds that are not a model of their own.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("full", {"kv_cache_dtype": "fp8"}),
    "fp8-e5m2": ("full", {"kv_cache_dtype": "fp8_e5m2"}),
    "draft": ("full", {}),
    "draft-alternating": ("alternating", {}),
    "eagle": ("full", {}),
    "chunks-of-part-blocks": ("chunked-local", {"block_size": 96}),
    "reference-no-hybrid": ("reference", {"disable_hybrid_kv_cache_manager": True}),
    "linear-hybrid-no-prefix": ("linear-hybrid", {"enable_prefix_caching": False}),
    # With prefix caching, the CPU kernels of Mamba 2 fail: see REFUSED.
    "mamba-hybrid": ("mamba-hybrid", {"enable_prefix_caching": False}),
    "mamba-hybrid-prefix": ("mamba-hybrid", {"enable_prefix_caching": True}),
    "encoder-decoder": (
        "encoder-decoder",
        # Each encoder's tokens are counted as the most of a batch: 1,500 are needed.
        {"max_model_len": 448, "max_num_batched_tokens": 1536},
    ),
    "embedding-decoder": ("embedding-decoder", {"runner": "pooling"}),
    "embedding-encoder": ("embedding-encoder", {"runner": "pooling"}),
}


class Run(NamedTuple):
    """What the scheduler has counted while requests ran."""

    running: int
    """The most requests that ran at once."""
    preemptions: int
    peak_blocks: int
    """The most blocks in use, without the null block."""


def engine_args(folder: Path, kind: str, **kwargs: Any) -> dict[str, Any]:
    """Write a model and return the engine arguments for it."""
    model, variant = VARIANTS.get(kind, (kind, {}))
    path = write_model(folder / "model", MODELS[model])
    if model in WITH_TOKENIZER:
        write_tokenizer(Path(path), MODELS[model]["vocab_size"])
    args = {
        "model": path,
        "load_format": "dummy",
        "skip_tokenizer_init": model not in WITH_TOKENIZER,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 512,
        **variant,
        **kwargs,
    }
    if kind.startswith("draft"):
        args["speculative_config"] = {
            "method": "draft_model",
            "model": write_model(folder / "draft", qwen3(layers=1)),
            "num_speculative_tokens": 8,
        }
    elif kind == "eagle":
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        args["speculative_config"] = {
            "method": "eagle",
            "model": write_model(folder / "draft", qwen3(layers=1) | llama),
            "num_speculative_tokens": 3,
        }
    elif kind == "mtp":
        args["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    return args


def plan_for(args: dict[str, Any]) -> Plan:
    return make_plan(EngineArgs(**args).create_engine_config())


def start(args: dict[str, Any], budget: int | None) -> LLM:
    return LLM(**args, kv_cache_memory_bytes=budget)


def prompt(model: str, number: int, length: int) -> Any:
    """A prompt of length tokens that shares no block with another number's."""
    tokens = [(7 * number + 3 * i + 1) % 500 for i in range(length)]
    if model == "encoder-decoder":
        audio = np.full(16000 * 30, number / 10, dtype=np.float32)
        return {
            "encoder_prompt": {
                "prompt": "",
                "multi_modal_data": {"audio": (audio, 16000)},
            },
            "decoder_prompt": {"prompt_token_ids": tokens},
        }
    return {"prompt_token_ids": tokens}


def run(llm: LLM, kind: str, prompt_len: int, late: bool = False) -> Run:
    """Run requests that grow from prompt_len to max_model_len, all at once.

    If late, the last has a prompt of full length, and comes when the others are about
    to end: then most blocks are in use.
    """
    engine = llm.llm_engine
    config = engine.vllm_config
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    max_model_len = config.model_config.max_model_len
    drafts = config.speculative_config
    step = 1 + (drafts.num_speculative_tokens if drafts else 0)
    model, _ = VARIANTS.get(kind, (kind, {}))

    def add(number: int, prompt_len: int) -> None:
        params: Any
        if kind.startswith("embedding"):
            params = PoolingParams(task="embed")
        else:
            params = SamplingParams(
                max_tokens=max_model_len - prompt_len,
                ignore_eos=True,
                detokenize=False,
                temperature=0,
            )
        engine.add_request(str(number), prompt(model, number, prompt_len), params)

    at_once = config.scheduler_config.max_num_seqs - late
    for number in range(at_once):
        add(number, prompt_len)
    running = preemptions = peak = 0
    schedule = scheduler.schedule

    def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal running, preemptions, peak
        output = schedule(*args, **kwargs)
        running = max(running, len(scheduler.running))
        preemptions += len(output.preempted_req_ids or ())
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        peak = max(peak, used)
        return output

    scheduler.schedule = schedule_and_count
    while engine.has_unfinished_requests():
        lengths = [request.num_tokens for request in scheduler.requests.values()]
        if late and max(lengths, default=0) >= max_model_len - 1 - step:
            # Some models put a token of their own before it.
            add(at_once, max_model_len - 2)
            late = False
        engine.step()
    return Run(running, preemptions, peak)


def set_environment(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    """Let the engine run in this process, with VLLM_CPU_KVCACHE_SPACE as given."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if variable is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    envs.disable_envs_cache()


def main(args: dict[str, Any]) -> None:
    """Start an engine in processes of its own and print what it has allocated.

    An eager pipeline with an explicit budget cannot run: the workers make their
    intermediate tensors in the warm-up, which there is none of then.
    """
    llm = LLM(**args)
    cache_config = llm.llm_engine.vllm_config.cache_config
    result = {
        "num_bytes": cache_config.kv_cache_memory_bytes,
        "num_blocks": cache_config.num_gpu_blocks,
    }
    if "pipeline_parallel_size" not in args:
        prompts = [{"prompt_token_ids": [1 + i] * 100} for i in range(2)]
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params)
        result["tokens"] = [len(output.outputs[0].token_ids) for output in outputs]
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
