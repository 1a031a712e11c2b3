# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget --deploy` writes: the CPU section of a vllm-omni deploy file.

vllm-omni's own loader resolves the stages, `vllm.entrypoints.kv_budget` plans their
budgets, and vLLM's reading of the machine gives the cores and the memory nodes.
Budgets are bytes per rank, as everywhere.
"""

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import transformers

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.kv_budget import (
    Plan,
    describe_blocks,
    make_plan,
    one_line,
    quiet,
)
from vllm.entrypoints.kv_budget_memory import checkpoint_bytes, shared_limits
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.cpu_resource_utils import (
    LogicalCPUInfo,
    get_allowed_cpu_list,
    get_memory_node_info,
    get_visible_memory_node,
    parse_id_list,
)
from vllm.v1.core.kv_budget import GiB, MiB, format_bytes, longest_model_len
from vllm.v1.worker.kv_cache_spec_discovery import specs_of_all_stages

PROG = "vllm kv-budget"
SPACE = "VLLM_CPU_KVCACHE_SPACE"
BIND = "VLLM_CPU_OMP_THREADS_BIND"
MEASURE = "measure"
PLANNED = {"ar", "generation"}
"""The kinds of stages whose models vLLM builds."""
NO_CACHE = "0 bytes: the model has no KV cache"

MEASURE_BY_HAND = """\
Stage {stage_id} ({name}): {why}. To measure what it needs:
  1. Serve with a budget that is surely enough, and send the heaviest load that is to
     be served: max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len}.
  2. Meanwhile watch, of this stage in /metrics, the greatest vllm:kv_cache_usage_perc
     (1 is all), and vllm:num_preemptions_total, which must stay where it is.
     vllm:cache_config_info has num_gpu_blocks and kv_cache_memory_bytes; their ratio
     is the size of a block.
  3. kv_cache_memory_bytes: (usage x num_gpu_blocks, rounded up, + 1 null block) x the
     size of a block. Its RssAnon in /proc/PID/status falls by the difference.\
