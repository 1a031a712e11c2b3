# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache budget of servers on CPU: `vllm serve` and `vllm launch render`.

Each test starts the installed command on a port of loopback that is free, waits
until it answers, asks it over HTTP and ends it with SIGTERM.
"""

import json
import subprocess
from pathlib import Path

import pytest
import regex as re

from tests.platforms.cpu_kv_cache_server import (
    READY_WITHIN,
    VLLM,
    anonymous_memory,
    as_flags,
    free_port,
    serve,
)
from tests.platforms.cpu_kv_cache_utils import (
    BUDGET,
    REFERENCE_ARGUMENTS,
    REFERENCE_BLOCKS,
    REFERENCE_MODEL,
    REFERENCE_TOKENS,
    TWO_RANKS,
    GiB,
    budgets,
    kill_group,
    needs_two_cores,
    process_environment,
    start,
    tail,
    write_model,
)

REFERENCE_FLAGS = as_flags(REFERENCE_ARGUMENTS)


def budget_flags(explicit: int | None) -> list[str]:
    return [] if explicit is None else ["--kv-cache-memory-bytes", "128M"]


@pytest.mark.parametrize(
    ("variable", "explicit"),
    [
        pytest.param("4", BUDGET, id="explicit-over-4"),
        pytest.param("0.125", None, id="variable-alone", marks=pytest.mark.slow_test),
    ],
)
def test_serve(tmp_path: Path, variable: str, explicit: int | None) -> None:
    model = write_model(tmp_path / "model", REFERENCE_MODEL)
    with serve(
        *(tmp_path, "serve", model, *REFERENCE_FLAGS, *budget_flags(explicit)),
        environment=process_environment(variable),
    ) as server:
        answer = server.complete()
        (cache_config,) = server.cache_config()
        log = server.log.read_text()
        server.stop()

    assert answer["usage"]["completion_tokens"] == 8, answer
    assert cache_config["kv_cache_memory_bytes"] == str(BUDGET)
    assert cache_config["num_gpu_blocks"] == str(REFERENCE_BLOCKS)
    assert cache_config["kv_cache_size_tokens"] == str(REFERENCE_TOKENS[BUDGET])
    precedence = f"kv_cache_memory_bytes={BUDGET} takes precedence over"
    assert (precedence in log) == (explicit is not None), log[-6000:]
    assert f"KV cache size: {REFERENCE_TOKENS[BUDGET]:,} tokens" in log, log[-6000:]


@pytest.mark.slow_test
@budgets
def test_serve_with_a_config_file(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    model = write_model(tmp_path / "model", REFERENCE_MODEL)
    lines = {"model": model, **REFERENCE_ARGUMENTS}
    if explicit is not None:
        lines["kv_cache_memory_bytes"] = "128M"
    config = tmp_path / "config.yaml"
    config.write_text(
        "".join(
            f"{name.replace('_', '-')}: {json.dumps(value)}\n"
            for name, value in lines.items()
        )
    )
    with serve(
        *(tmp_path, "serve", "--config", str(config)),
        environment=process_environment(variable),
    ) as server:
        answer = server.complete()
        (cache_config,) = server.cache_config()
        server.stop()

    assert answer["usage"]["completion_tokens"] == 8, answer
    assert cache_config["kv_cache_memory_bytes"] == str(BUDGET)
    assert cache_config["num_gpu_blocks"] == str(REFERENCE_BLOCKS)
    assert cache_config["kv_cache_size_tokens"] == str(REFERENCE_TOKENS[BUDGET])


@pytest.mark.slow_test
@needs_two_cores
@budgets
def test_serve_data_parallel(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    """Each rank has the whole budget; the front end reports the sum of the blocks."""
    model = write_model(tmp_path / "model", REFERENCE_MODEL)
    with serve(
        *(tmp_path, "serve", model, *REFERENCE_FLAGS, *budget_flags(explicit)),
        *("--data-parallel-size", "2"),
        environment=process_environment(variable, **TWO_RANKS),
    ) as server:
        answers = [server.complete() for _ in range(2)]
        cache_configs = server.cache_config()
        log = server.log.read_text()
        server.stop()

    assert [answer["usage"]["completion_tokens"] for answer in answers] == [8, 8]
    assert [cache_config["engine"] for cache_config in cache_configs] == ["0", "1"]
    for cache_config in cache_configs:
        assert cache_config["kv_cache_memory_bytes"] == str(BUDGET)
        assert cache_config["num_gpu_blocks"] == str(2 * REFERENCE_BLOCKS)
        assert cache_config["kv_cache_size_tokens"] == str(REFERENCE_TOKENS[BUDGET])
    size = f"KV cache size: {REFERENCE_TOKENS[BUDGET]:,} tokens"
    ranks = re.findall(rf"EngineCore_DP(\d) .*{size}", log)
    assert sorted(ranks) == ["0", "1"], log[-6000:]


@pytest.mark.slow_test
@pytest.mark.parametrize(
    ("variable", "flags", "message"),
    [
        pytest.param(
            "1GiB", ["--kv-cache-memory-bytes", "128M"], "number of GiB", id="variable"
        ),
        pytest.param(
            "4", ["--kv-cache-memory-bytes", "0"], "positive number of bytes", id="zero"
        ),
    ],
)
def test_serve_refuses_what_is_no_budget(
    tmp_path: Path, variable: str, flags: list[str], message: str
) -> None:
    model = write_model(tmp_path / "model", REFERENCE_MODEL)
    log = tmp_path / "log"
    process = start(
        *(log, VLLM, "serve", model, *REFERENCE_FLAGS, *flags),
        *("--host", "127.0.0.1", "--port", str(free_port())),
        environment=process_environment(variable),
    )
    try:
        status = process.wait(READY_WITHIN)
    except subprocess.TimeoutExpired:
        pytest.fail(f"serves, {tail(log)}")
    finally:
        kill_group(process)

    assert status == 1, tail(log)
    assert message in log.read_text(), tail(log)


@pytest.mark.slow_test
@pytest.mark.parametrize("variable", ["4", "0.125"])
def test_render_server_holds_no_cache(tmp_path: Path, variable: str) -> None:
    """Whatever the variable, as the render server assigns 0 to it in envs.

    That assignment is what makes its configuration say so.
    """
    model = write_model(tmp_path / "model", REFERENCE_MODEL)
    with serve(
        *(tmp_path, "launch", "render", model, *REFERENCE_FLAGS),
        environment=process_environment(variable, VLLM_SERVER_DEV_MODE="1"),
    ) as server:
        info = json.loads(server.ask("/server_info?config_format=json"))
        held = sum(anonymous_memory(process) for process in server.members())
        server.stop()

    assert info["vllm_config"]["cache_config"]["kv_cache_memory_bytes"] is None
    assert held < 2 * GiB
