# SPDX-License-Identifier: Apache-2.0
"""The pins of upstream.toml, and the settings that choose among them."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"


class BuildError(Exception):
    """What the user has to know, in one line: thing, value, what is accepted."""


@dataclass(frozen=True)
class Archive:
    """A file of a package index, known by name and hash.

    Attributes:
        project: The project's name on the index.
        file: The file's name.
        sha256: The hash of its content, in hexadecimal.
        setting: The environment variable that may name a local copy.
    """

    project: str
    file: str
    sha256: str
    setting: str


@dataclass(frozen=True)
class Release:
    """A vLLM release that a wheel can be built from.

    Attributes:
        version: Upstream's version, such as "0.32.0".
        wheel_version: The version of the wheel, such as "0.32.0+cpu.kv1".
        torch: The torch that the native modules need, such as "2.13.0+cpu".
        torch_index: The index to ask for it when the configured ones lack it.
        sdist: Upstream's sources.
        published_native_wheel: The wheel whose native modules are taken, if there
            is one yet.
        series_file: The quilt series that names the patches, in patches/.
        series: The patch files, in order.
        pinned: Whether patches must apply without an offset.
    """

    version: str
    wheel_version: str
    torch: str
    torch_index: str
    sdist: Archive
    published_native_wheel: Archive | None
    series_file: Path
    series: tuple[Path, ...]
    pinned: bool

    @property
    def native_wheel(self) -> Archive:
        """The wheel whose native modules are taken.

        Raises:
            BuildError: upstream.toml has none for this release.
        """
        if self.published_native_wheel is None:
            raise BuildError(
                f"release {self.version} has no native wheel in upstream.toml, so its "
                "modules must be compiled: set VLLM_USE_PRECOMPILED=0; "
                "`python -m cpu_wheel source` makes its patched tree"
            )
        return self.published_native_wheel


@dataclass(frozen=True)
class Settings:
    """What a user may choose; every door reads the same environment variables.

    Attributes:
        release: CPU_WHEEL_RELEASE, the vLLM release (default: the pinned one).
        cache: CPU_WHEEL_CACHE, the folder of downloads (default: build/downloads).
        tree: CPU_WHEEL_TREE, a tree that is patched already (default: none).
        precompiled: VLLM_USE_PRECOMPILED, whether the native modules come from the
            native wheel (default) or are compiled.
    """

    release: str | None = None
    cache: Path = ROOT / "build" / "downloads"
    tree: Path | None = None
    precompiled: bool = True

    @classmethod
    def from_environment(cls) -> "Settings":
        cache = os.environ.get("CPU_WHEEL_CACHE")
        tree = os.environ.get("CPU_WHEEL_TREE")
        precompiled = os.environ.get("VLLM_USE_PRECOMPILED", "").strip().lower()
        if precompiled not in ("", "0", "1", "false", "true"):
            raise BuildError(
                f"VLLM_USE_PRECOMPILED={precompiled!r}: expected 1, to take the native "
                "modules from the native wheel, or 0, to compile them"
            )
        return cls(
            release=os.environ.get("CPU_WHEEL_RELEASE") or None,
            cache=Path(cache).absolute() if cache else cls.cache,
            tree=Path(tree).absolute() if tree else None,
            precompiled=precompiled not in ("0", "false"),
        )


def read_series(series: Path) -> tuple[Path, ...]:
    """Return the patch files that a quilt series names, in order.

    Raises:
        BuildError: The series or one of its patches does not exist.
    """
    try:
        lines = series.read_text().splitlines()
    except FileNotFoundError:
        raise BuildError(f"{series}: the patch series does not exist") from None
    names = [line.split("#")[0].strip() for line in lines]
    patches = tuple(series.parent / name for name in names if name)
    for patch in patches:
        if not patch.is_file():
            name = patch.relative_to(series.parent)
            raise BuildError(f"{series} names {name}, which does not exist")
    return patches


def read_pins() -> dict[str, Any]:
    """Return the content of upstream.toml."""
    return tomllib.loads((ROOT / "upstream.toml").read_text())


def load_release(version: str | None = None) -> Release:
    """Return the pins of a release, by default of the pinned one.

    Raises:
        BuildError: upstream.toml has no such release.
    """
    pins = read_pins()
    version = version or pins["pinned"]
    try:
        pin = pins["release"][version]
    except KeyError:
        known = ", ".join(pins["release"])
        raise BuildError(
            f"release {version!r} is not in upstream.toml, which has: {known}"
        ) from None
    native_wheel = pin.get("native-wheel")
    return Release(
        version=version,
        wheel_version=f"{version}+cpu.kv{pins['revision']}",
        torch=f"{pin['torch']}+cpu",
        torch_index=pins["torch-index"],
        sdist=Archive(**pin["sdist"], setting="CPU_WHEEL_SDIST"),
        published_native_wheel=(
            Archive(**native_wheel, setting="CPU_WHEEL_NATIVE_WHEEL")
            if native_wheel
            else None
        ),
        series_file=PATCHES / pin["series"],
        series=read_series(PATCHES / pin["series"]),
        pinned=version == pins["pinned"],
    )
