# SPDX-License-Identifier: Apache-2.0
"""`vllm kv-budget --deploy`: a plan for the stages of a deploy file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.fork.omni.conftest import EXAMPLE, Environment, Plan, Planned, run_plans
from tests.fork.omni.models import QWEN2_5_OMNI, QWEN3_OMNI, write_json

pytestmark = pytest.mark.omni_test

MiB = 1 << 20
GiB = 1 << 30

TWO_RANKS = """\
base_config: qwen3-tts-cpu.yaml
platforms:
  cpu:
    stages:
      - stage_id: 0
        tensor_parallel_size: 2
"""
LARGE = """\
base_config: qwen3-tts-cpu.yaml
platforms:
  cpu:
    stages:
      - stage_id: 0
        max_num_seqs: 512
"""


def test_example_is_what_is_planned(plan: Plan, example: Path, qwen3_tts: Path) -> None:
    result = plan(qwen3_tts, example, on_16_cores=True)

    assert result.status == 0, result.stderr
    assert result.stdout == EXAMPLE.read_text()


def test_a_file_without_a_cpu_section(
    plan: Plan, example: Path, qwen3_tts: Path
) -> None:
    """vllm-omni's own: what it says of other platforms stays as it is."""
    own = example.with_name("qwen3_tts.yaml")

    result = plan(qwen3_tts, own, on_16_cores=True)

    assert result.status == 0, result.stderr
    before, after = own.read_text(), result.stdout
    assert after.startswith(before.rstrip())
    stages = YAML(typ="safe").load(after)["platforms"]["cpu"]["stages"]
    # 64 requests of 4,096 tokens.
    assert stages[0]["kv_cache_memory_bytes"] == (64 * 32 + 1) * 14 * MiB
    assert "kv_cache_memory_bytes" not in stages[1]
    assert "- stage_id: 1  # 0 bytes: the model has no KV cache" in after


def test_two_ranks(plan: Plan, example: Path, qwen3_tts: Path) -> None:
    """Each rank has half the KV heads, a budget and cores of its own."""
    file = example.with_name("two.yaml")
    file.write_text(TWO_RANKS)

    result = plan(qwen3_tts, file, "--json", on_16_cores=True)

    assert result.status == 0, result.stderr
    found = json.loads(result.stdout)
    talker, code2wav = found["stages"]
    assert talker["num_ranks"] == 2
    assert talker["kv_cache_memory_bytes"] == 33 * 7 * MiB
    assert talker["VLLM_CPU_OMP_THREADS_BIND"] == "0-5|6-10"
    assert code2wav["VLLM_CPU_OMP_THREADS_BIND"] == "11-14"
    assert found["front_end"] == [15]
    assert code2wav["kv_cache_memory_bytes"] == 0
    assert found["kv_cache_bytes"] == 33 * 14 * MiB


def test_too_little_memory(plan: Plan, example: Path, qwen3_tts: Path) -> None:
    """What is said to fit does, and one request more does not."""
    file = example.with_name("large.yaml")
    file.write_text(LARGE)

    result = plan(qwen3_tts, file, on_16_cores=True)

    assert (result.status, result.stdout) == (1, "")
    # 64 GiB are 4,681 blocks of 14 MiB; Code2Wav takes none.
    needed = (512 * 16 + 1) * 14 * MiB
    assert result.stderr == (
        "vllm kv-budget: error: memory node 0: the KV caches take "
        f"{needed:,} bytes ({needed / GiB:.7g} GiB), 68,719,476,736 bytes (64 GiB) is "
        f"available: {needed - 64 * GiB:,} bytes ({needed / GiB - 64:.7g} GiB) too "
        "much, and weights and activations come on top; what helps most: stage 0, "
        "max_num_seqs 292 (now 512) or max_model_len 1152 (now 2048) would fit\n"
    )


def test_too_few_cores(plan: Plan, example: Path, qwen3_tts: Path) -> None:
    has = len(os.sched_getaffinity(0))

    result = plan(qwen3_tts, example, "--front-end-cores", has)

    assert (result.status, result.stdout) == (1, "")
    assert result.stderr == (
        f"vllm kv-budget: error: 2 ranks and {has} for the front end need {has + 2} "
        f"cores, the machine has {has}: 2 too few; what helps most: "
        f"--front-end-cores {has - 2}\n"
    )


