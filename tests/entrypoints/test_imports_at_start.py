# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget` imports, of which nearly all of its time consists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.cpu_kv_cache_utils import llama, write_model

FRONT_END = ("fastapi", "openai", "uvicorn", "vllm.entrypoints.openai")
COMPILER = ("torch._inductor.compile_fx", "torch._inductor.lowering")


def imported(*arguments: str) -> set[str]:
    """Return the modules that a run of the command imports."""
    result = subprocess.run(
        [
            *(sys.executable, "-X", "importtime"),
            *("-m", "vllm.entrypoints.cli.main", "kv-budget", *arguments),
        ],
        capture_output=True,
        check=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        text=True,
    )
    assert result.stdout
    return set(re.findall(r"^import time:.*\| +(\S+)$", result.stderr, re.M))


def test_help_imports_neither_a_compiler_nor_the_engine() -> None:
    modules = imported("--help")

    assert "vllm.entrypoints.cli.kv_budget" in modules
    needless = {"torch._dynamo", "torch._inductor", "transformers", "vllm.config"}
    assert not modules & {*needless, *COMPILER, *FRONT_END}


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["compiled", "eager"])
def test_plan_imports_neither_a_compiler_nor_the_front_end(
    tmp_path: Path, enforce_eager: bool
) -> None:
    """The layers of a plan never run, whether or not the engine compiles them."""
    model = write_model(tmp_path / "model", llama(layers=2, kv_heads=2, head_dim=64))
    eager = ["--enforce-eager"] if enforce_eager else []

    modules = imported(model, "--max-model-len", "256", *eager)

    assert "vllm.v1.worker.kv_cache_spec_discovery" in modules
    assert not modules & {*COMPILER, *FRONT_END}


WATCHED = """
import sys
from vllm.entrypoints.cli.main import main

def say(event, args):
    if event == "subprocess.Popen":
        print("started:", args[1], file=sys.stderr)

sys.addaudithook(say)
main()
"""


def test_class_that_is_new_is_imported_here(tmp_path: Path) -> None:
    """Not in a process of its own, which would import vLLM again.

    What is known of a class is kept in a folder, which is an empty one here.
    """
    model = write_model(tmp_path / "model", llama(layers=2, kv_heads=2, head_dim=64))

    result = subprocess.run(
        [sys.executable, "-c", WATCHED, "kv-budget", model, "--max-model-len", "256"],
        capture_output=True,
        check=True,
        env=os.environ | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")},
        text=True,
    )

    assert "no preemption" in result.stdout
    assert "vllm.model_executor.models.registry" not in result.stderr


COMPILE = """
import torch, vllm
from torch._inductor import lowering
from torch._inductor.exc import OperatorIssue

formatted = []
OperatorIssue.operator_str = staticmethod(lambda *args: formatted.append(args) or "")
library = torch.library.Library("vllm", "FRAGMENT")
library.define("without_lowering(Tensor x) -> Tensor")
library.impl("without_lowering", torch.clone, "CPU")
library.impl("without_lowering", torch.empty_like, "Meta")
operator = torch.ops.vllm.without_lowering

result = torch.compile(lambda x: operator(x + 1) + 1)(torch.ones(4))

assert result.tolist() == [3] * 4
assert operator.default in lowering.fallbacks
assert not formatted
"""


def test_operator_without_lowering_is_not_formatted() -> None:
    """Formatting its arguments takes minutes for deep graphs.

    vLLM replaced a list in Inductor to prevent it. Since torch 2.13 torch does.
    """
    variables = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    subprocess.run(
        [sys.executable, "-c", COMPILE], check=True, env=os.environ | variables
    )
