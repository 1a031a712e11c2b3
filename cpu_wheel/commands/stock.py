# SPDX-License-Identifier: Apache-2.0
"""Unpack the native wheel as published, for comparison."""

import argparse

from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_stock


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    print(make_stock(settings))
