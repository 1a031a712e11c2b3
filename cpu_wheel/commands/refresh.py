# SPDX-License-Identifier: Apache-2.0
"""Write the commits of the worktree back to patches/."""

import argparse

from cpu_wheel import queue
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    release = load_release(settings.release)
    print(*queue.refresh(release, queue.worktree(release)), sep="\n")
