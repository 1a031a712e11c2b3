# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache budget that a configuration needs, in whole blocks.

A budget is `kv_cache_memory_bytes`: bytes per rank. Every size in here comes from
the functions by which the engine groups layers, lays out blocks and decides whether
it can start; what is added is how many requests there are, the null block that the
block pool keeps for itself, and what a request takes and the engine does not count.

`kv_cache_sizes` knows where each release has these functions, `kv_cache_in_flight`
what sliding windows and chunks hold.
"""

import copy
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_in_flight import Prefills, Window, prefills, windowed_spec
from vllm.v1.core.kv_cache_sizes import (
    KVCacheSpecs,
    get_kv_cache_configs,
    max_memory_usage_bytes,
    pool_bytes_per_block,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    update_kv_cache_capacity,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
)

logger = init_logger(__name__)

MiB = 1 << 20
GiB = 1 << 30
# More than any engine plans with; nothing of this size is ever allocated.
UNLIMITED_MEMORY = 1 << 60


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a block table, on one rank."""

    kind: str
    num_layers: int
    block_size: int
    """Tokens per block; for Mamba layers, per state."""
    blocks_per_request: int
    """The most blocks that a request of max_model_len holds once its prompt is
    computed."""
    blocks_of_a_prompt: int
    """The most that one holds while its prompt is computed."""


@dataclass(frozen=True)
class RankBudget:
    """What one rank needs. Sizes are bytes, the null block is among the blocks."""

    bytes_per_block: int
    bytes_per_token: int
    """What the attention layers write for one token."""
    groups: tuple[LayerGroup, ...]
    blocks_per_request: int


