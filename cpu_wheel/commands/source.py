# SPDX-License-Identifier: Apache-2.0
"""Write the patched source tree."""

import argparse

from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_source


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    print(make_source(settings))
