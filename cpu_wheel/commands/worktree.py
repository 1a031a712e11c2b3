# SPDX-License-Identifier: Apache-2.0
"""Make a git repository to edit and to test, one commit a patch."""

import argparse

from cpu_wheel import queue
from cpu_wheel.fetch import fetch
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    release = load_release(settings.release)
    folder = queue.worktree(release)
    pin = release.published_native_wheel
    queue.make_worktree(
        fetch(release.sdist, settings.cache, settings.sdist),
        release,
        folder,
        importable=True,
        native_wheel=fetch(pin, settings.cache, settings.native_wheel) if pin else None,
    )
    print(folder)
