# SPDX-License-Identifier: Apache-2.0
"""Build the wheel."""

import argparse
from pathlib import Path

from cpu_wheel.paths import DIST
from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_wheel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dist-dir",
        type=Path,
        metavar="DIR",
        default=DIST,
        help="the folder that takes the wheel (default: dist)",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    print(make_wheel(settings, arguments.dist_dir.absolute()))
