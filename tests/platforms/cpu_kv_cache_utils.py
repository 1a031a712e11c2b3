# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models, arguments and helpers of the tests of the KV cache on CPU."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm import LLM, SamplingParams, envs
from vllm.platforms import current_platform

MiB = 1 << 20
GiB = 1 << 30

REFERENCE_MODEL = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 35,
    "layer_types": [
        "full_attention" if (layer + 1) % 5 else "sliding_attention"
        for layer in range(35)
    ],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
REFERENCE_ARGUMENTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": 128,
    "max_model_len": 2048,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 2,
}
REFERENCE_TOKENS = {128 * MiB: 2231, GiB: 17881, 4 * GiB: 71527}
BUDGET = 128 * MiB
REFERENCE_BLOCK = 7 * MiB // 4
REFERENCE_BLOCKS = 73

budgets = pytest.mark.parametrize(
    ("variable", "explicit"),
    [
        pytest.param("4", BUDGET, id="explicit-over-4"),
        pytest.param("0.125", None, id="variable-alone"),
    ],
)

# On x86 that of 0.34.0 without triton-cpu; older releases do not have it.
STANDALONE_RUNNER = getattr(
    type(current_platform), "uses_standalone_cpu_model_runner", lambda: False
)()
needs_speculative_decoding = pytest.mark.skipif(
    STANDALONE_RUNNER,
    reason="the model runner without Triton rejects speculative decoding",
)

# One core for each of two ranks.
CORES = sorted(os.sched_getaffinity(0))
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2]))}
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two ranks on two cores")

# With enforce_eager there is no warm-up, which is what allocates the tensors that
# a later pipeline stage receives into: the first request ends the engine.
NOT_EAGER = {
    "enforce_eager": False,
    "compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"},
}

PROMPT = {"prompt_token_ids": list(range(1, 20))}
LENGTH = 8
GREEDY = SamplingParams(
    temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False
)


def reference_engine(folder: Path, **kwargs) -> LLM:
    """Start an engine on the reference model, whose config.json goes to folder."""
    (folder / "config.json").write_text(json.dumps(REFERENCE_MODEL))
    return LLM(str(folder), **REFERENCE_ARGUMENTS, **kwargs)


def share_of_memory(size: int) -> float:
    """The gpu_memory_utilization that gives a worker size bytes."""
    return size / psutil.virtual_memory().total


def set_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if value is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)
    envs.disable_envs_cache()


def held(worker: Any) -> int:
    """The bytes of the KV cache that a worker holds."""
    storages = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def generate(engine: LLM) -> int:
    return len(engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)


def process_environment(variable: str | None, **others: str) -> dict[str, str]:
    """The variables of a process, with VLLM_CPU_KVCACHE_SPACE set or unset."""
    environment = os.environ | others
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if variable is not None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = variable
    return environment


def write_model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def llama(layers: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """A model of full attention layers, nothing else of which takes memory."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, config: dict[str, Any], **kwargs: Any) -> str:
    """Write a model with random weights, always the same, that vLLM can load.

    Args:
        folder: Where.
        config: The contents of config.json.
        kwargs: Those of `save_pretrained`.

    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), torch_dtype=torch.bfloat16
    )
    model.save_pretrained(folder, **kwargs)
    return write_model(folder, config)


def start(
    log: Path,
    *command: str | Path,
    environment: dict[str, str],
    cwd: Path | None = None,
) -> subprocess.Popen:
    """Start a command whose output goes to log, in a process group of its own."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=cwd or log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path) -> str:
    return "the end of the log:\n" + log.read_text(errors="replace")[-6000:]
