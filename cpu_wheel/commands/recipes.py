# SPDX-License-Identifier: Apache-2.0
"""Write the patch lists, hashes and requirements that packaging/ repeats."""

import argparse

from cpu_wheel import recipes, steps
from cpu_wheel.paths import DIST
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def run(arguments: argparse.Namespace, settings: Settings) -> None:
    # Of the release alone: another tree or archive is not what is pinned.
    chosen = Settings(
        release=settings.release, cache=settings.cache, onednn=settings.onednn
    )
    tree, wheel = steps.make_source(chosen), steps.make_wheel(chosen, DIST)
    release = load_release(chosen.release)
    for path, text in recipes.written(release, tree, wheel).items():
        if text != path.read_text():
            path.write_text(text)
            print(path)
