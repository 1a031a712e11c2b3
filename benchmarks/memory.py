# SPDX-License-Identifier: Apache-2.0
"""What VLLM_CPU_KVCACHE_COMMIT=on-use and sleep do to memory, start-up and speed.

`python -m benchmarks.memory` measures four parts and keeps every figure in
benchmarks/results/memory.json; `--show` prints docs/results/memory.md from there.

- memory: the resident memory of an engine at four points of its life, and how long
  it takes to start, by budget and with and without prefix caching.
- speed: tokens a second of CPU time, in passes over new pages and in later ones.
- budget: what `vllm serve` holds on a checkpoint of 1 GB, by budget, as RssAnon
  (what it wrote) and as VmRSS (mapped files too).
- sleep: the resident memory of an engine that is awake, asleep at level 1 and 2, and
  awake again, how long that takes, and what the first request then takes; and the
  same calls on stock vLLM.

A round measures `startup` and then `on-use`, in the next round the other way
around. A ratio compares figures of one round, and of one pass.

Speed is measured on one thread, in CPU time. With two, each parallel loop ends where
one thread waits for the other, busily: whatever else wants a core then stops both, and
passes of either mode took up to ninety times as long on a machine with other work.
The CPU time of one thread holds no waiting; it does hold what the kernel does for the
thread, such as the first touch of a page.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checks.report import dump, place, table
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings
from tests.platforms.cpu_kv_cache_child import in_child

RESULTS = ROOT / "benchmarks" / "results" / "memory.json"
HEAD = """# Memory, start-up and speed with the KV cache committed on use

`python -m benchmarks.memory --show` prints this page; `make bench-memory` measures it.
The [guide](../memory.md) says when to use `on-use`.

A model with the geometry of a speech model's talker and dummy weights: 28 layers, 8 KV
heads of 128, 14 MiB a block, 56 MiB a request of full length (504 tokens). Memory is
RssAnon unless a column says otherwise."""
ABOUT = {
    "memory": """One engine in one process. "burst" is after 24 distinct requests of
full length, two at a time; "idle" is two seconds later.""",
    "speed": """A budget of 1 GiB and one OpenMP thread. A pass is 2 prompts of full
length, 12 of 100 tokens, and decoding after prompts of 16 and of 384 tokens, two at a
time. A ratio compares the same pass of the two modes. In a pass over new pages, more
than half of what its full-length prompts wrote lay on untouched pages; in a later pass,
less than 5%.""",
    "budget": """The process of `vllm serve` that holds the cache, once started, with a
checkpoint of 1 GB written for the purpose (safetensors, memory-mapped while it is
read).""",
    "sleep": """An engine in one process, on one thread, with a checkpoint of tied
