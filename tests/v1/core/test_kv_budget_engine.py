# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget` claims, on the running engine.

Sufficient: with the planned budget max_num_seqs requests of max_model_len run at
once and none is preempted. Exact start-up minimum: one block less and the engine
refuses. Tight, without windows and chunks: one block less, and fewer run at once or
one is preempted.
"""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.platforms.cpu_kv_cache_utils import needs_speculative_decoding
from tests.v1.core.kv_budget_engine import (
    Run,
    engine_args,
    plan_for,
    prompt,
    run,
    set_environment,
    start,
)
from tests.v1.core.kv_budget_models import qwen3, write_model
from vllm import SamplingParams

# One of each way to group layers; the rest is slow.
FAST = ["full", "reference", "mla", "linear-hybrid"]
SLOW = [
    "talker",
    "multi-query",
    "reference-no-hybrid",
    "alternating",
    "sliding",
    "chunked-local",
    "linear-hybrid-no-prefix",
    "mamba-hybrid",
    "mamba",
    "short-conv",
    "encoder-decoder",
    "sinks",
    "fp8",
    "fp8-e5m2",
    "embedding-decoder",
]
SPECULATIVE = ["draft", "eagle", "mtp"]
SLOW_SPECULATIVE = [pytest.mark.slow_test, needs_speculative_decoding]
KINDS = [
    *FAST,
    *(pytest.param(kind, marks=pytest.mark.slow_test) for kind in SLOW),
    *(pytest.param(kind, marks=SLOW_SPECULATIVE) for kind in SPECULATIVE),
]
TIGHT = [
    "full",
    "mla",
    *(
        pytest.param(kind, marks=pytest.mark.slow_test)
        for kind in (
            "talker",
            "multi-query",
            "fp8",
            "reference-no-hybrid",
            "mamba",
            "mamba-hybrid",
            "linear-hybrid",
            "short-conv",
            "encoder-decoder",
        )
    ),
    pytest.param("mtp", marks=SLOW_SPECULATIVE),
]

# What the CPU backend cannot run, and what it says.
REFUSED = {
    "mamba-hybrid-prefix": (IndexError, "out of bounds for dimension 0"),
    "draft-alternating": (IndexError, "out of bounds for dimension 0"),
    "chunks-of-part-blocks": (AssertionError, "256 is not divisible by block_size 96"),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, None)


@pytest.mark.forked
@pytest.mark.parametrize("kind", KINDS)
def test_planned_budget_is_sufficient(tmp_path: Path, kind: str) -> None:
    args = engine_args(tmp_path, kind)
    budget = plan_for(args).budget
    assert budget is not None

    llm = start(args, budget.num_bytes)
    result = run(llm, kind, args["max_model_len"] - 24)

    config = llm.llm_engine.vllm_config
    assert config.cache_config.num_gpu_blocks == budget.num_blocks
    assert result.preemptions == 0
    if not kind.startswith("embedding"):  # pooling ends with the step that starts it
        assert result.running == config.scheduler_config.max_num_seqs
    assert 0 < result.peak_blocks < budget.num_blocks


@pytest.mark.forked
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [0, 1], ids=["exact", "one-block-less"])
def test_start_up_minimum_is_exact(tmp_path: Path, kind: str, missing: int) -> None:
    """With a number of blocks the engine's own check decides, not the planner's."""
    args = engine_args(tmp_path, kind)
    budget = plan_for(args).budget
    assert budget is not None
    args["num_gpu_blocks_override"] = budget.start_blocks - missing

    if missing:
        # The second is what it says of the null block alone.
        refusal = "To serve at least one request|No available memory"
        with pytest.raises(ValueError, match=refusal):
            start(args, budget.num_bytes)
    else:
        llm = start(args, budget.num_bytes)
        cache_config = llm.llm_engine.vllm_config.cache_config
        assert cache_config.num_gpu_blocks == budget.start_blocks


@pytest.mark.forked
def test_one_byte_less_than_the_minimum_is_refused(tmp_path: Path) -> None:
    args = engine_args(tmp_path, "full")
    budget = plan_for(args).budget
    assert budget is not None

    with pytest.raises(ValueError) as error:
        start(args, budget.start_bytes - 1)

    message = str(error.value)
    assert f"`--kv-cache-memory-bytes={budget.start_bytes}`" in message
    assert "gpu_memory_utilization" not in message


def grow_together(
    folder: Path, kind: str, missing_blocks: int, **kwargs: Any
) -> tuple[Run, int, int]:
    """Grow short distinct prompts to max_model_len, without prefix caching.

    Returns:
        What was counted, max_num_seqs and the planned blocks.

    """
    limits = {"max_model_len": 256, "enable_prefix_caching": False}
    args = engine_args(folder, kind, **limits | kwargs)
    budget = plan_for(args).budget
    assert budget is not None
    missing = missing_blocks * budget.bytes_per_block
    llm = start(args, budget.num_bytes - missing)
    result = run(llm, kind, 8)
    return result, args["max_num_seqs"], budget.num_blocks


@pytest.mark.forked
@pytest.mark.parametrize("kind", TIGHT)
@pytest.mark.parametrize("missing", [0, 1], ids=["planned", "one-block-less"])
def test_budget_is_tight(tmp_path: Path, kind: str, missing: int) -> None:
    result, max_num_seqs, _ = grow_together(tmp_path, kind, missing)

    all_at_once = result.running == max_num_seqs and result.preemptions == 0
    assert all_at_once == (missing == 0)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("kind", ["linear-hybrid", "short-conv"])
@pytest.mark.parametrize("missing", [0, 1], ids=["planned", "one-block-less"])
def test_tight_for_states_at_the_ends_of_blocks(
    tmp_path: Path, kind: str, missing: int
) -> None:
    """With prefix caching, where both requests begin a block in the same step."""
    result, max_num_seqs, num_blocks = grow_together(
        tmp_path, kind, missing, max_model_len=512, enable_prefix_caching=True
    )

    if missing:
        assert result.running < max_num_seqs or result.preemptions
    else:
        assert result == Run(max_num_seqs, 0, num_blocks - 1)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("kind", ["full", "mla", "alternating"])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
@pytest.mark.parametrize("max_model_len", [256, 257, 255])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix", "no-prefix"])
def test_lengths_and_numbers_of_requests(
    tmp_path: Path,
    kind: str,
    max_num_seqs: int,
    max_model_len: int,
    prefix_caching: bool,
) -> None:
    args = engine_args(
        tmp_path,
        kind,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=prefix_caching,
    )
    budget = plan_for(args).budget
    assert budget is not None

    llm = start(args, budget.num_bytes)
    result = run(llm, kind, 8)

    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == budget.num_blocks
    assert result.running == max_num_seqs
    assert result.preemptions == 0


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("max_num_seqs", [2, 5])
@pytest.mark.parametrize(
    ("max_model_len", "spare"),
    [
        pytest.param(256, 0, id="whole-blocks"),
        pytest.param(255, 0, id="one-token-less"),
        # The last token is sampled and never written: a block a request too many.
        pytest.param(257, 1, id="one-token-more"),
    ],
)
@pytest.mark.parametrize("missing", [0, 1], ids=["least", "one-block-less"])
def test_tight_by_length(
    tmp_path: Path, max_num_seqs: int, max_model_len: int, spare: int, missing: int
) -> None:
    result, _, _ = grow_together(
        tmp_path,
        "full",
        spare * max_num_seqs + missing,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )

    all_at_once = result.running == max_num_seqs and result.preemptions == 0
    assert all_at_once == (missing == 0)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("block_size", [32, 64, 96, 256])
@pytest.mark.parametrize("missing", [0, 1], ids=["planned", "one-block-less"])
def test_block_sizes(tmp_path: Path, block_size: int, missing: int) -> None:
    result, _, num_blocks = grow_together(
        tmp_path, "full", missing, block_size=block_size
    )

    assert num_blocks == 1 + 2 * -(-256 // block_size)
    all_at_once = result.running == 2 and result.preemptions == 0
    assert all_at_once == (missing == 0)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("block_size", [16, 48])
def test_block_sizes_of_no_backend(tmp_path: Path, block_size: int) -> None:
    args = engine_args(tmp_path, "full", block_size=block_size)

    with pytest.raises(ValueError, match="No common block size") as planned:
        plan_for(args)
    with pytest.raises(ValueError) as started:
        start(args, 64 << 20)

    assert str(started.value) == str(planned.value)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize("missing", [0, 1], ids=["planned", "one-block-less"])
def test_watermark_is_planned_for(tmp_path: Path, missing: int) -> None:
    """Long prompts are admitted only beside the watermark."""
    args = engine_args(
        tmp_path, "full", watermark=0.2, max_num_batched_tokens=2048, max_num_seqs=4
    )
    budget = plan_for(args).budget
    assert budget is not None
    assert budget.num_blocks > 1 + 4 * 4

    llm = start(args, budget.num_bytes - missing * budget.bytes_per_block)
    result = run(llm, "full", 510)

    assert result.preemptions == 0
    assert (result.running == 4) == (missing == 0)


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_states_of_batches_in_flight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two stages work on two batches of a prompt, each with a state of its own."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    args = engine_args(
        tmp_path,
        "linear-hybrid-twice",
        pipeline_parallel_size=2,
        max_model_len=2048,
        max_num_seqs=1,
        max_num_batched_tokens=600,
        # Without a warm-up a pipeline does not run.
        enforce_eager=False,
        compilation_config={"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"},
    )
    budget = plan_for(args).budget
    assert budget is not None

    result = run(start(args, budget.num_bytes), "linear-hybrid-twice", 1900)

    assert result.preemptions == 0
    assert result.peak_blocks == budget.num_blocks - 1


@pytest.mark.slow_test
@pytest.mark.forked
def test_prefix_that_ends_within_a_block(tmp_path: Path) -> None:
    """A request that continues another's prompt copies the block that they share."""
    kind = "linear-hybrid"
    args = engine_args(
        tmp_path,
        kind,
        prefix_match_unit=32,
        max_model_len=2048,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
    )
    budget = plan_for(args).budget
    assert budget is not None
    engine = start(args, budget.num_bytes).llm_engine
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)

    for length in (320, 2040):
        engine.add_request(str(length), prompt(kind, 0, length), params)
        for _ in range(20):
            engine.step()
        assert not engine.has_unfinished_requests()


