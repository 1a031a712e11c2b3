# SPDX-License-Identifier: Apache-2.0
"""The budgets and cores of a vllm-omni deploy file take effect on CPU."""

import os
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.fork.omni.conftest import Environment, Plan, Start
from tests.fork.omni.models import llama, write_json

pytestmark = pytest.mark.omni_test

MiB = 1 << 20
GiB = 1 << 30

TALKER = 33 * 14 * MiB
CODE2WAV = 2 * GiB
# Of a worker that holds no cache: 440 MiB were measured.
PROCESS = 800 * MiB


@pytest.mark.parametrize(
    ("stage_id", "budget", "expected"),
    [
        pytest.param(
            0,
            TALKER,
            {
                "cores": [list(range(11))],
                "max_num_seqs": 2,
                "max_model_len": 2048,
                "architecture": "Qwen3TTSTalkerForConditionalGeneration",
            },
            id="talker",
        ),
        pytest.param(
            1,
            CODE2WAV,
            {
                "cores": [list(range(11, 15))],
                "max_num_seqs": 2,
                "max_model_len": 8192,
                "architecture": "Qwen3TTSCode2Wav",
            },
            id="code2wav",
        ),
    ],
)
def test_budget_of_the_file_arrives(
    fork: Environment,
    stock: Environment,
    start: Start,
    example: Path,
    qwen3_tts: Path,
    stage_id: int,
    budget: int,
    expected: dict[str, Any],
) -> None:
    """On stock vLLM the variable of the environment arrives instead."""
    variable = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    stage = ("configuration", example, stage_id, qwen3_tts)
    jobs = [start(build | variable, *stage) for build in (fork, stock)]

    found_on_fork, found_on_stock = [job.found() for job in jobs]

    assert found_on_fork == {"kv_cache_memory_bytes": budget, **expected}
    assert found_on_stock == {"kv_cache_memory_bytes": 4 * GiB, **expected}


def anonymous_memory(pid: int) -> int:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) * 1024


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core for each stage")
def test_two_stages_at_once(
    fork: Environment,
    start: Start,
    plan: Plan,
    tmp_path: Path,
    example: Path,
    qwen3_tts: Path,
) -> None:
    """Both engines run while what their workers have is read from outside.

    The models have the talker's geometry and a small one: vllm-omni has no workers
    for CPU yet, in which its own models would run.
    """
    planned = tmp_path / "planned.yaml"
    result = plan(qwen3_tts, example, "--front-end-cores", 0, "--output", planned)
    assert result.status == 0, result.stderr
    stages = YAML(typ="safe").load(planned)["platforms"]["cpu"]["stages"]
    cores = [
        {
            cpu
            for first, _, last in [
                part.partition("-")
                for part in stage["env"]["VLLM_CPU_OMP_THREADS_BIND"].split(",")
            ]
            for cpu in range(int(first), int(last or first) + 1)
        }
        for stage in stages
    ]
    models = [
        write_json(tmp_path / "talker", config=llama(28, 8, 128)),
        write_json(tmp_path / "small", config=llama(4, 4, 64)),
    ]
    environment = fork | {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        # What a worker has is asked by sending it a function.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    jobs = [
        start(environment, "engine", planned, stage_id, qwen3_tts, model)
        for stage_id, model in enumerate(models)
    ]

    found = [job.found() for job in jobs]
    workers = [report["ranks"][0] for report in found]
    anonymous = [anonymous_memory(worker["pid"]) for worker in workers]
    affinity = [os.sched_getaffinity(worker["pid"]) for worker in workers]
    print(f"RssAnon {anonymous}, affinity {affinity}")  # for pytest -rP

    assert [report["kv_cache_memory_bytes"] for report in found] == [TALKER, CODE2WAV]
    assert [report["num_gpu_blocks"] for report in found] == [33, 4096]
    assert [worker["held"] for worker in workers] == [TALKER, CODE2WAV]
    for size, budget in zip(anonymous, [TALKER, CODE2WAV], strict=True):
        assert budget < size < budget + PROCESS
    assert affinity == cores
    assert not cores[0] & cores[1]
    assert [worker["threads"] for worker in workers] == [len(cpus) for cpus in cores]
