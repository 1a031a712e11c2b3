# SPDX-License-Identifier: Apache-2.0
"""What VLLM_CPU_KVCACHE_COMMIT=on-use does to memory, start-up and speed.

`python -m benchmarks.memory` measures three parts and keeps every figure in
docs/results/memory.json; `--show` prints the tables from there.

- memory: the resident memory of an engine at four points of its life, and how long
  it takes to start, by budget and with and without prefix caching.
- speed: tokens a second, in the first pass over the pool and in later ones.
- budget: what `vllm serve` holds on a checkpoint of 1 GB, by budget, as RssAnon
  (what it wrote) and as VmRSS (mapped files too).

A round measures `startup` and then `on-use`, in the next round the other way
around. A ratio compares figures of one round.
"""

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checks.junit import place
from cpu_wheel.pins import ROOT
from cpu_wheel.steps import BUILD

RESULTS = ROOT / "docs" / "results" / "memory.json"
MiB = 1 << 20
GiB = 1 << 30
MODES = ("startup", "on-use")
BUDGETS = (GiB // 2, GiB, 4 * GiB, 8 * GiB)
SERVED_BUDGETS = (GiB // 4, GiB // 2, GiB, 2 * GiB, 4 * GiB)
BURST = 24
PASSES = 3
Record = dict[str, Any]

# 28 layers x 8 KV heads x 128, a talker's: 14 MiB a block of 128 tokens, 4 blocks
# and so 56 MiB a request of full length.
LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": 128,
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 2,
}
FULL, SHORT = 496, 100  # tokens of a prompt


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory of a process in bytes: RssAnon, RssFile and VmRSS."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {
        name: int(kib) << 10
        for name, kib in re.findall(r"(RssAnon|RssFile|VmRSS):\s+(\d+) kB", text)
    }


