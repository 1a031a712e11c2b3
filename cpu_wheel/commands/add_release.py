# SPDX-License-Identifier: Apache-2.0
"""Pin a release in upstream.toml and report which patches do not apply."""

import argparse

from cpu_wheel import releases
from cpu_wheel.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", metavar="X", help="the release, such as 0.32.0")


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    print(releases.add(arguments.version, settings.cache))
