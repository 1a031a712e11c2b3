# SPDX-License-Identifier: Apache-2.0
"""What the installed release generates when it is served, and how fast it is.

`python -m benchmarks.generation` writes a checkpoint of fixed-seed weights, serves it
in float32 with `vllm serve`, asks for greedy tokens over HTTP and compares them with
what transformers generates from the same checkpoint.

`--against PYTHON` measures tokens a second instead: of this environment and of another
one, whose Python is run by that command, in turn. `--show` prints
docs/results/generation.md from benchmarks/results/generation.json.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks.report import store, stored, table
from cpu_wheel.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "generation.json"
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # or every token repeats the one before
    "tie_word_embeddings": False,
}
PROMPTS = [
    [(37 * i + 11 * j) % 500 + 3 for j in range(n)]
    for i, n in enumerate((5, 19, 130, 300))
]
TOKENS = 48
FAST_MODEL = MODEL | {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 8192,
}
REQUESTS, PREFILL, DECODE = 8, 512, 64
PASSES, ROUNDS = 3, 5
SERVED = (
    *("release", "torch", "transformers", "answered"),
    *("as transformers", "same checkpoint", "as 0.32.0"),
)
NAMES = {"prefill": "prefill, tokens a second", "decode": "decode, tokens a second"}


def about_engine(worker: Any) -> dict[str, str]:
    """Return the model runner of a worker, and the native module that it loaded."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "runner": type(worker.model_runner).__name__,
        "kernels": ", ".join(sorted(set(re.findall(r"/(_C\w*)\.\S*so$", maps, re.M)))),
    }


def versions() -> dict[str, str]:
    """Return the versions that decide what is generated."""
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def release() -> str:
    """Return the release of the vLLM that is installed."""
    import vllm

    return vllm.__version__.partition("+")[0]


def expected_tokens(folder: str) -> list[list[int]]:
    """Return the greedy tokens of transformers for each prompt, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def serve_and_compare() -> dict[str, Any]:
    """Serve the checkpoint and ask for each prompt; return what came back."""
    from tests.platforms.cpu_kv_cache_server import as_flags, serve
    from tests.platforms.cpu_kv_cache_utils import (
        process_environment,
        write_checkpoint,
    )

    with tempfile.TemporaryDirectory() as scratch:
        model = write_checkpoint(Path(scratch, "model"), MODEL)
        weights = Path(model, "model.safetensors").read_bytes()
        flags = as_flags(
            {
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "max_model_len": 1024,
                "kv_cache_memory_bytes": "256M",
            }
        )
        body = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"detokenize": False, "return_token_ids": True}
        command = ("serve", model, *flags)
        start = time.monotonic()
        with serve(Path(scratch), *command, environment=process_environment(None)) as s:
            started = time.monotonic() - start
            tokens = []
            for prompt in PROMPTS:
                answer = json.loads(s.ask("/v1/completions", body | {"prompt": prompt}))
                tokens.append(answer["choices"][0]["token_ids"])
            s.stop()
        return {
            "checkpoint": hashlib.sha256(weights).hexdigest(),
            "seconds to start": round(started),
            "tokens": tokens,
            "as transformers": tokens == expected_tokens(model),
        }


def measure() -> dict[str, Any]:
    """Return tokens a second of an engine in this process, medians of PASSES."""
    from tests.platforms.cpu_kv_cache_utils import write_model
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            write_model(Path(folder), FAST_MODEL),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
        )

    def seconds(prompt: int, tokens: int) -> float:
        prompts: list[Any] = [
            {"prompt_token_ids": [(37 * i + 11 * j) % 5000 + 3 for j in range(prompt)]}
            for i in range(REQUESTS)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(64, 4)
    prefill, decode = [], []
    for _ in range(PASSES):
        prefill.append(REQUESTS * PREFILL / seconds(PREFILL, 1))
        longer = seconds(16, 1 + DECODE)
        decode.append(REQUESTS * DECODE / (longer - seconds(16, 1)))
    (about,) = engine.collective_rpc(about_engine)
    return {
        "release": release(),
        **about,
        "torch": versions()["torch"],
        "prefill": round(statistics.median(prefill)),
        "decode": round(statistics.median(decode)),
    }


def compare_speed(other: Sequence[str]) -> list[dict[str, Any]]:
    """Measure this environment and another, in turn, each time in a new process."""
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    records = []
    for number in range(ROUNDS):
        pair = [[sys.executable], list(other)]
        for python in pair if number % 2 == 0 else reversed(pair):
            output = subprocess.run(
                [*python, "-m", "benchmarks.generation", "--once"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            (line,) = re.findall(r"^RESULT (.*)$", output, re.MULTILINE)
            print(line, file=sys.stderr, flush=True)
            records.append(json.loads(line))
    return records


def page(results: dict[str, Any]) -> str:
    """Return docs/results/generation.md."""
    served = [(r, v["served"]) for r, v in results["releases"].items() if "served" in v]
    first = next(s for r, s in served if r == "0.32.0")
    rows = [
        (
            release,
            s["torch"],
            s["transformers"],
            f"{sum(map(len, s['tokens']))} tokens",
            "yes" if s["as transformers"] else "no",
            "yes" if s["checkpoint"] == first["checkpoint"] else "no",
            "yes" if s["tokens"] == first["tokens"] else "no",
        )
        for release, s in served
    ]
    speed = []
    for release, value in results["releases"].items():
        for record in value.get("speed", [])[:1]:
            cells = []
            for name in NAMES:
                values = [r[name] for r in value["speed"]]
                middle = statistics.median(values)
                cells.append(f"{middle:.0f} ({min(values)} to {max(values)})")
            torch = record["torch"]
            speed.append((release, record["runner"], record["kernels"], torch, *cells))
    lengths = ", ".join(str(len(prompt)) for prompt in PROMPTS)
    return f"""# What releases generate, and how fast

