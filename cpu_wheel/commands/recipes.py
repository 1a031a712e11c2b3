# SPDX-License-Identifier: Apache-2.0
"""Write the patch lists, hashes and requirements that packaging/ repeats."""

import argparse

from cpu_wheel import recipes, steps
from cpu_wheel.paths import DIST
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    pinned = Settings(cache=settings.cache)
    tree, wheel = steps.make_source(pinned), steps.make_wheel(pinned, DIST)
    for path, text in recipes.written(load_release(), tree, wheel).items():
        if text != path.read_text():
            path.write_text(text)
            print(path)
