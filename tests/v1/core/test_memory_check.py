# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV cache that is about to be allocated is checked, of all ranks together.

test_memory_control_groups.py has the same in control groups, which need root.
"""

import json
import os
import resource
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import regex as re

from tests.platforms.cpu_kv_cache_child import FITS, run_engine, use_cpu
from tests.platforms.cpu_kv_cache_utils import REFERENCE_BLOCK as BLOCK
from tests.platforms.cpu_kv_cache_utils import STANDALONE_RUNNER, GiB, MiB
from tests.v1.core.kv_budget_models import qwen3, write_model
from vllm.utils.memory_limits import MemoryLimit
from vllm.v1.core import memory_check


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cpu(monkeypatch)


def only_available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(
        memory_check,
        "limits_of_node",
        lambda node: [MemoryLimit("memory node 0", 2 * GiB, size, "here")],
    )


@pytest.mark.parametrize(
    ("variable", "size", "shown"),
    [
        pytest.param(None, 128 * MiB, "--kv-cache-memory-bytes=134217728", id="bytes"),
        pytest.param(
            "0.125",
            None,
            "VLLM_CPU_KVCACHE_SPACE=0.125 (--kv-cache-memory-bytes=134217728)",
            id="variable",
        ),
    ],
)
def test_budget_above_what_is_free_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    size: int | None,
    shown: str,
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    only_available(monkeypatch, 125 * MiB)

    error = run_engine(tmp_path, kv_cache_memory_bytes=size).error

    assert "Available memory (125.0 MiB of 2.0 GiB, memory node 0)" in error
    # 73 blocks of 1.75 MiB are less than the 128 MiB of the budget.
    assert f"(127.75 MiB for 1 rank(s), 73 blocks per rank, from {shown})" in error
    (budget,) = re.findall(r"--kv-cache-memory-bytes=(\d+) would fit", error)
    assert run_engine(tmp_path, kv_cache_memory_bytes=int(budget)).answer


def test_whole_blocks_are_checked_not_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only_available(monkeypatch, FITS)

    assert run_engine(tmp_path, kv_cache_memory_bytes=FITS + BLOCK - 1).answer == 68
    assert run_engine(tmp_path, kv_cache_memory_bytes=FITS + BLOCK).answer is None


def test_number_of_blocks_needs_no_share_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model alone takes more than gpu_memory_utilization leaves."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    share = {"gpu_memory_utilization": 0.001}

    assert run_engine(tmp_path, **share).answer is None
    assert run_engine(tmp_path, **share, num_gpu_blocks_override=68).answer == 68


def test_length_that_fits_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below 68 blocks no request of 2,048 tokens fits."""
    only_available(monkeypatch, 64 * MiB)

    error = run_engine(tmp_path, kv_cache_memory_bytes=FITS).error

    found = re.findall(
        r"--kv-cache-memory-bytes=(\d+) with --max-model-len (\d+) would fit", error
    )
    budget, length = map(int, found[0])
    shorter = {"kv_cache_memory_bytes": budget, "max_model_len": length}
    assert run_engine(tmp_path, **shorter).answer == budget // BLOCK