def make_engine(mode: str, budget: int, caching: bool) -> tuple[Any, float]:
    """Start an engine in this process; return it and the seconds that it took."""
    os.environ["VLLM_CPU_KVCACHE_COMMIT"] = mode
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tests.platforms.test_cpu_kv_cache_ways_in import llama
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = llama(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.monotonic()
        engine = LLM(
            folder,
            kv_cache_memory_bytes=budget,
            enable_prefix_caching=caching,
            **ARGUMENTS,
        )
        return engine, time.monotonic() - start


def generate(engine: Any, seed: int, prompts: int, length: int, tokens: int) -> float:
    """Run requests that share no prefix, and return the seconds that they took."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    requests = []
    for number in range(seed, seed + prompts):
        first, step = 1 + number % 499, 1 + number // 499
        ids = [first, step, *((first + step * i) % 509 for i in range(2, length))]
        requests.append({"prompt_token_ids": ids})
    start = time.monotonic()
    engine.generate(requests, params, use_tqdm=False)
    return time.monotonic() - start


def measure_memory(mode: str, budget: int, caching: bool) -> Record:
    """Return seconds to start, and RssAnon at four points of an engine's life."""
    engine, seconds = make_engine(mode, budget, caching)
    found = {"seconds": seconds, "started": read_status()["RssAnon"]}
    generate(engine, 0, 1, FULL, 8)
    found["one request"] = read_status()["RssAnon"]
    generate(engine, 1, BURST, FULL, 8)
    found["burst"] = read_status()["RssAnon"]
    time.sleep(2)
    found["idle"] = read_status()["RssAnon"]
    return found


def measure_speed(mode: str, budget: int, caching: bool) -> Record:
    """Return tokens a second by load, for each pass over the pool."""
    engine, _ = make_engine(mode, budget, caching)
    generate(engine, 499, 1, 16, 2)  # what only a first request does
    passes = []
    for number in range(PASSES):
        seed = 100 * number
        at_once = partial(generate, engine)
        long = at_once(seed + 80, 2, 384, 65) - at_once(seed + 90, 2, 384, 1)
        passes.append(
            {
                "prefill, full": 16 * FULL / at_once(seed, 16, FULL, 1),
                "prefill, short": 48 * SHORT / at_once(seed + 20, 48, SHORT, 1),
                "decode, short": 2 * 96 / at_once(seed + 70, 2, 16, 96),
                "decode, full": 2 * 64 / long,
            }
        )
    return {"passes": passes}


def send(measure: Callable[..., Any], arguments: Any, out: Connection) -> None:
    out.send(measure(**arguments))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def in_child(measure: Callable[..., Any], **arguments: Any) -> Any:
    """Measure in a forked child.

    Raises:
        RuntimeError: The child ended without a result.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(measure, arguments, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        call = f"{measure.__name__}({arguments})"
        raise RuntimeError(f"{call} ended without a result") from None
    finally:
        child.join()


def write_checkpoint(folder: Path) -> None:
    """Write a Llama of 1 GB with random weights, which vLLM maps when it loads it."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, vocabulary, kv = 1024, 4096, 28, 32768, KV_HEADS * HEAD_DIM
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (kv, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, kv),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir()
    weights = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def measure_server(mode: str, budget: int, model: Path) -> Record:
    """Return the memory of the process of `vllm serve` that holds the KV cache.

    That is the one with the most anonymous memory: it holds the weights too.
    """
    from tests.platforms.test_cpu_kv_cache_server import as_flags, serve
    from tests.platforms.test_cpu_kv_cache_ways_in import process_environment

    flags = as_flags({k: v for k, v in ARGUMENTS.items() if k != "load_format"})
    environment = process_environment(None, VLLM_CPU_KVCACHE_COMMIT=mode)
    environment["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        with serve(
            Path(folder),
            *("serve", str(model), *flags, "--kv-cache-memory-bytes", str(budget)),
            environment=environment,
        ) as server:
            seconds = time.monotonic() - start
            found = {"seconds": seconds}
            for point in ("started", "one request"):
                processes = [read_status(member.pid) for member in server.members()]
                held = max(processes, key=lambda status: status["RssAnon"])
                found |= {f"{point}, {name}": size for name, size in held.items()}
                server.complete()
            server.stop()
    return found


def measure(
    part: str, rounds: Iterable[int], budgets: Iterable[int]
) -> Iterator[Record]:
    """Measure a part and yield a record for each engine."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    import tests.platforms.test_cpu_kv_cache_server  # noqa: F401 - once, before forks

    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        cases: list[tuple[Callable[..., Record], Record]]
        if part == "budget":
            model = Path(folder) / "model"
            in_child(write_checkpoint, folder=model)
            cases = [
                (
                    partial(measure_server, budget=budget, model=model),
                    {"budget": budget},
                )
                for budget in budgets
            ]
        else:
            function = measure_memory if part == "memory" else measure_speed
            cases = [
                (
                    partial(in_child, function, budget=budget, caching=caching),
                    {"budget": budget, "prefix caching": caching},
                )
                for budget in budgets
                for caching in (False, True)
            ]
        for number in rounds:
            order = MODES if number % 2 == 0 else MODES[::-1]
            for measure_one, case in cases:
                for mode in order:
                    load = os.getloadavg()[0]
                    record = {"round": number, "mode": mode, "load": load, **case}
                    record |= measure_one(mode=mode)
                    print(f"memory: {part} {record}", file=sys.stderr, flush=True)
                    yield record


def spread(values: Iterable[float], form: str = "{:,.0f}") -> str:
    """Return the median with least and most, if they differ as shown."""
    values = sorted(values)
    shown = [form.format(v) for v in (statistics.median(values), values[0], values[-1])]
    return shown[0] if len({*shown}) == 1 else "{} ({} to {})".format(*shown)


def in_mib(records: Iterable[Record], key: str) -> str:
    return spread(record[key] / MiB for record in records)


def select(records: Iterable[Record], **wanted: Any) -> list[Record]:
    return [
        r
        for r in records
        if all(r[key.replace("_", " ")] == value for key, value in wanted.items())
    ]


def values_of(records: Iterable[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(record[key] for record in records))


def print_table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    head = list(head)
    print(f"\n| {' | '.join(head)} |\n{'| --- ' * len(head)}|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def fit(records: Iterable[Record], key: str) -> str:
    """Return slope a GiB of budget and intercept of a figure, by least squares."""
    records = list(records)
    scale, form = (1, "{:.2f} s") if key == "seconds" else (MiB, "{:,.0f} MiB")
    slope, intercept = statistics.linear_regression(
        [record["budget"] / GiB for record in records],
        [record[key] / scale for record in records],
    )
    return f"{form.format(intercept)} + {form.format(slope)} a GiB"


def show_memory(records: list[Record]) -> None:
    points = ("started", "one request", "burst", "idle")
    print_table(
        ("prefix caching", "budget, MiB", "mode", "start, s", *points),
        (
            (
                "on" if caching else "off",
                budget // MiB,
                mode,
                spread((r["seconds"] for r in rows), "{:.2f}"),
                *(in_mib(rows, point) for point in points),
            )
            for caching in (False, True)
            for budget in values_of(records, "budget")
            for mode in MODES
            if (rows := select(records, prefix_caching=caching, budget=budget))
            and (rows := select(rows, mode=mode))
        ),
    )
    print_table(
        ("mode", "start, s", "RssAnon once started"),
        (
            (mode, fit(rows, "seconds"), fit(rows, "started"))
            for mode in MODES
            if (rows := select(records, mode=mode))
        ),
    )


def show_speed(records: list[Record]) -> None:
    rows = []
    for caching in (False, True):
        chosen = select(records, prefix_caching=caching)
        by_round = [select(chosen, round=n) for n in values_of(chosen, "round")]
        pairs = [
            [record["passes"] for mode in MODES for record in select(pair, mode=mode)]
            for pair in by_round
            if len(pair) == len(MODES)
        ]
        for load in pairs[0][0][0] if pairs else ():
            ratios = [
                [
                    on_use[load] / startup[load]
                    for startup, on_use in zip(*pair, strict=True)
                ]
                for pair in pairs
            ]
            rows.append(
                (
                    "on" if caching else "off",
                    load,
                    spread(once[load] for startup, _ in pairs for once in startup),
                    spread((ratio[0] for ratio in ratios), "{:.3f}"),
                    spread((r for ratio in ratios for r in ratio[1:]), "{:.3f}"),
                )
            )
    print_table(
        (
            *("prefix caching", "load", "startup, tokens a second"),
            *("on-use / startup, first pass", "later passes"),
        ),
        rows,
    )


def show_budget(records: list[Record]) -> None:
    keys = ("started, RssAnon", "started, VmRSS", "started, RssFile")
    print_table(
        ("mode", "budget, MiB", *keys),
        (
            (mode, budget // MiB, *(in_mib(rows, key) for key in keys))
            for mode in MODES
            for budget in values_of(records, "budget")
            if (rows := select(records, mode=mode, budget=budget))
        ),
    )
    print_table(
        ("mode", *keys[:2]),
        (
            (mode, *(fit(rows, key) for key in keys[:2]))
            for mode in MODES
            if (rows := select(records, mode=mode))
        ),
    )


SHOW = {"memory": show_memory, "speed": show_speed, "budget": show_budget}
DEFAULT_BUDGETS = {"memory": BUDGETS, "speed": (GiB,), "budget": SERVED_BUDGETS}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory",
        description="Measure the KV cache committed at start-up and on use.",
        epilog="Sizes are in MiB. Budgets that do not fit into memory are left out.",
    )
    parser.add_argument("--only", choices=SHOW, help="one part, not all three")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--add", action="store_true", help="keep what is stored too")
    parser.add_argument("--show", action="store_true", help="only show what is stored")
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else list(SHOW)
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.show:
        meminfo = Path("/proc/meminfo").read_text()
        free = int(meminfo.partition("MemAvailable:")[2].split()[0]) << 10
        for part in parts:
            records = (
                stored[part]["records"] if arguments.add and part in stored else []
            )
            first = 1 + max((r["round"] for r in records), default=-1)
            budgets = [b for b in DEFAULT_BUDGETS[part] if b + 3 * GiB < free]
            numbers = range(first, first + arguments.rounds)
            for record in measure(part, numbers, budgets):
                records.append(record)
                stored[part] = place() | {"records": records}
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    for part in parts:
        if part in stored:
            records = stored[part]["records"]
            rounds = len(values_of(records, "round"))
            print(
                f"\n{part}: {stored[part]['date']}, {stored[part]['machine']}, ", end=""
            )
            print(f"{rounds} rounds, median (least to most)")
            SHOW[part](records)


if __name__ == "__main__":
    main()
