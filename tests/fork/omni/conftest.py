# SPDX-License-Identifier: Apache-2.0
"""What the tests with vllm-omni share. `make test-omni` installs it and runs them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cpu_wheel import install, steps
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import Release
from tests.fork.omni.models import write_qwen3_tts

OMNI = BUILD / "omni"
STAND_INS = Path(__file__).with_name("stand_ins")
EXAMPLE = ROOT / "examples" / "qwen3-tts-cpu.yaml"

Environment = dict[str, str]


class Job(NamedTuple):
    """A stage's process."""

    process: subprocess.Popen[bytes]
    result: Path
    log: Path

    @classmethod
    def start(cls, folder: Path, environment: Environment, *arguments: str) -> "Job":
        job, file, stage_id, model, *stand_in = arguments
        result = Path(tempfile.mkdtemp(dir=folder)) / "result.json"
        log = result.with_suffix(".log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.fork.omni.stage"),
                    *(job, file, stage_id, model, str(result), *stand_in),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(process, result, log)

    def found(self) -> Any:
        """Wait for what the job reports; its process stays."""
        while not self.result.exists():
            ended = self.process.poll() is not None
            if ended and not self.result.exists():
                pytest.fail(self.log.read_text(errors="replace")[-6000:])
            time.sleep(0.1)
        return json.loads(self.result.read_text())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


Start = Callable[..., Job]


class Planned(NamedTuple):
    """What `vllm kv-budget` returned and printed."""

    status: int
    stdout: str
    stderr: str


Plan = Callable[..., Planned]


@pytest.fixture(scope="session")
def fork() -> Environment:
    """The variables of a process that has vllm-omni beside the installed vLLM."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return {**environment, "PYTHONPATH": f"{OMNI}{os.pathsep}{STAND_INS / 'audio'}"}


@pytest.fixture(scope="session")
def vision(fork: Environment) -> Environment:
    """The same where models that see can be loaded."""
    path = os.pathsep.join([fork["PYTHONPATH"], str(STAND_INS / "vision")])
    return fork | {"PYTHONPATH": path}


@pytest.fixture(scope="session")
def stock(fork: Environment, release: Release, native_wheel: Path) -> Environment:
    """The same beside the native wheel as published."""
    folder = steps.stock_folder(release)
    install.unpack_wheel(native_wheel, folder)
    return {**fork, "PYTHONPATH": os.pathsep.join([str(folder), fork["PYTHONPATH"]])}


@pytest.fixture(scope="session")
def qwen3_tts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of Qwen3-TTS: a talker of 28 x 8 x 128."""
    return write_qwen3_tts(tmp_path_factory.mktemp("models") / "qwen3_tts")


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example, beside vllm-omni's own file as it asks for."""
    (tmp_path / "qwen3_tts.yaml").symlink_to(
        OMNI / "vllm_omni" / "deploy" / "qwen3_tts.yaml"
    )
    return Path(shutil.copy(EXAMPLE, tmp_path))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a job of stage.py; the process ends with the test."""
    with contextlib.ExitStack() as ends:

        def start(environment: Environment, *arguments: Any) -> Job:
            job = Job.start(tmp_path, environment, *map(str, arguments))
            ends.callback(job.end)
            return job

        yield start


def run_plans(
    environment: Environment, *plans: tuple[bool, list[object]]
) -> list[Planned]:
    """Run `vllm kv-budget` in one process, a time for each (on_16_cores, arguments)."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.fork.omni.plans"],
        cwd=ROOT,
        env=environment,
        input=json.dumps([(larger, list(map(str, rest))) for larger, rest in plans]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return [Planned(*result) for result in json.loads(process.stdout)]


@pytest.fixture(scope="session")
def plan(fork: Environment) -> Plan:
    """Run `vllm kv-budget MODEL --deploy FILE`, here or as on a larger machine."""

    def plan(*arguments: object, on_16_cores: bool = False) -> Planned:
        model, file, *options = arguments
        command = [model, "--deploy", file, *options]
        return run_plans(fork, (on_16_cores, command))[0]

    return plan
