# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget` says of the memory of this machine, and of the weights.

Activations are in none of these figures: they depend on the batch and the kernels.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm.config import VllmConfig
from vllm.utils.cpu_resource_utils import get_visible_memory_node
from vllm.utils.memory_limits import (
    MemoryLimit,
    cgroup_limits,
    host_limit,
    node_limit,
)
from vllm.v1.core.kv_budget import format_bytes


@dataclass(frozen=True)
class MachineMemory:
    """What this process, and all that it starts, may use together. Sizes are bytes."""

    limit: int
    limited_by: str
    available: int
    least_left_by: str


@dataclass(frozen=True)
class Need:
    """What all ranks of an engine on this machine take, without activations."""

    num_ranks: int
    kv_cache_bytes: int
    """Of all ranks."""
    checkpoint_bytes: int | None
    """All tensors of the safetensors files, None if there are none."""
    weight_bytes: tuple[int, ...]
    """Of a rank of each pipeline stage, as the engine builds it."""
    num_bytes: int
    """Caches of all ranks, and weights if the checkpoint is there."""


def shared_limits() -> list[MemoryLimit]:
    """Return the limits on all that this process starts, on any memory node."""
    return [*cgroup_limits(), host_limit()]


def read_memory() -> MachineMemory:
    """Return the memory that is there now, on all memory nodes together."""
    nodes = [
        node for number in get_visible_memory_node() if (node := node_limit(number))
    ]
    limits = shared_limits()
    if nodes:
        names = ", ".join(node.name.removeprefix("memory node ") for node in nodes)
        limits.append(
            MemoryLimit(
                f"memory node {names}",
                sum(node.limit for node in nodes),
                sum(node.available for node in nodes),
            )
        )
    least = min(limits, key=lambda limit: limit.limit)
    fullest = min(limits, key=lambda limit: limit.available)
    return MachineMemory(least.limit, least.name, fullest.available, fullest.name)


def checkpoint_bytes(model: str) -> int | None:
    """Return the bytes of all tensors in a folder's safetensors files.

    A file begins with the length of its header in 8 bytes, and the header gives the
    range of each tensor: https://github.com/huggingface/safetensors#format.

    Returns:
        The bytes, None if the model is no folder with such files.

    Raises:
        ValueError: If a file is none of these.

    """
    files = sorted(Path(model).glob("*.safetensors"))
    if not files:
        return None
    total = 0
    for file in files:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                if length > file.stat().st_size:
                    raise ValueError("the header is longer than the file")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            ranges = [tensor["data_offsets"] for tensor in header.values()]
            total += sum(end - begin for begin, end in ranges)
        except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
            raise ValueError(f"{file}: no safetensors file: {error}") from error
    return total


def count_need(
    vllm_config: VllmConfig, weight_bytes: Sequence[int], budget: int
) -> Need | None:
    """Return what the ranks on this machine take.

    Args:
        vllm_config: The engine's configuration.
        weight_bytes: The weights of a rank of each pipeline stage.
        budget: The KV cache of each rank.

    Returns:
        The need, None if the ranks of an engine are on several machines.

    """
    parallel_config = vllm_config.parallel_config
    if parallel_config.nnodes > 1:
        return None
    engines = max(parallel_config.data_parallel_size_local, 1)
    ranks_per_stage = engines * parallel_config.world_size // len(weight_bytes)
    num_ranks = engines * parallel_config.world_size
    in_files = checkpoint_bytes(vllm_config.model_config.model)
    weights = ranks_per_stage * sum(weight_bytes) if in_files is not None else 0
    return Need(
        num_ranks=num_ranks,
        kv_cache_bytes=num_ranks * budget,
        checkpoint_bytes=in_files,
        weight_bytes=tuple(weight_bytes),
        num_bytes=num_ranks * budget + weights,
    )


def memory_as_json(memory: MachineMemory, need: Need | None) -> dict:
    """Return both for JSON. Sizes are bytes."""
    return {
        "machine": asdict(memory),
        "need": asdict(need) | {"fits": need.num_bytes <= memory.available}
        if need
        else None,
    }


def describe_memory(memory: MachineMemory, need: Need | None) -> Iterator[str]:
    """Yield the lines about the memory of this machine."""
    yield "Memory of this machine, now"
    yield f"  limit          {format_bytes(memory.limit)}: {memory.limited_by}"
    yield f"  available      {format_bytes(memory.available)}: {memory.least_left_by}"
    if need is None:
        yield "  not compared: the ranks of this engine are on several machines"
        return
    caches = format_bytes(need.kv_cache_bytes)
    yield f"  KV caches      {caches}: {need.num_ranks} rank(s)"
    on_top = "weights and activations come"
    if need.checkpoint_bytes is not None:
        per_rank = " or ".join(map(format_bytes, dict.fromkeys(need.weight_bytes)))
        files = f"{need.checkpoint_bytes:,} bytes in the safetensors files"
        yield f"  weights        {per_rank} per rank, of {files}"
        yield f"  together       {format_bytes(need.num_bytes)}"
        on_top = "activations come"
    left = memory.available - need.num_bytes
    if left < 0:
        yield f"  does not fit   {format_bytes(-left)} too much, and {on_top} on top"
    else:
        yield f"  left           {format_bytes(left)}, and {on_top} on top"
