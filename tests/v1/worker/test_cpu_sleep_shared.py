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
from collections.abc import Callable, Iterator
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
    control_group,
    memory_controller,
    needs_groups,
)
from tests.v1.worker.cpu_sleep_engine import (
    ARGUMENTS,
    COMMITS,
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


def serve(model: str, commit: str, group: Group, pipe: Connection) -> None:
    """Answer "fill", "sleep" and "wake_up" until the pipe ends."""
    (group.folder / "cgroup.procs").write_text(str(os.getpid()))
    arguments = ARGUMENTS | {"kv_cache_memory_bytes": BUDGET, "load_format": "dummy"}
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
    def __init__(self, model: str, commit: str, group: Group) -> None:
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


def test_not_all_serve_without_sleep(tmp_path: Path, group: Group) -> None:
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


def waking_without_memory(
    model: str, group: Group, missing: int, **arguments: Any
) -> list[Any]:
    """Report on an engine that wakes up while so much is missing, and once more."""
    enter(group)
    engine = LLM(model, **(ARGUMENTS | {"load_format": "dummy"} | arguments))
    tokens, _ = generate(engine)
    before = group.usage()
    engine.sleep(level=1)
    released = before - group.usage()
    others = mmap.mmap(-1, MEMORY - group.usage() - released + missing)
    others.write(bytes(len(others)))
    asleep, found = group.usage(), []
    try:
        engine.wake_up()
    except RuntimeError as error:
        found.append(str(error))
    found += [is_sleeping(engine), group.usage() - asleep]
    others.close()
    found += [engine.wake_up(), generate(engine)[0] == tokens]
    engine.llm_engine.engine_core.shutdown()
    return found


@pytest.mark.parametrize(
    ("needed", "missing", "arguments"),
    [
        pytest.param("256.0 MiB", GiB // 8, {}, id="alone"),
        # Enough for one of two ranks, which have the budget each.
        pytest.param(
            *("512.0 MiB", GiB // 8, {"tensor_parallel_size": 2}),
            id="TP",
            marks=needs_two_cores,
        ),
    ],
)
def test_memory_that_is_gone_at_wake_up(
    tmp_path: Path, group: Group, needed: str, missing: int, arguments: dict[str, Any]
) -> None:
    """An engine that finds too little memory sleeps on, and wakes up later."""
    model = write_model(tmp_path / "model", llama(LAYERS, KV_HEADS, HEAD_DIM))
    run: Callable[[], Any] = partial(
        waking_without_memory, model, group, missing, **arguments
    )
    if arguments:
        run = partial(with_variables, run, **TWO_RANKS)

    error, sleeps, taken, awake, same = in_engine_child(
        "startup", run, core="1" if arguments else "0"
    )

    assert f"needs {needed} to wake up" in error
    assert "The engine sleeps on" in error
    assert sleeps
    assert taken < GiB // 16
    assert (awake, same) == (True, True)
    assert group.kills() == 0
