# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an engine on CPU holds in its KV cache, in bytes and by block.

`python -m tests.v1.worker.cpu_kv_cache_report ARGUMENTS ROUNDS` prints it for an
engine in processes of its own.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import regex as re
import torch

from tests.platforms.cpu_kv_cache_child import keep_log
from vllm import LLM, SamplingParams

MiB = 1 << 20

# Of 73 blocks one is the null block, a request of 2,048 tokens takes 67 and one of
# 127 the other 5.
WHOLE_POOL = 128 * MiB
BLOCKS = 73
BLOCK = 7 * MiB // 4


def rss_anon(_: Any = None) -> int:
    """The anonymous memory of this process that is resident, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


def blocks_of(worker: Any) -> list[str]:
    """A hash of each block of a worker's KV cache, over all layers."""
    # Layers of other groups lie on the same bytes.
    caches = {c.data_ptr(): c for c in worker.model_runner.kv_caches}.values()
    return [
        hashlib.sha256(
            b"".join(cache[block].view(torch.int16).numpy() for cache in caches)
        ).hexdigest()
        for block in range(BLOCKS)
    ]


def generate(engine: LLM, first_token: int) -> list[Any]:
    """Fill the whole pool, and return the tokens with their log-probabilities."""
    prompts = [
        {"prompt_token_ids": [(first_token + 7 * i) % 500 for i in range(length)]}
        for length in (96, 2016)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=31, logprobs=1, ignore_eos=True, detokenize=False
    )
    outputs = (output.outputs[0] for output in engine.generate(prompts, params))
    return [
        [
            (token, logprobs[token].logprob)
            for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    ]


def report(arguments: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Start an engine; report its memory, its log, its outputs and its blocks.

    Returns:
        rss_anon: bytes by rank, after start-up. lines: what this process logged.
        outputs: those of each round, in which requests fill the whole pool.
        blocks: a hash of each block after each round, by rank.
    """
    lines = keep_log()
    engine = LLM(**arguments)
    result = {"rss_anon": engine.collective_rpc(rss_anon), "lines": lines}
    result |= {"outputs": [], "blocks": []}
    for number in range(rounds):
        result["outputs"].append(generate(engine, 1 + 100 * number))
        result["blocks"].append(engine.collective_rpc(blocks_of))
    return result


if __name__ == "__main__":
    found = report(json.loads(sys.argv[1]), int(sys.argv[2]))
    print(f"RESULT {json.dumps(found)}", flush=True)
