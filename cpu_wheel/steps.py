# SPDX-License-Identifier: Apache-2.0
"""What every door calls: the steps in order, each done only when out of date."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cpu_wheel import compiled, contents, packager, source, wheel
from cpu_wheel.fetch import fetch, sha256
from cpu_wheel.pins import ROOT, BuildError, Release, Settings, load_release

BUILD = ROOT / "build"
# The years 1980 to 2107.
FIRST, LAST = 315532800, 4354819199


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
    sdist = fetch(release.sdist, settings.cache)
    tree = BUILD / f"vllm-{release.version}-{source_key(release)}"
    if not tree.exists():
        with step(f"unpack and patch {sdist.name}"):
            source.make_source(sdist, release.series, release.pinned, tree)
        for stale in BUILD.glob(f"vllm-{release.version}-*"):
            if stale != tree:
                shutil.rmtree(stale)
    return tree


def source_key(release: Release) -> str:
    """Return a hash of all that a patched tree is made from."""
    key = hashlib.sha256(release.sdist.sha256.encode())
    overlay = [ROOT / file for file in source.overlay_files(release.pinned)]
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
    if not settings.precompiled:
        compiled.check_host()
        tree = make_source(settings)
        path = dist / wheel.wheel_name(release.wheel_version, precompiled=False)
        with step(f"compile {path.name} with upstream's setup.py"):
            compiled.build(tree, release, wheel_epoch(tree), BUILD, path)
        return path
    pinned_wheel = release.native_wheel
    wheel.check_host(release.torch)
    native_wheel = fetch(pinned_wheel, settings.cache)
    tree = make_source(settings)
    epoch = wheel_epoch(tree)
    key = {
        "tree": tree.name,
        "native wheel": pinned_wheel.sha256,
        "epoch": epoch,
        "python": sys.version,
        "tools": {name: wheel.installed_version(name) for name in wheel.BUILD_TOOLS},
        "code": [
            sha256(ROOT / "cpu_wheel" / name) for name in ("contents.py", "wheel.py")
        ],
    }
    path = dist / wheel.wheel_name(release.wheel_version)
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
            native_wheel=native_wheel,
            version=release.wheel_version,
            epoch=epoch,
            sbom=contents.make_sbom(
                release, epoch, [contents.native_wheel_component(release)]
            ),
            log=BUILD / f"{path.name}.log",
            wheel=path,
        )
    if not settings.tree:
        record.write_text(json.dumps(key | {"sha256": sha256(path)}, indent=1))
    return path


def wheel_epoch(tree: Path) -> int:
    """Return the time of a wheel's members, in seconds since 1970.

    It is SOURCE_DATE_EPOCH, or else when upstream made the sdist of the tree.

    Raises:
        BuildError: The variable is no time that a zip can hold.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return int((tree / "PKG-INFO").stat().st_mtime)
    if not text.isascii() or not text.isdigit() or not FIRST <= int(text) <= LAST:
        raise BuildError(
            f"SOURCE_DATE_EPOCH={text!r} is not a number of seconds since 1970 that a "
            f"zip can hold, {FIRST} to {LAST}"
        )
    return int(text)
