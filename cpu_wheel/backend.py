# SPDX-License-Identifier: Apache-2.0
"""The PEP 517 backend: `pip wheel .`, `pip install .`, `python -m build --wheel`.

Needs nothing but Python until it builds, so that it can refuse at once.
"""

import sys
import tomllib
from typing import Any, NoReturn

from cpu_wheel.__main__ import main
from cpu_wheel.errors import BuildError
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings


def get_requires_for_build_wheel(
    config_settings: dict[str, Any] | None = None,
) -> list[str]:
    """Return what an isolated build environment must hold (PEP 517)."""
    try:
        release = load_release(Settings.from_environment().release)
    except BuildError as error:
        sys.exit(f"cpu_wheel: {error}")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [*groups["build"], f"torch=={release.torch}"]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel into a folder and return its file name (PEP 517)."""
    from cpu_wheel.wheel import wheel_name

    if status := main(["wheel", "--dist-dir", wheel_directory]):
        sys.exit(status)
    settings = Settings.from_environment()
    release = load_release(settings.release)
    return wheel_name(release.wheel_version, not settings.compiles(release))


def build_sdist(
    sdist_directory: str, config_settings: dict[str, Any] | None = None
) -> NoReturn:
    """Refuse: upstream's sources are fetched, so an sdist of this would lack them."""
    sys.exit(
        "cpu_wheel: there is no sdist of this repository, which holds patches and no "
        "sources; build the wheel (`python -m build --wheel`) or write the patched "
        "tree (`python -m cpu_wheel source`)"
    )


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> NoReturn:
    """Refuse: the folder vllm/ here holds only what the fork adds."""
    sys.exit(
        "cpu_wheel: an editable install is not possible, as vllm/ here holds only what "
        "the fork adds; use `pip install .`, or edit and test in the tree that "
        "`make worktree` makes"
    )