"""


class Machine(NamedTuple):
    """Where stages can run."""

    cores: dict[int, list[int]]
    """By memory node, a logical CPU of each physical core."""
    memory: dict[int, int]
    """By memory node, its bytes."""
    limit: int | None = None
    """The bytes that are available in all, to the stages of all nodes."""
    limited_by: str = "control group"
    available: dict[int, int] | None = None
    """By memory node, the bytes that are available now; None if all are."""


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


@dataclass(frozen=True)
class StagePlan:
    """What a stage gets."""

    stage: Stage
    num_bytes: int
    """Its budget, per rank."""
    reason: str
    plan: Plan | None
    """None if it has to be measured."""
    cores: tuple[tuple[int, ...], ...] = ()
    """Logical CPUs of each rank."""
    nodes: tuple[int, ...] = ()
    """The memory node of each rank."""


class DeployPlan(NamedTuple):
    """A plan for all stages of a file on one machine."""

    stages: list[StagePlan]
    front_end: list[int]
    """The logical CPUs that no stage has."""
    shortages: list[str]
    """What the machine has too little of, and what would help. Empty if it fits."""


def read_machine() -> Machine:
    """Return the cores and memory that this process may use, as vLLM reads them."""
    nodes = get_visible_memory_node()
    cpus = [cpu for cpu in get_allowed_cpu_list() if cpu.numa_node in nodes]
    infos = {
        node: get_memory_node_info(node)
        for node in sorted({cpu.numa_node for cpu in cpus})
    }
    least = min(shared_limits(), key=lambda limit: limit.available)
    return Machine(
        cores=one_cpu_per_core(cpus),
        memory={node: info.total_memory for node, info in infos.items()},
        limit=least.available,
        limited_by=least.name,
        available={node: info.available_memory for node, info in infos.items()},
    )


def one_cpu_per_core(cpus: Sequence[LogicalCPUInfo]) -> dict[int, list[int]]:
    """Return by memory node the last hardware thread of each physical core.

    That is the one to which vLLM's own binding (`auto`) pins a thread on x86.
    """
    last = {
        (cpu.numa_node, cpu.physical_core): cpu.id
        for cpu in sorted(cpus, key=lambda cpu: cpu.id)
    }
    nodes = sorted({node for node, _ in last})
    return {
        node: sorted(cpu for (where, _), cpu in last.items() if where == node)
        for node in nodes
    }


def find_pipeline(key: str) -> Any:
    """Return vllm-omni's description of the stages of a kind of model.

    Raises:
        ValueError: If it has none.

    """
    try:
        from vllm_omni.config.pipeline_registry import resolve_pipeline_config

        pipeline = resolve_pipeline_config(key)
    except ImportError:
        # The registry needs what any of its models needs. This one may need less.
        from vllm_omni.config.stage_config import PipelineConfig

        try:
            module = import_module(f"vllm_omni.model_executor.models.{key}.pipeline")
        except ImportError as error:
            raise ValueError(f"pipeline {key!r} of vllm-omni: {error}") from error
        pipeline = next(
            (
                found
                for found in vars(module).values()
                if isinstance(found, PipelineConfig) and found.model_type == key
            ),
            None,
        )
    if pipeline is None:
        raise ValueError(f"vllm-omni has no pipeline {key!r}")
    return pipeline


def read_stages(path: Path, model: str) -> list[Stage]:
    """Return the stages of a deploy file as vllm-omni resolves them on CPU.

    Raises:
        ImportError: If vllm-omni is not installed.
        ValueError: If the file or the model is none of vllm-omni's.

    """
    try:
        from vllm_omni.config.stage_config import (
            _apply_platform_overrides,
            load_deploy_config,
            merge_pipeline_deploy,
        )
    except ImportError as error:
        raise ImportError(f"--deploy needs vllm-omni: {error}") from error
    try:
        deploy = _apply_platform_overrides(load_deploy_config(path), platform="cpu")
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{path}: vllm-omni cannot read it: {reason}") from error
    key = deploy.pipeline
    if key is None:
        key = transformers.PretrainedConfig.get_config_dict(model)[0].get("model_type")
    if key is None:
        raise ValueError(f"{model}: its config.json has no model_type")
    stages = []
    for config in merge_pipeline_deploy(find_pipeline(key), deploy):
        num_replicas = int(config.yaml_runtime.get("num_replicas", 1))
        if num_replicas > 1:
            raise ValueError(
                f"stage {config.stage_id}: num_replicas={num_replicas} is not planned: "
                "replicas share an environment, and so the cores in it; "
                "data_parallel_size gives each rank its own"
            )
        kind = config.worker_type or config.stage_type.value
        stages.append(
            Stage(
                stage_id=config.stage_id,
                name=config.model_stage,
                engine_args={"model": model, **config.yaml_engine_args},
                env={
                    str(key): str(value)
                    for key, value in (config.yaml_runtime.get("env") or {}).items()
                },
                why_measure=None
                if kind in PLANNED
                else f"the engine cannot describe the cache of a {kind} stage",
            )
        )
    return stages


def stage_engine_args(stage: Stage) -> EngineArgs:
    """Return vLLM's own arguments among those of a stage, with no budget."""
    given = dict(stage.engine_args)
    if model_subdir := given.get("model_subdir"):
        given["model"] = os.path.join(given["model"], model_subdir)
    if model_arch := given.get("model_arch"):
        overrides = given.get("hf_overrides") or {}
        given["hf_overrides"] = {"architectures": [model_arch], **overrides}
    # These are classes of vllm-omni's, and none of them sizes a cache.
    not_planned = {"kv_cache_memory_bytes", "worker_cls", "scheduler_cls"}
    known = {field.name for field in fields(EngineArgs)} - not_planned
    return EngineArgs(
        **{key: given[key] for key in known & given.keys() if given[key] is not None}
    )


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add the variables of a stage for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def plan_stage(stage: Stage, machine: Machine) -> StagePlan:
    """Plan the budget of a stage, or find the one that it has.

    Raises:
        ValueError: If the engine would refuse the stage.

    """
    # vllm-omni lets a stage be longer than its model's positions too.
    variables = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", **stage.env}
    kept = stage.engine_args.get("kv_cache_memory_bytes")
    if kept is not None and (not isinstance(kept, int) or kept <= 0):
        raise ValueError(
            f"stage {stage.stage_id}: kv_cache_memory_bytes={kept!r}: expected a "
            "number of bytes such as 2147483648"
        )
    if stage.why_measure is None:
        try:
            with environment({**variables, SPACE: "0"}):
                plan = make_plan(
                    stage_engine_args(stage).create_engine_config(
                        UsageContext.LLM_CLASS
                    )
                )
        except Exception as error:
            raise ValueError(f"stage {stage.stage_id}: {one_line(error)}") from error
        budget = plan.budget
        if budget is None:
            return StagePlan(stage, 0, NO_CACHE, plan)
        reason = (
            f"{short(budget.num_bytes)} per rank: {describe_blocks(budget)}, for "
            f"max_num_seqs={budget.max_num_seqs} requests of "
            f"max_model_len={budget.max_model_len}"
        )
        return StagePlan(stage, budget.num_bytes, reason, plan)
    if kept is not None:
        reason = f"{MEASURE}: {short(kept)} per rank as it was, {stage.why_measure}"
        return StagePlan(stage, kept, reason, None)
    with environment(variables):
        space = envs.VLLM_CPU_KVCACHE_SPACE
    if isinstance(space, float | int) and space > 0:
        num_bytes, source = int(space * GiB), f"{SPACE}={space}"
    else:
        share = float(stage.engine_args.get("gpu_memory_utilization") or 0.92)
        num_bytes = int(share * max(machine.memory.values()))
        source = f"gpu_memory_utilization={share}"
    reason = f"{MEASURE}: {short(num_bytes)} per rank by {source}, {stage.why_measure}"
    return StagePlan(stage, num_bytes, reason, None)


