# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine on CPU that sleeps gives memory back, and has it again once awake.

Each engine is a real one in a forked child, with a checkpoint that can be loaded again.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.v1.worker.cpu_kv_cache_report import rss_anon
from tests.v1.worker.cpu_sleep_engine import (
    BUDGET,
    COMMITS,
    WEIGHTS,
    MiB,
    checkpoint,
    generate,
    in_engine_child,
    is_sleeping,
    kv_cache_of,
    mappings,
    start,
)
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


@pytest.fixture(scope="module")
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with tied embeddings, or another one if a test asks for it."""
    folder, tied = tmp_path_factory.mktemp("model"), getattr(request, "param", True)
    # Torch's threads would not survive the forks of this process.
    return in_engine_child("startup", lambda: checkpoint(folder, tied))


UNTIED = pytest.param(False, id="untied")


@pytest.mark.parametrize(
    ("level", "commit"),
    [
        (1, "on-use"),
        (2, "startup"),
        pytest.param(1, "startup", marks=pytest.mark.slow_test),
        pytest.param(2, "on-use", marks=pytest.mark.slow_test),
    ],
)
def test_memory_and_tokens(model: str, level: int, commit: str) -> None:
    def report() -> dict[str, Any]:
        engine = start(model)
        found: dict[str, Any] = {"started": rss_anon(), "tokens": []}
        (found["addresses"], _), *_ = engine.collective_rpc(kv_cache_of)
        generate(engine)  # The first one also takes memory that is not the cache's.
        engine.sleep(level=1)
        found["without a cache"] = rss_anon()
        engine.wake_up()
        for _ in range(2):
            found["tokens"].append(generate(engine))
            found["awake"] = rss_anon()
            engine.sleep(level=level)
            found["asleep"] = rss_anon(), is_sleeping(engine)
            (found["discarded"],) = engine.collective_rpc(kv_cache_of)
            engine.sleep(level=level)
            before = rss_anon()
            assert engine.wake_up()
            found["woken"] = rss_anon() - before, is_sleeping(engine)
        return found

    found = in_engine_child(commit, report)

    # An engine that never held a cache.
    own = found["started"] - (BUDGET if commit == "startup" else 0)
    assert found["awake"] > own + 0.9 * BUDGET
    asleep, is_asleep = found["asleep"]
    assert is_asleep
    assert asleep < 1.05 * own
    if level == 2:
        # oneDNN's copy too, of the weight that reads tokens and writes them.
        assert asleep < found["without a cache"] - 0.9 * WEIGHTS
    assert found["discarded"] == (found["addresses"], False)
    taken, is_asleep = found["woken"]
    assert not is_asleep
    taken -= 0.9 * WEIGHTS if level == 2 else 0
    assert taken > (0.9 * BUDGET if commit == "startup" else -MiB)
    if (level, commit) == (1, "on-use"):
        assert taken < 8 * MiB
    # The second time no prefix is cached.
    assert found["tokens"][0] == found["tokens"][1]
    assert found["tokens"][0][1] == 0


@pytest.mark.slow_test
@pytest.mark.parametrize("model", [UNTIED], indirect=True)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_weights_by_name_as_on_gpu(model: str, eager: bool) -> None:
    """`wake_up` by tags leaves the weights to `reload_weights`."""

    def report() -> list[Any]:
        engine = start(model, enforce_eager=eager)
        before = generate(engine)
        engine.sleep(level=2)
        asleep = rss_anon()
        steps = [engine.wake_up(tags=["weights"]), rss_anon() - asleep]
        engine.collective_rpc("reload_weights")
        steps += [rss_anon() - asleep, engine.wake_up(tags=["kv_cache"])]
        return [*steps, before == generate(engine)]

    awake, woken, loaded, fully_awake, same = in_engine_child("on-use", report)

    assert (awake, fully_awake, same) == (False, True, True)
    assert woken < 0.1 * WEIGHTS
    assert loaded > 0.9 * WEIGHTS


@pytest.mark.slow_test
@pytest.mark.parametrize(
    "arguments",
    [{"load_format": "dummy"}, {"sleep_preserve_parameter_names": ["*"]}],
    ids=["cannot-be-loaded", "preserved"],
)
def test_weights_that_stay(model: str, arguments: dict[str, Any]) -> None:
    def report() -> tuple[int, bool]:
        engine = start(model, **arguments)
        started, before = rss_anon(), generate(engine)
        engine.sleep(level=2)
        asleep = rss_anon()
        engine.wake_up()
        return started - asleep, before == generate(engine)

    given_back, same = in_engine_child("on-use", report)

    assert given_back < 0.5 * WEIGHTS
    assert same


@pytest.mark.parametrize("core", ["0", pytest.param("1", marks=pytest.mark.slow_test)])
def test_release_of_the_kv_cache_alone(model: str, core: str) -> None:
    """In one process, and with an engine core in another."""

    def report() -> tuple[list[int], list[bool], bool]:
        engine = start(model)
        before = generate(engine)
        if core == "0":
            # In one process nothing steps by itself, and a request that has finished
            # leaves the scheduler in the step after.
            engine.llm_engine.step()
        sizes, sleeping = engine.collective_rpc(rss_anon), []
        engine.sleep(level=0)
        engine.llm_engine.release_kv_cache_memory()
        sizes += engine.collective_rpc(rss_anon)
        sleeping.append(is_sleeping(engine))
        engine.wake_up(tags=["kv_cache"])
        sleeping.append(is_sleeping(engine))
        same = before == generate(engine)
        engine.llm_engine.engine_core.shutdown()
        return sizes, sleeping, same

    (awake, released), sleeping, same = in_engine_child("startup", report, core)

    assert awake - released > 0.95 * BUDGET
    assert sleeping == [True, False]
    assert same


def fill(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.fill_(1)


def test_what_is_awake_is_not_woken_again(model: str) -> None:
    """The rest wakes up without a check of memory that is taken already."""

    def report() -> list[Any]:
        engine = start(model)
        engine.sleep(level=1)
        steps = [engine.wake_up(tags=["kv_cache"])]
        engine.collective_rpc(fill)
        steps.append(engine.wake_up())
        return [*steps, engine.collective_rpc(kv_cache_of)[0][1]]

    assert in_engine_child("startup", report) == [False, True, True]


@pytest.mark.parametrize(
    "connector",
    [
        "DecodeBenchConnector",  # registers the cache
        pytest.param("ExampleConnector", marks=pytest.mark.slow_test),
    ],
)
def test_sleep_with_a_connector(model: str, tmp_path: Path, connector: str) -> None:
    # Newer releases tell a connector that the cache goes and comes back.
    is_told = hasattr(KVConnectorBase_V1, "unregister_kv_caches")

    def report() -> tuple[str, int, int, bool]:
        config = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
        engine = start(model, kv_transfer_config=config)
        before, error = rss_anon(), ""
        try:
            engine.sleep(level=1)
        except RuntimeError as refusal:
            error = str(refusal)
        asleep = rss_anon()
        awake = engine.wake_up()
        return error, before, asleep, awake

    error, before, asleep, awake = in_engine_child("startup", report)

    assert awake
    if connector == "DecodeBenchConnector" and not is_told:
        assert f"{connector} has registered its memory" in error
        assert asleep > before - 0.1 * BUDGET
    else:
        assert error == ""
        assert asleep < before - 0.9 * BUDGET


@pytest.mark.slow_test
@pytest.mark.parametrize("commit", COMMITS)
def test_a_hundred_times(model: str, commit: str) -> None:
    """No growth, and the same tokens, while every block is filled each time."""

    def report() -> list[Any]:
        engine = start(model)
        found = []
        for _ in range(100):
            tokens = generate(engine)
            engine.sleep(level=1)
            found.append((tokens, rss_anon(), mappings()))
            engine.wake_up()
        return found

    found = in_engine_child(commit, report)

    assert all(tokens == found[0][0] for tokens, _, _ in found)
    # After the first ones, which start threads.
    (_, rss, maps), (_, last_rss, last_maps) = found[5], found[-1]
    assert last_rss < rss + 4 * MiB
    assert last_maps < maps + 8
