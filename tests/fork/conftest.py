# SPDX-License-Identifier: Apache-2.0
"""What the tests of the fork itself share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu_wheel import packager, steps
from cpu_wheel.fetch import fetch
from cpu_wheel.paths import DIST, ROOT
from cpu_wheel.pins import Release, load_release
from cpu_wheel.settings import Settings
from tests.fork.packaging_tools import Inputs, content

SETTINGS = Settings.from_environment()
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def release() -> Release:
    return load_release()


@pytest.fixture(scope="session")
def sdist(release: Release) -> Path:
    return fetch(release.sdist, SETTINGS.cache, SETTINGS.sdist)


@pytest.fixture(scope="session")
def native_wheel(release: Release) -> Path:
    return fetch(release.native_wheel, SETTINGS.cache, SETTINGS.native_wheel)


@pytest.fixture(scope="session")
def tree() -> Path:
    """The patched tree of the pinned release."""
    return steps.make_source(SETTINGS)


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel that `make` builds."""
    return steps.make_wheel(SETTINGS, DIST)


@pytest.fixture(scope="session")
def ours(tree: Path) -> dict[str, bytes]:
    """The files of the tree that the wheel is built from."""
    return content(tree)


@pytest.fixture(scope="session")
def inputs(
    release: Release, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Inputs:
    """What a packager starts from."""
    series = tmp_path_factory.mktemp("series") / "patches"
    packager.write_series(release, series)
    return Inputs(sdist, series, release.version)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this repository's files where nothing was built, in a path with a
    space."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    copy = tmp_path / "a checkout"
    for name in listing.stdout.splitlines():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return copy


@pytest.fixture
def environment(sdist: Path, native_wheel: Path) -> dict[str, str]:
    """The variables of a command that finds this Python's tools and the downloads."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CPU_WHEEL_SDIST": str(sdist),
        "CPU_WHEEL_NATIVE_WHEEL": str(native_wheel),
    }


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """Run a command in that environment, changed by the argument env."""

    def run(
        *command: str | Path, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(argument) for argument in command],
            env=environment | (env or {}),
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    return run
