# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A planned budget against the engine's allocation and scheduling code.

Over generated layers, lengths and numbers of requests. There is no model: the
scheduler and its block pool are the engine's own, and each sampled token is a 0.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.platforms.cpu_kv_cache_utils import (
    STANDALONE_RUNNER,
    needs_speculative_decoding,
)
from tests.v1.core.kv_budget_engine import engine_args
from tests.v1.core.kv_budget_schedules import (
    Layers,
    finish_step,
    make_request,
    make_scheduler,
    run_random_schedule,
)
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_budget import UNLIMITED_MEMORY, KVBudget, plan_kv_budget
from vllm.v1.core.kv_cache_sizes import get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK_SIZES = [16, 32, 64, 128]
# With drafted tokens only where the model runner takes them.
BASES = ["full"] if STANDALONE_RUNNER else ["full", "draft"]
Configs = dict[str, VllmConfig]


@pytest.fixture(scope="module")
def base_configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """A configuration of each of BASES, whose layers are not used."""
    configs = {}
    for kind in BASES:
        args = engine_args(tmp_path_factory.mktemp("model"), kind)
        configs[kind] = EngineArgs(**args).create_engine_config()
    register_all_kvcache_specs(configs["full"])
    return configs


def attention_layers(random: Random, block_size: int) -> list[KVCacheSpec]:
    """Layers of one or two kinds, as models have them."""
    shape = {
        "block_size": block_size,
        "num_kv_heads": random.choice([1, 2, 8]),
        "head_size": random.choice([64, 128]),
        "dtype": random.choice([torch.bfloat16, torch.float32]),
    }
    full = FullAttentionSpec(**shape)
    window = random.randint(1, 200)
    # The engine refuses to run chunks that are not whole blocks.
    chunk = block_size * random.randint(1, 4)
    other = random.choice(
        [
            FullAttentionSpec(**(shape | {"num_kv_heads": 4})),
            SlidingWindowSpec(**shape, sliding_window=window),
            ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk),
            MLAAttentionSpec(**(shape | {"num_kv_heads": 1, "head_size": 576})),
            mamba(block_size, full.page_size_bytes),
        ]
    )
    mixes = isinstance(other, MLAAttentionSpec)
    num_full = 0 if mixes else random.randint(0, 4)
    num_other = random.randint(0 if num_full else 1, 4)
    layers = [full] * num_full + [other] * num_other
    return random.sample(layers, len(layers))


def mamba(block_size: int, page_size: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((4, 8),),
        dtypes=(torch.float32,),
        page_size_padded=page_size,
        mamba_cache_mode="align",
    )


def replaced(
    base: VllmConfig,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    prefix_caching: bool,
) -> VllmConfig:
    """A copy of a configuration with other limits, as the engine core has it."""
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.model_config.max_model_len = max_model_len
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = prefix_caching
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.mamba_cache_mode = "align"
    return config


def make_case(random: Random, bases: Configs) -> tuple[VllmConfig, Layers]:
    """A configuration, and the layers of its only rank."""
    block_size = random.choice(BLOCK_SIZES)
    specs = attention_layers(random, block_size)
    # Steps of Mamba layers end at whole blocks: with shorter ones the scheduler waits
    # for ever, however many blocks there are.
    has_mamba = any(isinstance(spec, MambaSpec) for spec in specs)
    shortest = block_size if has_mamba else 16
    config = replaced(
        bases[random.choice(BASES)],
        max_model_len=random.randint(2, 400),
        max_num_seqs=random.randint(1, 4),
        max_num_batched_tokens=random.randint(shortest, 512),
        block_size=block_size,
        prefix_caching=random.choice([False, True]),
    )
    return config, {f"layers.{i}": spec for i, spec in enumerate(specs)}


def plan(config: VllmConfig, layers: Layers) -> KVBudget:
    try:
        budget = plan_kv_budget(config, [layers])
    except (ValueError, NotImplementedError):
        # Then the engine cannot start with them either.
        with pytest.raises((ValueError, NotImplementedError)):
            get_kv_cache_configs(config, [dict(layers)], UNLIMITED_MEMORY)
        assume(False)
    assert budget is not None
    return budget


