# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a user is told about the KV cache budget on CPU.

The setting that an error or a log line shows works as printed: engines are
started again with it, and with one byte less. Each engine has dummy weights and a
forked child of its own, as it takes memory and threads that it does not give back.

The model has 28 full attention and 7 sliding window layers in groups of 7: a
block of 128 tokens takes 1.75 MiB, a request of 2,048 tokens 67 blocks.
"""

import argparse
from pathlib import Path

import pytest
import regex as re

from tests.platforms.cpu_kv_cache_child import (
    FITS,
    engine_arguments,
    run_engine,
    use_cpu,
)
from tests.platforms.cpu_kv_cache_utils import REFERENCE_BLOCK as BLOCK
from tests.platforms.cpu_kv_cache_utils import GiB, MiB
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_readable_int
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker import cpu_worker


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch)


def setting_in(error: str) -> str:
    """The setting that an error names, as it would be given."""
    (setting,) = re.findall(r"`([A-Za-z_-]+=[^`]+)`", error)
    return setting


def explicit(size: int) -> dict[str, int]:
    return {"kv_cache_memory_bytes": size}


@pytest.mark.parametrize("share_of_need", [0.5, 0], ids=["too-little", "none"])
@pytest.mark.parametrize("variable", [None, "4"], ids=["alone", "over-variable"])
def test_error_names_the_bytes_that_fit(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    share_of_need: float,
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)

    error = run_engine(tmp_path, **explicit(int(FITS * share_of_need) or MiB)).error

    assert setting_in(error) == f"--kv-cache-memory-bytes={FITS}"
    assert f"{FITS} bytes per rank" in error
    assert "gpu_memory_utilization" not in error


def test_bytes_that_fit_are_the_least(tmp_path: Path) -> None:
    error = run_engine(tmp_path, **explicit(64 * MiB)).error
    size = int(setting_in(error).partition("=")[2])

    assert run_engine(tmp_path, **explicit(size)).answer == 68
    assert run_engine(tmp_path, **explicit(size - 1)).error.endswith(
        error[error.index("Try giving") :]
    )


def test_size_that_fits_is_named_for_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.0625")

    error = run_engine(tmp_path).error

    assert setting_in(error) == f"--kv-cache-memory-bytes={FITS}"
    assert "takes precedence over VLLM_CPU_KVCACHE_SPACE" in error
    assert "gpu_memory_utilization" not in error
    assert run_engine(tmp_path, **explicit(FITS)).answer == 68


@pytest.mark.parametrize("budget", [1, BLOCK, 2 * BLOCK])
def test_automatic_length_names_the_bytes_that_fit(tmp_path: Path, budget: int) -> None:
    error = run_engine(tmp_path, max_model_len=-1, **explicit(budget)).error

    assert "Cannot auto-fit max_model_len" in error
    assert "gpu_memory_utilization" not in error
    name, _, size = setting_in(error).partition("=")
    assert name == "--kv-cache-memory-bytes"
    assert run_engine(tmp_path, max_model_len=-1, **explicit(int(size))).answer > 1
    again = run_engine(tmp_path, max_model_len=-1, **explicit(int(size) - 1))
    assert again.error == error


@pytest.mark.forked
def test_failed_automatic_length_leaves_the_configuration(tmp_path: Path) -> None:
    arguments = engine_arguments(tmp_path, max_model_len=-1, **explicit(BLOCK))
    config = EngineArgs(**arguments).create_engine_config()

    with pytest.raises(ValueError, match="Cannot auto-fit max_model_len"):
        LLMEngine.from_vllm_config(config)

    assert config.model_config.max_model_len == 2048


def test_number_of_blocks_that_fits_is_the_least(tmp_path: Path) -> None:
    settings = explicit(64 * MiB)
    error = run_engine(tmp_path, num_gpu_blocks_override=10, **settings).error

    assert "gpu_memory_utilization" not in error
    assert setting_in(error) == "--num-gpu-blocks-override=68"
    assert run_engine(tmp_path, num_gpu_blocks_override=68, **settings).answer == 68
    again = run_engine(tmp_path, num_gpu_blocks_override=67, **settings).error
    assert setting_in(again) == setting_in(error)


@pytest.mark.parametrize(
    ("available", "max_model_len"),
    [
        pytest.param(64 * MiB, 2048, id="too-little"),
        pytest.param(MiB, 2048, id="none"),
        pytest.param(MiB, -1, id="automatic-length"),
    ],
)
def test_memory_utilization_is_named_where_it_decides(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    available: int,
    max_model_len: int,
) -> None:
    monkeypatch.setattr(
        cpu_worker.CPUWorker, "determine_available_memory", lambda self: available
    )

    error = run_engine(
        tmp_path, max_model_len=max_model_len, gpu_memory_utilization=0.01
    ).error

    assert "Try increasing `gpu_memory_utilization`" in error
    assert "bytes per rank" not in error


@pytest.mark.slow_test
@pytest.mark.parametrize("layers", ["10,25", "25,10"])
def test_bytes_that_fit_two_pipeline_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layers: str
) -> None:
    """The rank with more layers alone decides."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", layers)

    def error(size: int) -> str:
        return run_engine(tmp_path, pipeline_parallel_size=2, **explicit(size)).error

    first = error(16 * MiB)
    size = int(setting_in(first).partition("=")[2])

    assert FITS // 2 < size < FITS
    assert setting_in(error(size - 1)) == setting_in(first)
    assert error(size) == ""


