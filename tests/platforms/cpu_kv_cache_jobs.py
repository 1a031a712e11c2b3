# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a test starts an engine for in a process of its own.

`python -m tests.platforms.cpu_kv_cache_jobs JOB ARGUMENTS RESULT` takes an engine's
arguments as JSON and writes what the job reports to the file RESULT.
"""

import asyncio
import concurrent.futures
import copy
import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from tests.platforms.cpu_kv_cache_utils import GREEDY, PROMPT, generate, held
from vllm import LLM, AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.v1.engine.async_llm import AsyncLLM


def report(config: VllmConfig, ranks: list[int], length: int) -> dict[str, Any]:
    return {
        "bytes": config.cache_config.kv_cache_memory_bytes,
        "blocks": config.cache_config.num_gpu_blocks,
        "tokens": config.cache_config.kv_cache_size_tokens,
        "ranks": ranks,
        "length": length,
    }


def sync_report(arguments: dict[str, Any]) -> dict[str, Any]:
    """Start an LLM, generate, and report what it holds."""
    engine = LLM(**arguments)
    length = generate(engine)
    return report(engine.llm_engine.vllm_config, engine.collective_rpc(held), length)


async def async_report(arguments: dict[str, Any]) -> dict[str, Any]:
    """As sync_report, with an AsyncLLM."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        async for output in engine.generate(PROMPT, GREEDY, "request"):
            length = len(output.outputs[0].token_ids)
        return report(engine.vllm_config, await engine.collective_rpc(held), length)
    finally:
        engine.shutdown()


def budget_of(config: VllmConfig) -> int | None:
    return config.cache_config.kv_cache_memory_bytes


def rebuilt_budget_of(config: VllmConfig) -> int | None:
    config.__post_init__()
    return budget_of(config)


def budgets_of_copies(arguments: dict[str, Any]) -> dict[str, int | None]:
    """Build a configuration and report the budget of each copy of it."""
    config = AsyncEngineArgs(**arguments).create_engine_config()
    copied = copy.deepcopy(config)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        return {
            "built": budget_of(config),
            "copied": budget_of(copied),
            "copied and rebuilt": rebuilt_budget_of(copied),
            "dataclasses.replace": budget_of(dataclasses.replace(config)),
            "replace": budget_of(replace(config)),
            "sent": pool.submit(budget_of, config).result(),
            "sent and rebuilt": pool.submit(rebuilt_budget_of, config).result(),
            "rebuilt": rebuilt_budget_of(config),
        }


JOBS = {
    "sync": sync_report,
    "async": lambda arguments: asyncio.run(async_report(arguments)),
    "copies": budgets_of_copies,
}

if __name__ == "__main__":
    outcome = JOBS[sys.argv[1]](json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(outcome))
