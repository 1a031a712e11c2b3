# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real control groups of version 1 with a memory limit, and processes in them.

It takes root, and the memory controller mounted as version 1.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.platforms.cpu_kv_cache_utils import REFERENCE_ARGUMENTS

MiB = 1 << 20
GiB = 1 << 30


def memory_controller() -> Path | None:
    """Return where the memory controller of version 1 is mounted, if it is."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.startswith("cgroup ") and "memory" in rest.split()[-1].split(","):
            return Path(fields.split()[4])
    return None


def why_not() -> str | None:
    """Return what is missing here to make a group, None if nothing is."""
    if os.geteuid() != 0:
        return "needs root, to make control groups"
    controller = memory_controller()
    if controller is None:
        return "needs the memory controller mounted as control groups version 1"
    if not os.access(controller, os.W_OK):
        return f"needs {controller} mounted so that it can be written to"
    return None


needs_groups = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Group(NamedTuple):
    """A control group of the test's own."""

    folder: Path

    def limit(self, size: int) -> None:
        (self.folder / "memory.limit_in_bytes").write_text(str(size))

    def usage(self) -> int:
        return int((self.folder / "memory.usage_in_bytes").read_text())

    def kills(self) -> int:
        text = (self.folder / "memory.oom_control").read_text()
        return int(dict(map(str.split, text.splitlines()))["oom_kill"])

    def command(self, *command: str, mounted: bool = False) -> Sequence[str]:
        """Return a command that runs in the group.

        Args:
            command: The command.
            mounted: Whether it sees the group as the root of all groups, as in a
                container.

        """
        script = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        if mounted:
            controller = memory_controller()
            mount = f'mount --bind "{self.folder}" "{controller}" && exec "$@"'
            command = ("unshare", "--mount", "sh", "-c", mount, "sh", *command)
        return ("sh", "-c", script, "sh", *command)


@contextlib.contextmanager
def control_group(limit: int | None = None, above: Group | None = None) -> Iterator:
    """Make a group, and remove it and all processes that are left in it."""
    parent = above.folder if above else memory_controller()
    assert parent is not None
    group = Group(parent / f"vllm-test-{uuid.uuid4().hex[:12]}")
    group.folder.mkdir()
    try:
        if limit is not None:
            group.limit(limit)
        yield group
    finally:
        for _ in range(100):
            for pid in (group.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            try:
                group.folder.rmdir()
                break
            except OSError:  # a process has not ended yet
                time.sleep(0.1)
        else:
            raise RuntimeError(f"{group.folder} cannot be removed")


class Outcome(NamedTuple):
    """How an engine ended that was started in a group."""

    status: int
    num_blocks: int | None
    error: str


ENGINE = """
import json, os, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    arguments = json.loads(sys.argv[1])
    generate = arguments.pop("generate", False)
    try:
        engine = LLM(**arguments)
        if generate:
            params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
            engine.generate({"prompt_token_ids": list(range(1, 100))}, params)
        blocks = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
        print("OUTCOME", json.dumps([blocks, ""]), flush=True)
    except Exception as error:
        print("OUTCOME", json.dumps([None, str(error)]), flush=True)
    sys.stdout.flush()
    os._exit(0)
"""


def engine_in(
    group: Group,
    model: str,
    *,
    mounted: bool = False,
    env: dict[str, str] | None = None,
    before: str = "",
    **arguments: Any,
) -> Outcome:
    """Start an engine in a group.

    Args:
        group: The group.
        model: The folder of a model, of which the weights are dummies.
        mounted: As for `Group.command`.
        env: Changes of the environment.
        before: Python statements to run in the process first.
        arguments: Those of `LLM`.

    Returns:
        How it ended: killed processes have a status below 0, or 137.

    """
    defaults = REFERENCE_ARGUMENTS | {"max_num_batched_tokens": 2048}
    text = json.dumps({"model": model, **defaults, **arguments})
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **(env or {}),
    }
    result = subprocess.run(
        group.command(sys.executable, "-c", before + ENGINE, text, mounted=mounted),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in result.stdout.splitlines():
        if line.startswith("OUTCOME "):
            return Outcome(
                result.returncode, *json.loads(line.removeprefix("OUTCOME "))
            )
    return Outcome(result.returncode, None, result.stderr[-2000:])


def fill_page_cache(group: Group, file: Path, size: int) -> None:
    """Write and read a file in a group, so that its page cache is charged to it."""
    script = 'head -c "$1" /dev/zero > "$2" && sync "$2" && cat "$2" > /dev/null'
    command = group.command("sh", "-c", script, "sh", str(size), str(file))
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"control groups: {reason}")
