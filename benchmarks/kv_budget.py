# SPDX-License-Identifier: Apache-2.0
"""What planning a KV cache budget takes: time and memory, as ratios in one run.

`python -m benchmarks.kv_budget` imports what the command needs of vLLM, builds the
configuration and plans, for a geometry of 28 layers and one of 80 in turns, each time
in a process of its own, takes the medians, and prints docs/results/kv-budget.md. Within
a process the clock is compared, between two the processor time, which other load on the
machine disturbs less. Then whole commands beside the help of another one, which
imports what all subcommands need, and beside the import of torch alone, below which
none of them can be.

A command is measured with all files in memory and, as root, after they were dropped
from it.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from checks.report import place, table
from cpu_wheel.paths import ROOT
from cpu_wheel.settings import inherited

MiB = 1 << 20
MEMORY_LIMIT = 300 * MiB
COMMAND_LIMIT = 1.2
HELP_LIMIT = 0.5
PLAN_LIMIT = 0.85
GEOMETRY_LIMIT = 1.1

DROP_CACHES = Path("/proc/sys/vm/drop_caches")

HEAD = """# What `vllm kv-budget` takes

`python -m benchmarks.kv_budget` prints this page. A ratio is taken within one run, as
the median of {runs} runs. The command plans a geometry of 28 layers and one of 80.
{date}, {machine}:
"""

COMMANDS = """Whole commands: the median of {runs} runs with all files in memory, and of
{cold_runs} right after they were dropped from it, each with the least and the most.
MODEL has 28 layers. "The first time" nothing is known yet of the model's class; later
vLLM reads it from a cache on disk. Importing torch is a part of every command.
"""

# Prints the seconds since the start, of the clock and of the processor, at the end of
# each stage, and the process's peak of resident bytes after the first and the last.
STAGES = """
import json, resource, sys, time
def now():
    return {"clock": time.perf_counter() - start, "cpu": time.process_time() - begin}
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start, begin = time.perf_counter(), time.process_time()
import vllm.entrypoints.kv_budget as kv_budget
from vllm.usage.usage_lib import UsageContext
result = {"import": now(), "import bytes": peak()}
args = kv_budget.EngineArgs(model=sys.argv[1], max_model_len=2048, max_num_seqs=2)
with kv_budget.quiet():
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    result["configuration"] = now()
    assert kv_budget.make_plan(config).budget is not None
print(json.dumps(result | {"plan": now(), "plan bytes": peak()}))
"""


KINDS = ("clock", "cpu")
PLAN_BYTES = itemgetter("plan bytes")


class Row(NamedTuple):
    """A figure, and the most that it may be."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def geometry(layers: int) -> dict[str, Any]:
    """A model as the talker of Qwen3-TTS: 112 KiB a token with 28 layers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "vocab_size": 3072,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }


def measure_plan(model: Path) -> dict[str, Any]:
    """Import, configure and plan in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", STAGES, str(model)],
        capture_output=True,
        check=True,
        cwd=model,
        env=inherited("VLLM_"),
        text=True,
    )
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def measure_command(*command: str | Path, cold: bool = False) -> dict[str, float]:
    """Return the seconds that a command takes."""
    if cold:
        os.sync()
        DROP_CACHES.write_text("3")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        command, capture_output=True, check=True, cwd=ROOT, env=inherited("VLLM_")
    )
    clock = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"clock": clock, "cpu": cpu}