@pytest.mark.parametrize("commit", ["startup", "on-use"])
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "refused-mapping"])
def test_limit_of_the_address_space_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    commit: str,
    checked: bool,
) -> None:
    """Also if the check has let it through: memory may be mapped after it."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_COMMIT", commit)
    if not checked:
        monkeypatch.setattr(
            "vllm.v1.engine.core.check_kv_cache_memory", lambda *arguments: None
        )
    number = getattr(resource, kind)
    hard = resource.getrlimit(number)[1]
    resource.setrlimit(number, (16 * GiB, hard))
    try:
        error = run_engine(tmp_path, kv_cache_memory_bytes=16 * GiB).error
    finally:
        resource.setrlimit(number, (resource.RLIM_INFINITY, hard))

    assert kind in error
    assert "of 16.0 GiB" in error
    assert len(error.splitlines()) == 1
    assert error.startswith("Available memory" if checked else "The system refuses")


RANK = """
    import json, os, sys
    from vllm import LLM
    from vllm.utils.memory_limits import MemoryLimit
    from vllm.v1.core import memory_check
    if available := json.loads(sys.argv[3]):
        place = f"host {int(os.environ['RANK']) % int(sys.argv[4])} node 0"
        node = MemoryLimit("memory node 0", available, available, place)
        memory_check.limits_of_node = lambda number: [node]
    arguments = {
        "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
        "dtype": "bfloat16", "block_size": 128, "max_model_len": 512,
        "max_num_seqs": 2, "pipeline_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
    }
    try:
        engine = LLM(sys.argv[1], **arguments | json.loads(sys.argv[2]))
        config = engine.llm_engine.vllm_config
        blocks = config.cache_config.num_gpu_blocks
        print("BLOCKS", blocks, "LENGTH", config.model_config.max_model_len)
    except Exception as error:
        print("ERROR", error)
    sys.stdout.flush()
"""


def launch(
    model: str,
    variable: str,
    partition: str = "1,3",
    available: int | None = None,
    hosts: int = 1,
    **arguments,
) -> list[str]:
    """Start two ranks as torchrun does, and return what each of them says.

    Each of the hosts, which are simulated, has the available bytes, if they are given.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", textwrap.dedent(RANK)),
                *(model, json.dumps(arguments), json.dumps(available), str(hosts)),
            ],
            env=os.environ
            | {
                "VLLM_CPU_KVCACHE_SPACE": variable,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_PP_LAYER_PARTITION": partition,
                "OMP_NUM_THREADS": "1",
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        line
        for output in outputs
        for line in output.splitlines()
        if line.startswith(("BLOCKS", "ERROR"))
    ]


@pytest.mark.skipif(
    STANDALONE_RUNNER,
    reason="model runner V2 rejects a pipeline under an external launcher",
)
def test_ranks_of_an_external_launcher_agree_or_are_refused(tmp_path: Path) -> None:
    """One layer in the first stage, three in the second: 0.5 and 1.5 MiB a block."""
    model = write_model(tmp_path / "model", qwen3(layers=4))

    budget = launch(model, "0.125")
    fit = launch(model, "fit")
    blocks = launch(model, "fit", num_gpu_blocks_override=40)

    assert len(budget) == len(fit) == 2
    for error in budget:
        assert "rank 0: 256 blocks of 524288 bytes, rank 1: 85 blocks of" in error
        assert "from VLLM_CPU_KVCACHE_SPACE=0.125" in error
        assert "--num-gpu-blocks-override=85" in error
    for error in fit:
        assert "VLLM_CPU_KVCACHE_SPACE=fit under an external launcher" in error
        assert "rank 0: 9 blocks" in error and "rank 1: 9 blocks" in error
        assert "--num-gpu-blocks-override=9" in error
    assert blocks == ["BLOCKS 40 LENGTH 512"] * 2


@pytest.mark.slow_test
@pytest.mark.parametrize(
    ("hosts", "blocks", "length"),
    [
        # 31 blocks of 1 MiB each: the null block, and 15 for each of two requests.
        pytest.param(1, 31, 1920, id="one-host"),
        # Each has 63 for itself.
        pytest.param(2, 63, 3968, id="two-hosts"),
    ],
)
def test_ranks_of_an_external_launcher_find_one_length(
    tmp_path: Path, hosts: int, blocks: int, length: int
) -> None:
    """Memory node 0 of a host has 66 MiB, of which a thirty-second is left."""
    model = write_model(tmp_path / "model", qwen3(layers=4))

    found = launch(model, "fit", "2,2", 66 * MiB, hosts, max_model_len=-1)

    assert found == [f"BLOCKS {blocks} LENGTH {length}"] * 2