embeddings (32 MiB, which oneDNN packs too) that it can load again. 12 distinct requests
of full length before each sleep, 672 MiB of cache with prefix caching on. "stock" is
the native wheel as published, on which `sleep` and `wake_up` do nothing. "asleep 1 /
without a cache" divides by the engine's memory at the start less a committed cache.""",
}
MiB = 1 << 20
GiB = 1 << 30
MODES = ("startup", "on-use")
BUDGETS = (GiB // 2, GiB, 4 * GiB, 8 * GiB)
SLEEP_MODES = ("stock", *MODES)
SERVED_BUDGETS = (GiB // 4, GiB // 2, GiB, 2 * GiB, 4 * GiB)
BURST = 24
SLEEP_BURST = 12  # of full length, so 672 MiB with prefix caching on
PASSES = 10
Record = dict[str, Any]

# 28 layers x 8 KV heads x 128, a talker's: 14 MiB a block of 128 tokens, 4 blocks
# and so 56 MiB a request of full length.
LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128
TOKEN = LAYERS * KV_HEADS * HEAD_DIM * 2 * 2  # bytes of K and V in bfloat16
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
LOADS = ("prefill, full", "prefill, short", "decode, short", "decode, full")


def read_status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory of a process in bytes: RssAnon, RssFile and VmRSS."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {
        name: int(kib) << 10
        for name, kib in re.findall(r"(RssAnon|RssFile|VmRSS):\s+(\d+) kB", text)
    }


def make_engine(
    mode: str, budget: int, caching: bool, **arguments: Any
) -> tuple[Any, float]:
    """Start an engine in this process; return it and the seconds that it took.

    The model is one with dummy weights unless the arguments name another.
    """
    os.environ["VLLM_CPU_KVCACHE_COMMIT"] = mode
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tests.platforms.cpu_kv_cache_utils import llama
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        config = llama(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        start = time.monotonic()
        engine = LLM(
            kv_cache_memory_bytes=budget,
            enable_prefix_caching=caching,
            **({"model": folder} | ARGUMENTS | arguments),
        )
        return engine, time.monotonic() - start


def distinct_prompts(seed: int, prompts: int, length: int) -> list[Record]:
    """Return prompts that share no prefix."""
    requests = []
    for number in range(seed, seed + prompts):
        first, step = 1 + number % 499, 1 + number // 499
        ids = [first, step, *((first + step * i) % 509 for i in range(2, length))]
        requests.append({"prompt_token_ids": ids})
    return requests


def generate(
    engine: Any, seed: int, prompts: int, length: int, tokens: int
) -> tuple[float, int]:
    """Run requests that share no prefix.

    Returns:
        The seconds of CPU time that they took, and the bytes of pages that this
        process touched for the first time.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    requests = distinct_prompts(seed, prompts, length)
    before = resource.getrusage(resource.RUSAGE_SELF)
    engine.generate(requests, params, use_tqdm=False)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, (after.ru_minflt - before.ru_minflt) * resource.getpagesize()


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
    """Return tokens a second of CPU time by load, for each pass.

    Of each pass, "new" is the share of the KV cache of its full-length prompts that
    lay on pages which were never touched, and "waited" the seconds that passed for a
    second of CPU time: 1 on an idle machine.
    """
    import torch

    torch.set_num_threads(1)
    engine, _ = make_engine(mode, budget, caching)
    at_once = partial(generate, engine)
    for length in (16, SHORT, FULL):  # what only a first request does
        at_once(500, 1, length, 2)
    passes = []
    for number in range(PASSES):
        seed = 20 * number
        wall, cpu = time.monotonic(), time.process_time()
        full, touched = at_once(seed, 2, FULL, 1)
        short, _ = at_once(seed + 2, 12, SHORT, 1)
        few, _ = at_once(seed + 14, 2, 16, 32)
        many = at_once(seed + 16, 2, 384, 33)[0] - at_once(seed + 18, 2, 384, 1)[0]
        waited = (time.monotonic() - wall) / (time.process_time() - cpu)
        passes.append(
            {
                "new": touched / (2 * FULL * TOKEN),
                "waited": waited,
                "prefill, full": 2 * FULL / full,
                "prefill, short": 12 * SHORT / short,
                "decode, short": 2 * 32 / few,
                "decode, full": 2 * 32 / many,
            }
        )
    return {"passes": passes}


def measure_sleep(mode: str, budget: int, caching: bool, model: str) -> Record:
    """Return what an engine holds and takes around its sleep at level 1 and 2.

    Requests are measured in CPU time of one thread, sleep and wake-up in both.
    """
    import torch

    from vllm import SamplingParams

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False
    )
    arguments: Record = {"model": model, "load_format": "auto"}
    if mode != "stock":
        arguments["enable_sleep_mode"] = True
    engine, _ = make_engine(mode, budget, caching, **arguments)
    found: Record = {}

    def look(point: str) -> None:
        found[point] = read_status()["RssAnon"]

    def call(name: str, function: Callable[[], Any]) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        function()
        found[f"{name}, s"] = time.monotonic() - wall
        found[f"{name}, CPU s"] = time.process_time() - cpu

    def burst() -> list[Any]:
        prompts = distinct_prompts(1, SLEEP_BURST, FULL)
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    look("started")
    found["first request, CPU s"], _ = generate(engine, 100, 1, FULL, 8)
    tokens, same = burst(), True
    for level in (1, 2):
        look("awake")
        call(f"sleep {level}", partial(engine.sleep, level=level))
        look(f"asleep {level}")
        call(f"wake up {level}", engine.wake_up)
        look(f"woken {level}")
        request, _ = generate(engine, 100, 1, FULL, 8)
        found[f"first request after {level}, CPU s"] = request
        same = same and burst() == tokens
    return found | {"same tokens": same}


def measure_sleeper(mode: str, **arguments: Any) -> Record:
    found: Record
    if mode != "stock":
        found = in_child(measure_sleep, mode=mode, **arguments)
        return found
    release = load_release(Settings.from_environment().release)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.memory"),
            *("--stock", json.dumps({"mode": mode, **arguments})),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(BUILD / f"stock-{release.version}")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    return found


def checkpoint(folder: Path, hidden: int, inner: int, vocabulary: int) -> None:
    """Write the model with random weights; vLLM maps the file when it loads it."""
    from tests.platforms.cpu_kv_cache_utils import llama, write_checkpoint

    config = llama(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    config |= {"hidden_size": hidden, "intermediate_size": inner}
    config |= {"vocab_size": vocabulary, "tie_word_embeddings": True}
    write_checkpoint(folder, config)


def measure_server(mode: str, budget: int, model: Path) -> Record:
    """Return the memory of the process of `vllm serve` that holds the KV cache.

    That is the one with the most anonymous memory: it holds the weights too.
    """
    from tests.platforms.cpu_kv_cache_server import as_flags, serve
    from tests.platforms.cpu_kv_cache_utils import process_environment

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
    import tests.platforms.cpu_kv_cache_server  # noqa: F401 - once, before forks

    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        cases: list[tuple[Callable[..., Record], Record]]
        if part == "budget":
            model = Path(folder) / "model"
            # 1 GB.
            shape = {"hidden": 1024, "inner": 4096, "vocabulary": 1 << 15}
            in_child(checkpoint, folder=model, **shape)
            cases = [
                (
                    partial(measure_server, budget=budget, model=model),
                    {"budget": budget},
                )
                for budget in budgets
            ]
        elif part == "sleep":
            # 32 MiB of weights that read and write tokens, which are packed too.
            model = Path(folder) / "model"
            shape = {"hidden": 64, "inner": 64, "vocabulary": 1 << 18}
            in_child(checkpoint, folder=model, **shape)
            cases = [
                (
                    partial(
                        measure_sleeper,
                        budget=budget,
                        caching=caching,
                        model=str(model),
                    ),
                    {"budget": budget, "prefix caching": caching},
                )
                for budget in budgets
                for caching in (True, False)
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
        modes = SLEEP_MODES if part == "sleep" else MODES
        for number in rounds:
            order = modes if number % 2 == 0 else modes[::-1]
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


def quartiles(values: Iterable[float], form: str) -> str:
    """Return the median, and the quartiles below and above it."""
    values = list(values)
    if len(values) < 2:
        return ", ".join(map(form.format, values)) or "none"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{form} ({form} to {form})".format(middle, low, high)


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


def print_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    print(f"\n{table(head, rows)}")


def fit(records: Iterable[Record], key: str) -> str:
    """Return slope a GiB of budget and intercept of a figure, by least squares."""
    records = list(records)
    scale, digits, unit = (1, 2, "s") if key == "seconds" else (MiB, 0, "MiB")
    slope, intercept = statistics.linear_regression(
        [record["budget"] / GiB for record in records],
        [record[key] / scale for record in records],
    )
    sign = "-" if round(slope, digits) < 0 else "+"
    return (
        f"{intercept:,.{digits}f} {unit} {sign} {abs(slope):,.{digits}f} {unit} a GiB"
    )


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
        pairs: list[tuple[Record, Record]] = []
        for number in values_of(chosen, "round"):
            both = [select(chosen, round=number, mode=mode) for mode in MODES]
            if all(both):
                pairs += zip(*(found[0]["passes"] for found in both), strict=True)
        # A pass that is neither has pages of both kinds.
        over_new = [pair for pair in pairs if pair[1]["new"] > 0.5]
        later = [pair for pair in pairs if pair[1]["new"] < 0.05]
        rows += [
            (
                "on" if caching else "off",
                load,
                quartiles((startup[load] for startup, _ in pairs), "{:,.0f}"),
                *(
                    f"{quartiles(ratios, '{:.3f}')}, {len(ratios)}"
                    for group in (over_new, later)
                    for ratios in [[on[load] / startup[load] for startup, on in group]]
                ),
            )
            for load in LOADS
            if pairs
        ]
    waited = [once["waited"] for record in records for once in record["passes"]]
    print(f"\nSeconds for a second of CPU time: {spread(waited, '{:.2f}')}. Below,")
    print("median (quartiles), and the number of passes:")
    print_table(
        (
            *("prefix caching", "load", "startup, tokens a second of CPU time"),
            *("on-use / startup, new pages", "later passes"),
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


def show_sleep(records: list[Record]) -> None:
    points = ("started", "awake", "asleep 1", "woken 1", "asleep 2", "woken 2")
    seconds = ("sleep 1, s", "wake up 1, s", "sleep 2, s", "wake up 2, s")
    requests = ("first request", "first request after 1", "first request after 2")
    memory, times = [], []
    for caching in (True, False):
        for budget in values_of(records, "budget"):
            for mode in SLEEP_MODES:
                rows = select(records, prefix_caching=caching, budget=budget, mode=mode)
                if not rows:
                    continue
                case = ("on" if caching else "off", budget // MiB, mode)
                same = all(row["same tokens"] for row in rows)
                # Of an engine that never held a cache.
                cache = 0 if mode == "on-use" else budget
                asleep = [row["asleep 1"] / (row["started"] - cache) for row in rows]
                memory.append(
                    (
                        *case,
                        *(in_mib(rows, point) for point in points),
                        spread(asleep, "{:.2f}"),
                        "yes" if same else "no",
                    )
                )
                a_gib = (
                    r["sleep 1, s"] / (r["awake"] - r["asleep 1"]) * GiB for r in rows
                )
                taken = [[r[f"{k}, CPU s"] for k in requests] for r in rows]
                times.append(
                    (
                        *case,
                        *(spread((r[k] for r in rows), "{:.3f}") for k in seconds),
                        "–" if mode == "stock" else spread(a_gib, "{:.3f}"),
                        *(spread(each, "{:.3f}") for each in zip(*taken, strict=True)),
                        spread((after / first for first, after, _ in taken), "{:.2f}"),
                    )
                )
    head = ("prefix caching", "budget, MiB", "mode")
    last = ("asleep 1 / without a cache", "same tokens")
    print_table((*head, *points, *last), memory)
    in_cpu = (f"{name}, CPU s" for name in requests)
    ratios = ("sleep 1, s a GiB given back", *in_cpu, "after 1 / first")
    print_table((*head, *seconds, *ratios), times)


SHOW = {
    "memory": show_memory,
    "speed": show_speed,
    "budget": show_budget,
    "sleep": show_sleep,
}
DEFAULT_BUDGETS = {
    "memory": BUDGETS,
    "speed": (GiB,),
    "budget": SERVED_BUDGETS,
    "sleep": (GiB, 4 * GiB),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.memory",
        description="Measure the KV cache committed at start-up and on use.",
        epilog="Sizes are in MiB. Budgets that do not fit into memory are left out. "
        "Five rounds took 14 minutes for memory, 7 for speed and 20 for budget on "
        "two cores with light other work.",
    )
    parser.add_argument("--only", choices=SHOW, help="one part, not all four")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--add", action="store_true", help="keep what is stored too")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print docs/results/memory.md from what is stored",
    )
    parser.add_argument("--stock", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stock:
        found = measure_sleep(**json.loads(arguments.stock))
        print(f"\n{json.dumps(found)}", flush=True)
        os._exit(0)  # the engine's threads do not end by themselves
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
                RESULTS.write_text(dump(stored, depth=3) + "\n")
    print(HEAD)
    for part in parts:
        if part in stored:
            records = stored[part]["records"]
            if part == "speed" and any("new" not in r["passes"][0] for r in records):
                print("\nspeed: stored by another method, measure it again")
                continue
            rounds = len(values_of(records, "round"))
            print(f"\n## {part.capitalize()}\n\n{ABOUT[part]}\n")
            print(
                f"{stored[part]['date']}, {stored[part]['machine']}, {rounds} rounds,"
            )
            print("median (least to most):")
            SHOW[part](records)


if __name__ == "__main__":
    main()
