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
from vllm.v1.request import Request
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
    """Steps in which a request waited for blocks though no prompt was computed."""


def make_scheduler(
    config: VllmConfig, layers: Layers, num_bytes: int
) -> tuple[Scheduler, int]:
    """A scheduler over the blocks of a budget, and its hash block size."""
    configs = get_kv_cache_configs(config, [dict(layers)], num_bytes)
    kv_cache_config = generate_scheduler_kv_cache_config(configs)
    config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    return scheduler, hash_block_size


def make_request(
    number: int, tokens: list[int], max_tokens: int, hash_block_size: int
) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
    )


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
    random: Random, number: int, max_model_len: int, hash_block_size: int
) -> list[Request]:
    """Requests with lengths at and around those that take most blocks."""
    requests = []
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
        requests.append(make_request(i, tokens, max_tokens, hash_block_size))
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
        config.model_config.max_model_len,
        hash_block_size,
    )
    rarely = random.random() < 0.5
    pool = scheduler.kv_cache_manager.block_pool
    decode_tokens = 1 + scheduler.num_spec_tokens
    spec = config.speculative_config
    draft_slots = spec.max_num_new_slots_for_drafting if spec is not None else 0
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
        output = scheduler.schedule()
        running = max(running, len(scheduler.running))
        preemptions += len(output.preempted_req_ids or ())
        peak = max(peak, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        most = max(output.num_scheduled_tokens.values(), default=0)
        free_seats = max_num_seqs - len(scheduler.running)
        tokens_left = config.scheduler_config.max_num_batched_tokens
        tokens_left -= output.total_num_scheduled_tokens
        tokens_left -= draft_slots * len(output.num_scheduled_tokens)
        if (
            scheduler.waiting
            and free_seats > 0
            and tokens_left > decode_tokens + draft_slots
        ):
            waits += most <= decode_tokens
        if not output.total_num_scheduled_tokens:
            raise AssertionError(f"seed {seed}: the scheduler is stuck")
        finish_step(scheduler, output, random)
        if preemptions:
            break
    return Outcome(running, preemptions, peak, waits)
