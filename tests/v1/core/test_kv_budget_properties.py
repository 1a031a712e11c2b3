# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A planned budget against the engine's allocation and scheduling code.

Over generated layers, lengths and numbers of requests. There is no model: the
scheduler and its block pool are the engine's own, and each sampled token is a 0.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any

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
    most_encoder_tokens,
    run_random_schedule,
)
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_budget import UNLIMITED_MEMORY, KVBudget, plan_kv_budget
from vllm.v1.core.kv_cache_sizes import get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK_SIZES = [16, 32, 64, 128]
TO_DECODE, TO_ENCODE = (16, 512), (1500, 2000)
# With drafted tokens only where the model runner takes them.
DRAFTING = [] if STANDALONE_RUNNER else ["draft", "eagle", "mtp"]
# That with MTP computes prompts whole: its model has MLA layers.
RANDOM_BASES = ["full", *DRAFTING[:2]]
Configs = dict[str, VllmConfig]


@pytest.fixture(scope="module")
def base_configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """Configurations, whose own layers are not used."""
    configs = {}
    for kind in ("full", "encoder-decoder", *DRAFTING):
        args = engine_args(tmp_path_factory.mktemp("model"), kind)
        configs[kind] = EngineArgs(**args).create_engine_config()
    register_all_kvcache_specs(configs["full"])
    return configs


def attention_layers(random: Random, config: VllmConfig) -> list[KVCacheSpec]:
    """Layers of one or two kinds, as models have them."""
    block_size = config.cache_config.block_size
    shape = {
        "block_size": block_size,
        "num_kv_heads": random.choice([1, 2, 8]),
        "head_size": random.choice([64, 128]),
        "dtype": random.choice([torch.bfloat16, torch.float32]),
    }
    full = FullAttentionSpec(**shape)
    if config.model_config.is_encoder_decoder:
        return [full, CrossAttentionSpec(**shape)] * random.randint(1, 4)
    other = random.choice(
        [
            FullAttentionSpec(**(shape | {"num_kv_heads": 4})),
            SlidingWindowSpec(**shape, sliding_window=random.randint(1, 200)),
            *chunks(random, config, shape),
            MLAAttentionSpec(**(shape | {"num_kv_heads": 1, "head_size": 576})),
            state(config, full.page_size_bytes),
        ]
    )
    mixes = isinstance(other, MLAAttentionSpec)
    num_full = 0 if mixes else random.randint(0, 4)
    num_other = random.randint(0 if num_full else 1, 4)
    layers = [full] * num_full + [other] * num_other
    return random.sample(layers, len(layers))


def chunks(
    random: Random, config: VllmConfig, shape: dict[str, Any]
) -> list[KVCacheSpec]:
    """Chunked layers, unless the engine rejects them beside drafts of this kind."""
    spec = config.speculative_config
    if spec is not None and spec.use_eagle():
        return []
    # Nor does it run chunks that are not whole blocks.
    size = shape["block_size"] * random.randint(1, 4)
    return [ChunkedLocalAttentionSpec(**shape, attention_chunk_size=size)]


def has_states(specs: Iterable[KVCacheSpec]) -> bool:
    return any(isinstance(spec, MambaSpec) for spec in specs)


