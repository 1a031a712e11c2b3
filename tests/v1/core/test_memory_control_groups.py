# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines in real control groups: refused in a line, or started, and never killed.

The model is the talker of a speech model: 28 layers of 8 KV heads of 128, which make
14 MiB a block of 128 tokens, and 16 blocks a request of 2,048 tokens. An engine takes
about 460 MiB beside its KV cache.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import regex as re

from tests.v1.core.control_groups import (
    GiB,
    MiB,
    control_group,
    engine_in,
    fill_page_cache,
    needs_groups,
)
from tests.v1.core.kv_budget_models import qwen3, write_model

pytestmark = [pytest.mark.cgroup_test, needs_groups]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("talker") / "model", qwen3(layers=28))


def budget_that_fits(error: str) -> int:
    (budget,) = re.findall(r"--kv-cache-memory-bytes=(\d+) would fit", error)
    return int(budget)


def test_limit_below_the_mount_is_found(talker: str) -> None:
    """A service of systemd sees the whole tree, and its limit far down in it."""
    with control_group(limit=2 * GiB) as group:
        refused = engine_in(group, talker, kv_cache_memory_bytes=4 * GiB)
        assert refused.num_blocks is None
        assert f"({group.folder}/memory.limit_in_bytes)" in refused.error
        assert "of 2.0 GiB" in refused.error
        assert "from --kv-cache-memory-bytes=4294967296" in refused.error

        budget = budget_that_fits(refused.error)
        started = engine_in(group, talker, kv_cache_memory_bytes=budget, generate=True)

        assert started.num_blocks == budget // (14 * MiB)
        assert group.kills() == 0


