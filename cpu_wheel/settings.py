# SPDX-License-Identifier: Apache-2.0
"""What the environment says: no other module of this repository's reads it."""

import os
from dataclasses import dataclass
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.paths import BUILD
from cpu_wheel.pins import Release

# What a zip can hold: the years 1980 to 2107.
FIRST, LAST = 315532800, 4354819199


@dataclass(frozen=True)
class Settings:
    """What a user may choose, by the same variables whatever tool is called.

    Attributes:
        release: CPU_WHEEL_RELEASE, the vLLM release (default: the pinned one).
        sdist: CPU_WHEEL_SDIST, its sources (default: they are downloaded).
        native_wheel: CPU_WHEEL_NATIVE_WHEEL, its native modules (likewise).
        tree: CPU_WHEEL_TREE, a tree that is patched already (default: none).
        cache: CPU_WHEEL_CACHE, the folder of downloads (default: build/downloads).
        precompiled: VLLM_USE_PRECOMPILED, whether the native modules come from the
            native wheel or are compiled (default: None, from the wheel if the release
            has one).
        epoch: SOURCE_DATE_EPOCH, the time of the wheel's members in seconds since
            1970 (default: when upstream made the sdist).
        onednn: FETCHCONTENT_SOURCE_DIR_ONEDNN, its sources, for compiling.
        variants: VLLM_CPU_X86_VARIANTS, those to compile (default: all).
        bundle_tcmalloc: VLLM_CPU_BUNDLE_TCMALLOC, as upstream's build takes it.
    """

    release: str | None = None
    sdist: Path | None = None
    native_wheel: Path | None = None
    tree: Path | None = None
    cache: Path = BUILD / "downloads"
    precompiled: bool | None = None
    epoch: int | None = None
    onednn: Path | None = None
    variants: str = ""
    bundle_tcmalloc: str = "0"

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read the variables.

        Raises:
            BuildError: One has a value that is not accepted.
        """
        device = os.environ.get("VLLM_TARGET_DEVICE") or "cpu"
        if device != "cpu":
            raise BuildError(f"VLLM_TARGET_DEVICE={device!r}: only cpu is built here")
        precompiled = os.environ.get("VLLM_USE_PRECOMPILED", "").strip().lower()
        if precompiled not in ("", "0", "1", "false", "true"):
            raise BuildError(
                f"VLLM_USE_PRECOMPILED={precompiled!r}: expected 1, to take the native "
                "modules from the native wheel, or 0, to compile them"
            )
        return cls(
            release=os.environ.get("CPU_WHEEL_RELEASE") or None,
            sdist=read_path("CPU_WHEEL_SDIST"),
            native_wheel=read_path("CPU_WHEEL_NATIVE_WHEEL"),
            tree=read_path("CPU_WHEEL_TREE"),
            cache=read_path("CPU_WHEEL_CACHE") or cls.cache,
            precompiled=precompiled in ("1", "true") if precompiled else None,
            epoch=read_epoch(),
            onednn=read_path("FETCHCONTENT_SOURCE_DIR_ONEDNN"),
            variants=os.environ.get("VLLM_CPU_X86_VARIANTS", ""),
            bundle_tcmalloc=os.environ.get("VLLM_CPU_BUNDLE_TCMALLOC", "0"),
        )

    def compiles(self, release: Release) -> bool:
        """Whether native modules are compiled: as chosen, or as no wheel has them."""
        if self.precompiled is None:
            return release.published_native_wheel is None
        return not self.precompiled


def read_path(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).absolute() if value else None


def read_epoch() -> int | None:
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not FIRST <= int(text) <= LAST:
        raise BuildError(
            f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds since 1970 that a "
            f"zip can hold, {FIRST} to {LAST}"
        )
    return int(text)


def inherited(*without: str) -> dict[str, str]:
    """Return the environment for another program, but for variables that begin so."""
    return {k: v for k, v in os.environ.items() if not k.startswith(without)}