def state(config: VllmConfig, page_size: int) -> MambaSpec:
    """A layer with a state instead of tokens: Mamba, linear or a short convolution.

    To the engine's block pool these are the same. With prefix caching it keeps states
    at the ends of blocks, else one a request.
    """
    aligned = config.cache_config.enable_prefix_caching
    max_model_len = config.model_config.max_model_len
    return MambaSpec(
        block_size=config.cache_config.block_size if aligned else max_model_len,
        shapes=((4, 8),),
        dtypes=(torch.float32,),
        page_size_padded=page_size,
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
        num_speculative_blocks=config.num_speculative_tokens,
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
    config.scheduler_config.max_num_encoder_input_tokens = max_num_batched_tokens
    config.scheduler_config.encoder_cache_size = max_num_batched_tokens
    config.cache_config = copy.copy(base.cache_config)
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = prefix_caching
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.mamba_cache_mode = "align" if prefix_caching else "none"
    return config


def make_case(random: Random, bases: Configs) -> tuple[VllmConfig, Layers]:
    """A configuration, and the layers of its only rank."""
    base = bases[random.choice([*RANDOM_BASES, "encoder-decoder"])]
    encodes = base.model_config.is_encoder_decoder
    config = replaced(
        base,
        max_model_len=random.randint(2, 400),
        max_num_seqs=random.randint(1, 4),
        # The engine wants room for the longest clip of Whisper.
        max_num_batched_tokens=random.randint(*(TO_ENCODE if encodes else TO_DECODE)),
        block_size=random.choice(BLOCK_SIZES),
        prefix_caching=not encodes and random.choice([False, True]),
    )
    specs = attention_layers(random, config)
    limits = config.scheduler_config
    if config.cache_config.enable_prefix_caching and has_states(specs):
        # Their steps end at whole blocks: with less room than for a block, and for a
        # drafted token, the scheduler waits for ever, however many blocks there are.
        shortest = config.cache_config.block_size + 1
        limits.max_num_batched_tokens = max(limits.max_num_batched_tokens, shortest)
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
        encoder_tokens = most_encoder_tokens(scheduler.vllm_config)
        scheduler.add_request(
            make_request(number, tokens, max_tokens, hash_block_size, encoder_tokens)
        )

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


@settings(COMMON, max_examples=100)
@given(random=RANDOMS)
def test_tight_without_windows(base_configs: Configs, random: Random) -> None:
    """One block less, and short prompts no longer grow to max_model_len together."""
    config, layers = make_case(random, base_configs)
    specs = layers.values()
    windowed = SlidingWindowSpec | ChunkedLocalAttentionSpec
    assume(not any(isinstance(spec, windowed) for spec in specs))
    block_size = config.cache_config.block_size
    max_model_len = config.model_config.max_model_len
    max_num_seqs = config.scheduler_config.max_num_seqs
    assume(max_num_seqs > 1 and max_model_len % block_size != 1)
    # A state is held twice where a block begins, and the last token is not computed.
    assume(not has_states(specs) or max_model_len >= block_size + 2)
    # A step has room for one encoder: who comes later begins with more tokens.
    late = int(config.model_config.is_encoder_decoder)
    assume(max_model_len > max_num_seqs)
    prompts = [[number] * (1 + late * number) for number in range(max_num_seqs)]
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
    max_num_seqs = random.randint(1, 6)
    config = replaced(
        bases[random.choice(["full", *RANDOM_BASES])],
        max_model_len=random.randint(30, 300),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=random.randint(16, 300),
        block_size=block_size,
        prefix_caching=random.choice([False, True]),
    )
    # Below 9, eight drafted tokens fail an assertion of the scheduler.
    threshold = random.choice([0, 0, random.randint(9, 64)])
    config.scheduler_config.long_prefill_token_threshold = threshold
    window = random.choice([block_size, 2 * block_size, 1, random.randint(1, 100)])
    sliding = SlidingWindowSpec(**shape, sliding_window=window)
    other = random.choice([sliding, *chunks(random, config, shape)])
    specs: list[KVCacheSpec] = [other] * random.randint(1, 3)
    specs += [FullAttentionSpec(**shape)] * random.randint(0, 1)
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
    assert outcome.waits == 0, seed
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
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=64)
CHUNKED = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
CROSS = CrossAttentionSpec(**SHAPE)
MLA = MLAAttentionSpec(**(SHAPE | {"head_size": 576}))
WINDOWED: dict[str, list[KVCacheSpec]] = {
    "sliding": [SLIDING],
    "sliding-and-full": [SLIDING, FULL],
    "chunked": [CHUNKED],
    "chunked-and-full": [CHUNKED, FULL],
}


