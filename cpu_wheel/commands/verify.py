# SPDX-License-Identifier: Apache-2.0
"""Check where each file of a wheel comes from."""

import argparse
import dataclasses
import sys
from pathlib import Path

from cpu_wheel import contents
from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path, metavar="WHEEL")


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    release = load_release(settings.release)
    contents.read_wheel(arguments.wheel, release)  # before anything is fetched
    # The one who verifies says so, never the wheel; and against our own tree.
    compiled = settings.compiles(release)
    kinds, wrong = contents.verify(
        arguments.wheel,
        release,
        sdist=fetch(release.sdist, settings.cache, settings.sdist),
        native_wheel=(
            None
            if compiled
            else fetch(release.native_wheel, settings.cache, settings.native_wheel)
        ),
        tree=make_source(dataclasses.replace(settings, tree=None)),
    )
    if compiled:
        print(
            "cpu_wheel: the native modules were compiled: only the wheel's own "
            "RECORD vouches for them",
            file=sys.stderr,
        )
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    if wrong:
        print(*wrong, sep="\n")
        raise BuildError(f"{arguments.wheel}: {len(wrong)} files, see above")
