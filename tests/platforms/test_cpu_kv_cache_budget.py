# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which KV cache budget a configuration for the CPU platform ends up with.

kv_cache_memory_bytes takes precedence, VLLM_CPU_KVCACHE_SPACE is its default in
GiB, and an invalid value is rejected when the configuration is built. No engine
is started here, see test_cpu_kv_cache_allocation.py.
"""

import logging
from collections.abc import Iterator

import pytest

from vllm import envs
from vllm.config import CacheConfig, DeviceConfig, VllmConfig
from vllm.logger import _print_info_once
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.zen_cpu import ZenCpuPlatform

pytestmark = pytest.mark.skip_global_cleanup

MiB = 1 << 20
GiB = 1 << 30


@pytest.fixture(autouse=True, params=[CpuPlatform, ZenCpuPlatform], ids=["cpu", "zen"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms._current_platform", request.param())
    # An engine started earlier in this process would have frozen the variables.
    envs.disable_envs_cache()


@pytest.fixture
def info_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the platform logs, with nothing logged before it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore
    _print_info_once.cache_clear()
    caplog.set_level(logging.INFO, logger="vllm.platforms.cpu")
    logger = logging.getLogger("vllm.platforms.cpu")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def set_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", value)


def make_config(kv_cache_memory_bytes: int | None, **kwargs) -> VllmConfig:
    return VllmConfig(
        cache_config=CacheConfig(kv_cache_memory_bytes=kv_cache_memory_bytes, **kwargs),
        device_config=DeviceConfig("cpu"),
    )


@pytest.mark.parametrize(
    ("variable", "explicit", "expected"),
    [
        pytest.param(None, 128 * MiB, 128 * MiB, id="explicit-alone"),
        pytest.param("1", 128 * MiB, 128 * MiB, id="explicit-below-variable"),
        pytest.param("1", 4 * GiB, 4 * GiB, id="explicit-above-variable"),
        pytest.param("1", GiB, GiB, id="explicit-equals-variable"),
        pytest.param("0.5", 128 * MiB, 128 * MiB, id="explicit-and-fraction"),
        pytest.param("0", 128 * MiB, 128 * MiB, id="explicit-and-zero"),
        pytest.param("", 128 * MiB, 128 * MiB, id="explicit-and-empty"),
        pytest.param("4", 1, 1, id="explicit-one-byte"),
        pytest.param("1", None, GiB, id="one"),
        pytest.param("40", None, 40 * GiB, id="forty"),
        pytest.param("0.5", None, 512 * MiB, id="half"),
        pytest.param("0.125", None, 128 * MiB, id="eighth"),
        pytest.param("1e-1", None, 107374182, id="rounded-down"),
        pytest.param("9.313225746154785e-10", None, 1, id="one-byte"),
        pytest.param(" 8 ", None, 8 * GiB, id="spaces"),
        pytest.param("8\n", None, 8 * GiB, id="newline"),
        pytest.param(None, None, None, id="nothing"),
        pytest.param("", None, None, id="empty"),
        pytest.param(" ", None, None, id="blank"),
        pytest.param("0", None, None, id="zero"),
        pytest.param("0.0", None, None, id="zero-fraction"),
    ],
)
def test_budget(
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    explicit: int | None,
    expected: int | None,
) -> None:
    set_variable(monkeypatch, variable)

    config = make_config(explicit)

    assert config.cache_config.kv_cache_memory_bytes == expected


@pytest.mark.parametrize("explicit", [None, 128 * MiB], ids=["alone", "explicit"])
@pytest.mark.parametrize(
    "variable",
    [
        "abc",
        "-1",
        "-0.5",
        "nan",
        "inf",
        "-inf",
        "1e300",
        "1e-12",
        "1GiB",
        "4g",
        "4 GiB",
        "0,5",
        "0x10",
        "1/2",
        "50%",
        "--",
        "1_0",
        pytest.param("\uff11\uff10", id="full-width"),
        pytest.param("\u0661", id="arabic"),
    ],
)
def test_invalid_variable_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, explicit: int | None
) -> None:
    set_variable(monkeypatch, variable)

    with pytest.raises(ValueError) as error:
        make_config(explicit)

    assert f"Invalid VLLM_CPU_KVCACHE_SPACE={variable!r}: " in str(error.value)
    assert "number of GiB" in str(error.value)


@pytest.mark.parametrize("variable", [None, "4", "0"], ids=["unset", "set", "zero"])
@pytest.mark.parametrize("explicit", [0, -1])
def test_invalid_explicit_budget_is_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, explicit: int
) -> None:
    set_variable(monkeypatch, variable)

    with pytest.raises(ValueError, match=rf"(?s)kv_cache_memory_bytes.*={explicit}\b"):
        make_config(explicit)


def test_precedence_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, info_lines: list[str]
) -> None:
    set_variable(monkeypatch, "4")

    config = make_config(128 * MiB)
    config.__post_init__()
    make_config(128 * MiB)

    (line,) = [line for line in info_lines if "VLLM_CPU_KVCACHE_SPACE" in line]
    assert f"kv_cache_memory_bytes={128 * MiB}" in line
    assert "VLLM_CPU_KVCACHE_SPACE=4" in line


@pytest.mark.parametrize(
    ("variable", "explicit"),
    [
        pytest.param(None, 128 * MiB, id="explicit-alone"),
        pytest.param("1", GiB, id="equal"),
        pytest.param("0", 128 * MiB, id="zero"),
        pytest.param("", 128 * MiB, id="empty"),
        pytest.param("4", None, id="variable-alone"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_nothing_is_logged_without_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
    info_lines: list[str],
    variable: str | None,
    explicit: int | None,
) -> None:
    set_variable(monkeypatch, variable)

    make_config(explicit)

    assert not [line for line in info_lines if "VLLM_CPU_KVCACHE_SPACE" in line]


@pytest.mark.parametrize(
    ("variable", "explicit", "expected"),
    [
        pytest.param("4", 128 * MiB, 128 * MiB, id="explicit"),
        pytest.param("0.125", None, 128 * MiB, id="variable"),
        pytest.param("0", None, None, id="neither"),
    ],
)
def test_rebuilding_the_configuration_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    info_lines: list[str],
    variable: str,
    explicit: int | None,
    expected: int | None,
) -> None:
    set_variable(monkeypatch, variable)
    config = make_config(explicit)
    info_lines.clear()

    config.__post_init__()
    rebuilt = VllmConfig(
        cache_config=config.cache_config, device_config=config.device_config
    )

    assert rebuilt.cache_config.kv_cache_memory_bytes == expected
    assert not [line for line in info_lines if "VLLM_CPU_KVCACHE_SPACE" in line]


def test_number_of_blocks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variable(monkeypatch, "4")

    config = make_config(128 * MiB, num_gpu_blocks_override=7)

    assert config.cache_config.num_gpu_blocks_override == 7
    assert config.cache_config.kv_cache_memory_bytes == 128 * MiB


def test_later_engine_of_a_process_has_its_own_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variable(monkeypatch, "4")
    envs.enable_envs_cache()  # as the first engine does when it starts
    try:
        set_variable(monkeypatch, "1")
        config = make_config(None)
    finally:
        envs.disable_envs_cache()

    assert config.cache_config.kv_cache_memory_bytes == GiB


@pytest.mark.parametrize("variable", ["", "0", "0.5", "4"])
def test_engine_start_accepts_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """An engine evaluates every variable when it starts."""
    set_variable(monkeypatch, variable)

    envs.enable_envs_cache()
    try:
        assert float(variable or 0) == envs.VLLM_CPU_KVCACHE_SPACE
    finally:
        envs.disable_envs_cache()