@dataclass(frozen=True)
class KVBudget:
    """What an engine needs. Sizes are bytes per rank, as `kv_cache_memory_bytes`."""

    max_num_seqs: int
    max_model_len: int
    ranks: tuple[RankBudget, ...]
    blocks_per_request: int
    """The most blocks of a request whose prompt is computed."""
    blocks_in_flight: int
    """The blocks that prompts take beyond these, of all requests together."""
    start_blocks: int
    start_bytes: int
    """The least budget with which the engine starts."""
    held_blocks: int
    """The pool with which no request is preempted, the null block among it."""
    admission_blocks: int
    """The pool with which a prompt of full length is admitted beside the others."""
    num_blocks: int
    num_bytes: int
    """The budget with which max_num_seqs requests of max_model_len run at once
    and none is preempted: the larger of the two above, and of what starts."""
    watermark: float
    """The share of all blocks that the scheduler keeps free beside a request."""

    @property
    def bytes_per_block(self) -> int:
        """A block of the rank that needs the largest: it decides for all ranks."""
        return max(rank.bytes_per_block for rank in self.ranks)

    def num_requests(self, num_blocks: int) -> int:
        """How many requests of max_model_len fit at once into num_blocks blocks."""
        alone = num_blocks >= self.start_blocks
        beside = num_blocks - 1 - int(self.watermark * num_blocks)
        beside -= self.blocks_in_flight
        return max(beside // self.blocks_per_request, int(alone))


@dataclass(frozen=True)
class Allocation:
    """What the engine makes of a given budget."""

    num_bytes: int
    num_blocks: int
    num_requests: int
    """Requests of max_model_len for which there is room at once, none preempted."""
    logged_tokens: int
    """As in the engine's log, where the null block counts."""
    logged_concurrency: float
    """As in the engine's log, where it does not."""


def format_bytes(num_bytes: int) -> str:
    """Return a size with its bytes, and its MiB or GiB."""
    if abs(num_bytes) < MiB:
        return f"{num_bytes:,} bytes ({num_bytes / 1024:.7g} KiB)"
    if abs(num_bytes) < GiB:
        return f"{num_bytes:,} bytes ({num_bytes / MiB:.7g} MiB)"
    return f"{num_bytes:,} bytes ({num_bytes / GiB:.7g} GiB)"


def _planning_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy in which only max_model_len and the specs decide."""
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.num_gpu_blocks_override = None
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.original_max_model_len = None
    return config


def _plan_groups(
    vllm_config: VllmConfig, kv_cache_specs: KVCacheSpecs
) -> list[list[KVCacheGroupSpec]]:
    """Return each rank's groups, as the engine makes them from all ranks' specs."""
    configs = get_kv_cache_configs(vllm_config, kv_cache_specs, UNLIMITED_MEMORY)
    return [config.kv_cache_groups for config in configs]


def _needed_blocks(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return the blocks that the engine counts for a request of max_model_len."""
    needed = max_memory_usage_bytes(vllm_config, groups)
    return needed // pool_bytes_per_block(vllm_config, groups)


def _uncounted_blocks(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> int:
    """Return the blocks that a request takes in a group beyond the engine's count."""
    cache_config = vllm_config.cache_config
    is_mamba = get_kv_cache_spec_kind(group.kv_cache_spec) is KVCacheSpecKind.MAMBA
    blocks = 0
    if is_mamba and cache_config.mamba_cache_mode == "align":
        # The engine counts the states of one batch, a pipeline has more in flight.
        blocks += vllm_config.max_concurrent_batches - 1
    if cache_config.enable_prefix_caching and cache_config.prefix_match_unit:
        blocks += 1  # a copy of the block in which a prefix ends
    return blocks


def _windows(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> list[Window]:
    """Return the windows of the groups that release old tokens."""
    specs = [spec for group in groups if (spec := windowed_spec(group)) is not None]
    return [Window.of(vllm_config, spec) for spec in specs]


def _constant_blocks(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Return what a request of max_model_len takes in groups that keep all tokens."""
    uncounted = sum(_uncounted_blocks(vllm_config, group) for group in groups)
    windows = _windows(vllm_config, groups)
    counted = sum(window.engine_count for window in windows)
    return _needed_blocks(vllm_config, groups) - counted + uncounted


@dataclass(frozen=True)
class _Need:
    """The blocks that requests of max_model_len need, without the null block."""

    per_request: int
    in_flight: int
    to_admit: int
    """What must be free to admit a request of full length."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> "_Need":
        scheduler_config = vllm_config.scheduler_config
        constant = _constant_blocks(vllm_config, groups)
        windows = _windows(vllm_config, groups)
        mode = prefills(vllm_config, groups)
        num_tokens = scheduler_config.max_num_batched_tokens
        if mode is Prefills.UNBOUNDED:
            num_tokens = vllm_config.max_in_flight_tokens
        in_flight = sum(
            window.above_decoding(
                scheduler_config.max_num_seqs,
                num_tokens,
                mode,
                bool(vllm_config.cache_config.enable_prefix_caching),
            )
            for window in windows
        )
        return cls(
            per_request=constant + sum(window.decoding for window in windows),
            in_flight=in_flight,
            to_admit=constant + sum(window.admission for window in windows),
        )


def _describe_group(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> LayerGroup:
    # A pipeline stage may have no layer of a group, whose blocks then hold nothing.
    per_request = of_a_prompt = 0
    if pool_bytes_per_block(vllm_config, [group]):
        need = _Need.of(vllm_config, [group])
        per_request = of_a_prompt = need.per_request
        for window in _windows(vllm_config, [group]):
            of_a_prompt = window.held(vllm_config.max_in_flight_tokens)
            of_a_prompt += _uncounted_blocks(vllm_config, group)
    return LayerGroup(
        kind=get_kv_cache_spec_kind(group.kv_cache_spec).value,
        num_layers=len(group.layer_names),
        block_size=group.kv_cache_spec.block_size,
        blocks_per_request=per_request,
        blocks_of_a_prompt=of_a_prompt,
    )


def _bytes_per_token(specs: dict[str, KVCacheSpec]) -> int:
    return sum(
        spec.page_size_bytes // spec.block_size
        for spec in specs.values()
        if isinstance(spec, AttentionSpec)
    )


def _blocks_beside_watermark(num_blocks: int, watermark: float) -> int:
    """Return the least pool that keeps num_blocks beside the scheduler's watermark.

    Beside others, a request is admitted only if this share of all blocks stays free.
    """
    pool = num_blocks
    while missing := max(num_blocks + int(watermark * pool) - pool, 0):
        pool += missing
    return pool


def plan_kv_budget(
    vllm_config: VllmConfig, kv_cache_specs: KVCacheSpecs
) -> KVBudget | None:
    """Plan the budget for max_num_seqs requests of max_model_len.

    Args:
        vllm_config: The engine's configuration, with the KV cache layout resolved.
        kv_cache_specs: The specs of each rank. Neither is changed.

    Returns:
        The budget, or None if no layer has a KV cache.

    Raises:
        ValueError: If the engine cannot group or lay out these specs.

    """
    if not any(kv_cache_specs):
        return None
    config = _planning_config(vllm_config)
    ranks = []
    start_bytes = 0
    needs = []
    groups_of_ranks = _plan_groups(config, kv_cache_specs)
    for specs, groups in zip(kv_cache_specs, groups_of_ranks, strict=True):
        need = _Need.of(config, groups)
        needs.append(need)
        rank = RankBudget(
            bytes_per_block=pool_bytes_per_block(config, groups),
            bytes_per_token=_bytes_per_token(specs),
            groups=tuple(_describe_group(config, group) for group in groups),
            blocks_per_request=need.per_request,
        )
        ranks.append(rank)
        start_blocks = 1 + _needed_blocks(config, groups)
        start_bytes = max(start_bytes, start_blocks * rank.bytes_per_block)
    # All ranks have the blocks of the one that can afford the fewest.
    largest_block = max(rank.bytes_per_block for rank in ranks)
    blocks_per_request = max(need.per_request for need in needs)
    in_flight = max(need.in_flight for need in needs)
    to_admit = max(need.to_admit for need in needs) - blocks_per_request
    scheduler_config = config.scheduler_config
    max_num_seqs = scheduler_config.max_num_seqs
    watermark = scheduler_config.watermark if max_num_seqs > 1 else 0
    held_blocks = _blocks_beside_watermark(
        1 + max_num_seqs * blocks_per_request + in_flight, watermark
    )
    admission_blocks = _blocks_beside_watermark(
        1 + max_num_seqs * blocks_per_request + to_admit, watermark
    )
    start_blocks = start_bytes // largest_block
    num_blocks = max(held_blocks, admission_blocks, start_blocks)
    return KVBudget(
        max_num_seqs=max_num_seqs,
        max_model_len=config.model_config.max_model_len,
        ranks=tuple(ranks),
        blocks_per_request=blocks_per_request,
        blocks_in_flight=max(in_flight, to_admit),
        start_blocks=start_blocks,
        start_bytes=start_bytes,
        held_blocks=held_blocks,
        admission_blocks=admission_blocks,
        num_blocks=num_blocks,
        num_bytes=num_blocks * largest_block,
        watermark=scheduler_config.watermark,
    )


def plan_allocation(
    vllm_config: VllmConfig,
    kv_cache_specs: KVCacheSpecs,
    budget: KVBudget,
    num_bytes: int,
) -> Allocation:
    """Return what the engine allocates from num_bytes per rank.

    Raises:
        ValueError: If it refuses to start with so few.

    """
    config = _planning_config(vllm_config)
    override = vllm_config.cache_config.num_gpu_blocks_override
    config.cache_config.num_gpu_blocks_override = override
    configs: list[KVCacheConfig] = get_kv_cache_configs(
        config, kv_cache_specs, num_bytes
    )
    scheduler_kv_cache_config = generate_scheduler_kv_cache_config(configs)
    update_kv_cache_capacity(config, scheduler_kv_cache_config)
    num_blocks = scheduler_kv_cache_config.num_blocks
    return Allocation(
        num_bytes=num_bytes,
        num_blocks=num_blocks,
        num_requests=budget.num_requests(num_blocks),
        logged_tokens=config.cache_config.kv_cache_size_tokens,
        logged_concurrency=config.cache_config.kv_cache_max_concurrency,
    )


def longest_model_len(
    vllm_config: VllmConfig,
    kv_cache_specs: KVCacheSpecs,
    num_bytes: int,
    num_requests: int,
) -> int:
    """Return the greatest max_model_len of which num_requests fit into num_bytes.

    Returns:
        The length in tokens, 0 if not even one token fits.

    """
    config = _planning_config(vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = num_requests
    longest = config.model_config.max_model_len

    def num_bytes_for(length: int) -> int:
        config.model_config.max_model_len = length
        budget = plan_kv_budget(config, kv_cache_specs)
        return budget.num_bytes if budget is not None else 0

    return bisect_right(range(1, longest + 1), num_bytes, key=num_bytes_for)


def shorten_max_model_len(
    vllm_config: VllmConfig, kv_cache_specs: KVCacheSpecs, num_bytes: int
) -> None:
    """Set max_model_len as the engine does when it is -1, to what num_bytes holds.

    Raises:
        ValueError: If not even one token fits.

    """
    get_kv_cache_configs(vllm_config, kv_cache_specs, num_bytes)


fitted_bytes: int | None = None
"""The budget that VLLM_CPU_KVCACHE_SPACE=fit gave the engine that starts."""


def _adopt_budget(worker: Any, num_bytes: int) -> None:
    """Give a worker its budget."""
    worker.cache_config.kv_cache_memory_bytes = num_bytes


def _fit_max_model_len(
    vllm_config: VllmConfig,
    kv_cache_specs: KVCacheSpecs,
    budget: KVBudget,
    collective_rpc: Callable[..., Any],
) -> KVBudget:
    """Find max_model_len, if it is to be found, and return the budget for it.

    It is the longest of which max_num_seqs requests fit into the memory that the ranks
    of this host share. A thirty-second of that is left, as it moves between starts.

    Raises:
        ValueError: If not even one token fits.

    """
    # Not every release that can fit has the patch with this module.
    if vllm_config.model_config.original_max_model_len != -1 or not find_spec(
        "vllm.v1.core.memory_check"
    ):
        return budget
    from vllm.v1.core import memory_check

    unlimited = UNLIMITED_MEMORY // budget.bytes_per_block
    limits = collective_rpc(memory_check.report_limits)
    ranks = [
        memory_check.RankMemory(unlimited, unlimited * rank.bytes_per_block, of_rank)
        for rank, of_rank in zip(budget.ranks, limits, strict=True)
    ]
    plans = memory_check.gather_plans(vllm_config, ranks)
    num_engines = getattr(memory_check._local_engines, "num_engines", 1)
    shortage = memory_check.find_shortage(
        [rank for ranks in plans for rank in ranks] * num_engines
    )
    if shortage is None:
        return budget
    longest = longest_model_len(
        vllm_config,
        kv_cache_specs,
        shortage.num_blocks * budget.bytes_per_block,
        budget.max_num_seqs,
    )
    length = min(memory_check.gather_plans(vllm_config, longest))
    if not length:
        limit = shortage.limit
        raise ValueError(
            f"VLLM_CPU_KVCACHE_SPACE=fit with --max-model-len auto: "
            f"{format_bytes(limit.available)} is available ({limit.name}), too little "
            f"for one token of each of max_num_seqs={budget.max_num_seqs} requests."
        )
    model_config = vllm_config.model_config
    model_config.max_model_len = model_config.original_max_model_len = length
    collective_rpc("update_max_model_len", args=(length,))
    found = plan_kv_budget(vllm_config, kv_cache_specs)
    assert found is not None
    return found


def fit_kv_cache(
    vllm_config: VllmConfig,
    kv_cache_specs: KVCacheSpecs,
    collective_rpc: Callable[..., Any],
) -> None:
    """Size the cache to what the configuration needs, if the user asks for it.

    VLLM_CPU_KVCACHE_SPACE=fit does, unless `kv_cache_memory_bytes` is set. On CPU.
    Whether the memory is there is checked as for any other budget, by
    `vllm.v1.core.memory_check`.

    Args:
        vllm_config: The engine's configuration, with the KV cache layout resolved.
        kv_cache_specs: The specs of each rank.
        collective_rpc: Calls a function on each worker.

    Raises:
        ValueError: If the ranks of an external launcher need different budgets.

    """
    global fitted_bytes
    fitted_bytes = None
    is_fit = os.getenv("VLLM_CPU_KVCACHE_SPACE", "").strip() == "fit"
    if not is_fit or not current_platform.is_cpu():
        return
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        logger.info(
            "kv_cache_memory_bytes=%d takes precedence over "
            "VLLM_CPU_KVCACHE_SPACE=fit.",
            explicit,
        )
        return
    budget = plan_kv_budget(vllm_config, kv_cache_specs)
    if budget is None:
        return
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None:
        logger.warning(
            "num_gpu_blocks_override=%d takes precedence over "
            "VLLM_CPU_KVCACHE_SPACE=fit, which would use %d blocks.",
            override,
            budget.num_blocks,
        )
        num_bytes = override * budget.bytes_per_block
        budget = replace(budget, num_blocks=override, num_bytes=num_bytes)
    else:
        budget = _fit_max_model_len(vllm_config, kv_cache_specs, budget, collective_rpc)
    plans = [(budget.num_blocks, budget.num_bytes)]
    # Not every release that can fit has the patch with this module.
    if find_spec("vllm.v1.core.memory_check"):
        from vllm.v1.core.memory_check import gather_plans

        plans = gather_plans(vllm_config, plans[0])
    if override is None and len(set(plans)) > 1:
        ranks = ", ".join(
            f"rank {rank}: {num_blocks} blocks, {format_bytes(num_bytes)}"
            for rank, (num_blocks, num_bytes) in enumerate(plans)
        )
        raise ValueError(
            "VLLM_CPU_KVCACHE_SPACE=fit under an external launcher needs ranks that "
            f"plan alike ({ranks}). --num-gpu-blocks-override="
            f"{max(num_blocks for num_blocks, _ in plans)} gives all of them enough."
        )
    collective_rpc(_adopt_budget, args=(budget.num_bytes,))
    vllm_config.cache_config.kv_cache_memory_bytes = fitted_bytes = budget.num_bytes
    logger.info(
        "VLLM_CPU_KVCACHE_SPACE=fit: %s per rank, %d blocks, for max_num_seqs=%d "
        "requests of max_model_len=%d.",
        format_bytes(budget.num_bytes),
        budget.num_blocks,
        budget.max_num_seqs,
        budget.max_model_len,
    )