def spread(values: list[float]) -> str:
    """Return the median, with the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kv_budget",
        description="Time and memory of planning a KV cache budget, as ratios.",
        epilog="Exit status 1 when one of them is above its limit.",
    )
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--cold-runs", type=int, metavar="N", help="default: 3 as root")
    arguments = parser.parse_args()
    if arguments.cold_runs is None:
        arguments.cold_runs = 3 if os.access(DROP_CACHES, os.W_OK) else 0

    with tempfile.TemporaryDirectory() as folder:
        models = {layers: Path(folder, str(layers)) for layers in (28, 80)}
        for layers, model in models.items():
            model.mkdir()
            (model / "config.json").write_text(json.dumps(geometry(layers)))
        runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in models}
        # Nothing is known yet of the model's class, as in a new container.
        new = ("sh", "-c", 'VLLM_CACHE_ROOT=$(mktemp -d -p "$0") exec "$@"', folder)
        vllm = Path(sys.executable).with_name("vllm")
        plan = ("kv-budget", models[28], "--max-model-len", "2048")
        commands: dict[str, tuple[str | Path, ...]] = {
            "python -c 'import torch'": (sys.executable, "-c", "import torch"),
            "vllm serve --help": (vllm, "serve", "--help"),
            "vllm kv-budget --help": (vllm, "kv-budget", "--help"),
            "vllm kv-budget MODEL": (vllm, *plan),
            "vllm kv-budget MODEL, the first time": (*new, vllm, *plan),
        }
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        cold: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for model in models.values():
            measure_plan(model)  # fills the caches on disk
        for number in range(arguments.runs):
            for layers, model in models.items():
                runs[layers].append(measure_plan(model))
            for name, command in commands.items():
                seconds[name].append(measure_command(*command))
            done = f"{number + 1} of {arguments.runs} rounds"
            print(f"kv_budget: {done}", file=sys.stderr)
        for _ in range(arguments.cold_runs):
            for name, command in commands.items():
                cold[name].append(measure_command(*command, cold=True))

    def median(layers: int, value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(value, runs[layers]))

    def whole(run: dict[str, Any]) -> float:
        return float(run["plan"]["cpu"])

    def of_configuration(run: dict[str, Any]) -> float:
        return float(run["plan"]["clock"] / run["configuration"]["clock"])

    def of_command(name: str, kind: str) -> float:
        return statistics.median(run[kind] for run in seconds[name])

    rows = [
        Row(
            "command, of import and configuration",
            median(28, of_configuration),
            COMMAND_LIMIT,
        ),
        Row(
            "processor time with 80 layers, of that with 28",
            median(80, whole) / median(28, whole),
            GEOMETRY_LIMIT,
        ),
        Row(
            "peak memory with 80 layers, of that with 28",
            median(80, PLAN_BYTES) / median(28, PLAN_BYTES),
            GEOMETRY_LIMIT,
        ),
        Row(
            "peak memory above the import, of 300 MiB",
            median(80, lambda run: run["plan bytes"] - run["import bytes"])
            / MEMORY_LIMIT,
            1,
        ),
        *(
            Row(
                f"processor time of {name}, of that of vllm serve --help",
                of_command(name, "cpu") / of_command("vllm serve --help", "cpu"),
                limit,
            )
            for name, limit in (
                ("vllm kv-budget --help", HELP_LIMIT),
                ("vllm kv-budget MODEL", PLAN_LIMIT),
            )
        ),
    ]
    cells = ((row.name, f"{row.value:.2f}", f"{row.limit:.2f}") for row in rows)
    print(HEAD.format(**place(), runs=arguments.runs))
    print(table(("figure", "ratio", "limit"), cells))
    for layers in runs:
        stages = [
            f"{stage} {median(layers, lambda run: run[stage]['clock']):.2f} s"  # noqa: B023
            for stage in ("import", "configuration", "plan")
        ]
        peak = f"{median(layers, PLAN_BYTES) / MiB:.0f} MiB"
        print(f"\n{layers} layers, since the start: {', '.join(stages)}; {peak}")
    print()
    print(COMMANDS.format(**vars(arguments)))
    times = [
        [
            f"`{name}`",
            *(spread([run[kind] for run in seconds[name]]) for kind in KINDS),
            spread([run["clock"] for run in cold[name]]) if cold[name] else "–",
        ]
        for name in commands
    ]
    print(table(("command", "warm, s", "CPU time, s", "cold, s"), times))
    for row in rows:
        if not row.met:
            print(f"kv_budget: above its limit: {row.name}", file=sys.stderr)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
