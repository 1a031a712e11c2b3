# SPDX-License-Identifier: Apache-2.0
"""The stages of a deploy file, as vllm-omni's own loader resolves them on CPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import transformers

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints import kv_budget
from vllm.entrypoints.kv_budget import one_line
from vllm.model_executor.models import ModelRegistry
from vllm.transformers_utils.config import get_config

# The kinds of stages whose models vLLM builds.
PLANNED = {"ar", "generation"}
# vllm-omni has no workers for CPU yet.
WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
# What sizes no cache: how stages are connected, for which vllm-omni asks its own
# workers, and what its files choose for CUDA and vLLM refuses without Triton.
NOT_PLANNED = {
    "custom_process_next_stage_input_func",
    "kv_cache_memory_bytes",
    "moe_backend",
    "requires_full_payload_input",
    "scheduler_cls",
    "stage_connector_spec",
    "use_v2_model_runner",
    "worker_cls",
}


@dataclass(frozen=True)
class Stage:
    """A stage of a deploy file, as it is on CPU."""

    stage_id: int
    name: str
    engine_args: dict[str, Any]
    env: dict[str, str]
    why_measure: str | None
    """Why the engine cannot describe its cache, None if it can."""

    @property
    def num_ranks(self) -> int:
        """The ranks on one node: each has a budget and cores of its own."""
        size = {
            key: int(self.engine_args.get(key) or 1)
            for key in (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "data_parallel_size",
                "nnodes",
            )
        }
        replicas = int(
            self.engine_args.get("data_parallel_size_local")
            or size["data_parallel_size"]
        )
        ranks = size["tensor_parallel_size"] * size["pipeline_parallel_size"]
        return max(ranks // size["nnodes"], 1) * replicas


def find_pipeline(key: str, model: str) -> Any:
    """Return vllm-omni's description of the stages of a kind of model.

    That of some kinds depends on the model, such as whether it is to speak.

    Raises:
        ValueError: If it has none.

    """
    why = ""
    try:
        from vllm_omni.config.pipeline_registry import resolve_pipeline_config

        hf_config = None
        try:
            hf_config = get_config(model, trust_remote_code=False)
        except Exception as error:  # most kinds do not need it
            why = f" for {model}: {one_line(error)}"
        pipeline = resolve_pipeline_config(key, hf_config)
    except ImportError as missing:
        # The registry needs what any of its models needs. This one may need less.
        from vllm_omni.config.stage_config import PipelineConfig

        try:
            module = import_module(f"vllm_omni.model_executor.models.{key}.pipeline")
        except ImportError:
            raise ValueError(f"pipeline {key!r} of vllm-omni: {missing}") from missing
        pipeline = next(
            (
                found
                for found in vars(module).values()
                if isinstance(found, PipelineConfig) and found.model_type == key
            ),
            None,
        )
    if pipeline is None:
        raise ValueError(f"vllm-omni has no pipeline {key!r}{why}")
    return pipeline


def platform_section() -> Callable[..., Any]:
    """Return vllm-omni's function that applies the `platforms:` section of a name.

    Its public ones apply that of the platform they run on, and none of these is CPU.

    Raises:
        ImportError: If it is not where vllm-omni 0.32 has it.

    """
    from vllm_omni.config import stage_config

    try:
        function: Callable[..., Any] = stage_config._apply_platform_overrides
    except AttributeError:
        raise ImportError(
            f"vllm-omni {metadata.version('vllm-omni')} is not supported: its "
            "stage_config has no _apply_platform_overrides, as 0.32 has"
        ) from None
    return function


def read_stages(path: Path, model: str) -> list[Stage]:
    """Return the stages of a deploy file as vllm-omni resolves them on CPU.

    Raises:
        ImportError: If vllm-omni is not installed.
        ValueError: If the file or the model is none of vllm-omni's.

    """
    try:
        from vllm_omni.config import load_deploy_config, merge_pipeline_deploy
    except ImportError as error:
        raise ImportError(f"--deploy needs vllm-omni: {error}") from error
    apply_platform = platform_section()
    try:
        deploy = apply_platform(load_deploy_config(path), platform="cpu")
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path}: vllm-omni cannot read it: {reason}") from error
    key = deploy.pipeline
    if key is None:
        key = transformers.PretrainedConfig.get_config_dict(model)[0].get("model_type")
    if key is None:
        raise ValueError(f"{model}: there is no config.json with a model_type")
    stages = []
    for config in merge_pipeline_deploy(find_pipeline(key, model), deploy):
        num_replicas = int(config.yaml_runtime.get("num_replicas", 1))
        if num_replicas > 1:
            raise ValueError(
                f"stage {config.stage_id}: num_replicas={num_replicas} is not planned: "
                "replicas share an environment, and so the cores in it; "
                "data_parallel_size gives each rank its own"
            )
        kind = config.worker_type or config.stage_type.value
        why_measure = None
        if kind not in PLANNED:
            why_measure = f"the engine cannot describe the cache of a {kind} stage"
        # What vllm-omni adds once it starts a stage: which part of a model it is, and
        # what a stage that generates without a loop does without.
        engine_args = {
            "model": model,
            **config.yaml_engine_args,
            "model_stage": config.model_stage,
            "hf_config_name": config.hf_config_name,
        }
        if kind == "generation":
            engine_args.setdefault("disable_hybrid_kv_cache_manager", True)
            engine_args.setdefault("enable_prefix_caching", False)
        stages.append(
            Stage(
                stage_id=config.stage_id,
                name=config.model_stage,
                engine_args=engine_args,
                env={
                    str(key): str(value)
                    for key, value in (config.yaml_runtime.get("env") or {}).items()
                },
                why_measure=why_measure,
            )
        )
    return stages


def stage_engine_args(stage: Stage) -> EngineArgs:
    """Return vllm-omni's arguments of a stage's engine, with no budget."""
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    given = dict(stage.engine_args)
    if model_subdir := given.get("model_subdir"):
        given["model"] = os.path.join(given["model"], model_subdir)
    known = {field.name for field in fields(OmniEngineArgs)} - NOT_PLANNED
    engine_args: EngineArgs = OmniEngineArgs(
        **{key: given[key] for key in known & given.keys() if given[key] is not None},
        worker_cls=WORKER,
    )
    return engine_args


def explain(stage: Stage, error: Exception) -> str:
    """Return in one line why a stage cannot be planned."""
    message = kv_budget.explain(error, stage.engine_args["model"])
    architecture = str(stage.engine_args.get("model_arch"))
    if isinstance(error, ImportError) or "failed to be inspected" in message:
        # vLLM asks another process for the class, and says in its log what failed.
        try:
            ModelRegistry.models[architecture].load_model_cls()
        except Exception as reason:
            return f"{architecture} of vllm-omni cannot be loaded: {one_line(reason)}"
    return message
