# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every entry point through which a KV cache budget reaches an engine on CPU.

Each way is taken with an explicit kv_cache_memory_bytes of 128 MiB against
VLLM_CPU_KVCACHE_SPACE=4 and with the variable alone at 0.125. An engine starts
in a process of its own, with the processes that it starts in turn, and reports
its blocks, its tokens and the bytes that each of its workers really holds. An LLM
in one process is in test_cpu_kv_cache_allocation.py, servers are in
test_cpu_kv_cache_server.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import TokenizersBackend

from tests.platforms.cpu_kv_cache_utils import (
    BUDGET,
    LENGTH,
    NOT_EAGER,
    PROMPT,
    REFERENCE_ARGUMENTS,
    REFERENCE_BLOCK,
    REFERENCE_BLOCKS,
    REFERENCE_MODEL,
    REFERENCE_TOKENS,
    STANDALONE_RUNNER,
    TWO_RANKS,
    GiB,
    MiB,
    budgets,
    generate,
    held,
    kill_group,
    llama,
    needs_speculative_decoding,
    needs_two_cores,
    process_environment,
    set_variable,
    share_of_memory,
    start,
    tail,
    write_model,
)
from vllm import LLM, AsyncEngineArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # up to 0.32.0
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

RESULT_WITHIN = 400
ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow_test

MLA: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "torch_dtype": "bfloat16",
}

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 256,
    "intermediate_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def run_here(
    folder: Path, job: str, arguments: dict[str, Any], environment: dict[str, str]
) -> Any:
    """Run one of cpu_kv_cache_jobs.py in a process of its own."""
    log, result = folder / "log", folder / "result.json"
    process = start(
        *(log, sys.executable, "-m", "tests.platforms.cpu_kv_cache_jobs"),
        *(job, json.dumps(arguments), str(result)),
        environment=environment,
        cwd=ROOT,
    )
    try:
        status = process.wait(RESULT_WITHIN)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no result after {RESULT_WITHIN} s, {tail(log)}")
    finally:
        kill_group(process)
    assert status == 0, tail(log)
    return json.loads(result.read_text())


