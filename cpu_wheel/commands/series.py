# SPDX-License-Identifier: Apache-2.0
"""Print the patch files of a release, in order."""

import argparse

from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    print(*load_release(settings.release).series, sep="\n")
