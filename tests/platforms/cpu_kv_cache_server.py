# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A vllm command that serves, for a test."""

import json
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import regex as re

from tests.platforms.cpu_kv_cache_utils import kill_group, start, tail

VLLM = Path(sysconfig.get_path("scripts")) / "vllm"
READY_WITHIN = 300
STOPPED_WITHIN = 60


def as_flags(arguments: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(str(value))
    return flags


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()

    def complete(self) -> dict[str, Any]:
        """Ask for eight tokens after a prompt of token ids."""
        body = {"prompt": list(range(1, 20)), "max_tokens": 8, "ignore_eos": True}
        return json.loads(self.ask("/v1/completions", body | {"detokenize": False}))

    def cache_config(self) -> list[dict[str, str]]:
        """The labels of vllm:cache_config_info, of each engine."""
        return [
            dict(re.findall(r'(\w+)="([^"]*)"', line))
            for line in self.ask("/metrics").splitlines()
            if line.startswith("vllm:cache_config_info{")
        ]

    def members(self) -> list[psutil.Process]:
        """The running processes that the server consists of."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> None:
        """End the server with SIGTERM; nothing of it may stay."""
        members = self.members()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            pytest.fail(f"runs on after SIGTERM, {tail(self.log)}")
        assert status == 0, f"status {status}, {tail(self.log)}"
        _, alive = psutil.wait_procs(members, timeout=10)
        alive = [
            process
            for process in alive
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        assert not alive, f"still there: {alive}, {tail(self.log)}"


def anonymous_memory(process: psutil.Process) -> int:
    """RssAnon of a process, which a KV cache would be part of, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def serve(folder: Path, *command: str, environment: dict[str, str]) -> Iterator[Server]:
    """Run a vllm command that serves until it is ready, and kill what is left."""
    port = free_port()
    log = folder / "log"
    process = start(
        *(log, VLLM, *command, "--host", "127.0.0.1", "--port", str(port)),
        environment=environment,
    )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + READY_WITHIN
        while True:
            try:
                server.ask("/health")
                break
            except OSError:
                assert process.poll() is None, f"did not start, {tail(log)}"
                assert time.monotonic() < deadline, f"not ready, {tail(log)}"
                time.sleep(0.2)
        yield server
    finally:
        kill_group(process)
