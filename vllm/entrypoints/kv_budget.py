# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget` prints: the budget that an engine with these arguments needs.

The configuration is the engine's own, its layers are built on the meta device and
the sizes come from `vllm.v1.core.kv_budget`. No weights and no cache are allocated.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.kv_budget_memory import (
    Need,
    count_need,
    describe_memory,
    memory_as_json,
    read_memory,
)
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.cpu import CpuPlatform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_budget import (
    Allocation,
    GiB,
    KVBudget,
    format_bytes,
    plan_allocation,
    plan_kv_budget,
    shorten_max_model_len,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.worker.kv_cache_spec_discovery import specs_of_all_stages

PROG = "vllm kv-budget"
MLA_KINDS = {KVCacheSpecKind.MLA_ATTENTION, KVCacheSpecKind.SLIDING_WINDOW_MLA}


class Plan(NamedTuple):
    """A configuration with its budget, and what a given budget makes of it."""

    config: VllmConfig
    block_size: int
    budget: KVBudget | None
    """None if no layer has a KV cache."""
    given: Allocation | None
    """None if no budget is given."""
    weight_bytes: tuple[int, ...]
    """The weights of a rank of each pipeline stage."""


def make_plan(vllm_config: VllmConfig) -> Plan:
    """Plan as the engine core does when it starts, with nothing allocated.

    Raises:
        ValueError: If the engine would not start with this configuration, or with
            the budget in it.

    """
    register_all_kvcache_specs(vllm_config)
    workers = specs_of_all_stages(vllm_config)
    specs = [worker.kv_cache_spec for worker in workers]
    if any(specs) and not all(specs):
        raise ValueError(
            f"pipeline stage {specs.index({})} has no layer with a KV cache, "
            "which the engine rejects: use fewer stages or another partition"
        )
    resolve_kv_cache_layout(
        vllm_config,
        [worker.supported_layouts for worker in workers],
        [spec for rank_specs in specs for spec in rank_specs.values()],
    )
    num_bytes = vllm_config.cache_config.kv_cache_memory_bytes
    if num_bytes is not None and vllm_config.model_config.original_max_model_len == -1:
        shorten_max_model_len(vllm_config, specs, num_bytes)
    budget = plan_kv_budget(vllm_config, specs)
    override = vllm_config.cache_config.num_gpu_blocks_override
    if budget is not None and override is not None:
        num_bytes = override * budget.bytes_per_block
    given = None
    if budget is not None and num_bytes is not None:
        given = plan_allocation(vllm_config, specs, budget, num_bytes)
    weight_bytes = tuple(worker.weight_bytes for worker in workers)
    return Plan(vllm_config, workers[0].block_size, budget, given, weight_bytes)


def need(plan: Plan) -> Need | None:
    """Return what all ranks on this machine take with the budget, given or planned."""
    num_bytes = plan.budget.num_bytes if plan.budget is not None else 0
    if plan.given is not None:
        num_bytes = plan.given.num_bytes
    return count_need(plan.config, plan.weight_bytes, num_bytes)


def host_features() -> dict[str, bool]:
    """Return what of the host a plan may depend on."""
    return {
        "amx": CpuPlatform.supports_x86_isa("amx_tile"),
        "avx512_bf16": CpuPlatform.supports_x86_isa("avx512_bf16"),
    }


def host_dependence(budget: KVBudget) -> dict[str, str]:
    """Return which features of the host this plan depends on, and for what."""
    kinds = {group.kind for rank in budget.ranks for group in rank.groups}
    depends = {}
    if kinds & {kind.value for kind in MLA_KINDS}:
        depends["amx"] = "the block size of MLA layers"
    if KVCacheSpecKind.MAMBA.value in kinds:
        depends["avx512_bf16"] = "the data type of Mamba and linear attention states"
    return depends


def paste_lines(num_bytes: int) -> dict[str, str]:
    """Return a budget as the flag, the variable and the YAML key that set it.

    The variable's value is the shortest fraction that stands for these very bytes.
    """
    return {
        "flag": f"--kv-cache-memory-bytes {num_bytes}",
        "variable": f"VLLM_CPU_KVCACHE_SPACE={num_bytes / GiB!r}",
        "yaml": f"kv_cache_memory_bytes: {num_bytes}",
    }


def source(plan: Plan, given: Allocation) -> str:
    """Return the setting that a given budget comes from."""
    override = plan.config.cache_config.num_gpu_blocks_override
    if override is not None:
        return f"--num-gpu-blocks-override={override}"
    space = envs.get_cpu_kvcache_space()
    if int(space * GiB) == given.num_bytes:
        return f"VLLM_CPU_KVCACHE_SPACE={space}"
    return f"--kv-cache-memory-bytes={given.num_bytes}"


def settings(plan: Plan) -> dict[str, Any]:
    """Return what of the configuration the plan is for."""
    config = plan.config
    parallel_config = config.parallel_config
    return {
        "model": config.model_config.model,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "block_size": plan.block_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "tensor_parallel_size": parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": parallel_config.pipeline_parallel_size,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "hybrid_kv_cache_manager": (
            not config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
    }


def as_json(plan: Plan) -> str:
    """Return a plan as JSON. Sizes are bytes, per rank."""
    report: dict[str, Any] = {"settings": settings(plan), "host": host_features()}
    budget = plan.budget
    report["needs_kv_cache"] = budget is not None
    if budget is not None:
        report["host_dependence"] = host_dependence(budget)
        report["budget"] = asdict(budget)
        report["paste"] = paste_lines(budget.num_bytes)
        if plan.given is not None:
            report["given"] = asdict(plan.given) | {
                "source": source(plan, plan.given),
                "bytes_above_budget": plan.given.num_bytes - budget.num_bytes,
            }
    report["memory"] = memory_as_json(read_memory(), need(plan))
    return json.dumps(report, indent=2)


def describe_ranks(plan: Plan, budget: KVBudget) -> Iterator[str]:
    """Yield the lines about blocks, once if all ranks are alike."""
    ranks = list(dict.fromkeys(budget.ranks))
    for rank in ranks:
        if len(ranks) > 1:
            stages = [str(i) for i, other in enumerate(budget.ranks) if other == rank]
            yield f"Ranks of pipeline stage {', '.join(stages)}"
        else:
            yield "Each rank"
        yield f"  block          {format_bytes(rank.bytes_per_block)}"
        yield f"  token          {format_bytes(rank.bytes_per_token)}"
        request = f"{rank.blocks_per_request} blocks"
        yield f"  request        {request} for {budget.max_model_len:,} tokens"
        for group in dict.fromkeys(rank.groups):
            count = rank.groups.count(group)
            times = f"{count} x " if count > 1 else ""
            prompt = ""
            if group.blocks_of_a_prompt > group.blocks_per_request:
                prompt = f", {group.blocks_of_a_prompt} during its prompt"
            yield (
                f"  group          {times}{group.kind}: {group.num_layers} layers, "
                f"{group.block_size:,} tokens a block, "
                f"{group.blocks_per_request} blocks a request{prompt}"
            )


def describe_given(plan: Plan, budget: KVBudget, given: Allocation) -> Iterator[str]:
    """Yield the lines about the budget that is set."""
    yield f"Given by {source(plan, given)}"
    yield f"  budget         {format_bytes(given.num_bytes)}: {given.num_blocks} blocks"
    yield (
        f"  room for       {given.num_requests} requests of "
        f"{budget.max_model_len:,} tokens at once"
    )
    yield (
        f"  engine's log   {given.logged_tokens:,} tokens, "
        f"{given.logged_concurrency:.2f}x (its tokens count the null block)"
    )
    difference = given.num_bytes - budget.num_bytes
    if difference:
        more = "more" if difference > 0 else "less"
        yield f"  difference     {format_bytes(abs(difference))} {more} than needed"


def describe_blocks(budget: KVBudget) -> str:
    """Return the blocks of the budget as the sum that they are."""
    prompts = budget.blocks_in_flight
    requests = budget.max_num_seqs * budget.blocks_per_request + prompts
    held_back = budget.num_blocks - 1 - requests
    in_flight = f" + {prompts} for prompts" if prompts else ""
    what = "of the watermark" if budget.watermark else "of the start-up check"
    rest = f" + {held_back} {what}" if held_back else ""
    return (
        f"{budget.num_blocks} blocks = {budget.max_num_seqs} x "
        f"{budget.blocks_per_request}{in_flight} + 1 null block{rest}"
    )


def describe_decision(budget: KVBudget) -> Iterator[str]:
    """Yield a line if the engine asks for more than its requests hold."""
    if budget.num_blocks == budget.held_blocks:
        return
    who = "admission of a prompt"
    if budget.admission_blocks < budget.num_blocks:
        who = "the start-up check"
    yield (
        f"  decided by     {who}: requests hold at most {budget.held_blocks - 1} "
        "blocks beside the null block"
    )


def as_text(plan: Plan) -> str:
    """Return a plan for people."""
    lines = [f"{key:24}{value}" for key, value in settings(plan).items()]
    features = host_features()
    names = {"amx": "AMX", "avx512_bf16": "AVX512-BF16"}
    has = ", ".join(f"{names[k]} {'yes' if v else 'no'}" for k, v in features.items())
    budget = plan.budget
    depends = host_dependence(budget) if budget is not None else {}
    effect = "; ".join(f"{names[key]} decides {what}" for key, what in depends.items())
    lines.append(f"{'host':24}{has}" + (f" ({effect})" if effect else ""))
    memory = list(describe_memory(read_memory(), need(plan)))
    if budget is None:
        return "\n".join([*lines, "", "This model needs no KV cache.", "", *memory])
    lines += ["", *describe_ranks(plan, budget)]
    start = f"{budget.start_blocks} blocks, the null block among them"
    needed = f"{format_bytes(budget.num_bytes)}: {describe_blocks(budget)}"
    lines += [
        "",
        "Budget, per rank",
        f"  to start       {format_bytes(budget.start_bytes)}: {start}",
        f"  no preemption  {needed}",
        *describe_decision(budget),
    ]
    if plan.given is not None:
        lines += ["", *describe_given(plan, budget, plan.given)]
    lines += ["", "To have no preemption, one of"]
    lines += [f"  {line}" for line in paste_lines(budget.num_bytes).values()]
    return "\n".join([*lines, "", *memory])


def one_line(error: BaseException) -> str:
    """Return the first sentence or so of an error, without pydantic's frame."""
    details = getattr(error, "errors", None)
    if callable(details) and (found := details()):
        message = str(found[0].get("msg", error))
        if not message.startswith("Value error, "):  # then it names nothing
            name = ".".join(map(str, found[0]["loc"]))
            message = f"{name}={found[0]['input']!r}: {message}"
        message = message.removeprefix("Value error, ")
    else:
        message = str(error) or type(error).__name__
    return " ".join(message.split())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep standard output for the plan, log nothing, and ask the user nothing.

    With the logging level at DEBUG, all is logged.
    """
    logger = logging.getLogger("vllm")
    if logger.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.CRITICAL)  # what fails is said once, by main()
    with (
        open(os.devnull) as nothing,
        contextlib.redirect_stdout(sys.stderr),
    ):
        stdin, sys.stdin = sys.stdin, nothing
        try:
            yield
        finally:
            sys.stdin = stdin


def has_only_params(model: str) -> bool:
    """Return whether a folder is in Mistral's format, which weights tell the engine."""
    return os.path.isfile(os.path.join(model, "params.json")) and not os.path.isfile(
        os.path.join(model, "config.json")
    )


def explain(error: Exception, model: str) -> str:
    """Return an error in one line that names what is at fault."""
    message = one_line(error)
    if os.path.isfile(model):
        return f"{model}: not a folder with a config.json: {message}"
    if isinstance(error, AttributeError | LookupError | TypeError):
        file = "params.json" if has_only_params(model) else "config.json"
        return f"{os.path.join(model, file)}: {type(error).__name__}: {message}"
    if "check the logs" in message:
        message += f" VLLM_LOGGING_LEVEL=DEBUG {PROG} shows them."
    return message


def import_classes(model: str) -> None:
    """Import the classes of a model in a folder, which the layers need later anyway.

    The engine's code imports one to ask what it supports, and to keep CUDA out of this
    process it does so in another one, which imports all of vLLM again.
    """
    with contextlib.suppress(Exception):  # it is said when the configuration is built
        with open(os.path.join(model, "config.json")) as file:
            architectures = json.load(file)["architectures"]
        for name in architectures:
            if known := ModelRegistry.models.get(name):
                ModelRegistry.register_model(name, known.load_model_cls())


def main(args: argparse.Namespace) -> int:
    """Print the plan for parsed arguments.

    Returns:
        The exit status: 0, or 1 if the engine would not start with them.

    """
    if args.config_format == "auto" and has_only_params(args.model):
        args.config_format = "mistral"
    try:
        with quiet():
            engine_args = EngineArgs.from_cli_args(args)
            import_classes(args.model)
            vllm_config = engine_args.create_engine_config(
                UsageContext.OPENAI_API_SERVER
            )
            plan = make_plan(vllm_config)
    except Exception as error:
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        print(f"{PROG}: error: {explain(error, args.model)}", file=sys.stderr)
        return 1
    print(as_json(plan) if args.json else as_text(plan))
    return 0
