# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm kv-budget`: its figures for known models, its output and its refusals.

What it claims is tested on the engine in test_kv_budget_engine.py.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.platforms.cpu_kv_cache_utils import (
    STANDALONE_RUNNER,
    needs_speculative_decoding,
)
from tests.v1.core.kv_budget_engine import engine_args, plan_for, set_environment
from tests.v1.core.kv_budget_models import (
    FULL,
    MODELS,
    SLIDING,
    gemma3,
    qwen3,
    write_model,
    write_tokenizer,
)
from vllm.platforms import current_platform
from vllm.v1.core.kv_budget import KVBudget, _blocks_beside_watermark

MiB = 1 << 20
GiB = 1 << 30


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, None)


def plan(folder: Path, model: dict[str, Any] | str, **kwargs: Any) -> KVBudget:
    if isinstance(model, str):
        args = engine_args(folder, model, **kwargs)
    else:
        args = engine_args(folder, "full", **kwargs)
        write_model(Path(args["model"]), model)
    budget = plan_for(args).budget
    assert budget is not None
    return budget


def kv_budget(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Run the subcommand and return its exit status, output and last error line."""
    from vllm.entrypoints.cli.kv_budget import run

    try:
        status = run(list(args))
    except SystemExit as end:  # of the parser
        assert isinstance(end.code, int)
        status = end.code
    output, errors = capfd.readouterr()
    assert "Traceback" not in errors
    return status, output, errors.strip().splitlines()[-1] if errors.strip() else ""


@pytest.mark.forked
def test_talker(tmp_path: Path) -> None:
    """28 layers x 8 KV heads x 128: 448 MiB by tokens, a block more in truth."""
    budget = plan(tmp_path, "talker", max_model_len=2048, max_num_batched_tokens=2048)

    assert budget.num_blocks == 33
    assert budget.num_bytes == 484_442_112 == 462 * MiB
    assert budget.start_blocks == 17
    (rank,) = budget.ranks
    assert rank.bytes_per_token == 112 * 1024
    assert rank.bytes_per_block == 14 * MiB
    assert rank.blocks_per_request == 16


@pytest.mark.forked
def test_reference(tmp_path: Path) -> None:
    """Four groups of 16 blocks and a sliding one of 2, 7 layers each.

    One of the two requests holds a third block while its prompt is computed.
    """
    budget = plan(tmp_path, "reference", max_model_len=2048, max_num_batched_tokens=128)

    assert budget.blocks_per_request == 66
    assert budget.num_blocks == 1 + 2 * 66 + 1
    assert budget.bytes_per_block == 7 * MiB // 4
    groups = [
        (g.kind, g.num_layers, g.blocks_per_request, g.blocks_of_a_prompt)
        for g in budget.ranks[0].groups
    ]
    assert groups == [(FULL, 7, 16, 16)] * 4 + [("sliding_window", 7, 2, 3)]


@pytest.mark.forked
def test_eight_requests_of_a_36_layer_model(tmp_path: Path) -> None:
    """24 GiB were set for what 9 GiB and a block serve."""
    budget = plan(
        tmp_path,
        qwen3(layers=36, max_position_embeddings=8192),
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )

    assert budget.num_bytes == 9 * GiB + 18 * MiB


@pytest.mark.forked
@pytest.mark.parametrize("hybrid", [True, False], ids=["hybrid", "no-hybrid"])
def test_windows_save_memory_with_the_hybrid_manager(
    tmp_path: Path, hybrid: bool
) -> None:
    args = {"max_model_len": 4096, "max_num_seqs": 1}
    model = gemma3([SLIDING] * 5 + [FULL], window=64)
    budget = plan(tmp_path, model, disable_hybrid_kv_cache_manager=not hybrid, **args)

    # 4 heads x 128 x 2 x 2 bytes x 128 tokens are 256 KiB a layer and block
    if hybrid:
        # groups of one layer: 32 blocks for the full one, 6 for each of the others
        assert budget.num_bytes == (1 + 32 + 5 * 6) * 256 * 1024
    else:
        assert budget.num_bytes == (1 + 32) * 6 * 256 * 1024


@pytest.mark.forked
def test_heads_are_divided_by_tensor_parallelism(tmp_path: Path) -> None:
    one = plan(tmp_path / "1", "full")
    two = plan(tmp_path / "2", "full", tensor_parallel_size=2)

    assert two.bytes_per_block * 2 == one.bytes_per_block
    assert two.num_blocks == one.num_blocks


@pytest.mark.forked
def test_latent_cache_is_not_divided_by_tensor_parallelism(tmp_path: Path) -> None:
    one = plan(tmp_path / "1", "mla")
    two = plan(tmp_path / "2", "mla", tensor_parallel_size=2)

    assert two == one
    assert one.ranks[0].bytes_per_token == 2 * (512 + 64) * 2


@pytest.mark.forked
def test_stages_need_only_their_own_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    budget = plan(tmp_path, qwen3(layers=4), pipeline_parallel_size=2)

    first, second = budget.ranks
    assert [rank.groups[0].num_layers for rank in (first, second)] == [1, 3]
    assert first.bytes_per_block * 3 == second.bytes_per_block
    assert budget.num_bytes == budget.num_blocks * second.bytes_per_block


@pytest.mark.forked
@needs_speculative_decoding
def test_draft_layers_are_counted(tmp_path: Path) -> None:
    target = plan(tmp_path / "target", "full")
    both = plan(tmp_path / "both", "draft")

    assert target.ranks[0].groups[0].num_layers == 2
    assert both.ranks[0].groups[0].num_layers == 3
    assert both.bytes_per_block * 2 == target.bytes_per_block * 3


@pytest.mark.forked
def test_a_state_for_each_batch_in_flight(tmp_path: Path) -> None:
    one = plan(tmp_path / "1", "linear-hybrid-twice")
    two = plan(tmp_path / "2", "linear-hybrid-twice", pipeline_parallel_size=2)

    mamba = [group for group in two.ranks[0].groups if group.kind == "mamba"]
    assert len(mamba) == 3
    assert two.blocks_per_request == one.blocks_per_request + len(mamba)
    assert two.start_blocks == one.start_blocks


@pytest.mark.forked
def test_a_copy_of_the_block_in_which_a_prefix_ends(tmp_path: Path) -> None:
    whole = plan(tmp_path / "whole", "linear-hybrid")
    parts = plan(tmp_path / "parts", "linear-hybrid", prefix_match_unit=32)

    groups = len(whole.ranks[0].groups)
    assert parts.blocks_per_request == whole.blocks_per_request + groups
    assert parts.start_blocks == whole.start_blocks


@pytest.mark.forked
def test_one_request_against_256(tmp_path: Path) -> None:
    one = plan(tmp_path / "1", "full", max_num_seqs=1)
    many = plan(tmp_path / "256", "full", max_num_seqs=256)

    assert one.num_blocks == 1 + 4
    assert many.num_blocks == 1 + 256 * 4
    assert one.start_bytes == many.start_bytes == one.num_bytes


@pytest.mark.forked
def test_nothing_is_allocated(tmp_path: Path) -> None:
    """160 GB of weights and 5 GB of cache, by name only."""
    model = qwen3(layers=80, hidden_size=8192, intermediate_size=28672)
    model |= {"num_attention_heads": 64, "vocab_size": 150000}
    plan(tmp_path / "warm-up", "full")
    before = psutil.Process().memory_info().rss

    budget = plan(tmp_path, model, max_model_len=4096, max_num_batched_tokens=4096)

    assert budget.num_bytes > 2 * GiB
    assert psutil.Process().memory_info().rss - before < 100 * MiB


@pytest.mark.forked
def test_planning_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    import torch

    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    plan(tmp_path, "full", tensor_parallel_size=2)

    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert not _ROPE_DICT


@pytest.mark.forked
def test_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path, MODELS["talker"])

    status, output, _ = kv_budget(
        capfd, model, "--max-model-len", "2048", "--max-num-seqs", "2"
    )

    assert status == 0
    assert "14,680,064 bytes (14 MiB)" in output
    assert "114,688 bytes (112 KiB)" in output
    assert "16 blocks for 2,048 tokens" in output
    assert "484,442,112 bytes (462 MiB): 33 blocks = 2 x 16 + 1 null block" in output
    assert "  --kv-cache-memory-bytes 484442112\n" in output
    assert "  VLLM_CPU_KVCACHE_SPACE=0.451171875\n" in output
    assert "  kv_cache_memory_bytes: 484442112\n" in output


@pytest.mark.forked
def test_a_command_line_of_vllm_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its file of options; what has no effect is named and ignored."""
    model = write_model(tmp_path, MODELS["talker"])
    config = tmp_path / "serve.yaml"
    config.write_text("port: 9000\nmax-num-seqs: 2\nmax_model_len: 2048\n")

    status, output, line = kv_budget(
        capfd,
        model,
        *("--config", str(config), "--enable-auto-tool-choice"),
        *("--tool-call-parser", "hermes", "--served_model_name", "talker"),
    )

    assert status == 0
    assert "484,442,112 bytes (462 MiB): 33 blocks" in output
    assert line.startswith("vllm kv-budget: ignored, no effect on the cache: ")
    ignored = set(line.partition("cache: ")[2].split(", "))
    assert ignored == {"--port", "--enable-auto-tool-choice", "--tool-call-parser"}


@pytest.mark.forked
@pytest.mark.parametrize(
    ("variable", "flag", "source"),
    [
        pytest.param("4", None, "VLLM_CPU_KVCACHE_SPACE=4.0", id="variable"),
        pytest.param("1", "4GiB", f"--kv-cache-memory-bytes={4 * GiB}", id="flag"),
    ],
)
def test_json_of_a_given_budget(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    variable: str,
    flag: str | None,
    source: str,
) -> None:
    set_environment(monkeypatch, variable)
    model = write_model(tmp_path, MODELS["talker"])
    args = ["--max-model-len", "2048", "--max-num-seqs", "2", "--json"]
    args += ["--kv-cache-memory-bytes", str(4 * GiB)] if flag else []

    status, output, _ = kv_budget(capfd, "--model", model, *args)

    assert status == 0
    report = json.loads(output)
    assert report["budget"]["num_bytes"] == 484_442_112
    given = report["given"]
    assert given["source"] == source
    assert given["num_blocks"] == 292
    assert given["num_requests"] == 18  # 291 blocks of use, 16 a request
    assert given["logged_concurrency"] == 291 / 16
    assert given["bytes_above_budget"] == 4 * GiB - 484_442_112


@pytest.mark.forked
def test_number_of_blocks_beats_a_given_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, MODELS["full"])
    args = ["--max-model-len", "512", "--max-num-seqs", "2", "--json"]
    args += ["--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "6"]

    status, output, _ = kv_budget(capfd, model, *args)

    assert status == 0
    given = json.loads(output)["given"]
    assert given["source"] == "--num-gpu-blocks-override=6"
    assert given["num_blocks"] == 6
    assert given["num_bytes"] == 6 * MiB
    assert given["num_requests"] == 1


@pytest.mark.parametrize("watermark", [0, 0.01, 0.2, 0.5])
@pytest.mark.parametrize("per_request", [1, 4, 37])
def test_room_beside_the_watermark(watermark: float, per_request: int) -> None:
    """As many requests as the planned pool is for, and one less in one block less."""
    for requests in (2, 3, 8, 100):
        blocks = _blocks_beside_watermark(1 + requests * per_request, watermark)
        budget = KVBudget(
            max_num_seqs=requests,
            max_model_len=1,
            ranks=(),
            blocks_per_request=per_request,
            blocks_in_flight=0,
            start_blocks=1 + per_request,
            start_bytes=1 + per_request,
            held_blocks=blocks,
            admission_blocks=blocks,
            num_blocks=blocks,
            num_bytes=blocks,
            watermark=watermark,
        )

        assert budget.num_requests(blocks) == requests
        assert budget.num_requests(blocks - 1) == requests - 1
        assert budget.num_requests(1 + per_request) == 1
        assert budget.num_requests(0) == 0


@pytest.mark.parametrize("num_bytes", [1, 484_442_112, 107374183, 40 * GiB + 1, 3**30])
def test_the_variable_to_paste_means_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    from vllm import envs
    from vllm.entrypoints.kv_budget import paste_lines

    name, value = paste_lines(num_bytes)["variable"].split("=")
    monkeypatch.setenv(name, value)

    assert int(envs.VLLM_CPU_KVCACHE_SPACE * GiB) == num_bytes


@pytest.mark.forked
def test_model_without_kv_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, MODELS["embedding-encoder"])

    status, output, _ = kv_budget(capfd, model)

    assert status == 0
    assert "needs no KV cache" in output