def run_engine(
    folder: Path,
    variable: str | None,
    explicit: int | None,
    *,
    way: str = "sync",
    model: dict[str, Any] = REFERENCE_MODEL,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Start an engine in a process of its own, and return what it reports."""
    return run_here(
        folder,
        way,
        {
            "model": write_model(folder / "model", model),
            "kv_cache_memory_bytes": explicit,
            **(REFERENCE_ARGUMENTS | arguments),
        },
        process_environment(
            variable,
            VLLM_ENABLE_V1_MULTIPROCESSING="1",
            # What a worker holds is asked by sending it a function.
            VLLM_ALLOW_INSECURE_SERIALIZATION="1",
            **(environment or {}),
        ),
    )


def forked_engine(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    variable: str | None,
    explicit: int | None = None,
    *,
    model: dict[str, Any],
    **arguments: Any,
) -> LLM:
    """Start an engine in this process, which pytest has forked."""
    set_variable(monkeypatch, variable)
    return LLM(
        write_model(folder / "model", model),
        kv_cache_memory_bytes=explicit,
        **(REFERENCE_ARGUMENTS | arguments),
    )


@pytest.mark.parametrize(
    ("way", "variable", "explicit"),
    [
        pytest.param("sync", "4", BUDGET, id="sync-explicit-over-4", marks=SLOW),
        pytest.param("sync", "0.125", None, id="sync-variable-alone"),
        pytest.param("async", "4", BUDGET, id="async-explicit-over-4", marks=SLOW),
        pytest.param("async", "0.125", None, id="async-variable-alone", marks=SLOW),
    ],
)
def test_engine(tmp_path: Path, way: str, variable: str, explicit: int | None) -> None:
    found = run_engine(tmp_path, variable, explicit, way=way)

    assert found == {
        "bytes": BUDGET,
        "blocks": REFERENCE_BLOCKS,
        "tokens": REFERENCE_TOKENS[BUDGET],
        "ranks": [REFERENCE_BLOCKS * REFERENCE_BLOCK],
        "length": LENGTH,
    }


@SLOW
@needs_two_cores
@budgets
def test_tensor_parallel_budget_is_per_rank(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    """Each rank has half the KV heads, so that its budget holds twice the blocks."""
    found = run_engine(
        tmp_path,
        variable,
        explicit,
        environment=TWO_RANKS,
        tensor_parallel_size=2,
    )

    blocks = 2 * REFERENCE_BLOCKS
    assert found["bytes"] == BUDGET
    assert found["blocks"] == blocks
    assert found["tokens"] == 2 * REFERENCE_TOKENS[BUDGET]
    assert found["ranks"] == [blocks * REFERENCE_BLOCK // 2] * 2
    assert found["length"] == LENGTH


@SLOW
@needs_two_cores
def test_tensor_parallel_ranks_share_no_latent_cache(tmp_path: Path) -> None:
    """MLA keeps one latent vector a token, which every rank has whole."""
    bytes_per_token = MLA["num_hidden_layers"] * (512 + 64) * 2

    found = run_engine(
        tmp_path,
        "4",
        BUDGET,
        model=MLA,
        environment=TWO_RANKS,
        tensor_parallel_size=2,
    )

    first, second = found["ranks"]
    assert first == second
    # A block is 16 or 128 tokens, which the host decides.
    assert BUDGET - 128 * bytes_per_token < first <= BUDGET
    assert found["tokens"] * bytes_per_token <= first
    assert (found["tokens"] + 2 * 128) * bytes_per_token > first
    assert found["length"] == LENGTH


@SLOW
@needs_two_cores
def test_without_a_budget_each_rank_takes_its_share(tmp_path: Path) -> None:
    """Both ranks of a node take it: two shares of the node's memory are used."""
    found = run_engine(
        tmp_path,
        None,
        None,
        environment=TWO_RANKS,
        tensor_parallel_size=2,
        gpu_memory_utilization=share_of_memory(2 * GiB),
    )

    first, second = found["ranks"]
    assert first == second
    assert 2 * BUDGET < first < 2 * GiB
    log = (tmp_path / "log").read_text()
    assert log.count("with 2.0 GiB requested memory for the worker") == 2
    assert found["length"] == LENGTH


@SLOW
@pytest.mark.forked
def test_two_engines_on_one_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One with a budget, then one with a share of memory; both serve."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    engine = forked_engine(
        *(monkeypatch, tmp_path, "4", 64 * MiB),
        model=REFERENCE_MODEL,
        max_model_len=512,
    )

    found = run_engine(
        tmp_path, None, None, gpu_memory_utilization=share_of_memory(2 * GiB)
    )

    assert "GiB memory was consumed by non-kv usages" in (tmp_path / "log").read_text()
    assert 2 * BUDGET < sum(found["ranks"]) < 2 * GiB
    assert found["length"] == LENGTH
    assert engine.collective_rpc(held) == [36 * REFERENCE_BLOCK]
    assert generate(engine) == LENGTH