def test_fit_above_the_limit_says_what_would(talker: str) -> None:
    fit = {"VLLM_CPU_KVCACHE_SPACE": "fit"}
    with control_group(limit=2 * GiB) as group:
        refused = engine_in(group, talker, env=fit, max_num_seqs=8)
        # 8 x 16 blocks and the null block
        assert "129 blocks per rank, from VLLM_CPU_KVCACHE_SPACE=fit" in refused.error
        (requests, length) = re.findall(
            r"with --max-num-seqs (\d+) or --max-model-len (\d+) none", refused.error
        )[0]

        fewer = engine_in(group, talker, env=fit, max_num_seqs=int(requests))
        shorter = engine_in(
            group, talker, env=fit, max_num_seqs=8, max_model_len=int(length)
        )

        assert fewer.num_blocks == 1 + 16 * int(requests)
        assert shorter.num_blocks == 1 + 8 * -(-int(length) // 128)
        assert group.kills() == 0


def test_page_cache_is_given_back(talker: str, tmp_path: Path) -> None:
    """A container that has just read its checkpoint, and starts again."""
    checkpoint = tmp_path / "checkpoint"
    with control_group(limit=4 * GiB) as group:
        fill_page_cache(group, checkpoint, 3584 * MiB)
        used = group.usage()

        started = engine_in(
            group, talker, mounted=True, kv_cache_memory_bytes=GiB, generate=True
        )

        assert used > 3 * GiB
        assert started.num_blocks == 73, started.error
        assert group.kills() == 0
    checkpoint.unlink()


def test_too_many_blocks_are_refused_whatever_the_budget(talker: str) -> None:
    with control_group(limit=3 * GiB) as group:
        refused = engine_in(
            group,
            talker,
            mounted=True,
            kv_cache_memory_bytes=512 * MiB,
            num_gpu_blocks_override=300,
        )

        assert "from --num-gpu-blocks-override=300" in refused.error
        assert re.search(r"--num-gpu-blocks-override=\d+ would fit", refused.error)
        assert group.kills() == 0


def test_few_blocks_start_whatever_the_budget(talker: str) -> None:
    with control_group(limit=3 * GiB) as group:
        started = engine_in(
            group,
            talker,
            mounted=True,
            kv_cache_memory_bytes=8 * GiB,
            num_gpu_blocks_override=40,
            max_model_len=512,
            generate=True,
        )

        assert started.num_blocks == 40, started.error
        assert group.kills() == 0


def test_limit_of_the_group_above(talker: str) -> None:
    with (
        control_group(limit=2 * GiB) as above,
        control_group(above=above) as middle,
        control_group(limit=8 * GiB, above=middle) as group,
    ):
        refused = engine_in(group, talker, kv_cache_memory_bytes=4 * GiB)

        assert f"({above.folder}/memory.limit_in_bytes)" in refused.error
        assert above.kills() == 0


def test_group_above_the_mount(talker: str) -> None:
    """A pod's limit, of which a container sees the sum of limits only."""
    with control_group(limit=2 * GiB) as pod, control_group(above=pod) as group:
        refused = engine_in(group, talker, mounted=True, kv_cache_memory_bytes=4 * GiB)

        assert "of 2.0 GiB, a control group above /" in refused.error
        assert pod.kills() == 0


def test_groups_without_limits(talker: str) -> None:
    with control_group() as above, control_group(above=above) as group:
        started = engine_in(group, talker, kv_cache_memory_bytes=512 * MiB)

        assert started.num_blocks == 36


def test_limit_that_changes_while_the_process_runs() -> None:
    script = """
        from vllm.utils.cpu_resource_utils import get_memory_node_info
        for _ in range(3):
            info = get_memory_node_info(0)
            print("SIZES", info.total_memory, info.available_memory, flush=True)
            input()
    """
    with control_group(limit=4 * GiB) as group:
        process = subprocess.Popen(
            group.command(sys.executable, "-c", textwrap.dedent(script)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        seen = []
        for limit in (2 * GiB, 6 * GiB, None):
            line = next(line for line in process.stdout if line.startswith("SIZES"))
            seen.append(tuple(map(int, line.split()[1:])))
            if limit is not None:
                group.limit(limit)
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait()

        assert [total for total, _ in seen] == [4 * GiB, 2 * GiB, 6 * GiB]
        assert all(total - GiB < available < total for total, available in seen)


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_ranks_of_an_engine_are_added_up(talker: str, parallel: str) -> None:
    """Each of two ranks passes alone with 1.5 GiB, in a group of 4 GiB."""
    with control_group(limit=4 * GiB) as group:
        refused = engine_in(
            group,
            talker,
            env={"OMP_NUM_THREADS": "1"},
            kv_cache_memory_bytes=3 * GiB // 2,
            distributed_executor_backend="mp",
            **{f"{parallel}_parallel_size": 2},
        )

        # Half the heads or half the layers: 7 MiB a block
        assert "(2.99 GiB for 2 rank(s), 219 blocks per rank" in refused.error
        assert group.kills() == 0


def data_parallel_engines(limit: int, talker: str, variable: str, **arguments) -> str:
    """Start two engines of one front end in a control group, and return their output.

    They end with the number of blocks of both, and the longest request.
    """
    script = """
        import asyncio, json, sys
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def main():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
                model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True,
                enforce_eager=True, dtype="bfloat16", block_size=128,
                max_num_seqs=4, data_parallel_size=2, **json.loads(sys.argv[2]),
            ))
            config = engine.vllm_config
            blocks = config.cache_config.num_gpu_blocks
            print("BLOCKS", blocks, "LENGTH", config.model_config.max_model_len)
            sys.stdout.flush()
            engine.shutdown()

        if __name__ == "__main__":
            asyncio.run(main())
    """
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": variable,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(script), talker]
    with control_group(limit=limit) as group:
        result = subprocess.run(
            group.command(*command, json.dumps(arguments)),
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )

        assert group.kills() == 0
        output = result.stdout + result.stderr
        return output.replace(str(group.folder), "GROUP")


@pytest.mark.parametrize("fits", [False, True], ids=["above", "below"])
def test_data_parallel_engines_are_added_up(talker: str, fits: bool) -> None:
    """Two budgets of 910 MiB, each of which would fit alone."""
    budget = {"kv_cache_memory_bytes": 65 * 14 * MiB, "max_model_len": 2048}

    output = data_parallel_engines((6 if fits else 3) * GiB, talker, "", **budget)

    if fits:
        assert "BLOCKS 130 LENGTH 2048" in output, output[-3000:]
    else:
        assert "for 2 rank(s), 65 blocks per rank" in output, output[-3000:]
        assert "(GROUP/memory.limit_in_bytes)" in output


def test_data_parallel_engines_find_lengths_that_fit_together(talker: str) -> None:
    """With --max-model-len auto, where the whole length of 4,096 needs 3.5 GiB."""
    output = data_parallel_engines(3 * GiB, talker, "fit", max_model_len=-1)

    found = re.search(r"BLOCKS (\d+) LENGTH (\d+)", output)
    assert found is not None, output[-3000:]
    blocks, length = map(int, found.groups())
    # The front end has the least length of both engines: one may have more blocks.
    least = 2 * (1 + 4 * length // 128)
    assert least <= blocks <= least + 8
    assert 128 <= length < 4096
    assert blocks * 14 * MiB < 3 * GiB - 2 * 460 * MiB
