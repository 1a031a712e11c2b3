# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines on CPU that sleep share the memory of a machine.

The memory is that of a control group, which each test makes and removes.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.cpu_kv_cache_utils import (
    TWO_RANKS,
    llama,
    needs_two_cores,
    write_model,
)
from tests.v1.core.control_groups import (
    GiB,
    Group,
    MiB,
    control_group,
    memory_controller,
    needs_groups,
)
from tests.v1.worker.cpu_sleep_engine import (
    ARGUMENTS,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    generate,
    in_engine_child,
    is_sleeping,
    with_variables,
)
from vllm import LLM
from vllm.utils.cpu_resource_utils import get_cgroup_memory_limit

BUDGET = 2 * GiB
MEMORY = 3 * BUDGET // 2  # half of what the engines have together

pytestmark = [pytest.mark.cgroup_test, needs_groups]


@pytest.fixture
def group() -> Iterator[Group]:
    with control_group(limit=MEMORY) as group:
        yield group


def enter(group: Group) -> None:
    """Move this process into a group, which it then sees as a container does."""
    (group.folder / "cgroup.procs").write_text(str(os.getpid()))
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, bind, recursive, private = 0x20000, 0x1000, 0x4000, 0x40000
    source, target = os.fsencode(group.folder), os.fsencode(memory_controller())
    if (
        libc.unshare(new_mounts)
        or libc.mount(None, b"/", None, recursive | private, None)
        or libc.mount(source, target, None, bind, None)
    ):
        raise OSError(ctypes.get_errno(), "cannot mount the control group")
    getattr(get_cgroup_memory_limit, "cache_clear", lambda: None)()


def serve(
    model: str, commit: str, sleeps: bool, group: Group, pipe: Connection
) -> None:
    """Answer "fill", "sleep" and "wake_up" until the pipe ends."""
    (group.folder / "cgroup.procs").write_text(str(os.getpid()))
    arguments = ARGUMENTS | {
        "kv_cache_memory_bytes": BUDGET,
        "load_format": "dummy",
        "enable_sleep_mode": sleeps,
    }
    engine = with_variables(
        partial(LLM, model, **arguments),
        VLLM_CPU_KVCACHE_COMMIT=commit,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
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
    def __init__(
        self, model: str, commit: str, group: Group, sleeps: bool = True
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(model, commit, sleeps, group, theirs)
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


@pytest.mark.parametrize(
    "commit", ["on-use", pytest.param("startup", marks=pytest.mark.slow_test)]
)
def test_all_serve_in_turn(tmp_path: Path, group: Group, commit: str) -> None:
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


def test_not_all_are_there_without_sleep(tmp_path: Path, group: Group) -> None:
    """None sleeps, so one is killed or does not start; on stock vLLM too."""
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))
    engines: list[Engine] = []
    try:
        engines.append(Engine(model, "startup", group, sleeps=False))
        assert engines[0].ask() == "started"
        for _ in range(2):
            engines.append(Engine(model, "startup", group, sleeps=False))
            with contextlib.suppress(EOFError):
                engines[-1].ask()
        for engine in engines:
            engine.process.join(1)
        assert not all(engine.process.is_alive() for engine in engines)
    finally:
        for engine in engines:
            engine.stop()


def waking_without_memory(
    model: str, group: Group, needed: int, missing: int, **arguments: Any
) -> list[Any]:
    """Report on an engine that wakes up while so much is missing, and once more."""
    enter(group)
    group = Group(memory_controller())  # as it is mounted now
    engine = LLM(model, **(ARGUMENTS | {"load_format": "dummy"} | arguments))
    try:
        tokens, _ = generate(engine)
        engine.sleep(level=1)
        others = mmap.mmap(-1, MEMORY - group.usage() - needed + missing)
        others.write(bytes(len(others)))
        asleep, found = group.usage(), []
        try:
            engine.wake_up()
        except Exception as error:  # a core of its own wraps that of its workers
            found.append(str(error))
        found += [is_sleeping(engine), group.usage() - asleep]
        others.close()
        return [*found, engine.wake_up(), generate(engine)[0] == tokens]
    finally:
        engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=needs_two_cores)], ids=["alone", "TP"]
)
def test_memory_that_is_gone_at_wake_up(
    tmp_path: Path, group: Group, ranks: int
) -> None:
    """An engine that finds too little memory sleeps on, and wakes up later.

    What is missing is less than what one of two ranks needs.
    """
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))
    needed = ranks * ARGUMENTS["kv_cache_memory_bytes"]
    report = partial(
        waking_without_memory,
        *(model, group, needed, 128 * MiB),
        tensor_parallel_size=ranks,
    )

    error, sleeps, taken, awake, same = in_engine_child(
        "startup",
        partial(with_variables, report, **(TWO_RANKS if ranks == 2 else {})),
        core="1" if ranks == 2 else "0",
    )

    assert f"needs {needed // MiB}.0 MiB to wake up" in error
    assert "The engine sleeps on" in error
    assert sleeps
    assert taken < 64 * MiB
    assert (awake, same) == (True, True)
    assert group.kills() == 0
