# SPDX-License-Identifier: Apache-2.0
"""The budgets and cores of all stages on a machine.

`vllm.entrypoints.kv_budget` plans the budgets, in bytes per rank as everywhere.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm import envs
from vllm.entrypoints.kv_budget import Plan, describe_blocks, make_plan
from vllm.entrypoints.kv_budget_memory import checkpoint_bytes
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.kv_budget import GiB, MiB, format_bytes, longest_model_len
from vllm.v1.worker.kv_cache_spec_discovery import specs_of_all_stages
from vllm_kv_budget_deploy.cores import (
    Machine,
    cores_in_file,
    format_ids,
    give_cores,
    keep_for_front_end,
)
from vllm_kv_budget_deploy.stages import Stage, explain, stage_engine_args

SPACE = "VLLM_CPU_KVCACHE_SPACE"
MEASURE = "measure"
NO_CACHE = "0 bytes: the model has no KV cache"


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
            raise ValueError(
                f"stage {stage.stage_id}: {explain(stage, error)}"
            ) from error
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