@pytest.mark.forked
def test_number_of_blocks_beats_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, "fit")

    llm = start(engine_args(tmp_path, "full", num_gpu_blocks_override=6), None)

    cache_config = llm.llm_engine.vllm_config.cache_config
    assert cache_config.num_gpu_blocks == 6
    assert cache_config.kv_cache_memory_bytes == 6 << 20


@pytest.mark.forked
@pytest.mark.parametrize("kind", KINDS)
def test_fit_is_the_planned_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    args = engine_args(tmp_path, kind)
    budget = plan_for(args).budget
    assert budget is not None
    set_environment(monkeypatch, "fit")

    llm = start(args, None)

    cache_config = llm.llm_engine.vllm_config.cache_config
    assert cache_config.kv_cache_memory_bytes == budget.num_bytes
    assert cache_config.num_gpu_blocks == budget.num_blocks


@pytest.mark.forked
@pytest.mark.parametrize("max_num_seqs", [1, 256])
def test_fit_follows_the_number_of_requests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, max_num_seqs: int
) -> None:
    args = engine_args(
        tmp_path, "multi-query", max_num_seqs=max_num_seqs, max_model_len=1024
    )
    set_environment(monkeypatch, "fit")

    llm = start(args, None)

    blocks = 1 + max_num_seqs * 8
    cache_config = llm.llm_engine.vllm_config.cache_config
    assert cache_config.num_gpu_blocks == blocks
    assert cache_config.kv_cache_memory_bytes == blocks * 128 * 2 * 128 * 2 * 2


