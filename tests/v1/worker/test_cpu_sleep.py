# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine on CPU that sleeps gives memory back, and has it again once awake.

Each engine is a real one in a forked child, with a checkpoint that can be loaded again.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.platforms.test_cpu_kv_cache_ways_in import llama, write_model
from tests.v1.worker.test_cpu_kv_cache_commit import COMMITS, in_child, rss_anon
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

MiB = 1 << 20
BUDGET = 256 * MiB
LAYERS, KV_HEADS, HEAD_DIM = 8, 16, 256
BLOCK = 16 * MiB  # 128 tokens of 8 layers x 16 heads x 256 x K and V in bfloat16
VOCABULARY, HIDDEN = 262144, 64
WEIGHTS = 2 * VOCABULARY * HIDDEN * 2  # those that read tokens, and that write them

ARGUMENTS: dict[str, Any] = {
    "kv_cache_memory_bytes": BUDGET,
    "enable_sleep_mode": True,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": 128,
    "max_model_len": 640,
    "max_num_batched_tokens": 640,
    "max_num_seqs": 3,
}


def write_checkpoint(folder: Path, tied: bool) -> str:
    config = llama(LAYERS, KV_HEADS, HEAD_DIM) | {"tie_word_embeddings": tied}
    config |= {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    inner, heads = config["intermediate_size"], KV_HEADS * HEAD_DIM
    shapes = {
        "model.embed_tokens": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        shapes |= {
            f"{layer}input_layernorm": (HIDDEN,),
            f"{layer}post_attention_layernorm": (HIDDEN,),
            **{f"{layer}self_attn.{p}_proj": (heads, HIDDEN) for p in "qkv"},
            f"{layer}self_attn.o_proj": (HIDDEN, heads),
            f"{layer}mlp.gate_proj": (inner, HIDDEN),
            f"{layer}mlp.up_proj": (inner, HIDDEN),
            f"{layer}mlp.down_proj": (HIDDEN, inner),
        }
    folder.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(
            std=0.05, generator=random
        )
        for name, shape in shapes.items()
        if not (tied and name == "lm_head")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return write_model(folder, config)


@pytest.fixture(scope="module")
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with tied embeddings, or another one if a test asks for it."""
    folder, tied = tmp_path_factory.mktemp("model"), getattr(request, "param", True)
    # Torch's threads would not survive the forks of this process.
    return in_child("startup", lambda: write_checkpoint(folder, tied))


UNTIED = pytest.param(False, id="untied")


def generate(engine: LLM, budget: int = BUDGET) -> tuple[list[list[int]], int]:
    """Fill every block of a budget; return tokens and how many were cached."""
    requests = [
        {"prompt_token_ids": [(1 + n + 7 * i) % 500 for i in range(630)]}
        for n in range((budget // BLOCK - 1) // 5)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(requests, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(output.num_cached_tokens for output in outputs)


def kv_cache_of(worker: Any) -> tuple[list[int], bool]:
    """The addresses of a worker's KV cache, and whether anything is in it."""
    caches = worker.model_runner.kv_caches
    return [c.data_ptr() for c in caches], any(bool(c.any()) for c in caches)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def start(model: str, **arguments: Any) -> LLM:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return LLM(model, **(ARGUMENTS | arguments))


def is_sleeping(engine: LLM) -> bool:
    return engine.llm_engine.is_sleeping()


@pytest.mark.parametrize(
    ("level", "commit"),
    [
        (1, "on-use"),
        (2, "startup"),
        pytest.param(1, "startup", marks=pytest.mark.slow_test),
        pytest.param(2, "on-use", marks=pytest.mark.slow_test),
    ],
)
def test_memory_and_tokens(model: str, level: int, commit: str) -> None:
    def report() -> dict[str, Any]:
        engine = start(model)
        found: dict[str, Any] = {"started": rss_anon(), "tokens": []}
        (found["addresses"], _), *_ = engine.collective_rpc(kv_cache_of)
        for _ in range(2):
            found["tokens"].append(generate(engine))
            found["awake"] = rss_anon()
            engine.sleep(level=level)
            found["asleep"] = rss_anon(), is_sleeping(engine)
            (found["discarded"],) = engine.collective_rpc(kv_cache_of)
            engine.sleep(level=level)
            before = rss_anon()
            assert engine.wake_up()
            found["woken"] = rss_anon() - before, is_sleeping(engine)
        return found

    found = in_child(commit, report)

    # An engine that never held a cache.
    own = found["started"] - (BUDGET if commit == "startup" else 0)
    assert found["awake"] > own + 0.9 * BUDGET
    asleep, is_asleep = found["asleep"]
    assert is_asleep
    assert asleep < 1.05 * own - (0.9 * WEIGHTS if level == 2 else 0)
    assert found["discarded"] == (found["addresses"], False)
    taken, is_asleep = found["woken"]
    assert not is_asleep
    taken -= 0.9 * WEIGHTS if level == 2 else 0
    assert taken > (0.9 * BUDGET if commit == "startup" else -MiB)
    if (level, commit) == (1, "on-use"):
        assert taken < 8 * MiB
    # The second time no prefix is cached.
    assert found["tokens"][0] == found["tokens"][1]
    assert found["tokens"][0][1] == 0


@pytest.mark.slow_test
@pytest.mark.parametrize("model", [UNTIED], indirect=True)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_weights_by_name_as_on_gpu(model: str, eager: bool) -> None:
    """`wake_up` by tags leaves the weights to `reload_weights`."""

    def report() -> list[Any]:
        engine = start(model, enforce_eager=eager)
        before = generate(engine)
        engine.sleep(level=2)
        asleep = rss_anon()
        steps = [engine.wake_up(tags=["weights"]), rss_anon() - asleep]
        engine.collective_rpc("reload_weights")
        steps += [rss_anon() - asleep, engine.wake_up(tags=["kv_cache"])]
        return [*steps, before == generate(engine)]

    awake, woken, loaded, fully_awake, same = in_child("on-use", report)

    assert (awake, fully_awake, same) == (False, True, True)
    assert woken < 0.1 * WEIGHTS
    assert loaded > 0.9 * WEIGHTS


@pytest.mark.slow_test
@pytest.mark.parametrize(
    "arguments",
    [{"load_format": "dummy"}, {"sleep_preserve_parameter_names": ["*"]}],
    ids=["cannot-be-loaded", "preserved"],
)
def test_weights_that_stay(model: str, arguments: dict[str, Any]) -> None:
    def report() -> tuple[int, bool]:
        engine = start(model, **arguments)
        started, before = rss_anon(), generate(engine)
        engine.sleep(level=2)
        asleep = rss_anon()
        engine.wake_up()
        return started - asleep, before == generate(engine)

    given_back, same = in_child("on-use", report)

    assert given_back < 0.5 * WEIGHTS
    assert same


@pytest.mark.slow_test
def test_release_of_the_kv_cache_alone(model: str) -> None:
    def report() -> tuple[list[int], list[bool], bool]:
        engine = start(model)
        before = generate(engine)
        sizes, sleeping = [rss_anon()], []
        engine.sleep(level=0)
        engine.llm_engine.release_kv_cache_memory()
        sizes.append(rss_anon())
        sleeping.append(is_sleeping(engine))
        engine.wake_up(tags=["kv_cache"])
        sleeping.append(is_sleeping(engine))
        return sizes, sleeping, before == generate(engine)

    (awake, released), sleeping, same = in_child("startup", report)

    assert awake - released > 0.95 * BUDGET
    assert sleeping == [True, False]
    assert same


@pytest.mark.parametrize(
    ("connector", "refused"),
    [
        ("DecodeBenchConnector", True),
        pytest.param("ExampleConnector", False, marks=pytest.mark.slow_test),
    ],
)
def test_connector_that_registered_the_cache(
    model: str, tmp_path: Path, connector: str, refused: bool
) -> None:
    def report() -> tuple[str, int, int, bool]:
        config = KVTransferConfig(
            kv_connector=connector,
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
        engine = start(model, kv_transfer_config=config)
        before, error = rss_anon(), ""
        try:
            engine.sleep(level=1)
        except RuntimeError as refusal:
            error = str(refusal)
        asleep = rss_anon()
        awake = engine.wake_up()
        return error, before, asleep, awake

    error, before, asleep, awake = in_child("startup", report)

    assert awake
    if refused:
        assert f"{connector} has registered its memory" in error
        assert asleep > before - 0.1 * BUDGET
    else:
        assert error == ""
        assert asleep < before - 0.9 * BUDGET


@pytest.mark.slow_test
@pytest.mark.parametrize("commit", COMMITS)
def test_a_hundred_times(model: str, commit: str) -> None:
    """No growth, and the same tokens, while every block is filled each time."""

    def report() -> list[Any]:
        engine = start(model)
        found = []
        for _ in range(100):
            tokens = generate(engine)
            engine.sleep(level=1)
            found.append((tokens, rss_anon(), mappings()))
            engine.wake_up()
        return found

    found = in_child(commit, report)

    assert all(tokens == found[0][0] for tokens, _, _ in found)
    # After the first ones, which start threads.
    (_, rss, maps), (_, last_rss, last_maps) = found[5], found[-1]
    assert last_rss < rss + 4 * MiB
    assert last_maps < maps + 8
