# SPDX-License-Identifier: Apache-2.0
"""The blocks that are planned, beside the most that an engine uses, by kind of model.

`python -m benchmarks.kv_budget_peaks` runs two requests of full length in each engine,
in a forked child a kind, on the dummy models of the tests, and prints
docs/results/kv-budget-peaks.md.
"""

import os
import sys
import tempfile
from pathlib import Path

from checks.report import place, table
from tests.platforms.cpu_kv_cache_child import in_child

HEAD = """# Planned blocks, and blocks in use

`python -m benchmarks.kv_budget_peaks` prints this page. Each engine has the planned
budget and runs two requests of full length (`max_model_len` 512,
`max_num_batched_tokens` 512): both with a prompt of 488 tokens at once, and one that is
about to end when another comes with a prompt of full length. The null block is not
counted.
{date}, {machine}:
"""
KINDS = (
    "full",
    "multi-query",
    "mla",
    "fp8",
    "draft",
    "eagle",
    "mtp",
    "reference",
    "reference-no-hybrid",
    "alternating",
    "sliding",
    "sinks",
    "chunked-local",
    "linear-hybrid",
    "linear-hybrid-no-prefix",
    "mamba-hybrid",
    "mamba",
    "short-conv",
    "encoder-decoder",
)


def measure(kind: str) -> tuple[object, ...]:
    """Return what was planned without the null block, and what was counted."""
    from tests.v1.core.kv_budget_engine import engine_args, plan_for, run, start

    with tempfile.TemporaryDirectory() as folder:
        args = engine_args(Path(folder), kind)
        budget = plan_for(args).budget
        assert budget is not None
        llm = start(args, budget.num_bytes)
        runs = [
            run(llm, kind, args["max_model_len"] - 24),
            run(llm, kind, 8, late=True),
        ]
    planned, peak = budget.num_blocks - 1, max(found.peak_blocks for found in runs)
    running = max(found.running for found in runs)
    preemptions = sum(found.preemptions for found in runs)
    return kind, planned, peak, f"{planned / peak:.2f}", running, preemptions


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import tests.v1.core.kv_budget_engine  # noqa: F401 - once, before the forks

    rows = []
    for kind in KINDS:
        print(f"kv_budget_peaks: {kind} ...", file=sys.stderr, flush=True)
        rows.append(in_child(measure, kind=kind))
    head = ("kind", "planned", "most in use", "ratio", "ran at once", "preemptions")
    print(HEAD.format(**place()))
    print(table(head, rows))


if __name__ == "__main__":
    main()