@pytest.mark.forked
def test_explicit_budget_wins_over_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, "fit")

    llm = start(engine_args(tmp_path, "full"), 64 << 20)

    cache_config = llm.llm_engine.vllm_config.cache_config
    assert cache_config.kv_cache_memory_bytes == 64 << 20
    assert cache_config.num_gpu_blocks == 64


@pytest.mark.forked
def test_fit_needs_no_share_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gpu_memory_utilization=1 is refused with anything else running."""
    set_environment(monkeypatch, "fit")

    llm = start(engine_args(tmp_path, "full", gpu_memory_utilization=1.0), None)

    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 9


@pytest.mark.forked
def test_fit_that_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_environment(monkeypatch, "fit")
    args = engine_args(tmp_path, "talker", max_model_len=4096, max_num_seqs=4096)
    args["max_num_batched_tokens"] = 4096

    with pytest.raises(ValueError) as error:
        start(args, None)

    message = str(error.value)
    # 1 + 4,096 x 32 blocks of 14 MiB
    assert "(1792.01 GiB for 1 rank(s), 131073 blocks per rank, from " in message
    assert "from VLLM_CPU_KVCACHE_SPACE=fit)" in message
    (value,) = re.findall(r"with --max-num-seqs (\d+) none is preempted", message)
    assert 1 <= int(value) < 4096
    assert "--max-model-len" not in message  # 4,096 of one token would be too many


@pytest.mark.forked
def test_fit_finds_the_longest_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With --max-model-len auto; a limit of the address space stands for memory."""
    set_environment(monkeypatch, "fit")
    model = qwen3(layers=28, max_position_embeddings=32768)
    args = engine_args(tmp_path, "full", max_model_len=-1, max_num_seqs=16)
    write_model(Path(args["model"]), model)
    room = 4 << 30  # 292 blocks of 14 MiB, where 16 x 256 are needed for the whole
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))

    llm = start(args, None)

    config = llm.llm_engine.vllm_config
    length = config.model_config.max_model_len
    assert config.model_config.original_max_model_len == length
    runner = llm.collective_rpc(lambda worker: worker.model_runner.max_model_len)
    assert runner == [length]
    # Whole blocks for each of 16: what is left is too little for 16 more.
    assert length % 128 == 0
    assert config.cache_config.num_gpu_blocks == 1 + 16 * length // 128
    assert room / 2 < config.cache_config.kv_cache_memory_bytes < room
    engine_core = llm.llm_engine.engine_core.engine_core
    assert engine_core.scheduler.max_model_len == length


