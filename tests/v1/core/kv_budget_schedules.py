# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Random schedules on the engine's own scheduler, with no model: every token is a 0.

A schedule is a function of its seed: when requests arrive, how long they are, which
prefix they share, and how many drafted tokens are accepted.
"""

from random import Random
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_sizes import get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

Layers = dict[str, KVCacheSpec]


class Outcome(NamedTuple):
    """What was counted during a schedule."""

    running: int
    """The most requests that ran at once."""
    preemptions: int
    peak: int
    """The most blocks in use, without the null block."""
    waits: int
    """Steps in which a request was refused blocks though no prompt was computed."""


def make_scheduler(
    config: VllmConfig, layers: Layers, num_bytes: int
) -> tuple[Scheduler, int]:
    """A scheduler over the blocks of a budget, and its hash block size."""
    configs = get_kv_cache_configs(config, [dict(layers)], num_bytes)
    kv_cache_config = generate_scheduler_kv_cache_config(configs)
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    config.cache_config.block_size = min(
        group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups
    )
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    return scheduler, hash_block_size


def watch_refusals(scheduler: Scheduler) -> list[str]:
    """Return a list that grows with each new request that finds too few free blocks."""
    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    allocate, count = manager.allocate_slots, coordinator.get_num_blocks_to_allocate
    refused = []
    needed = 0

    def count_needed(*args: Any, **kwargs: Any) -> int:
        nonlocal needed
        needed = count(*args, **kwargs)
        return needed

    def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        # "More than all" is how Mamba layers ask to wait for a state that this very
        # step computes. Who really needed so many would never run.
        postponed = needed > manager.block_pool.num_gpu_blocks
        if (
            blocks is None
            and not postponed
            and request.status is not RequestStatus.RUNNING
        ):
            refused.append(request.request_id)
        return blocks

    coordinator.get_num_blocks_to_allocate = count_needed
    manager.allocate_slots = allocate_slots
    return refused


def make_request(
    number: int,
    tokens: list[int],
    max_tokens: int,
    hash_block_size: int,
    encoder_tokens: int = 0,
) -> Request:
    encoded = MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(),
        modality="audio",
        identifier=str(number),
        mm_position=PlaceholderRange(offset=0, length=encoder_tokens),
    )
    return Request(
        request_id=str(number),
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        mm_features=[encoded] if encoder_tokens else None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


def most_encoder_tokens(config: VllmConfig) -> int:
    """What the engine counts for the encoder of a request, 0 if there is none."""
    if not config.model_config.is_encoder_decoder:
        return 0
    return config.scheduler_config.max_num_encoder_input_tokens


def finish_step(
    scheduler: Scheduler, output: SchedulerOutput, random: Random | None = None
) -> None:
    """Tell the scheduler what a model would have sampled, and what is drafted next."""
    ids = list(output.num_scheduled_tokens)
    sampled = []
    for req_id in ids:
        request = scheduler.requests[req_id]
        drafts = output.scheduled_spec_decode_tokens.get(req_id, ())
        if request.num_computed_tokens < request.num_tokens:
            sampled.append([])  # its prompt goes on
        else:
            accepted = random.randint(0, len(drafts)) if random else 0
            sampled.append([0] * (1 + accepted))
    fields: dict[str, Any] = {"req_ids": ids, "sampled_token_ids": sampled}
    if "req_id_to_index" in ModelRunnerOutput.__dataclass_fields__:  # to 0.33.0
        fields["req_id_to_index"] = {req_id: i for i, req_id in enumerate(ids)}
    scheduler.update_from_output(output, ModelRunnerOutput(**fields))
    if random and scheduler.num_spec_tokens:
        decoding = [
            req_id
            for req_id, tokens in zip(ids, sampled, strict=True)
            if tokens and req_id in scheduler.requests
        ]
        drafts = [[0] * random.randint(0, scheduler.num_spec_tokens) for _ in decoding]
        scheduler.update_draft_token_ids(DraftTokenIds(decoding, drafts))


def random_requests(
    random: Random, number: int, config: VllmConfig, hash_block_size: int
) -> list[Request]:
    """Requests with lengths at and around those that take most blocks."""
    requests = []
    max_model_len = config.model_config.max_model_len
    encoder_tokens = most_encoder_tokens(config)
    shared = [random.randint(1, 3) for _ in range(max_model_len)]
    for i in range(number):
        kind = random.randrange(4)
        if kind == 0:
            length = max_model_len - 1
        elif kind == 1:
            length = random.randint(1, max_model_len - 1)
        else:
            length = random.randint(1, min(max_model_len - 1, 12))
        common = random.choice([0, 0, length, random.randint(0, length)])
        tokens = shared[:common] + [10 + i] * (length - common)
        room = max_model_len - length
        max_tokens = random.choice([1, random.randint(1, room), room])
        if encoder_tokens:
            encoder_tokens = random.randint(1, most_encoder_tokens(config))
        request = make_request(i, tokens, max_tokens, hash_block_size, encoder_tokens)
        requests.append(request)
    return requests


def run_random_schedule(
    config: VllmConfig, layers: Layers, num_bytes: int, seed: int
) -> Outcome:
    """Run the schedule of a seed to its end."""
    random = Random(seed)
    init_none_hash(sha256)
    scheduler, hash_block_size = make_scheduler(config, layers, num_bytes)
    max_num_seqs = config.scheduler_config.max_num_seqs
    requests = random_requests(
        random,
        random.randint(max_num_seqs, 3 * max_num_seqs),
        config,
        hash_block_size,
    )
    refused = watch_refusals(scheduler)
    rarely = random.random() < 0.5
    pool = scheduler.kv_cache_manager.block_pool
    decode_tokens = 1 + scheduler.num_spec_tokens
    running = preemptions = peak = waits = 0
    while requests or scheduler.has_unfinished_requests():
        arrive = random.randint(0, max_num_seqs)
        if rarely and random.random() < 0.7:
            arrive = 0
        if not scheduler.has_unfinished_requests():
            arrive = max(arrive, 1)
        for request in requests[:arrive]:
            scheduler.add_request(request)
        del requests[:arrive]
        refused.clear()
        output = scheduler.schedule()
        running = max(running, len(scheduler.running))
        preemptions += len(output.preempted_req_ids or ())
        peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        most = max(output.num_scheduled_tokens.values(), default=0)
        waits += bool(refused) and most <= decode_tokens
        if not output.total_num_scheduled_tokens:
            raise AssertionError(f"seed {seed}: the scheduler is stuck")
        finish_step(scheduler, output, random)
        if preemptions:
            break
    return Outcome(running, preemptions, peak, waits)