@pytest.mark.parametrize(
    ("variable", "size", "shown"),
    [
        pytest.param(None, 128 * MiB, "128.0 MiB (134217728 bytes)", id="explicit"),
        pytest.param(
            "4", 128 * MiB + 1, "128.0 MiB (134217729 bytes)", id="explicit-over-4"
        ),
        pytest.param("0.125", None, "128.0 MiB (134217728 bytes)", id="variable"),
        pytest.param("1", None, "1.0 GiB (1073741824 bytes)", id="one-GiB"),
    ],
)
def test_budget_is_logged_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    size: int | None,
    shown: str,
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)

    log = run_engine(tmp_path, kv_cache_memory_bytes=size).log

    (line,) = [line for line in log if line.startswith("KV cache per rank: ")]
    assert f"KV cache per rank: {shown} of the " in line


@pytest.mark.parametrize("explicit_size", [None, 256 * MiB], ids=["fit", "explicit"])
def test_fit_is_logged_as_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, explicit_size: int | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "fit")

    log = run_engine(tmp_path, max_num_seqs=2, kv_cache_memory_bytes=explicit_size).log

    (named,) = [line for line in log if "VLLM_CPU_KVCACHE_SPACE" in line]
    # Two requests share one batch in flight. One block is the null block.
    size = explicit_size or (2 * 64 + 5 + 1) * BLOCK
    if explicit_size:
        assert named.startswith(f"kv_cache_memory_bytes={size} takes precedence over ")
    assert "VLLM_CPU_KVCACHE_SPACE=fit" in named
    (line,) = [line for line in log if line.startswith("KV cache per rank: ")]
    assert f"({size} bytes)" in line


def test_maximum_concurrency_leaves_out_the_null_block(tmp_path: Path) -> None:
    def ask(engine: LLM) -> tuple[float, int, int]:
        config = engine.llm_engine.vllm_config.cache_config
        core = engine.llm_engine.engine_core.engine_core  # type: ignore
        pool = core.scheduler.kv_cache_manager.block_pool
        return (
            config.kv_cache_max_concurrency,
            config.kv_cache_size_tokens,
            pool.get_num_free_blocks(),
        )

    result = run_engine(tmp_path, ask, **explicit(2 * 67 * BLOCK))

    concurrency, tokens, free_blocks = result.answer
    assert free_blocks == 133
    assert concurrency == free_blocks / 67
    (line,) = [line for line in result.log if "Maximum concurrency" in line]
    assert line.endswith(
        "KV cache size: 4,096 tokens, 4,065 of them for requests, "
        "Maximum concurrency for 2,048 tokens per request: 1.99x"
    )
    # The size is that of the whole pool.
    assert tokens == 2 * 2048


@pytest.mark.parametrize(
    ("refused", "suggested"),
    [
        ("0.125G", "134217728"),
        ("1.5K", "1536"),
        ("0.1G", "107374182"),
        ("0.0G", "0"),
    ],
)
def test_decimals_with_a_binary_suffix(refused: str, suggested: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))

    with pytest.raises(argparse.ArgumentError) as error:
        parser.parse_args(["--kv-cache-memory-bytes", refused])

    assert f"Did you mean to use {suggested} instead?" in str(error.value)
    units = {"K": 1 << 10, "M": MiB, "G": GiB, "T": 1 << 40}
    size = int(float(refused[:-1]) * units[refused[-1]])
    assert human_readable_int(suggested) == size
