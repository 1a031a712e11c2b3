# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The blocks that requests hold in layers that release old tokens.

Layers with a sliding window or chunks hold what a request still attends to, and what
it computes in this step. The second is bounded by the batch, for all requests
together; docs/kv-budget.md derives the bound. Which tokens are released is asked of
the manager that releases them, so there is no second formula for it.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)


class Prefills(Enum):
    """How prompts that are computed in part share the tokens of a batch."""

    ONE = "one at a time: what is left of a batch goes to the last request"
    SEVERAL = "several at once, which share one batch"
    UNBOUNDED = "several at once, and each may hold a whole batch"


def prefills(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> Prefills:
    """Return how the scheduler divides batches among prompts."""
    scheduler_config = vllm_config.scheduler_config
    cache_config = vllm_config.cache_config
    model_config = vllm_config.model_config
    mm_config = model_config.multimodal_config if model_config is not None else None
    kinds = {get_kv_cache_spec_kind(group.kv_cache_spec) for group in groups}
    if (
        # Blocks are released a batch later.
        vllm_config.max_concurrent_batches > 1
        # An encoder's budget cuts chunks short, and lets them grow again.
        or (mm_config is not None and not mm_config.language_model_only)
        or getattr(scheduler_config, "long_prefill_token_threshold_adaptive", False)
        or (KVCacheSpecKind.MAMBA in kinds and cache_config.mamba_cache_mode == "align")
        or vllm_config.kv_transfer_config is not None
    ):
        return Prefills.UNBOUNDED
    if (
        scheduler_config.long_prefill_token_threshold
        or cache_config.prefix_match_unit
        # Chunks must not end shortly before the end of a prompt.
        or getattr(vllm_config, "num_prefill_lookahead_tokens", 0) > 1
    ):
        return Prefills.SEVERAL
    return Prefills.ONE


def windowed_spec(group: KVCacheGroupSpec) -> KVCacheSpec | None:
    """Return the spec by which a group releases old tokens, None if it keeps all."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):  # as the scheduler takes it
        spec = next(iter(spec.kv_cache_specs.values()))
    windowed = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
    return spec if windowed else None


@dataclass(frozen=True)
class Window:
    """The blocks of a group that releases old tokens, as its manager counts them."""

    block_size: int
    max_tokens: int
    """max_model_len: no request has blocks beyond it."""
    lookahead: int
    """The slots of drafted tokens that the scheduler adds to each step."""
    decode_tokens: int
    """The tokens that a step computes of a request whose prompt is computed."""
    reach: int
    """The most computed tokens of which the first block is still held."""
    admission: int
    """The blocks that must be free to admit a request of max_model_len."""
    engine_count: int
    """What the engine's start-up check counts for a request."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, spec: KVCacheSpec) -> "Window":
        max_tokens = vllm_config.model_config.max_model_len
        manager = get_manager_for_kv_cache_spec(
            spec,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            max_model_len=max_tokens,
            block_pool=BlockPool(1, enable_caching=False, hash_block_size=1),
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=spec.block_size,
        )
        block_size = manager.block_size
        reach = bisect_right(
            range(max_tokens),
            0,
            key=lambda computed: manager.get_num_skipped_tokens(computed) // block_size,
        )
        engine_count = manager.max_admission_blocks_per_request
        assert engine_count is not None
        return cls(
            block_size=block_size,
            max_tokens=max_tokens,
            lookahead=vllm_config.num_lookahead_tokens,
            decode_tokens=1 + vllm_config.num_speculative_tokens,
            reach=reach - 1,
            admission=min(engine_count, -(-max_tokens // block_size)),
            engine_count=engine_count,
        )

    def held(self, num_tokens: int, computed: int | None = None) -> int:
        """Return the most blocks of a request with so many tokens in flight.

        Args:
            num_tokens: Tokens that are scheduled and not yet processed.
            computed: The tokens before them; those with most blocks if None.

        """
        start = self.reach if computed is None else computed
        end = min(start + num_tokens + self.lookahead, self.max_tokens)
        return -(-end // self.block_size)

    @property
    def decoding(self) -> int:
        """The most blocks of a request whose prompt is computed."""
        return self.held(self.decode_tokens)

    def above_decoding(
        self,
        num_requests: int,
        num_tokens: int,
        prefills: Prefills,
        prefix_caching: bool,
    ) -> int:
        """Return the most blocks above `decoding`, of all requests together.

        Args:
            num_requests: The requests.
            num_tokens: The tokens in flight, of a batch and for all requests.
            prefills: How prompts share them.
            prefix_caching: Whether a request may start behind cached tokens.

        """
        most = self.held(num_tokens) - self.decoding
        if prefills is Prefills.UNBOUNDED or num_requests == 1:
            return num_requests * most
        if prefills is Prefills.SEVERAL:
            # The first block costs a request the fewest tokens, more cost a block's.
            first = self._tokens_for_one_more()
            number = min(num_requests, num_tokens // first)
            more = number + (num_tokens - number * first) // self.block_size
            return min(more, num_requests * most)
        # One prompt goes on within a block, others start at the begin of one. The
        # request that came first decodes: it has released its prompt's blocks.
        start = self.reach // self.block_size * self.block_size if prefix_caching else 0
        return max(
            above + self._of_new_requests(num_requests - 2, num_tokens - own, start)
            for own, above in self._steps(num_tokens)
        )

    def _tokens_for_one_more(self) -> int:
        end = self.decoding * self.block_size
        return max(end - self.reach - self.lookahead + 1, 1)

    def _steps(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens for which a prompt that goes on takes more blocks."""
        yield 0, 0
        first = self._tokens_for_one_more()
        for own in range(first, num_tokens + 1, self.block_size):
            if (above := self.held(own) - self.decoding) <= 0:
                return
            yield own, above
            if self.held(own) == self.held(self.max_tokens):
                return

    def _of_new_requests(self, num_requests: int, num_tokens: int, start: int) -> int:
        """Return the most blocks above `decoding` of requests that start.

        They take a block for each block_size tokens, so few long ones take most.
        """
        longest = max(self.max_tokens - start, 1)
        whole = min(num_tokens // longest, num_requests)
        above = whole * max(self.held(longest, start) - self.decoding, 0)
        if whole < num_requests and (rest := num_tokens - whole * longest):
            above += max(self.held(rest, start) - self.decoding, 0)
        return above