def named(specs: list[KVCacheSpec]) -> Layers:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


@pytest.mark.parametrize("kind", WINDOWED)
def test_five_percent_less_is_too_little(base_configs: Configs, kind: str) -> None:
    """All but one request are about to end, when the last comes with a long prompt."""
    config = replaced(base_configs["full"], 320, 8, 320, 16, False)
    layers = named(WINDOWED[kind])
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


@pytest.mark.parametrize(
    ("base", "prefix_caching", "num_states", "others"),
    [
        pytest.param("full", False, 0, [FULL], id="full"),
        pytest.param("full", False, 0, [MLA], id="mla"),
        pytest.param(
            "mtp", False, 0, [MLA, MLA], id="mla-mtp", marks=needs_speculative_decoding
        ),
        pytest.param("full", False, 1, [], id="states"),
        pytest.param("full", False, 3, [FULL], id="states-and-full"),
        pytest.param("full", True, 1, [], id="states-with-prefixes"),
        pytest.param("full", True, 3, [FULL], id="states-with-prefixes-and-full"),
        pytest.param(
            "mtp",
            True,
            3,
            [FULL],
            id="states-with-drafts-and-full",
            marks=needs_speculative_decoding,
        ),
        pytest.param("encoder-decoder", False, 0, [FULL, CROSS], id="encoder-decoder"),
    ],
)
def test_one_block_less_is_too_little(
    base_configs: Configs,
    base: str,
    prefix_caching: bool,
    num_states: int,
    others: list[KVCacheSpec],
) -> None:
    """Short prompts grow to max_model_len together."""
    num_tokens = 1600 if base == "encoder-decoder" else 320
    config = replaced(base_configs[base], 320, 8, num_tokens, 16, prefix_caching)
    layers = named([state(config, FULL.page_size_bytes)] * num_states + others)
    budget = plan(config, layers)

    results = []
    for missing in (0, budget.bytes_per_block):
        num_bytes = budget.num_bytes - missing
        scheduler, hash_block_size = make_scheduler(config, layers, num_bytes)
        prompts = [[number] for number in range(8)]
        results.append(grow(scheduler, prompts, hash_block_size))

    assert results[0] == (8, 0, budget.num_blocks - 1)
    assert results[1][:2] != (8, 0)


def add_stages(config: VllmConfig) -> None:
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.pipeline_parallel_size = 2


def add_images(config: VllmConfig) -> None:
    config.model_config.multimodal_config = MultiModalConfig()


def add_connector(config: VllmConfig) -> None:
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ExampleConnector", kv_role="kv_both"
    )


def add_adaptive_threshold(config: VllmConfig) -> None:
    config.scheduler_config.long_prefill_token_threshold_adaptive = True


def add_nothing(config: VllmConfig) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "num_states", "for_prompts"),
    [
        # A window of 64 tokens holds 5 blocks, and 10 more with a batch of 160.
        pytest.param(add_nothing, 0, 10, id="one-batch"),
        pytest.param(add_images, 0, 4 * 10, id="images"),
        pytest.param(add_connector, 0, 4 * 10, id="connector"),
        pytest.param(add_adaptive_threshold, 0, 4 * 10, id="adaptive-threshold"),
        pytest.param(add_nothing, 1, 4 * 10, id="states-with-prefixes"),
        pytest.param(add_stages, 0, 4 * 20, id="two-stages"),
    ],
)
def test_a_whole_batch_for_each_request(
    base_configs: Configs,
    change: Callable[[VllmConfig], None],
    num_states: int,
    for_prompts: int,
) -> None:
    """Where chunks of prompts may grow again, or blocks are released later."""
    config = replaced(base_configs["full"], 1024, 4, 160, 16, True)
    change(config)
    states = [state(config, SLIDING.page_size_bytes)] * num_states

    budget = plan_kv_budget(config, [named([SLIDING, *states])])

    assert budget is not None
    assert budget.blocks_in_flight == for_prompts
