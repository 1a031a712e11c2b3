# SPDX-License-Identifier: Apache-2.0
"""Write the patched source tree."""

import argparse
import shutil
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="copy the tree there (a new folder)"
    )


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    tree = make_source(settings)
    if arguments.output:
        if arguments.output.exists():
            raise BuildError(f"{arguments.output} exists; name a new folder")
        shutil.copytree(tree, arguments.output, symlinks=True)
        tree = arguments.output
    print(tree)
