# SPDX-License-Identifier: Apache-2.0
"""Compile the native modules, by upstream's setup.py and CMake.

The folder stays, so that an interrupted compilation goes on where it was.
"""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

from cyclonedx.model.component import Component

from cpu_wheel import contents, wheel
from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.pins import Release
from cpu_wheel.settings import Settings, inherited

VARIANTS = "VLLM_CPU_X86_VARIANTS"


def check_host() -> None:
    """Check that what compiles is installed; the compiler is CMake's to judge.

    Raises:
        BuildError: Something is missing; names what.
    """
    wheel.check_tools()
    if not wheel.installed_version("torch"):
        raise BuildError("torch is not installed, which the native modules link")
    if not shutil.which("cmake", path=search_path()):
        raise BuildError("cmake is not on the PATH, which compiles the native modules")


def search_path() -> str:
    """Return the PATH of a build: first the tools of the environment of this Python."""
    return f"{Path(sys.executable).parent}{os.pathsep}{inherited()['PATH']}"


def build_environment(version: str, epoch: int, settings: Settings) -> dict[str, str]:
    """Return the environment of a build from source; see wheel.build_environment."""
    onednn = settings.onednn
    return (
        {"CMAKE_BUILD_TYPE": "Release"}
        | wheel.build_environment(version, epoch)
        | {
            "PATH": search_path(),
            "VLLM_USE_PRECOMPILED": "0",
            "VLLM_CPU_BUNDLE_TCMALLOC": settings.bundle_tcmalloc,
            VARIANTS: settings.variants,
            **({"FETCHCONTENT_SOURCE_DIR_ONEDNN": str(onednn)} if onednn else {}),
            # Not needed on CPU, and a cargo on the PATH must not change the wheel.
            "CARGO": "false",
            "RUSTC": "false",
        }
    )


def update(tree: Path, folder: Path) -> None:
    """Make a folder's files those of a tree, so that only what differs is compiled.

    The time of what is copied is that of the copy: a file that is older than the one
    before must be compiled too.
    """
    for path in folder.glob("vllm/**/*.py"):
        if not (tree / path.relative_to(folder)).exists():
            path.unlink()
    for path in sorted(tree.rglob("*")):
        target = folder / path.relative_to(tree)
        if path.is_symlink() or path.is_dir():
            continue
        if not target.is_file() or target.read_bytes() != path.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def build(
    tree: Path,
    release: Release,
    epoch: int,
    settings: Settings,
    folder: Path,
    path: Path,
) -> None:
    """Build a wheel from source; a failure leaves none behind.

    Args:
        tree: The patched tree; it is copied, never written to.
        release: The release.
        epoch: The time of the wheel's members, in seconds since 1970.
        settings: What the user chose.
        folder: The folder that takes the log and the compilation's own folder.
        path: The wheel to make.

    Raises:
        BuildError: Upstream's build failed, or the wheel is not what it must be.
    """
    if settings.variants and VARIANTS not in (tree / "setup.py").read_text():
        raise BuildError(
            f"{VARIANTS} is for vLLM 0.31.0 and newer, {release.version} has no choice"
        )
    work = folder / f"compiled-{release.version}"
    update(tree, work)
    # What an earlier build put together, with other variants perhaps, and what CMake
    # remembers of it, such as a compiler or a source of oneDNN that was wrong.
    for pattern in ("lib*", "bdist*", "temp*/CMakeFiles/[0-9]*"):
        for stale in (work / "build").glob(pattern):
            shutil.rmtree(stale)
    for cache in work.glob("build/temp*/CMakeCache.txt"):
        cache.unlink()
    shutil.rmtree(work / "dist", ignore_errors=True)
    log = folder / f"{path.name}.log"
    environment = build_environment(release.wheel_version, epoch, settings)
    wheel.run_setup(work, work / "dist", False, environment, log)
    built = work / "dist" / path.name
    sbom = contents.make_sbom(release, epoch, components(work))
    modules = contents.COMPILED_MODULES
    wheel.finish(built, release.wheel_version, modules, epoch, sbom, path)


def components(work: Path) -> list[Component]:
    """Return what the native modules were made with: the compiler, and oneDNN.

    Args:
        work: The folder where they were compiled.
    """
    (cache,) = work.glob("build/temp*/CMakeCache.txt")
    folders = dict(
        re.findall(r"^oneDNN_(SOURCE|BINARY)_DIR:STATIC=(.+)$", cache.read_text(), re.M)
    )
    (compiler,) = cache.parent.glob("CMakeFiles/*/CMakeCXXCompiler.cmake")
    found = dict(
        re.findall(
            r'set\(CMAKE_CXX_COMPILER_(ID|VERSION) "(.+)"\)', compiler.read_text()
        )
    )
    version = Path(folders["BINARY"]) / "include/oneapi/dnnl/dnnl_version.h"
    numbers = re.findall(r"define DNNL_VERSION_[A-Z]+ +(\d+)", version.read_text())
    source = Path(folders["SOURCE"])
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source).as_posix()
        if file.is_file() and not name.startswith(".git/"):
            digest.update(f"{sha256(file)}  {name}\n".encode())
    return [
        contents.compiled_component(f"compiler: {found['ID']}", found["VERSION"], None),
        contents.compiled_component("oneDNN", ".".join(numbers), digest.hexdigest()),
    ]