@pytest.mark.forked
def test_fit_of_a_model_without_kv_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = engine_args(tmp_path, "embedding-encoder")
    assert plan_for(args).budget is None
    set_environment(monkeypatch, "fit")

    llm = start(args, None)

    assert llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes is None
    assert run(llm, "embedding-encoder", 100).peak_blocks == 0


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.parametrize(
    "kind",
    [
        "mamba-hybrid-prefix",
        "chunks-of-part-blocks",
        pytest.param("draft-alternating", marks=needs_speculative_decoding),
    ],
)
def test_what_the_backend_refuses(tmp_path: Path, kind: str) -> None:
    """Planned all the same; if one of these runs one day, it belongs in KINDS."""
    error, message = REFUSED[kind]
    args = engine_args(tmp_path, kind)
    budget = plan_for(args).budget
    assert budget is not None

    llm = start(args, budget.num_bytes)
    with pytest.raises(error, match=message):
        run(llm, kind, args["max_model_len"] - 24)


def run_in_processes(args: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run an engine with a process a rank, one core each."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.v1.core.kv_budget_engine", json.dumps(args)],
        capture_output=True,
        cwd=Path(__file__).parents[3],
        env=inherited | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | environment,
        text=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-4000:] + result.stderr[-4000:]
    allocated: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT"))
    return allocated


@pytest.mark.slow_test
@pytest.mark.forked
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("fit", [True, False], ids=["fit", "planned"])
@pytest.mark.parametrize(
    ("kind", "parallel", "partition"),
    [
        pytest.param("full", {"tensor_parallel_size": 2}, {}, id="tensor-parallel"),
        pytest.param(
            "four-layers",
            {"pipeline_parallel_size": 2},
            {"VLLM_PP_LAYER_PARTITION": "1,3"},
            id="uneven-pipeline",
        ),
    ],
)
def test_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    parallel: dict[str, int],
    partition: dict[str, str],
    fit: bool,
) -> None:
    for name, value in partition.items():
        monkeypatch.setenv(name, value)
    args = engine_args(tmp_path, kind, **parallel)
    budget = plan_for(args).budget
    assert budget is not None
    variable = {"VLLM_CPU_KVCACHE_SPACE": "fit"} if fit else {}
    given = {} if fit else {"kv_cache_memory_bytes": budget.num_bytes}

    result = run_in_processes(args | given, **partition, **variable)

    assert result["num_bytes"] == budget.num_bytes
    assert result["num_blocks"] == budget.num_blocks
    assert result.get("tokens", [4, 4]) == [4, 4]


@pytest.mark.slow_test
@pytest.mark.forked
def test_metrics_report_the_fitted_bytes(tmp_path: Path) -> None:
    """The budget is decided in the engine core, /metrics is the front end's."""
    args = engine_args(tmp_path, "full")
    budget = plan_for(args).budget
    assert budget is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    command = [Path(sys.executable).with_name("vllm"), "serve", args.pop("model")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in args.items():
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=inherited | {"VLLM_CPU_KVCACHE_SPACE": "fit"},
            stdout=output,
            stderr=output,
        )
    try:
        metrics = wait_for(f"http://127.0.0.1:{port}/metrics", server, log)
    finally:
        server.terminate()
        server.wait()

    assert f'kv_cache_memory_bytes="{budget.num_bytes}"' in metrics
    assert f'num_gpu_blocks="{budget.num_blocks}"' in metrics
    line = next(x for x in log.read_text().splitlines() if "=fit:" in x)
    assert f"{budget.num_bytes:,} bytes" in line
    assert f"{budget.num_blocks} blocks" in line
    assert "MiB" in line


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    """Return what a server answers once it is up."""
    for _ in range(300):
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            assert server.poll() is None, log.read_text()[-4000:]
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
