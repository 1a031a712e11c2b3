# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What `vllm kv-budget` says of the memory of this machine and of the weights."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.platforms.cpu_kv_cache_utils import write_checkpoint
from tests.v1.core.kv_budget_models import qwen3, write_model
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.kv_budget import as_json, as_text, make_plan
from vllm.entrypoints.kv_budget_memory import checkpoint_bytes

GiB = 1 << 30


def checkpoint(folder: Path) -> str:
    """Write a model with weights; vocabulary and layers divide by two."""
    config = qwen3(layers=4, tie_word_embeddings=False)
    return write_checkpoint(folder, config, max_shard_size="1MB")


def plan(model: str, **kwargs):
    return make_plan(
        EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=2,
            **kwargs,
        ).create_engine_config()
    )


def memory(model: str, **kwargs) -> dict:
    return json.loads(as_json(plan(model, **kwargs)))["memory"]


@pytest.mark.forked
def test_weights_of_a_checkpoint_are_counted(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    in_files = sum(
        tensor.nbytes
        for tensor in AutoModelForCausalLM.from_pretrained(
            model, torch_dtype=torch.bfloat16
        ).parameters()
    )

    need = memory(model)["need"]

    assert len(files) > 1
    assert need["checkpoint_bytes"] == in_files
    assert need["weight_bytes"] == [in_files]
    assert need["num_bytes"] == in_files + need["kv_cache_bytes"]


@pytest.mark.forked
@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        pytest.param({"tensor_parallel_size": 2}, 2, id="tensor"),
        pytest.param({"pipeline_parallel_size": 2}, 2, id="pipeline"),
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4, id="both"
        ),
    ],
)
def test_weights_are_those_of_a_rank(
    tmp_path: Path, parallel: dict[str, int], num_ranks: int
) -> None:
    model = checkpoint(tmp_path)
    stages = parallel.get("pipeline_parallel_size", 1)

    need = memory(model, distributed_executor_backend="mp", **parallel)["need"]

    whole = need["checkpoint_bytes"]
    assert need["num_ranks"] == num_ranks
    assert len(need["weight_bytes"]) == stages
    weights = sum(need["weight_bytes"]) * num_ranks // stages
    # Norms are not divided, so all ranks hold a little more than the checkpoint.
    assert whole <= weights < 1.05 * whole
    assert need["num_bytes"] == weights + need["kv_cache_bytes"]


@pytest.mark.forked
def test_weights_are_unknown_without_a_checkpoint(tmp_path: Path) -> None:
    text = as_text(plan(write_model(tmp_path / "model", qwen3())))

    assert "Memory of this machine, now" in text
    assert "weights and activations come on top" in text
    assert "safetensors" not in text


@pytest.mark.forked
def test_whole_that_does_not_fit_is_said(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    given = plan(model, kv_cache_memory_bytes=1024 * GiB)

    lines = as_text(given).splitlines()

    (verdict,) = [line for line in lines if "does not fit" in line]
    assert verdict.endswith("too much, and activations come on top")
    assert not json.loads(as_json(given))["memory"]["need"]["fits"]


def test_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4)}, file)
    assert checkpoint_bytes(str(tmp_path)) == 16

    for content in (b"", b"12345678", struct.pack("<Q", 2) + b"[]"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model.safetensors: no safetensors file"):
            checkpoint_bytes(str(tmp_path))