@pytest.mark.forked
def test_no_network_for_a_local_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tried = []

    def refuse(self: socket.socket, address: Any) -> None:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    model = write_model(tmp_path, MODELS["full"])

    status, _, _ = kv_budget(capfd, model, "--max-model-len", "512")

    assert status == 0
    assert not tried


REMOTE_CODE = {
    "architectures": ["Nowhere"],
    "model_type": "nowhere",
    "auto_map": {"AutoConfig": "configuration_nowhere.NowhereConfig"},
}


BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "n_layer": 2,
    "n_head": 8,
    "hidden_size": 512,
    "vocab_size": 512,
    "seq_length": 2048,
}


@pytest.mark.forked
@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        pytest.param(None, [], "config.json", id="no-config"),
        pytest.param(
            qwen3(architectures=["NowhereForCausalLM"], model_type="nowhere"),
            [],
            "nowhere",
            id="unknown-model",
        ),
        pytest.param(REMOTE_CODE, [], "trust", id="remote-code"),
        pytest.param(
            MODELS["full"],
            ["--max-model-len", "5000"],
            "max_model_len (5000) is greater",
            id="too-long",
        ),
        pytest.param(
            MODELS["full"],
            ["--kv-cache-memory-bytes", "1000"],
            "--kv-cache-memory-bytes=",
            id="below-one-block",
        ),
        pytest.param(
            MODELS["full"],
            ["--kv-cache-memory-bytes", "0"],
            "kv_cache_memory_bytes=0: ",
            id="zero",
        ),
        pytest.param(
            MODELS["full"],
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "max_num_batched_tokens",
            id="contradiction",
        ),
        pytest.param(
            MODELS["full"], ["--tensor-parallel-size", "3"], "divisible", id="heads"
        ),
        pytest.param(
            MODELS["full"],
            ["--block-size", "16"],
            "No common block size for 16",
            id="block-size-16",
        ),
        pytest.param(
            qwen3(head_dim=80),
            ["--kv-cache-dtype", "fp8"],
            "FP8 KV cache requires head_size divisible by 32 on CPU."
            if current_platform.supports_x86_isa("avx512")
            else "fp8 is not supported by the CPU attention backend on this host",
            id="fp8-with-head-size-80",
        ),
        pytest.param(
            qwen3(head_dim=72),
            [],
            "Unsupported CPU attention configuration: head_dim=72",
            id="head-size-without-kernels",
        ),
        pytest.param(
            MODELS["full"],
            ["--block-size", "0"],
            "block_size=0: Input should be greater than 0",
            id="block-size-0",
        ),
        pytest.param(
            MODELS["full"],
            ["--num-gpu-blocks-override", "4", "--max-model-len", "512"],
            "--num-gpu-blocks-override=5",
            id="too-few-blocks",
        ),
        pytest.param(
            qwen3(layers=1),
            ["--pipeline-parallel-size", "2"],
            "stage 1 has no layer with a KV cache",
            id="stage-without-layers",
        ),
        pytest.param(
            BLOOM,
            [],
            "BloomForCausalLM needs real weights while it is built",
            id="needs-weights",
        ),
        pytest.param(
            MODELS["full"],
            [
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 4}',
            ],
            "does not yet support: speculative decoding",
            id="runner-without-it",
            marks=pytest.mark.skipif(
                not STANDALONE_RUNNER, reason="this model runner decodes speculatively"
            ),
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    model: dict[str, Any] | None,
    args: list[str],
    message: str,
) -> None:
    if model is not None:
        write_model(tmp_path, model)

    status, output, line = kv_budget(capfd, str(tmp_path), *args)

    assert status == 1
    assert not output
    assert line.startswith("vllm kv-budget: error: ")
    assert message in line


