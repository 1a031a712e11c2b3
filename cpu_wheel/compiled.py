# SPDX-License-Identifier: Apache-2.0
"""Compile the native modules, by upstream's setup.py and CMake, once for each input.

They go into an archive laid out as a native wheel is, from which wheels are then
built. The folder stays, so that an interrupted compilation goes on where it was.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cpu_wheel import contents, host, wheel
from cpu_wheel.errors import BuildError
from cpu_wheel.files import making, sha256
from cpu_wheel.pins import Release
from cpu_wheel.settings import Settings, inherited

VARIANTS = "VLLM_CPU_X86_VARIANTS"
ONEDNN = "FETCHCONTENT_SOURCE_DIR_ONEDNN"
# What of a tree is compiled, and by what.
SOURCES = ("CMakeLists.txt", "setup.py", "cmake/**/*", "csrc/**/*")
# In the archive: what the modules were made with, by name: version and digest.
MADE_WITH = "made-with.json"


def check_host(release: Release) -> None:
    """Check that what compiles a release is installed.

    Raises:
        BuildError: Something is missing; names what.
    """
    if lacks := host.missing(host.COMPILE):
        raise BuildError(f"{lacks} (to compile vLLM {release.version})")
    wheel.check_tools()


def check_torch(release: Release) -> str:
    """Return the version of the torch that the native modules are to be linked with.

    Raises:
        BuildError: It is not of the series that the release needs, such as 2.14.
    """
    found = wheel.installed_version("torch") or "none"
    if not release.takes_torch(found):
        raise BuildError(
            f"torch {found} is installed for {sys.executable}, {release.torch} is "
            "needed: run `python -m cpu_wheel torch`"
        )
    return found


def build_environment(version: str, epoch: int, settings: Settings) -> dict[str, str]:
    """Return the environment of a compilation; see wheel.build_environment."""
    return (
        {"CMAKE_BUILD_TYPE": "Release"}
        | wheel.build_environment(version, epoch)
        | {
            "PATH": host.search_path(),
            "VLLM_USE_PRECOMPILED": "0",
            "VLLM_CPU_BUNDLE_TCMALLOC": settings.bundle_tcmalloc,
            VARIANTS: settings.variants,
            **({ONEDNN: str(settings.onednn)} if settings.onednn else {}),
            # Not needed on CPU, and a cargo on the PATH must not change the wheel.
            "CARGO": "false",
            "RUSTC": "false",
        }
    )


def native_key(tree: Path, torch: str, settings: Settings) -> str:
    """Return a hash of what native modules are made from.

    Args:
        tree: The patched tree.
        torch: The version of the torch that is linked.
        settings: What the user chose.
    """
    environment = inherited()
    compiler = [*host.compiler(), "--version"]
    names = ("CC", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_ARGS")
    made_from = [
        tree_digest(tree, *SOURCES),
        tree_digest(settings.onednn) if settings.onednn else "named by CMake",
        subprocess.run(compiler, capture_output=True, text=True, check=False).stdout,
        torch,
        settings.variants,
        settings.bundle_tcmalloc,
        *(environment.get(name, "") for name in names),
    ]
    return hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:12]


def tree_digest(folder: Path, *patterns: str) -> str:
    """Return a hash of the names and contents of a folder's files, but for git's."""
    digest = hashlib.sha256()
    for file in sorted({f for p in patterns or ["**/*"] for f in folder.glob(p)}):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not name.startswith(".git/"):
            digest.update(f"{sha256(file)}  {name}\n".encode())
    return digest.hexdigest()


def update(tree: Path, folder: Path) -> None:
    """Make a folder's files those of a tree, so that only what differs is compiled.

    The time of what is copied is that of the copy: a file that is older than the one
    before must be compiled too.
    """
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
    archive: Path,
) -> None:
    """Compile the native modules of a tree; a failure leaves no archive.

    Args:
        tree: The patched tree; it is copied, never written to.
        release: The release.
        epoch: See wheel.build_environment.
        settings: What the user chose.
        folder: The folder that takes the log and the compilation's own folder.
        archive: The archive to make.

    Raises:
        BuildError: Upstream's build failed.
    """
    if settings.variants and VARIANTS not in (tree / "setup.py").read_text():
        raise BuildError(
            f"{VARIANTS} is for vLLM 0.31.0 and newer, {release.version} has no choice"
        )
    work = folder / f"compiled-{release.version}"
    update(tree, work)
    # What an earlier build put together, with other variants perhaps, and what CMake
    # remembers of it, such as a compiler or a source of oneDNN that was wrong.
    for pattern in ("lib*", "temp*/CMakeFiles/[0-9]*"):
        for stale in (work / "build").glob(pattern):
            shutil.rmtree(stale)
    for cache in work.glob("build/temp*/CMakeCache.txt"):
        cache.unlink()
    log = folder / f"{work.name}.log"
    environment = build_environment(release.wheel_version, epoch, settings)
    try:
        wheel.run_setup(work, ["build_ext"], environment, log)
    except BuildError as error:
        if settings.onednn or "onednn" not in str(error).lower():
            raise
        raise BuildError(
            f"{error}; set {ONEDNN} to a source tree of oneDNN {onednn_version(tree)}"
        ) from None
    (built,) = work.glob("build/lib*")
    with making(archive) as partial, zipfile.ZipFile(partial, "w") as natives:
        natives.writestr(MADE_WITH, json.dumps(made_with(work)))
        for module in sorted(built.rglob("*.so*")):
            natives.write(module, module.relative_to(built))


def onednn_version(tree: Path) -> str:
    """Return the version of oneDNN that a tree's CMake names for x86."""
    text = (tree / "cmake/cpu_extension.cmake").read_text()
    tags = re.findall(r"oneDNN\.git\s+GIT_TAG\s+(v\S+)", text)
    return tags[-1] if tags else "as vLLM's CMake names it"


def made_with(work: Path) -> dict[str, tuple[str, str | None]]:
    """Return the compiler and oneDNN of a compilation, each its version and digest.

    Args:
        work: The folder where it was done.
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
    return {
        f"compiler: {found['ID']}": (found["VERSION"], None),
        "oneDNN": (".".join(numbers), tree_digest(Path(folders["SOURCE"]))),
    }


def native_modules(archive: Path, torch: str | None) -> contents.Natives:
    """Return what there is to know of an archive of compiled modules.

    Args:
        archive: The archive.
        torch: See contents.Natives.
    """
    with zipfile.ZipFile(archive) as natives:
        made = json.loads(natives.read(MADE_WITH))
    components = [contents.compiled_component(n, *made[n]) for n in made]
    return contents.Natives(archive, contents.COMPILED_MODULES, components, torch)