def short(num_bytes: int) -> str:
    """Return a size in MiB or GiB alone."""
    unit, name = (GiB, "GiB") if num_bytes >= GiB else (MiB, "MiB")
    return f"{num_bytes / unit:.7g} {name}"


def cores_in_file(stage: Stage) -> int | None:
    """Return how many logical CPUs a stage is bound to, None if it is not.

    Raises:
        ValueError: If its binding is none of vLLM's.

    """
    bind = stage.env.get(BIND, "auto")
    if bind in ("auto", "nobind"):
        return None
    try:
        return sum(len(parse_id_list(rank)) for rank in bind.split("|"))
    except ValueError:
        raise ValueError(
            f"stage {stage.stage_id}: {BIND}={bind!r}: expected a list of CPUs "
            "such as 0-3,8 for each rank, with | between ranks"
        ) from None


def give_cores(
    weights: Sequence[float], cores: Mapping[int, Sequence[int]]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Give each rank cores of one memory node, about in proportion to its weight.

    Args:
        weights: The weight of each rank.
        cores: By memory node, the CPUs to give away; there are enough of them.

    Returns:
        The CPUs of each rank, and its memory node.

    """
    ranks_of: dict[int, list[int]] = {node: [] for node in cores}
    for rank in sorted(range(len(weights)), key=lambda rank: -weights[rank]):
        node = max(
            (node for node in cores if len(ranks_of[node]) < len(cores[node])),
            key=lambda node: (
                len(cores[node])
                / sum(weights[other] for other in [*ranks_of[node], rank])
            ),
        )
        ranks_of[node].append(rank)
    given: dict[int, tuple[int, ...]] = {}
    node_of: dict[int, int] = {}
    for node, ranks in ranks_of.items():
        # Webster's method: the rank that is furthest below its share is next.
        count = dict.fromkeys(sorted(ranks), 1)
        while count and sum(count.values()) < len(cores[node]):
            count[max(count, key=lambda r: weights[r] / (2 * count[r] + 1))] += 1
        start = 0
        for rank, number in count.items():
            given[rank] = tuple(cores[node][start : start + number])
            node_of[rank] = node
            start += number
    order = range(len(weights))
    return [given[rank] for rank in order], [node_of[rank] for rank in order]


def keep_for_front_end(
    cores: Mapping[int, Sequence[int]], number: int
) -> tuple[dict[int, list[int]], list[int]]:
    """Return the cores without the last ones, and these."""
    left = {node: list(cpus) for node, cpus in cores.items()}
    kept = [
        left[max(left, key=lambda node: (len(left[node]), node))].pop()
        for _ in range(number)
    ]
    return left, sorted(kept)


def too_few_cores(
    plans: Sequence[StagePlan], machine: Machine, front_end: int
) -> str | None:
    """Return what to change if there is no core for each rank, None if there is."""
    has = sum(map(len, machine.cores.values()))
    ranks = sum(plan.stage.num_ranks for plan in plans)
    if ranks + front_end <= has:
        return None
    missing = ranks + front_end - has
    largest = max(plans, key=lambda plan: plan.stage.num_ranks).stage
    if front_end >= missing:
        knob = f"--front-end-cores {front_end - missing}"
    elif largest.num_ranks > missing:
        knob = (
            f"{largest.num_ranks - missing} instead of {largest.num_ranks} ranks of "
            f"stage {largest.stage_id}"
        )
    else:
        knob = f"a machine with {ranks + front_end} cores"
    return (
        f"{ranks} ranks and {front_end} for the front end need {ranks + front_end} "
        f"cores, the machine has {has}: {missing} too few; what helps most: {knob}"
    )


def weights_of(plan: StagePlan) -> int:
    """Return the weights of a rank in a folder with safetensors, or 0 if unknown."""
    if plan.plan is None or not plan.plan.weight_bytes:
        return 0
    model = plan.plan.config.model_config.model
    return max(plan.plan.weight_bytes) if checkpoint_bytes(model) else 0


def too_little_memory(
    plans: Sequence[StagePlan], place: str, total: int, ranks_of: Mapping[int, int]
) -> str | None:
    """Return what to change if more is needed than a place has, or None.

    Args:
        plans: The stages.
        place: What the memory is called.
        total: The bytes that are available there.
        ranks_of: By stage_id, how many ranks are there.

    """
    weights = {plan.stage.stage_id: weights_of(plan) for plan in plans}
    needed = {
        plan.stage.stage_id: (plan.num_bytes + weights[plan.stage.stage_id])
        * ranks_of.get(plan.stage.stage_id, 0)
        for plan in plans
    }
    missing = sum(needed.values()) - total
    if missing <= 0:
        return None
    largest = max(plans, key=lambda plan: needed[plan.stage.stage_id])
    stage, ranks = largest.stage, ranks_of[largest.stage.stage_id]
    allowed = largest.num_bytes - -(-missing // ranks)
    if largest.plan is None or largest.plan.budget is None:
        knob = f"kv_cache_memory_bytes of stage {stage.stage_id}, now as it was"
        if allowed > 0:
            knob += f": at most {allowed} would fit"
    else:
        budget = largest.plan.budget
        fitting = []
        if requests := budget.num_requests(allowed // budget.bytes_per_block):
            fitting.append(f"max_num_seqs {requests} (now {budget.max_num_seqs})")
        if allowed > 0:
            with environment(stage.env):
                workers = specs_of_all_stages(largest.plan.config)
            specs = [worker.kv_cache_spec for worker in workers]
            length = longest_model_len(
                largest.plan.config, specs, allowed, budget.max_num_seqs
            )
            if length > 0:
                fitting.append(f"max_model_len {length} (now {budget.max_model_len})")
        knob = f"stage {stage.stage_id}, " + (
            f"{' or '.join(fitting)} would fit"
            if fitting
            else "but no max_num_seqs or max_model_len of it alone is enough"
        )
    what, on_top = "the KV caches", "weights and activations"
    if any(weights.values()):
        what, on_top = "the KV caches and known weights", "activations"
    return (
        f"{place}: {what} take {format_bytes(total + missing)}, "
        f"{format_bytes(total)} is available: {format_bytes(missing)} too much, and "
        f"{on_top} come on top; what helps most: {knob}"
    )


def plan_deploy(
    stages: Sequence[Stage], machine: Machine, front_end: int
) -> DeployPlan:
    """Plan the budgets and the cores of all stages on a machine.

    Args:
        stages: The stages of a deploy file.
        machine: Where they run.
        front_end: How many cores are left to all that is no rank.

    Raises:
        ValueError: If the engine would refuse a stage.

    """
    plans = [plan_stage(stage, machine) for stage in stages]
    in_file = {stage.stage_id: cores_in_file(stage) for stage in stages}
    if shortage := too_few_cores(plans, machine, front_end):
        return DeployPlan(plans, [], [shortage])
    proportional = None not in in_file.values()
    weights = [
        (in_file[stage.stage_id] or 1) / stage.num_ranks if proportional else 1.0
        for stage in stages
        for _ in range(stage.num_ranks)
    ]
    cores, kept = keep_for_front_end(machine.cores, front_end)
    cpus, nodes = give_cores(weights, cores)
    bound, rank = [], 0
    for plan in plans:
        end = rank + plan.stage.num_ranks
        bound.append(
            replace(plan, cores=tuple(cpus[rank:end]), nodes=tuple(nodes[rank:end]))
        )
        rank = end
    places = [
        (
            f"memory node {node}",
            total,
            {plan.stage.stage_id: plan.nodes.count(node) for plan in bound},
        )
        for node, total in (machine.available or machine.memory).items()
    ]
    if machine.limit is not None:
        if len(places) == 1:
            places = []  # the same memory
        everywhere = {plan.stage.stage_id: len(plan.nodes) for plan in bound}
        places.append((machine.limited_by, machine.limit, everywhere))
    shortages = [too_little_memory(bound, *place) for place in places]
    return DeployPlan(bound, kept, [text for text in shortages if text])


def format_ids(ids: Sequence[int]) -> str:
    """Return CPU numbers as `parse_id_list` reads them, such as 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )


def bind(plan: StagePlan) -> str:
    """Return the VLLM_CPU_OMP_THREADS_BIND of a stage."""
    return "|".join(format_ids(cpus) for cpus in plan.cores)


def reason_of_cores(plan: StagePlan, deploy: DeployPlan) -> str:
    """Return why a stage has its cores."""
    number = sum(map(len, plan.cores))
    total = len(deploy.front_end) + sum(
        len(cpus) for other in deploy.stages for cpus in other.cores
    )
    in_file = [cores_in_file(other.stage) for other in deploy.stages]
    nodes = ", ".join(map(str, sorted(set(plan.nodes))))
    reason = f"{number} of {total} cores, memory node {nodes}"
    if None in in_file:
        return f"{reason}: as many for each rank"
    was = " to ".join(str(count) for count in in_file)
    return f"{reason}: in proportion to {was} as it was"


def annotate(mapping: Any, key: str, text: str) -> None:
    """Put a comment at the end of a key's line, and keep what follows that line."""
    tokens = mapping.ca.items.get(key)
    after = tokens[2].value.partition("\n")[2] if tokens and tokens[2] else ""
    mapping.ca.items.pop(key, None)
    mapping.yaml_add_eol_comment(f"{text}\n{after}".rstrip(" "), key)


def child(mapping: Any, key: str) -> Any:
    """Return the mapping under a key, made if there is none, a line for each key."""
    if not mapping.get(key):
        mapping[key] = type(mapping)()
    mapping[key].fa.set_block_style()
    return mapping[key]


