# SPDX-License-Identifier: Apache-2.0
"""The blocks that are planned, beside the most that an engine uses, by kind of model.

`python -m benchmarks.kv_budget_peaks` runs two requests of full length at once in each
engine, in a forked child a kind, on the dummy models of the tests, and prints
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
budget and runs two requests of full length at once (`max_model_len` 512, a prompt of
488 tokens, `max_num_batched_tokens` 512). The null block is not counted.
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
        running, preemptions, peak = run(llm, kind, args["max_model_len"] - 24)
    return kind, budget.num_blocks - 1, peak, running, preemptions


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import tests.v1.core.kv_budget_engine  # noqa: F401 - once, before the forks

    rows = []
    for kind in KINDS:
        print(f"kv_budget_peaks: {kind} ...", file=sys.stderr, flush=True)
        rows.append(in_child(measure, kind=kind))
    head = ("kind", "planned", "most in use", "ran at once", "preemptions")
    print(HEAD.format(**place()))
    print(table(head, rows))


if __name__ == "__main__":
    main()
