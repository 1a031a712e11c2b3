# SPDX-License-Identifier: Apache-2.0
"""Write the whole series of a release, the overlay as its last patch."""

import argparse
from pathlib import Path

from cpu_wheel.packager import write_series
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new one")


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    write_series(load_release(settings.release), arguments.folder.absolute())