def write_section(document: Any, deploy: DeployPlan) -> None:
    """Write a plan into the `platforms: cpu:` section of a deploy document."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    document.fa.set_block_style()
    platforms = child(document, "platforms")
    cpu = child(platforms, "cpu")
    total = sum(plan.num_bytes * plan.stage.num_ranks for plan in deploy.stages)
    left = f"CPUs {format_ids(deploy.front_end)}" if deploy.front_end else "no CPU"
    annotate(
        platforms,
        "cpu",
        f"KV caches of all ranks: {short(total)}; left to the front end: {left}",
    )
    if cpu.get("stages"):
        cpu["stages"].fa.set_block_style()
    else:
        cpu["stages"] = []
    entries = {entry["stage_id"]: entry for entry in cpu["stages"]}
    for plan in deploy.stages:
        stage_id = plan.stage.stage_id
        if stage_id not in entries:
            entries[stage_id] = type(cpu)(stage_id=stage_id)
            cpu["stages"].append(entries[stage_id])
        entry = entries[stage_id]
        entry.fa.set_block_style()
        # vllm-omni's nested layout, in which it reads no key beside these two.
        nested = "engine_args" in entry
        engine_args = child(entry, "engine_args") if nested else entry
        env = child(child(entry, "runtime") if nested else entry, "env")
        no_value = "kv_cache_memory_bytes" not in plan.stage.engine_args
        if plan.num_bytes == 0 and "kv_cache_memory_bytes" in engine_args:
            text = f"without effect, {plan.reason}"
            annotate(engine_args, "kv_cache_memory_bytes", text)
        elif plan.num_bytes == 0 or (plan.plan is None and no_value):
            annotate(entry, "stage_id", plan.reason)
        else:
            engine_args["kv_cache_memory_bytes"] = plan.num_bytes
            annotate(engine_args, "kv_cache_memory_bytes", plan.reason)
        env[BIND] = DoubleQuotedScalarString(bind(plan))
        annotate(env, BIND, reason_of_cores(plan, deploy))


def as_json(deploy: DeployPlan, machine: Machine) -> str:
    """Return a plan as JSON. Sizes are bytes, budgets per rank."""
    return json.dumps(
        {
            "stages": [
                {
                    "stage_id": plan.stage.stage_id,
                    "model_stage": plan.stage.name,
                    "num_ranks": plan.stage.num_ranks,
                    "kv_cache_memory_bytes": plan.num_bytes,
                    "measure": plan.plan is None,
                    "reason": plan.reason,
                    "budget": asdict(plan.plan.budget)
                    if plan.plan and plan.plan.budget
                    else None,
                    BIND: bind(plan),
                    "memory_nodes": plan.nodes,
                }
                for plan in deploy.stages
            ],
            "front_end": deploy.front_end,
            "kv_cache_bytes": sum(
                plan.num_bytes * plan.stage.num_ranks for plan in deploy.stages
            ),
            "machine": machine._asdict(),
            "shortages": deploy.shortages,
        },
        indent=2,
    )


def measure_by_hand(plan: StagePlan) -> str:
    """Return how to find out what a stage needs that cannot be planned."""
    return MEASURE_BY_HAND.format(
        stage_id=plan.stage.stage_id,
        name=plan.stage.name,
        why=plan.stage.why_measure,
        max_num_seqs=plan.stage.engine_args.get("max_num_seqs"),
        max_model_len=plan.stage.engine_args.get("max_model_len"),
    )


def load_document(path: Path) -> tuple[Any, Any]:
    """Return a YAML reader that keeps comments, and the document that it read.

    Raises:
        ImportError: If ruamel.yaml is not installed.
        ValueError: If the file is no YAML mapping.

    """
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError:
        raise ImportError(
            "--deploy needs ruamel.yaml: pip install 'vllm[kv-budget]'"
        ) from None
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = sys.maxsize
    yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        document = yaml.load(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise ValueError(f"{path}: invalid YAML: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: not a deploy file: expected a YAML mapping")
    return yaml, document


def write_file(yaml: Any, document: Any, source: Path, target: Path) -> None:
    """Write a document beside the target, then rename it.

    An inherited file is named relative to the folder of the file that names it.
    """
    base = document.get("base_config")
    if base and "$" not in base and source.parent.resolve() != target.parent.resolve():
        document["base_config"] = os.path.relpath(source.parent / base, target.parent)
    part = target.with_name(f".{target.name}.part")
    yaml.dump(document, part)
    part.replace(target)


class Parser(FlexibleArgumentParser):
    """vLLM's parser, with help in full and errors in one line."""

    format_help = argparse.ArgumentParser.format_help

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            first = unknown.partition(" ")[0]
            message = f"{first}: with --deploy, engine arguments come from the file"
        print(f"{PROG}: error: {message}", file=sys.stderr)
        sys.exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog=PROG,
        usage=f"{PROG} MODEL --deploy FILE [options]",
        description="Plan the stages of a vllm-omni deploy file for this machine, and "
        "print it with the `platforms: cpu:` section that fits.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="The model that the file is for."
    )
    parser.add_argument("--deploy", metavar="FILE", type=Path, help="The file to read.")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="Write the file instead of printing it.",
    )
    parser.add_argument(
        "--force", action="store_true", help="Overwrite the file of --output."
    )
    parser.add_argument(
        "--front-end-cores",
        type=int,
        default=1,
        metavar="N",
        help="How many cores to keep free of stages.",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="Say how to measure the stages that cannot be planned.",
    )
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON.")
    args = parser.parse_args(list(arguments))
    if args.front_end_cores < 0:
        parser.error(f"--front-end-cores {args.front_end_cores}: expected 0 or more")
    if args.output and args.output.exists() and not args.force:
        parser.error(f"{args.output} exists; --force overwrites it")
    return args


def run(args: argparse.Namespace) -> int:
    """Plan for parsed arguments, print or write the plan, return the exit status."""
    transformers.logging.set_verbosity_error()
    with quiet(), warnings.catch_warnings(action="ignore"):
        yaml, document = load_document(args.deploy)
        machine = read_machine()
        deploy = plan_deploy(
            read_stages(args.deploy, args.model), machine, args.front_end_cores
        )
    if args.json:
        print(as_json(deploy, machine))
    for shortage in deploy.shortages:
        print(f"{PROG}: error: {shortage}", file=sys.stderr)
    if args.measure:
        by_hand = [measure_by_hand(p) for p in deploy.stages if p.plan is None]
        print("\n".join(by_hand) or "Every stage is planned.", file=sys.stderr)
    if deploy.shortages:
        return 1
    write_section(document, deploy)
    if args.output:
        write_file(yaml, document, args.deploy, args.output)
    elif not args.json:
        yaml.dump(document, sys.stdout)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run, with an error in one line."""
    args = parse(arguments)
    try:
        return run(args)
    except Exception as error:
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        print(f"{PROG}: error: {one_line(error)}", file=sys.stderr)
        return 1
