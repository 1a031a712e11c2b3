# SPDX-License-Identifier: Apache-2.0
"""The cores of a machine, and which of them each rank gets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm.entrypoints.kv_budget_memory import shared_limits
from vllm.utils.cpu_resource_utils import (
    LogicalCPUInfo,
    get_allowed_cpu_list,
    get_memory_node_info,
    get_visible_memory_node,
    parse_id_list,
)
from vllm_kv_budget_deploy.stages import Stage

BIND = "VLLM_CPU_OMP_THREADS_BIND"


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