@pytest.mark.forked
def test_file_instead_of_a_folder_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file, for which vLLM needs a plugin."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF" + bytes(60))

    status, output, line = kv_budget(capfd, str(model))

    assert (status, output) == (1, "")
    message = f"{model}: not a folder with a config.json: "
    assert line.startswith(f"vllm kv-budget: error: {message}")


PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "head_dim": 128,
    "hidden_dim": 64,
    "n_heads": 8,
    "n_kv_heads": 8,
    "norm_eps": 1e-5,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


@pytest.mark.forked
@pytest.mark.parametrize("weights", [True, False], ids=["weights", "no-weights"])
def test_folder_in_the_format_of_mistral(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], weights: bool
) -> None:
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    if weights:
        header = b"{}"
        file = tmp_path / "consolidated.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)

    status, output, _ = kv_budget(capfd, str(tmp_path), "--max-model-len", "2048")

    assert status == 0
    # 2 layers x 8 KV heads x 128 x 2 (keys, values) x 2 bytes
    assert "token          8,192 bytes (8 KiB)" in output


@pytest.mark.forked
@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({}, "'config.json'. - For Mistral models", id="nothing"),
        pytest.param(
            {"consolidated.safetensors": ""}, "'params.json'", id="no-params-json"
        ),
        pytest.param(
            {"params.json": '{"dim": 64}'}, "/params.json: ", id="part-of-params-json"
        ),
        pytest.param({"config.json": "{"}, "/config.json' is not a valid", id="json"),
    ],
)
def test_file_that_is_missing_or_broken_is_named(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    files: dict[str, str],
    message: str,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    status, output, line = kv_budget(capfd, str(tmp_path))

    assert (status, output) == (1, "")
    assert line.startswith("vllm kv-budget: error: ")
    assert message in line and str(tmp_path) in line


@pytest.mark.forked
@pytest.mark.parametrize("missing", ["tokenizer*", "preprocessor_config.json", "[pt]*"])
def test_files_that_a_plan_does_not_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    model = MODELS["encoder-decoder"]
    folder = Path(write_model(tmp_path, model))
    write_tokenizer(folder, model["vocab_size"])
    for file in folder.glob(missing):
        file.unlink()

    status, output, _ = kv_budget(capfd, str(folder), "--max-model-len", "448")

    assert status == 0
    assert "cross_attention" in output


@pytest.mark.forked
def test_bad_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    set_environment(monkeypatch, "4GiB")

    status, _, line = kv_budget(capfd, write_model(tmp_path, MODELS["full"]))

    assert status == 1
    assert "Invalid VLLM_CPU_KVCACHE_SPACE='4GiB': " in line


@pytest.mark.forked
@pytest.mark.parametrize("flag", ["--max-num-seqs", "--kv-cache-memory-bytes"])
def test_unreadable_flag_has_the_status_of_other_subcommands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str
) -> None:
    status, _, line = kv_budget(capfd, str(tmp_path), flag, "many")

    assert status == 2
    assert flag in line


def test_standard_output_is_json_and_nothing_else(tmp_path: Path) -> None:
    """The command itself, as a shell runs it. It imports nothing of the server.

    At this level modules log as they are imported.
    """
    model = write_model(tmp_path, MODELS["full"])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}

    result = subprocess.run(
        [Path(sys.executable).with_name("vllm"), "kv-budget", model, "--json"],
        capture_output=True,
        cwd=tmp_path,
        env=environment
        | {"PYTHONPROFILEIMPORTTIME": "1", "VLLM_LOGGING_LEVEL": "DEBUG"},
        text=True,
    )

    assert result.returncode == 0, result.stderr
    assert "DEBUG" in result.stderr
    assert "vllm.entrypoints.cli.kv_budget\n" in result.stderr
    assert "vllm.entrypoints.cli.serve\n" not in result.stderr
    assert json.loads(result.stdout)["settings"]["max_model_len"] == 4096
