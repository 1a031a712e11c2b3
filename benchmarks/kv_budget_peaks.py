# SPDX-License-Identifier: Apache-2.0
"""The blocks that are planned, beside the most that an engine uses, by kind of model.

`python -m benchmarks.kv_budget_peaks` runs two requests of full length at once in each
engine, in a forked child a kind, on the dummy models of the tests.
"""

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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


def measure(kind: str, channel: Connection) -> None:
    """Send the planned blocks without the null block, and what was counted."""
    from tests.v1.core.kv_budget_engine import engine_args, plan_for, run, start

    with tempfile.TemporaryDirectory() as folder:
        args = engine_args(Path(folder), kind)
        budget = plan_for(args).budget
        assert budget is not None
        llm = start(args, budget.num_bytes)
        result = run(llm, kind, args["max_model_len"] - 24)
    channel.send((budget.num_blocks - 1, *result))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


def main() -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    import tests.v1.core.kv_budget_engine  # noqa: F401 - once, before the forks

    context = multiprocessing.get_context("fork")
    print("| kind | planned | most in use | ran at once | preemptions |")
    print("| --- | --- | --- | --- | --- |")
    failed = []
    for kind in KINDS:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=measure, args=(kind, sender))
        child.start()
        sender.close()
        try:
            planned, running, preemptions, peak = receiver.recv()
            cells: tuple[Any, ...] = (kind, planned, peak, running, preemptions)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
        except EOFError:
            failed.append(kind)
        child.join()
    for kind in failed:
        print(f"kv_budget_peaks: no result of {kind}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