# Seeded by one draw each: a case is a function of its seed.
RANDOMS = st.randoms(use_true_random=True)
COMMON = settings(
    deadline=None,
    derandomize=True,  # the same cases in each run
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(COMMON, max_examples=500)
@given(random=RANDOMS)
def test_allocation_of_planned_budgets(base_configs: Configs, random: Random) -> None:
    config, layers = make_case(random, base_configs)
    budget = plan(config, layers)

    def allocate(num_bytes: int) -> int:
        (result,) = get_kv_cache_configs(config, [dict(layers)], num_bytes)
        return result.num_blocks

    assert allocate(budget.num_bytes) == budget.num_blocks
    assert budget.num_bytes == budget.num_blocks * budget.bytes_per_block
    assert allocate(budget.start_bytes) == budget.start_blocks
    with pytest.raises(ValueError):
        allocate(budget.start_bytes - 1)
    with pytest.raises(ValueError):
        allocate(budget.start_bytes - budget.bytes_per_block)


@settings(COMMON, max_examples=300)
@given(ranks=st.integers(1, 4), random=RANDOMS)
def test_ranks_share_the_number_of_blocks(
    base_configs: Configs, ranks: int, random: Random
) -> None:
    """A pipeline stage with fewer layers takes less of the same budget."""
    config, layers = make_case(random, base_configs)
    owner = [random.randrange(ranks) for _ in layers]
    specs: list[Layers] = [{} for _ in range(ranks)]
    for rank, (name, spec) in zip(owner, layers.items(), strict=True):
        specs[rank][name] = spec
    assume(all(specs))
    try:
        budget = plan_kv_budget(config, specs)
    except (ValueError, NotImplementedError):
        assume(False)
    assert budget is not None
    assume(all(rank.bytes_per_block for rank in budget.ranks))

    results = get_kv_cache_configs(config, specs, budget.num_bytes)

    assert {result.num_blocks for result in results} == {budget.num_blocks}
    with pytest.raises(ValueError):
        get_kv_cache_configs(config, specs, budget.start_bytes - 1)
    get_kv_cache_configs(config, specs, budget.start_bytes)


def grow(
    scheduler: Scheduler,
    prompts: list[list[int]],
    hash_block_size: int,
    late: list[int] | None = None,
    late_step: int = 0,
) -> tuple[int, int, int]:
    """Run requests from their prompts to max_model_len; one may come later.

    Returns:
        The most that ran at once, the preemptions, and the most blocks in use.

    """
    init_none_hash(sha256)

    def add(number: int, tokens: list[int]) -> None:
        max_tokens = scheduler.max_model_len - len(tokens)
        request = make_request(number, tokens, max_tokens, hash_block_size)
        scheduler.add_request(request)

    for number, tokens in enumerate(prompts):
        add(number, tokens)
    pool = scheduler.kv_cache_manager.block_pool
    step = running = preemptions = peak = 0
    while scheduler.has_unfinished_requests():
        if late and step == late_step:
            add(len(prompts), late)
        step += 1
        output = scheduler.schedule()
        assert output.total_num_scheduled_tokens > 0, "the scheduler is stuck"
        running = max(running, len(scheduler.running))
        preemptions += len(output.preempted_req_ids or ())
        peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        finish_step(scheduler, output)
    return running, preemptions, peak


@settings(COMMON, max_examples=400)
@given(random=RANDOMS)
def test_no_preemption_with_the_planned_budget(
    base_configs: Configs, random: Random
) -> None:
    config, layers = make_case(random, base_configs)
    max_model_len = config.model_config.max_model_len
    max_num_seqs = config.scheduler_config.max_num_seqs
    # Twice as many requests as may run: blocks are freed and taken again.
    lengths = [random.randint(0, 400) for _ in range(8)]
    prompts = [
        [number] * (1 + length % (max_model_len - 1))
        for number, length in enumerate(lengths[: 2 * max_num_seqs])
    ]
    budget = plan(config, layers)
    scheduler, hash_block_size = make_scheduler(config, layers, budget.num_bytes)

    running, preemptions, peak = grow(scheduler, prompts, hash_block_size)

    assert preemptions == 0
    assert running <= max_num_seqs
    assert peak < budget.num_blocks


@needs_speculative_decoding
@pytest.mark.parametrize("in_flight", range(26, 34))
def test_slots_of_drafted_tokens(base_configs: Configs, in_flight: int) -> None:
    """One request, alone: with the engine's own count it may wait for ever."""
    spec = SlidingWindowSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        sliding_window=18,
    )
    config = replaced(base_configs["draft"], 200, 1, in_flight, 16, False)
    layers: Layers = {"layers.0": spec}
    budget = plan(config, layers)
    scheduler, hash_block_size = make_scheduler(config, layers, budget.num_bytes)

    _, preemptions, peak = grow(scheduler, [[1] * 150], hash_block_size)

    assert preemptions == 0
    assert peak < budget.num_blocks


