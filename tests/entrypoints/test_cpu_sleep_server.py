# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm serve` on CPU sleeps and wakes up, alone and with parallel ranks."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.cpu_kv_cache_server import (
    Server,
    anonymous_memory,
    as_flags,
    serve,
)
from tests.platforms.cpu_kv_cache_utils import (
    NOT_EAGER,
    TWO_RANKS,
    llama,
    needs_two_cores,
    process_environment,
    tail,
    write_model,
)

pytestmark = [pytest.mark.slow_test, needs_two_cores]

MiB = 1 << 20
BUDGET = 512 * MiB
LONG = 400  # tokens of a request that is running when the server is told to sleep
FLAGS = as_flags(
    {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "block_size": 128,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": BUDGET,
        "enable_sleep_mode": True,
    }
)


EAGER = ["--enforce-eager"]
# What NOT_EAGER says a pipeline needs.
COMPILED = ["--compilation-config", json.dumps(NOT_EAGER["compilation_config"])]


def sleeping_server(folder: Path, *flags: str, **variables: str) -> Any:
    model = write_model(folder / "model", llama(28, 8, 128))
    variables |= {"VLLM_SERVER_DEV_MODE": "1"}
    return serve(
        *(folder, "serve", model, *FLAGS, *flags),
        environment=process_environment(None, **variables),
    )


def complete(server: Server, tokens: int = 8) -> tuple[str, list[int]]:
    """Return why a request ended, and the tokens that it got."""
    body = {
        "prompt": list(range(1, 20)),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    (choice,) = json.loads(server.ask("/v1/completions", body))["choices"]
    return choice["finish_reason"], choice["token_ids"] or []


class Later:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self.thread = threading.Thread(target=lambda: self.results.append(function()))
        self.thread.start()

    def is_done(self, seconds: float) -> bool:
        self.thread.join(seconds)
        return bool(self.results)


def is_sleeping(server: Server) -> bool:
    return json.loads(server.ask("/is_sleeping"))["is_sleeping"]


def held(server: Server) -> int:
    """The anonymous memory of all processes that the server consists of."""
    return sum(anonymous_memory(process) for process in server.members())


@pytest.mark.parametrize(
    ("parallel", "caches"),
    [
        pytest.param(EAGER, 1, id="alone"),
        pytest.param([*EAGER, "--tensor-parallel-size", "2"], 2, id="TP"),
        pytest.param([*COMPILED, "--pipeline-parallel-size", "2"], 2, id="PP"),
        pytest.param([*EAGER, "--data-parallel-size", "2"], 2, id="DP"),
    ],
)
def test_served(tmp_path: Path, parallel: list[str], caches: int) -> None:
    variables = TWO_RANKS if caches == 2 else {}
    with sleeping_server(tmp_path, *parallel, **variables) as server:
        tokens = complete(server)
        awake = held(server)
        for level in (1, 2, 1):
            answer = json.loads(server.ask(f"/sleep?level={level}", {}))
            assert answer == {"status": "sleeping", "level": level}
            assert is_sleeping(server)
            assert held(server) < awake - 0.95 * caches * BUDGET, tail(server.log)
            server.ask("/sleep?level=1", {})  # a second time
            # A request to a sleeping server waits until it is awake.
            request = Later(lambda: complete(server))
            assert not request.is_done(2)
            answer = json.loads(server.ask("/wake_up", {}))
            assert answer == {"status": "awake", "tags": None}
            assert request.is_done(60), tail(server.log)
            assert request.results == [tokens]
            assert not is_sleeping(server)
            assert held(server) > awake - 0.1 * caches * BUDGET
        server.ask("/sleep?level=1", {})
        server.stop()  # with SIGTERM, while it sleeps


def test_sleep_during_a_request(tmp_path: Path) -> None:
    """It ends, is waited for, or goes on after waking, as the mode says."""
    with sleeping_server(tmp_path, *EAGER) as server:
        whole = complete(server, LONG)
        assert whole[0] == "length"
        found = {}
        for mode in ("abort", "wait", "keep"):
            request = Later(lambda: complete(server, LONG))
            time.sleep(0.5)
            assert not request.results, "too short to be told to sleep during it"
            server.ask(f"/sleep?level=1&mode={mode}", {})
            assert is_sleeping(server)
            done = request.is_done(5)
            server.ask("/wake_up", {})
            assert request.is_done(60), tail(server.log)
            (result,) = request.results
            found[mode] = done, result
        server.stop()

    done, (reason, tokens) = found["abort"]
    assert (done, reason) == (True, "abort")
    assert len(tokens) < LONG
    assert found["wait"] == (True, whole)
    assert found["keep"] == (False, whole)


def test_a_worker_that_dies_asleep(tmp_path: Path) -> None:
    """The server ends; it does not wait for a worker that never wakes up."""
    with sleeping_server(
        tmp_path, *EAGER, "--tensor-parallel-size", "2", **TWO_RANKS
    ) as server:
        server.ask("/sleep?level=1", {})
        worker = max(server.members(), key=lambda p: (anonymous_memory(p), p.pid))
        worker.send_signal(signal.SIGKILL)
        server.process.wait(60)
        assert "died unexpectedly" in server.log.read_text(), tail(server.log)
