# SPDX-License-Identifier: Apache-2.0
"""The steps of a build in order, each done only when out of date."""

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cpu_wheel import compiled, contents, packager, source, wheel
from cpu_wheel.fetch import fetch
from cpu_wheel.files import sha256
from cpu_wheel.install import unpack_wheel
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import Release, load_release
from cpu_wheel.settings import Settings


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what begins, and how many seconds it took."""
    print(f"cpu_wheel: {what} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"cpu_wheel: {what}: {time.monotonic() - start:.1f} s", file=sys.stderr)


def make_source(settings: Settings) -> Path:
    """Make the patched source tree of a release, if it is not there.

    A tree that the user names is taken as it is.

    Returns:
        The folder, named after a hash of all that goes into it.

    Raises:
        BuildError: An archive or a patch is not what it must be.
    """
    release = load_release(settings.release)
    if settings.tree:
        packager.check_tree(settings.tree, release)
        return settings.tree
    sdist = fetch(release.sdist, settings.cache, settings.sdist)
    tree = BUILD / f"vllm-{release.version}-{source_key(release)}"
    if not tree.exists():
        with step(f"unpack and patch {sdist.name}"):
            source.make_source(sdist, release, tree)
        for stale in BUILD.glob(f"vllm-{release.version}-*"):
            if stale != tree:
                shutil.rmtree(stale)
    return tree


def source_key(release: Release) -> str:
    """Return a hash of all that a patched tree is made from."""
    key = hashlib.sha256(release.sdist.sha256.encode())
    overlay = [ROOT / file for file in source.overlay_files(release)]
    for path in (*release.series, *overlay):
        key.update(f"\n{path.relative_to(ROOT)} {sha256(path)}".encode())
    return key.hexdigest()[:12]


def make_wheel(settings: Settings, dist: Path) -> Path:
    """Make the wheel of a release, if it is not there.

    Args:
        settings: What the user chose.
        dist: The folder that takes the wheel.

    Returns:
        The wheel's path.

    Raises:
        BuildError: The host or an input is not what it must be.
    """
    release = load_release(settings.release)
    BUILD.mkdir(parents=True, exist_ok=True)
    compiles = settings.compiles(release)
    if compiles:
        compiled.check_host(release)
        tree = make_source(settings)
        natives = make_natives(settings, release, tree)
    else:
        pinned = release.native_wheel
        wheel.check_host(release.torch)
        natives = contents.Natives(
            fetch(pinned, settings.cache, settings.native_wheel),
            wheel.NATIVE_MODULES,
            [contents.native_wheel_component(release)],
        )
        tree = make_source(settings)
    epoch = wheel_epoch(settings, tree)
    key = {
        "tree": tree.name,
        "native modules": sha256(natives.archive),
        "torch": natives.torch,
        "epoch": epoch,
        "python": sys.version,
        "tools": {name: wheel.installed_version(name) for name in wheel.BUILD_TOOLS},
        "code": [
            sha256(ROOT / "cpu_wheel" / name) for name in ("contents.py", "wheel.py")
        ],
    }
    path = dist / wheel.wheel_name(release.wheel_version, not compiles)
    record = BUILD / f"{path.name}.json"
    with contextlib.suppress(OSError, ValueError):
        # Nobody knows what is in a tree that somebody else patched.
        if not settings.tree and json.loads(record.read_text()) == key | {
            "sha256": sha256(path)
        }:
            return path
    with step(f"build {path.name} with upstream's setup.py"):
        wheel.build(
            source=tree,
            natives=natives,
            version=release.wheel_version,
            epoch=epoch,
            sbom=contents.make_sbom(release, epoch, natives.components),
            log=BUILD / f"{path.name}.log",
            wheel=path,
        )
    if not settings.tree:
        record.write_text(json.dumps(key | {"sha256": sha256(path)}, indent=1))
    return path


def make_natives(settings: Settings, release: Release, tree: Path) -> contents.Natives:
    """Compile the native modules of a tree, if they are not there.

    Raises:
        BuildError: The host is not what it must be, or upstream's build failed.
    """
    torch = compiled.check_torch(release)
    key = compiled.native_key(tree, torch, settings)
    archive = BUILD / f"native-{release.version}-{key}.zip"
    if not archive.exists():
        with step(f"compile the native modules of vLLM {release.version}"):
            epoch = wheel_epoch(settings, tree)
            compiled.build(tree, release, epoch, settings, BUILD, archive)
        for stale in BUILD.glob(f"native-{release.version}-*"):
            if stale != archive:
                stale.unlink()
    return compiled.native_modules(archive, None if torch == release.torch else torch)


def make_stock(settings: Settings) -> Path:
    """Unpack the native wheel as published, if it is not there, and return where."""
    release = load_release(settings.release)
    native_wheel = fetch(release.native_wheel, settings.cache, settings.native_wheel)
    folder = stock_folder(release)
    unpack_wheel(native_wheel, folder)
    return folder


def stock_folder(release: Release) -> Path:
    """Return the folder with which in PYTHONPATH `import vllm` is stock vLLM."""
    return BUILD / f"stock-{release.version}"


def wheel_epoch(settings: Settings, tree: Path) -> int:
    """Return the time of a wheel's members, in seconds since 1970.

    It is what the user chose, or else when upstream made the sdist of the tree.
    """
    if settings.epoch is not None:
        return settings.epoch
    return int((tree / "PKG-INFO").stat().st_mtime)