@settings(COMMON, max_examples=200)
@given(random=RANDOMS)
def test_tight_for_full_attention(base_configs: Configs, random: Random) -> None:
    config, layers = make_case(random, base_configs)
    assume(all(isinstance(spec, FullAttentionSpec) for spec in layers.values()))
    block_size = config.cache_config.block_size
    max_model_len = config.model_config.max_model_len
    max_num_seqs = config.scheduler_config.max_num_seqs
    assume(max_num_seqs > 1 and max_model_len % block_size != 1)
    assume(config.scheduler_config.max_num_batched_tokens >= max_num_seqs)
    config.cache_config.enable_prefix_caching = False
    prompts = [[number] for number in range(max_num_seqs)]
    budget = plan(config, layers)

    results = []
    for missing in (0, budget.bytes_per_block):
        num_bytes = budget.num_bytes - missing
        scheduler, hash_size = make_scheduler(config, layers, num_bytes)
        results.append(grow(scheduler, prompts, hash_size)[:2])

    assert results[0] == (max_num_seqs, 0)
    assert results[1] != (max_num_seqs, 0)


def windowed_case(random: Random, bases: Configs) -> tuple[VllmConfig, Layers]:
    """A configuration with layers that release old tokens, alone or beside others."""
    block_size = random.choice([16, 32])
    shape = {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    window = random.choice([block_size, 2 * block_size, 1, random.randint(1, 100)])
    chunk = block_size * random.randint(1, 4)
    other: KVCacheSpec = random.choice(
        [
            SlidingWindowSpec(**shape, sliding_window=window),
            ChunkedLocalAttentionSpec(**shape, attention_chunk_size=chunk),
        ]
    )
    specs = [other] * random.randint(1, 3)
    specs += [FullAttentionSpec(**shape)] * random.randint(0, 1)
    max_num_seqs = random.randint(1, 6)
    config = replaced(
        bases[random.choice(["full", *BASES])],
        max_model_len=random.randint(30, 300),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.randint(16, 300),
        block_size=block_size,
        prefix_caching=random.choice([False, True]),
    )
    # Below 9, eight drafted tokens fail an assertion of the scheduler.
    threshold = random.choice([0, 0, random.randint(9, 64)])
    config.scheduler_config.long_prefill_token_threshold = threshold
    return config, {f"layers.{i}": spec for i, spec in enumerate(specs)}


Case = Callable[[Random, Configs], tuple[VllmConfig, Layers]]


def any_case(random: Random, bases: Configs) -> tuple[VllmConfig, Layers]:
    """A configuration with layers of any kinds that an engine can group."""
    while True:
        config, layers = make_case(random, bases)
        with suppress(ValueError, NotImplementedError):
            plan_kv_budget(config, [layers])
            return config, layers


def check_random_schedule(bases: Configs, make: Case, seed: int) -> None:
    config, layers = make(Random(seed), bases)
    budget = plan_kv_budget(config, [layers])
    assert budget is not None

    outcome = run_random_schedule(config, layers, budget.num_bytes, seed)

    assert outcome.preemptions == 0, seed
    # A prompt of Mamba layers is computed by whole blocks, or waits for more tokens.
    has_states = any(isinstance(spec, MambaSpec) for spec in layers.values())
    assert has_states or outcome.waits == 0, seed
    assert outcome.peak < budget.held_blocks, seed


CASES = [
    pytest.param(windowed_case, id="windows-and-chunks"),
    pytest.param(any_case, id="any-kind"),
]


@pytest.mark.parametrize("make", CASES)
def test_random_schedules(base_configs: Configs, make: Case) -> None:
    for seed in range(150):
        check_random_schedule(base_configs, make, seed)


@pytest.mark.slow_test
@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_ten_thousand_random_schedules(
    base_configs: Configs, make: Case, first: int
) -> None:
    for seed in range(first, first + 1000):
        check_random_schedule(base_configs, make, seed)


SHAPE = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
KINDS: dict[str, list[KVCacheSpec]] = {
    "full": [FullAttentionSpec(**SHAPE)],
    "sliding": [SlidingWindowSpec(**SHAPE, sliding_window=64)],
    "chunked": [ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)],
}
KINDS["sliding-and-full"] = KINDS["sliding"] + KINDS["full"]
KINDS["chunked-and-full"] = KINDS["chunked"] + KINDS["full"]


@pytest.mark.parametrize("kind", KINDS)
def test_five_percent_less_is_too_little(base_configs: Configs, kind: str) -> None:
    """All but one request are about to end, when the last comes with a long prompt."""
    config = replaced(base_configs["full"], 320, 8, 320, 16, False)
    layers = {f"layers.{i}": spec for i, spec in enumerate(KINDS[kind])}
    budget = plan(config, layers)
    missing = -(-budget.num_blocks * 5 // 100) * budget.bytes_per_block

    results = []
    for num_bytes in (budget.num_bytes, budget.num_bytes - missing):
        scheduler, hash_block_size = make_scheduler(config, layers, num_bytes)
        prompts = [[number] for number in range(7)]
        results.append(grow(scheduler, prompts, hash_block_size, [7] * 319, 318))

    running, preemptions, peak = results[0]
    assert (running, preemptions) == (8, 0)
    assert 0.95 * (budget.num_blocks - 1) <= peak < budget.num_blocks
    assert results[1][:2] != (8, 0)