@SLOW
@needs_two_cores
@budgets
def test_pipeline_parallel_budget_is_per_rank(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    """Of the 7 layers of a group a rank has at most 4: a block takes 1 MiB there."""
    found = run_engine(
        tmp_path,
        variable,
        explicit,
        environment=TWO_RANKS,
        pipeline_parallel_size=2,
        **NOT_EAGER,
    )

    assert found == {
        "bytes": BUDGET,
        "blocks": 128,
        "tokens": 3855,
        "ranks": [BUDGET] * 2,
        "length": LENGTH,
    }


@SLOW
@needs_two_cores
@budgets
def test_pipeline_stage_with_most_layers_decides(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    """A block takes 512 KiB a layer: 85 blocks fit a stage of 3 layers."""
    found = run_engine(
        tmp_path,
        variable,
        explicit,
        model=llama(layers=4, kv_heads=8, head_dim=128),
        environment=TWO_RANKS | {"VLLM_PP_LAYER_PARTITION": "1,3"},
        pipeline_parallel_size=2,
        **NOT_EAGER,
    )

    assert found["bytes"] == BUDGET
    assert found["blocks"] == 85
    assert found["ranks"] == [85 * MiB // 2, 3 * 85 * MiB // 2]
    assert found["length"] == LENGTH


@SLOW
@needs_two_cores
def test_pipeline_parallel_does_not_generate_eagerly(tmp_path: Path) -> None:
    """The engine starts within its budget, and its first request ends it."""
    with pytest.raises(AssertionError, match="the end of the log"):
        run_engine(
            tmp_path, "4", BUDGET, environment=TWO_RANKS, pipeline_parallel_size=2
        )

    log = (tmp_path / "log").read_text()
    assert "KV cache size: 3,855 tokens" in log, tail(tmp_path / "log")
    assert "assert self.intermediate_tensors is not None" in log


@pytest.mark.forked
@needs_speculative_decoding
@budgets
def test_speculative_decoding_with_ngram(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    explicit: int | None,
) -> None:
    engine = forked_engine(
        *(monkeypatch, tmp_path, variable, explicit),
        model=REFERENCE_MODEL,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
        },
    )

    cache_config = engine.llm_engine.vllm_config.cache_config
    assert cache_config.num_gpu_blocks == REFERENCE_BLOCKS
    assert cache_config.kv_cache_size_tokens == REFERENCE_TOKENS[BUDGET]
    assert engine.collective_rpc(held) == [REFERENCE_BLOCKS * REFERENCE_BLOCK]
    assert generate(engine) == LENGTH


@pytest.mark.forked
@needs_speculative_decoding
@budgets
def test_speculative_decoding_with_a_draft_model(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    explicit: int | None,
) -> None:
    """Two layers of the target and one of the draft, 256 KiB a block each."""
    draft = write_model(tmp_path / "draft", llama(1, kv_heads=4, head_dim=128))

    engine = forked_engine(
        *(monkeypatch, tmp_path, variable, explicit),
        model=llama(2, kv_heads=4, head_dim=128),
        speculative_config={
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 8,
        },
    )

    assert engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == 170
    assert engine.collective_rpc(held) == [170 * 3 * MiB // 4]
    assert generate(engine) == LENGTH


@pytest.mark.skipif(
    not STANDALONE_RUNNER, reason="other model runners decode speculatively"
)
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding_is_rejected_by_name(tmp_path: Path, method: str) -> None:
    model = write_model(tmp_path / "model", llama(2, kv_heads=4, head_dim=128))
    speculative = {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        draft = llama(1, kv_heads=4, head_dim=128)
        speculative["model"] = write_model(tmp_path / "draft", draft)
    arguments = REFERENCE_ARGUMENTS | {
        "model": model,
        "speculative_config": speculative,
    }

    with pytest.raises(ValueError, match="not yet support: speculative decoding"):
        EngineArgs(**arguments).create_engine_config()


@pytest.mark.forked
@pytest.mark.parametrize(
    ("variable", "explicit"),
    [
        pytest.param("4", None, id="variable-alone"),
        pytest.param("4", BUDGET, id="explicit-over-4"),
        pytest.param(None, None, id="nothing"),
    ],
)
def test_encoder_only_model_holds_no_cache(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    explicit: int | None,
) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = TokenizersBackend(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "model")

    engine = forked_engine(
        *(monkeypatch, tmp_path, variable, explicit),
        model=BERT,
        runner="pooling",
        skip_tokenizer_init=False,  # a pooling LLM always asks for a tokenizer
        max_model_len=512,
        max_num_batched_tokens=512,
        gpu_memory_utilization=share_of_memory(3 * GiB),
    )

    assert sum(engine.collective_rpc(held)) == 0
    assert len(engine.embed(PROMPT)[0].outputs.embedding) == 256


@pytest.mark.forked
def test_pooling_asks_for_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Tokenizer not available"):
        forked_engine(
            *(monkeypatch, tmp_path, "4", BUDGET),
            model=BERT,
            runner="pooling",
            max_model_len=512,
            max_num_batched_tokens=512,
        )


@pytest.mark.forked
def test_data_parallel_in_one_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="not supported for single-process usage"):
        forked_engine(
            *(monkeypatch, tmp_path, "4", BUDGET),
            model=REFERENCE_MODEL,
            data_parallel_size=2,
        )


@pytest.mark.forked
@pytest.mark.parametrize(
    ("variable", "explicit", "blocks"),
    [
        pytest.param("0.4", None, 273, id="variable-0.4"),
        pytest.param("2", 400_000_000, 254, id="explicit-over-2"),
    ],
)
def test_whole_blocks_of_the_budget_are_held(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    explicit: int | None,
    blocks: int,
) -> None:
    engine = forked_engine(
        *(monkeypatch, tmp_path, variable, explicit),
        model=llama(24, kv_heads=2, head_dim=64),
        max_model_len=256,
    )

    assert engine.llm_engine.vllm_config.cache_config.num_gpu_blocks == blocks
    assert engine.collective_rpc(held) == [blocks * 3 * MiB // 2]


@pytest.mark.forked
def test_budget_above_free_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        forked_engine(*(monkeypatch, tmp_path, "1000000", None), model=REFERENCE_MODEL)

    assert "Available memory" in str(error.value)
    assert "--kv-cache-memory-bytes" in str(error.value)
    assert "VLLM_CPU_KVCACHE_SPACE" in str(error.value)


@pytest.mark.forked
@pytest.mark.parametrize("variable", [None, "4"], ids=["alone", "over-4"])
def test_only_an_explicit_budget_is_checked_against_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None
) -> None:
    """All of the memory is never free, so a share of 1.0 would be refused."""
    engine = forked_engine(
        *(monkeypatch, tmp_path, variable, 64 * MiB),
        model=REFERENCE_MODEL,
        max_model_len=512,
        gpu_memory_utilization=1.0,
    )

    assert engine.collective_rpc(held) == [36 * REFERENCE_BLOCK]


@pytest.mark.forked
def test_share_of_memory_that_is_not_free_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # From 0.33.0 on it is refused when the cache is sized, not before.
    refusal = "less than (desired CPU memory utilization|requested memory for kv)"
    with pytest.raises(ValueError, match=refusal):
        forked_engine(
            *(monkeypatch, tmp_path, None),
            model=REFERENCE_MODEL,
            gpu_memory_utilization=1.0,
        )


@budgets
def test_copies_of_a_configuration_keep_the_budget(
    tmp_path: Path, variable: str, explicit: int | None
) -> None:
    arguments = REFERENCE_ARGUMENTS | {
        "model": write_model(tmp_path / "model", REFERENCE_MODEL),
        "kv_cache_memory_bytes": explicit,
    }

    found = run_here(tmp_path, "copies", arguments, process_environment(variable))

    assert found == dict.fromkeys(found, BUDGET)
    assert {"sent", "sent and rebuilt"} < found.keys()


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """The parser of `vllm serve`."""
    return make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("134217728", 128 * MiB),
        ("128M", 128 * MiB),
        ("131072K", 128 * MiB),
        ("1G", 1024 * MiB),
        ("128m", 128_000_000),
        ("0.125g", 125_000_000),
        ("0.5g", 500_000_000),
        (" 128M ", 128 * MiB),
    ],
)
def test_flag(parser: FlexibleArgumentParser, text: str, size: int) -> None:
    # With HF_HUB_OFFLINE a model that is not a folder is looked up.
    arguments = parser.parse_args(["--model", ".", "--kv-cache-memory-bytes", text])

    assert AsyncEngineArgs.from_cli_args(arguments).kv_cache_memory_bytes == size


@pytest.mark.parametrize("text", ["0.125G", "0.5G", "128.5M", "128MiB", "1e6", "lots"])
def test_flag_is_refused(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--kv-cache-memory-bytes", text])

    assert stop.value.code == 2
    assert "--kv-cache-memory-bytes" in capsys.readouterr().err.splitlines()[-1]
