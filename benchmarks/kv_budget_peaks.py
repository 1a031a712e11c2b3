# SPDX-License-Identifier: Apache-2.0
"""The blocks that are planned, beside the most that an engine uses, by kind of model.

`python -m benchmarks.kv_budget_peaks` runs two requests of full length in each engine,
in a forked child a kind, on the dummy models of the tests, and prints
docs/results/kv-budget-peaks.md.
"""

import math
import os
import sys
import tempfile
from pathlib import Path

from checks.report import place, table
from tests.platforms.cpu_kv_cache_child import in_child

HEAD = """# Planned blocks, and blocks in use

`python -m benchmarks.kv_budget_peaks` prints this page. Each engine has the planned
budget and runs two requests of full length (`max_model_len` 512,
`max_num_batched_tokens` 512): both with a prompt of 488 tokens at once, both with one
of 8, and one that is about to end when another comes with a prompt of full length. The
null block is not counted. The last column is an engine with 5% less, rounded up to
whole blocks: whether it preempts, lets a request wait, or does not start.
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


def serve(kind: str, less: float = 0) -> tuple[int, int, int, int] | None:
    """Run an engine with the planned budget, or with less, in all ways.

    Returns:
        The planned blocks without the null block, the most in use, the least that ran
        at once in one of these ways, and the preemptions; None if it does not start.

    """
    from tests.v1.core.kv_budget_engine import engine_args, plan_for, run, start

    with tempfile.TemporaryDirectory() as folder:
        args = engine_args(Path(folder), kind)
        budget = plan_for(args).budget
        assert budget is not None
        num_blocks = budget.num_blocks - math.ceil(less * budget.num_blocks)
        if num_blocks < budget.start_blocks:
            return None
        llm = start(args, num_blocks * budget.bytes_per_block)
        runs = [
            run(llm, kind, args["max_model_len"] - 24),
            run(llm, kind, 8),
            run(llm, kind, 8, late=True),
        ]
    return (
        budget.num_blocks - 1,
        max(found.peak_blocks for found in runs),
        min(found.running for found in runs),
        sum(found.preemptions for found in runs),
    )


def measure(kind: str) -> tuple[object, ...]:
    """Return a row of the table."""
    planned, peak, running, preemptions = in_child(serve, kind=kind)
    ratio = f"{planned / peak:.2f}"
    less = in_child(serve, kind=kind, less=0.05)
    if less is None:
        outcome = "does not start"
    elif less[3]:
        outcome = "preempts"
    else:
        outcome = "waits" if less[2] < running else "runs"
    return kind, planned, peak, ratio, running, preemptions, outcome


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import tests.v1.core.kv_budget_engine  # noqa: F401 - once, before the forks

    rows = []
    for kind in KINDS:
        print(f"kv_budget_peaks: {kind} ...", file=sys.stderr, flush=True)
        rows.append(measure(kind))
    head = ["kind", "planned", "most in use", "ratio", "ran at once", "preemptions"]
    head += ["with 5% less"]
    print(HEAD.format(**place()))
    print(table(head, rows))


if __name__ == "__main__":
    main()