`python -m benchmarks.generation --show` prints this page; without `--show` it measures.
{results["date"]}, {results["machine"]}.

A Llama of {MODEL["num_hidden_layers"]} layers with fixed-seed weights, served with
`vllm serve` in float32 and asked over HTTP for {TOKENS} greedy tokens after each of
{len(PROMPTS)} prompts of {lengths} tokens:

{table(SERVED, rows)}

Speed: a Llama of {FAST_MODEL["num_hidden_layers"]} layers with dummy weights in
bfloat16, {REQUESTS} requests at once, each a prompt of {PREFILL} tokens for prefill and
{DECODE} generated tokens for decode. {ROUNDS} processes of each release in turn on
one machine, each with the median of {PASSES} passes. Median of the processes, and
their range:

{table(("release", "model runner", "kernels", "torch", *NAMES.values()), speed)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.generation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status 1 when served tokens are not those of transformers.",
    )
    parser.add_argument("--against", metavar="PYTHON", help="a command, in one word")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="print the page")
    arguments = parser.parse_args()
    if arguments.show:
        print(page(json.loads(RESULTS.read_text())), end="")
        return 0
    if arguments.once:
        print("RESULT", json.dumps(measure()), flush=True)
        os._exit(0)  # the engine's threads do not end by themselves
    releases = stored(RESULTS)
    status = 0
    if arguments.against:
        found: dict[str, list[Any]] = {}
        for record in compare_speed(shlex.split(arguments.against)):
            found.setdefault(record["release"], []).append(record)
        for version, records in found.items():
            releases.setdefault(version, {})["speed"] = records
    else:
        served = versions() | serve_and_compare()
        releases.setdefault(release(), {})["served"] = served
        status = 0 if served["as transformers"] else 1
        print({k: v for k, v in served.items() if k != "tokens"})
    store(RESULTS, dict(sorted(releases.items(), reverse=True)))
    return status


if __name__ == "__main__":
    sys.exit(main())
