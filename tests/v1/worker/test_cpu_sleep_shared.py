# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines on CPU that sleep share the memory of a machine.

The memory is that of a control group, which each test makes and removes.
"""

import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.test_cpu_kv_cache_ways_in import llama, write_model
from tests.v1.worker.test_cpu_kv_cache_commit import COMMITS, in_child
from tests.v1.worker.test_cpu_sleep import (
    ARGUMENTS,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    generate,
    is_sleeping,
)
from vllm import LLM, envs
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

GiB = 1 << 30
BUDGET = 2 * GiB
MEMORY = 3 * BUDGET // 2  # half of what the engines have together
IS_V1 = Path("/sys/fs/cgroup/memory").is_dir()
GROUPS = Path("/sys/fs/cgroup/memory" if IS_V1 else "/sys/fs/cgroup")
LIMIT = "memory.limit_in_bytes" if IS_V1 else "memory.max"
USAGE = "memory.usage_in_bytes" if IS_V1 else "memory.current"

pytestmark = [
    pytest.mark.slow_test,
    pytest.mark.skipif(
        not os.access(GROUPS, os.W_OK),
        reason="this user cannot make a control group",
    ),
]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit, from which no process is left."""
    folder = GROUPS / f"vllm-sleep-{os.getpid()}"
    folder.mkdir()
    (folder / LIMIT).write_text(str(MEMORY))
    yield folder
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:  # the kernel has not yet seen all of them go
            time.sleep(0.1)
    folder.rmdir()


def enter(group: Path) -> None:
    """Move this process into a group, which it then sees as a container does."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, bind, recursive, private = 0x20000, 0x1000, 0x4000, 0x40000
    if (
        libc.unshare(new_mounts)
        or libc.mount(None, b"/", None, recursive | private, None)
        or libc.mount(os.fsencode(group), os.fsencode(GROUPS), None, bind, None)
    ):
        raise OSError(ctypes.get_errno(), "cannot mount the control group")
    get_cgroup_memory_limit.cache_clear()


def serve(model: str, commit: str, group: Path, pipe: Connection) -> None:
    """Answer "fill", "sleep" and "wake_up" until the pipe ends."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_COMMIT"] = commit
    envs.disable_envs_cache()
    arguments = ARGUMENTS | {"kv_cache_memory_bytes": BUDGET, "load_format": "dummy"}
    engine = LLM(model, **arguments)
    actions: dict[str, Any] = {
        "fill": lambda: generate(engine, budget=BUDGET)[0],
        "sleep": engine.sleep,
        "wake_up": engine.wake_up,
    }
    pipe.send("started")
    while True:
        try:
            action = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(actions[action]())


class Engine:
    def __init__(self, model: str, commit: str, group: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(model, commit, group, theirs)
        )
        self.process.start()
        theirs.close()

    def ask(self, action: str | None = None) -> Any:
        """Ask for an action, or wait for the start.

        Raises:
            EOFError: The engine is not there any more.

        """
        if action is not None:
            self.pipe.send(action)
        return self.pipe.recv()

    def stop(self) -> int | None:
        self.process.kill()
        self.process.join()
        return self.process.exitcode


@pytest.mark.parametrize("commit", COMMITS)
def test_all_serve_in_turn(tmp_path: Path, group: Path, commit: str) -> None:
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))
    engines: list[Engine] = []
    try:
        for _ in range(3):
            engines.append(Engine(model, commit, group))
            assert engines[-1].ask() == "started"
            engines[-1].ask("sleep")
        tokens = []
        for _ in range(2):
            for engine in engines:
                assert engine.ask("wake_up")
                tokens.append(engine.ask("fill"))
                engine.ask("sleep")
    finally:
        for engine in engines:
            engine.stop()
    assert len(tokens) == 6
    assert all(one == tokens[0] for one in tokens)


def test_not_all_serve_without_sleep(tmp_path: Path, group: Path) -> None:
    """What stock vLLM does: the kernel kills the one for which nothing is left."""
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))
    engines: list[Engine] = []
    try:
        with pytest.raises(EOFError):
            for _ in range(3):
                engines.append(Engine(model, "startup", group))
                engines[-1].ask()
        engines[-1].process.join(10)
        assert -signal.SIGKILL in [engine.process.exitcode for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


def test_memory_that_is_gone_at_wake_up(tmp_path: Path, group: Path) -> None:
    """An engine that finds too little memory sleeps on, and wakes up later."""
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))

    def report() -> list[Any]:
        enter(group)
        engine = LLM(model, **(ARGUMENTS | {"load_format": "dummy"}))
        tokens, _ = generate(engine)
        engine.sleep(level=1)
        free = MEMORY - int((GROUPS / USAGE).read_text())
        others = mmap.mmap(-1, free - ARGUMENTS["kv_cache_memory_bytes"] // 2)
        others.write(bytes(len(others)))
        found: list[Any] = []
        try:
            engine.wake_up()
        except RuntimeError as error:
            found.append(str(error))
        found.append(is_sleeping(engine))
        others.close()
        return [*found, engine.wake_up(), generate(engine)[0] == tokens]

    error, sleeps, awake, same = in_child("startup", report)

    assert "needs 256.0 MiB to wake up" in error
    assert "The engine sleeps on." in error
    assert (sleeps, awake, same) == (True, True, True)
