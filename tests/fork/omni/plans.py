# SPDX-License-Identifier: Apache-2.0
"""The `vllm kv-budget` command, run for each of the JSON list on standard input.

Each is [on_16_cores, arguments]; the first is whether the machine is one of 16 cores
and 64 GiB instead of this one. Prints a JSON list of [status, stdout, stderr].
"""

import contextlib
import io
import json
import sys
from typing import Any

from vllm.entrypoints.cli import kv_budget as cli
from vllm_kv_budget_deploy import command
from vllm_kv_budget_deploy.cores import Machine, read_machine

LARGER = Machine(cores={0: list(range(16))}, memory={0: 64 << 30})


def run(on_16_cores: bool, arguments: list[str]) -> tuple[Any, str, str]:
    machine = (lambda: LARGER) if on_16_cores else read_machine
    setattr(command, "read_machine", machine)  # noqa: B010 - imported there
    status: Any = None
    with (
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            status = cli.run(arguments)
        except SystemExit as end:
            status = end.code
    return status, stdout.getvalue(), stderr.getvalue()


if __name__ == "__main__":
    results = [run(*plan) for plan in json.load(sys.stdin)]
    print(json.dumps(results))
