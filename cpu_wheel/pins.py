# SPDX-License-Identifier: Apache-2.0
"""The pins of upstream.toml: what a release is built from."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.paths import PATCHES, ROOT


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

    def verify(self, path: Path) -> None:
        """Check a file against this pin.

        Raises:
            BuildError: The file is missing or has another hash.
        """
        try:
            actual = sha256(path)
        except (FileNotFoundError, IsADirectoryError):
            raise BuildError(f"{path}: no such file (expected {self.file})") from None
        if actual != self.sha256:
            raise BuildError(
                f"{path}: sha256 is {actual}, expected {self.sha256} "
                f"({self.file} as pinned in upstream.toml)"
            )


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
        whole_overlay: Whether it gets all files of the overlay: the pinned release
            and newer ones, whose engine the modules of the fork are written for.
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
    whole_overlay: bool

    def takes_torch(self, found: str) -> bool:
        """Return whether modules compiled with a torch suit: 2.14.1 does for 2.14.0."""
        return found.split(".")[:2] == self.torch.split(".")[:2]

    @property
    def native_wheel(self) -> Archive:
        """The wheel whose native modules are taken.

        Raises:
            BuildError: upstream.toml has none for this release.
        """
        if self.published_native_wheel is None:
            raise BuildError(
                f"release {self.version} has no native wheel in upstream.toml: its "
                "modules can only be compiled, which VLLM_USE_PRECOMPILED=1 rules out"
            )
        return self.published_native_wheel


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
    newest_first = list(pins["release"])
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
        whole_overlay=(
            newest_first.index(version) <= newest_first.index(pins["pinned"])
        ),
    )
