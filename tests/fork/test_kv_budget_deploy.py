# SPDX-License-Identifier: Apache-2.0
"""Cores, memory and comments of a deploy plan, without vllm-omni."""

import io
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ruamel.yaml import YAML

from vllm.entrypoints.cli import kv_budget as cli
from vllm.utils.cpu_resource_utils import LogicalCPUInfo, parse_id_list
from vllm_kv_budget_deploy.cores import (
    BIND,
    Machine,
    format_ids,
    give_cores,
    keep_for_front_end,
    one_cpu_per_core,
)
from vllm_kv_budget_deploy.document import write_section
from vllm_kv_budget_deploy.plan import DeployPlan, StagePlan, plan_deploy
from vllm_kv_budget_deploy.stages import Stage

GiB = 1 << 30
WHY = "a cache of another kind"


def stage(stage_id: int, bind: str = "auto", **engine_args: Any) -> Stage:
    """A stage that has to be measured: its budget is what the file says."""
    arguments = {"kv_cache_memory_bytes": GiB} | engine_args
    return Stage(stage_id, f"stage{stage_id}", arguments, {BIND: bind}, WHY)


def test_one_cpu_of_each_core() -> None:
    """Two nodes of two cores with two threads, numbered as x86 machines number."""
    cpus = [LogicalCPUInfo(cpu, cpu % 4, cpu % 4 // 2) for cpu in range(8)]

    assert one_cpu_per_core(cpus) == {0: [4, 5], 1: [6, 7]}


def test_same_core_number_on_two_nodes() -> None:
    cpus = [LogicalCPUInfo(0, 0, 0), LogicalCPUInfo(1, 0, 1)]

    assert one_cpu_per_core(cpus) == {0: [0], 1: [1]}


@pytest.mark.parametrize(
    ("weights", "cores", "expected", "nodes"),
    [
        pytest.param(
            [12, 4], {0: 15}, ["0-10", "11-14"], [0, 0], id="proportion-of-the-file"
        ),
        pytest.param([1, 1], {0: 15}, ["0-7", "8-14"], [0, 0], id="equal"),
        pytest.param([100, 1], {0: 3}, ["0-1", "2"], [0, 0], id="never-none"),
        pytest.param([1, 1], {0: 8, 1: 7}, ["0-7", "8-14"], [0, 1], id="a-node-each"),
        pytest.param(
            [1, 1, 1],
            {0: 8, 1: 8},
            ["0-3", "8-15", "4-7"],
            [0, 1, 0],
            id="three-on-two",
        ),
        pytest.param([1, 3], {0: 2, 1: 6}, ["0-1", "2-7"], [0, 1], id="uneven-nodes"),
        pytest.param(
            [10, 1, 1], {0: 1, 1: 3}, ["1-2", "0", "3"], [1, 0, 1], id="full-node"
        ),
        pytest.param([1, 1], {0: 1, 1: 0, 2: 1}, ["0", "1"], [0, 2], id="empty-node"),
    ],
)
def test_cores_of_ranks(
    weights: list[float], cores: dict[int, int], expected: list[str], nodes: list[int]
) -> None:
    numbers = iter(range(100))
    free = {node: [next(numbers) for _ in range(n)] for node, n in cores.items()}

    cpus, found_nodes = give_cores(weights, free)

    assert [format_ids(of_rank) for of_rank in cpus] == expected
    assert found_nodes == nodes
    given = [cpu for of_rank in cpus for cpu in of_rank]
    assert sorted(given) == sorted(cpu for of_node in free.values() for cpu in of_node)


def test_front_end_has_the_last_cores_of_the_larger_node() -> None:
    left, kept = keep_for_front_end({0: [0, 1, 2], 1: [3, 4]}, 2)

    assert left == {0: [0, 1], 1: [3]}
    assert kept == [2, 4]


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-6"])
def test_ids_are_those_that_vllm_reads(text: str) -> None:
    assert format_ids(parse_id_list(text)) == text


@pytest.mark.parametrize(
    ("engine_args", "ranks"),
    [
        pytest.param({}, 1, id="one"),
        pytest.param({"tensor_parallel_size": 2}, 2, id="tensor"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6, id="pipeline"
        ),
        pytest.param(
            {"tensor_parallel_size": 2, "data_parallel_size": 4}, 8, id="data"
        ),
        pytest.param(
            {"data_parallel_size": 4, "data_parallel_size_local": 1}, 1, id="data-local"
        ),
        pytest.param({"tensor_parallel_size": 8, "nnodes": 2}, 4, id="two-nodes"),
    ],
)
def test_ranks_of_a_node(engine_args: dict[str, Any], ranks: int) -> None:
    machine = Machine({0: list(range(16))}, {0: 16 * GiB})

    plan = plan_deploy([stage(0, **engine_args)], machine, 1).stages[0]

    assert plan.stage.num_ranks == ranks
    assert len(plan.cores) == ranks
    assert len({cpu for cpus in plan.cores for cpu in cpus}) == 15


def test_ranks_fill_their_memory_node() -> None:
    """Four ranks of 3 GiB on two nodes: two on each, and a node of 5 GiB is short."""
    machine = Machine({0: [0, 1], 1: [2, 3]}, {0: 6 * GiB, 1: 5 * GiB})
    stages = [stage(0, tensor_parallel_size=4, kv_cache_memory_bytes=3 * GiB)]

    plan = plan_deploy(stages, machine, 0)

    assert plan.stages[0].nodes.count(1) == 2
    assert len(plan.shortages) == 1
    assert plan.shortages[0].startswith("memory node 1: ")
    assert f"{GiB:,} bytes (1 GiB) too much" in plan.shortages[0]
    assert f"at most {5 * GiB // 2} would fit" in plan.shortages[0]


def test_control_group_holds_all_ranks() -> None:
    machine = Machine({0: [0], 1: [1]}, {0: GiB, 1: GiB}, limit=GiB)

    plan = plan_deploy([stage(0), stage(1)], machine, 0)

    assert [text.split(":")[0] for text in plan.shortages] == ["control group"]


@pytest.mark.parametrize(
    ("cores", "front_end", "helps"),
    [
        pytest.param(5, 1, "--front-end-cores 0", id="front-end"),
        pytest.param(4, 0, "3 instead of 4 ranks of stage 0", id="ranks"),
        pytest.param(1, 0, "a machine with 5 cores", id="machine"),
    ],
)
def test_too_few_cores(cores: int, front_end: int, helps: str) -> None:
    machine = Machine({0: list(range(cores))}, {0: 16 * GiB})

    plan = plan_deploy([stage(0, tensor_parallel_size=4), stage(1)], machine, front_end)

    missing = 5 + front_end - cores
    assert plan.shortages[0].endswith(f"{missing} too few; what helps most: {helps}")


def test_bad_binding_is_named() -> None:
    machine = Machine({0: [0, 1]}, {0: 16 * GiB})

    with pytest.raises(ValueError, match=r"stage 0: VLLM_CPU_OMP_THREADS_BIND='0-x'"):
        plan_deploy([stage(0, bind="0-x")], machine, 0)


def written(text: str, *plans: StagePlan, front_end: tuple[int, ...] = ()) -> str:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(text)
    write_section(document, DeployPlan(list(plans), list(front_end), []))
    output = io.StringIO()
    yaml.dump(document, output)
    return output.getvalue()


FLAT = """\
# the file
base_config: other.yaml  # inherited

platforms:
  # another platform
  npu: {stages: []}
  cpu:
    stages:
      - stage_id: 0  # the talker
        max_num_seqs: 2   # two at once
        kv_cache_memory_bytes: 4294967296  # a guess
        # after the guess

        # before the environment
        env:
          VLLM_CPU_OMP_THREADS_BIND: "0-11"
          OTHER: "1"  # kept
# the end
"""


def test_comments_are_kept() -> None:
    plan = StagePlan(stage(0, bind="0-11"), GiB, "because", None, ((0, 1),), (0,))

    text = written(FLAT, plan, front_end=(2,))

    gone = ["4294967296  # a guess", 'BIND: "0-11"', "  cpu:\n"]
    for line in FLAT.splitlines():
        assert line in text or any(old in f"{line}\n" for old in gone)
    assert re.search("kv_cache_memory_bytes: 1073741824 +# because\n", text)
    assert 'VLLM_CPU_OMP_THREADS_BIND: "0-1"  # 2 of 3 cores' in text
    assert "  cpu:  # " in text
    assert written(text, plan, front_end=(2,)) == text


def test_nested_layout() -> None:
    """With `engine_args`, vllm-omni reads no budget and no environment beside it."""
    before = "platforms: {cpu: {stages: [{stage_id: 0, engine_args: {a: 1}}]}}"
    plan = StagePlan(stage(0), GiB, "because", None, ((0, 1), (2,)), (0, 0))

    text = written(before, plan)
    document = YAML(typ="safe").load(text)

    # A comment inside of braces would end the line in them.
    assert "{" not in text
    assert document["platforms"]["cpu"]["stages"][0] == {
        "stage_id": 0,
        "engine_args": {"a": 1, "kv_cache_memory_bytes": GiB},
        "runtime": {"env": {BIND: "0-1|2"}},
    }


def test_no_cache_is_no_budget() -> None:
    """The engine refuses a budget of 0."""
    plan = StagePlan(stage(0), 0, "the model needs no KV cache", None, ((0,),), (0,))

    text = written("{}", plan)

    assert "kv_cache_memory_bytes" not in text
    assert "stage_id: 0  # the model needs no KV cache\n" in text


@pytest.mark.parametrize("before", ["{}", "platforms:\n", "platforms:\n  cpu:\n"])
def test_missing_section_is_added(before: str) -> None:
    plans = [
        StagePlan(stage(number), GiB, "because", None, ((number,),), (0,))
        for number in range(2)
    ]

    document = YAML(typ="safe").load(written(before, *plans))

    stages = document["platforms"]["cpu"]["stages"]
    assert [entry["env"][BIND] for entry in stages] == ["0", "1"]
    assert [entry["kv_cache_memory_bytes"] for entry in stages] == [GiB, GiB]


@pytest.mark.forked
@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(
            "vllm_kv_budget_deploy",
            "--deploy is not installed: pip install --find-links dist "
            "'vllm[kv-budget]', after `make wheel`",
            id="package",
        ),
        pytest.param("vllm_omni", "--deploy needs vllm-omni: ", id="vllm-omni"),
    ],
)
def test_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    module: str,
    message: str,
) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: []")
    for name in list(sys.modules):
        if name.startswith(f"{module}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    assert cli.run(["model", "--deploy", str(file)]) == 1

    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"vllm kv-budget: error: {message}")


@pytest.mark.forked
def test_changed_vllm_omni_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One that has not the private function that the package calls."""
    config = ModuleType("vllm_omni.config")
    config.stage_config = ModuleType("vllm_omni.config.stage_config")  # type: ignore[attr-defined]
    config.load_deploy_config = config.merge_pipeline_deploy = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
    monkeypatch.setitem(sys.modules, "vllm_omni.config", config)
    monkeypatch.setattr(metadata, "version", lambda name: "0.99")
    file = tmp_path / "deploy.yaml"
    file.write_text("stages: []")

    assert cli.run(["model", "--deploy", str(file)]) == 1

    assert capfd.readouterr().err == (
        "vllm kv-budget: error: vllm-omni 0.99 is not supported: its stage_config has "
        "no _apply_platform_overrides, as 0.32 has\n"
    )