def test_nothing_to_measure(plan: Plan, example: Path, qwen3_tts: Path) -> None:
    """Code2Wav is built as vllm-omni's own class, and has no layer with a cache."""
    result = plan(qwen3_tts, example, "--measure", on_16_cores=True)

    assert result.stdout == EXAMPLE.read_text()
    assert result.stderr == "Every stage is planned.\n"


def parts(layers: int, kv_heads: int) -> int:
    """The bytes of two requests of 2,048 tokens: keys and values of heads of 64."""
    return (2 * 16 + 1) * 128 * layers * 2 * kv_heads * 64 * 2


THINKER, TALKER, NO_CACHE = parts(5, 4), parts(3, 2), 0
PARTS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "qwen2_5_omni": ("qwen2_5_omni", {}, [THINKER, TALKER, NO_CACHE]),
    "qwen2_5_omni-text": ("qwen2_5_omni_thinker_only", {}, [THINKER]),
    "qwen2_5_omni-two-ranks": (
        "qwen2_5_omni",
        {"tensor_parallel_size": 2},
        [THINKER // 2, TALKER // 2, NO_CACHE],
    ),
    "qwen3_omni": ("qwen3_omni_moe", {}, [THINKER, TALKER, NO_CACHE]),
    "qwen3_omni-text": ("qwen3_omni_moe", {"enable_audio_output": False}, [THINKER]),
    "qwen3_omni_thinker_only": ("qwen3_omni_moe_thinker_only", {}, [THINKER]),
}


def write_omni(
    folder: Path, pipeline: str, tensor_parallel_size: int = 1, **config: object
) -> list[object]:
    """Write a model of parts and a deploy file, and return the command's arguments."""
    which = QWEN2_5_OMNI if pipeline.startswith("qwen2_5") else QWEN3_OMNI
    model = write_json(folder, config=which | config)
    ranks = {"tensor_parallel_size": tensor_parallel_size}
    stage = {"max_model_len": 2048, "max_num_seqs": 2, "max_num_batched_tokens": 2048}
    # As vllm-omni's own files, for CUDA.
    triton = {"moe_backend": "triton", "model_runner": "v2"}
    stages = [{"stage_id": number, **stage, **triton, **ranks} for number in range(3)]
    file = folder / "deploy.yaml"
    file.write_text(json.dumps({"pipeline": pipeline, "stages": stages}))
    return [model, "--deploy", file, "--json"]


@pytest.fixture(scope="module")
def plans_of_parts(
    vision: Environment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Planned]:
    folder = tmp_path_factory.mktemp("parts")
    commands = [
        (True, write_omni(folder / name, pipeline, **config))
        for name, (pipeline, config, _) in PARTS.items()
    ]
    return dict(zip(PARTS, run_plans(vision, *commands), strict=True))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_model(plans_of_parts: dict[str, Planned], name: str) -> None:
    """Each stage has the cache of its own part, as vllm-omni's own classes build it."""
    result = plans_of_parts[name]

    assert result.status == 0, result.stderr
    found = json.loads(result.stdout)["stages"]
    assert [stage["kv_cache_memory_bytes"] for stage in found] == PARTS[name][2]
    layers = [
        [group["num_layers"] for group in stage["budget"]["ranks"][0]["groups"]]
        for stage in found
        if stage["budget"]
    ]
    assert layers == [[5], [3]][: len(layers)]


def test_parts_that_cannot_be_loaded(fork: Environment, tmp_path: Path) -> None:
    """The module that a model's class needs is named, as vLLM only does in its log."""
    command = write_omni(tmp_path / "model", "qwen2_5_omni")

    (result,) = run_plans(fork, (True, command))

    assert (result.status, result.stdout) == (1, "")
    assert result.stderr == (
        "vllm kv-budget: error: stage 0: Qwen2_5OmniForConditionalGeneration of "
        "vllm-omni cannot be loaded: No module named 'torchvision'\n"
    )


