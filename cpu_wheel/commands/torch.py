# SPDX-License-Identifier: Apache-2.0
"""Install the CPU build of torch that the release needs."""

import argparse

from cpu_wheel import compiled
from cpu_wheel.install import install_torch
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    release = load_release(settings.release)
    if settings.compiles(release):
        # Before a download that would be in vain.
        compiled.check_host(release)
    install_torch(release, settings.compiles(release))
