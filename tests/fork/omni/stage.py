# SPDX-License-Identifier: Apache-2.0
"""A stage of a deploy file in a process of its own, as vllm-omni runs it.

`python -m tests.fork.omni.stage JOB FILE STAGE_ID MODEL RESULT [STAND_IN]` resolves the
stage with vllm-omni's own loader and does one of the jobs at the end of this file. It
knows nothing of the planner, and runs on stock vLLM too.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm_omni.config.stage_config import (
    _apply_platform_overrides,
    load_deploy_config,
    merge_pipeline_deploy,
)
from vllm_omni.model_executor.models.qwen3_tts.pipeline import QWEN3_TTS_PIPELINE

from tests.platforms.cpu_kv_cache_utils import generate, held
from vllm import LLM, EngineArgs
from vllm.utils.ompmultiprocessing import OMPProcessManager

RUNNING: list[LLM] = []
"""An engine ends with the last reference to it."""


def resolve(file: str, stage_id: int, model: str) -> dict[str, Any]:
    """Return a stage's arguments for vLLM, and put its environment into ours."""
    deploy = _apply_platform_overrides(load_deploy_config(file), platform="cpu")
    stage = merge_pipeline_deploy(QWEN3_TTS_PIPELINE, deploy)[stage_id]
    os.environ.update(stage.yaml_runtime["env"])
    # As vllm-omni does for stages that are longer than the model's positions.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    given = stage.yaml_engine_args
    names = {field.name for field in dataclasses.fields(EngineArgs)} & given.keys()
    return {
        **{name: given[name] for name in names if given[name] is not None},
        "model": model,
        "hf_overrides": {"architectures": [given["model_arch"]]},
    }


def configuration(arguments: dict[str, Any]) -> dict[str, Any]:
    """Build the engine's configuration, and report what of the file is in it."""
    config = EngineArgs(**arguments).create_engine_config()
    return {
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "cores": OMPProcessManager(config).cpu_lists,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "architecture": config.model_config.architecture,
    }


def inside(worker: Any) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "held": held(worker),
        "threads": torch.get_num_threads(),
    }


def engine(arguments: dict[str, Any], stand_in: str) -> dict[str, Any]:
    """Start the engine with another model and no weights, and generate."""
    llm = LLM(
        **arguments
        | {
            "model": stand_in,
            "hf_overrides": {},
            "load_format": "dummy",
            "skip_tokenizer_init": True,
        }
    )
    RUNNING.append(llm)
    generate(llm)
    cache_config = llm.llm_engine.vllm_config.cache_config
    return {
        "kv_cache_memory_bytes": cache_config.kv_cache_memory_bytes,
        "num_gpu_blocks": cache_config.num_gpu_blocks,
        "ranks": llm.collective_rpc(inside),
    }


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "configuration": configuration,
    "engine": engine,
}

if __name__ == "__main__":
    job, file, stage_id, model, result, *stand_in = sys.argv[1:]
    found = JOBS[job](resolve(file, int(stage_id), model), *stand_in)
    Path(result).with_suffix(".part").write_text(json.dumps(found))
    Path(result).with_suffix(".part").rename(result)
    sys.stdin.read()  # until the test has seen what it wants to see
