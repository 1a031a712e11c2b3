# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine, one process: a function, or an engine, in a forked child."""

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.platforms.cpu_kv_cache_utils import (
    REFERENCE_ARGUMENTS,
    REFERENCE_BLOCK,
    REFERENCE_MODEL,
)
from vllm import LLM, envs
from vllm.platforms.cpu import CpuPlatform

# 67 blocks for a request of 2,048 tokens, and the null block
FITS = 68 * REFERENCE_BLOCK


def use_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of a test run on CPU, in one process, without a budget."""
    monkeypatch.setattr("vllm.platforms._current_platform", CpuPlatform())
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    envs.disable_envs_cache()


def send(function: Callable[..., Any], arguments: Any, out: Connection) -> None:
    out.send(function(**arguments))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def in_child(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Return what a function returns in a forked child.

    Raises:
        RuntimeError: The child ended without a result.

    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(function, arguments, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(
            f"{function.__name__}({arguments}) ended with status {child.exitcode}"
        ) from None
    finally:
        child.join()


def engine_arguments(folder: Path, **kwargs: Any) -> dict[str, Any]:
    """The arguments of an engine, whose config.json goes to folder."""
    (folder / "config.json").write_text(json.dumps(REFERENCE_MODEL))
    return {"model": str(folder), **REFERENCE_ARGUMENTS, **kwargs}


def keep_log() -> list[str]:
    """Return a list that takes each line that this process logs from now on."""
    lines: list[str] = []
    make_record = logging.getLogRecordFactory()

    def keep(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        lines.append(record.getMessage())
        return record

    # Handlers would not outlive the engine's own configuration of logging.
    logging.setLogRecordFactory(keep)
    return lines


def answer(ask: Callable[[LLM], Any], arguments: dict[str, Any]) -> SimpleNamespace:
    lines = keep_log()
    answered, error = None, ""
    try:
        answered = ask(LLM(**arguments))
    except Exception as exception:
        error = str(exception)
    return SimpleNamespace(answer=answered, error=error, log=lines)


def num_blocks(engine: LLM) -> int:
    blocks = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks is not None
    return blocks


def run_engine(
    folder: Path, ask: Callable[[LLM], Any] = num_blocks, **kwargs: Any
) -> SimpleNamespace:
    """Start an engine in a forked child and ask it something.

    Returns:
        What it answered, the error that it did not start with, and what it logged.

    """
    return in_child(answer, ask=ask, arguments=engine_arguments(folder, **kwargs))