def test_output(plan: Plan, tmp_path: Path, example: Path, qwen3_tts: Path) -> None:
    """No file is overwritten unasked; what a file inherits is found from elsewhere."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    output = folder / "planned.yaml"
    output.write_text("mine")
    mode = output.stat().st_mode

    refused = plan(qwen3_tts, example, "--output", output)
    assert refused.status == 1
    assert refused.stderr == (
        f"vllm kv-budget: error: {output} exists; --force overwrites it\n"
    )
    assert output.read_text() == "mine"

    forced = plan(qwen3_tts, example, "--output", output, "--force", on_16_cores=True)
    assert (forced.status, forced.stdout) == (0, "")
    assert output.read_text() == EXAMPLE.read_text().replace(
        "base_config: qwen3_tts.yaml", "base_config: ../qwen3_tts.yaml"
    )
    assert output.stat().st_mode == mode
    assert [file.name for file in folder.iterdir()] == ["planned.yaml"]


def test_bad_options_are_one_line(
    fork: Environment, tmp_path: Path, example: Path, qwen3_tts: Path
) -> None:
    vllm_omni_own = example.with_name("qwen3_tts.yaml")
    deploy = [qwen3_tts, "--deploy", example]
    results = run_plans(
        fork,
        (True, [*deploy, "--max-num-seqs", 4]),
        (True, [*deploy, "--front_end_cores", -1]),
        (True, ["--deploy", example]),
        (True, [*deploy, "--output", tmp_path / "nowhere" / "file.yaml"]),
        (True, [tmp_path, "--deploy", vllm_omni_own]),
    )

    assert [result.stderr for result in results] == [
        f"vllm kv-budget: error: {message}\n"
        for message in (
            "--max-num-seqs: with --deploy, engine arguments come from the file",
            "--front-end-cores -1: expected 0 or more",
            "the following arguments are required: MODEL",
            f"--output {tmp_path}/nowhere/file.yaml: expected a file in an existing "
            "folder",
            f"{tmp_path}: there is no config.json with a model_type",
        )
    ]
    assert [result.stdout for result in results] == [""] * 5


BAD_FILES = {
    "list": ("[]", "{file}: not a deploy file: expected a YAML mapping"),
    "yaml": ("a: [", "{file}: invalid YAML: "),
    "base": (
        "base_config: nowhere.yaml",
        "{file}: vllm-omni cannot read it: FileNotFoundError: ",
    ),
    "no-stage-id": (
        "stages: [{max_num_seqs: 2}]",
        "{file}: vllm-omni cannot read it: KeyError: 'stage_id'",
    ),
    "pipeline": ("pipeline: nothing", "pipeline 'nothing' of vllm-omni: "),
    "refused": ("stages: [{stage_id: 0, max_num_seqs: 0}]", "stage 0: "),
    "replicas": (
        "stages: [{stage_id: 1, num_replicas: 2}]",
        "stage 1: num_replicas=2 is not planned: ",
    ),
    "binding": (
        "stages: [{stage_id: 0, env: {VLLM_CPU_OMP_THREADS_BIND: x}}]",
        "stage 0: VLLM_CPU_OMP_THREADS_BIND='x': expected a list of CPUs",
    ),
    "budget": (
        "stages: [{stage_id: 1, kv_cache_memory_bytes: 2GiB}]",
        "stage 1: kv_cache_memory_bytes='2GiB': expected a number of bytes",
    ),
    "no-file": (None, "{file}: No such file or directory"),
}


@pytest.fixture(scope="module")
def bad_plans(
    fork: Environment, qwen3_tts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Planned]]:
    """The files, and what the command says of each."""
    folder = tmp_path_factory.mktemp("bad")
    files = {name: folder / f"{name}.yaml" for name in BAD_FILES}
    for name, (text, _) in BAD_FILES.items():
        if text is not None:
            files[name].write_text(text)
    commands = [(True, [qwen3_tts, "--deploy", file]) for file in files.values()]
    results = run_plans(fork, *commands)
    return dict(zip(files, zip(files.values(), results, strict=True), strict=True))


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_one_line(
    bad_plans: dict[str, tuple[Path, Planned]], name: str
) -> None:
    file, result = bad_plans[name]

    message = BAD_FILES[name][1].format(file=file)
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr.startswith(f"vllm kv-budget: error: {message}")
    assert len(result.stderr.splitlines()) == 1
