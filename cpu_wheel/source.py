# SPDX-License-Identifier: Apache-2.0
"""Make the patched source tree: unpack, patch, add the overlay."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.files import making
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release
from cpu_wheel.settings import inherited

if not hasattr(tarfile, "data_filter"):  # as Python 3.11.2 of Debian 12
    from backports import tarfile  # type: ignore[no-redef]

OVERLAY = ("vllm/**/*.py", "tests/**/*.py", "licenses/*.txt")
# What tests the fork itself is not part of what upstream's tree gets.
NOT_OVERLAY = ("tests/fork/",)
# What is not written against the engine of the pinned release and newer ones.
OVERLAY_OF_EVERY_RELEASE = ("tests/platforms/", "licenses/")


def unpack(sdist: Path, destination: Path) -> None:
    """Unpack a source archive so that its only top folder becomes `destination`.

    Members that would leave the folder, devices and set-user-id bits are refused
    by tarfile's data filter; modes and times are the archive's, whatever the umask.
    """
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=destination.parent) as name:
        try:
            with tarfile.open(sdist) as archive:
                archive.extractall(name, filter="data")
            (top,) = Path(name).iterdir()
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise BuildError(f"{sdist} is not unpacked: {error}") from None
        top.rename(destination)


def git_environment(tree: Path) -> dict[str, str]:
    """Return an environment in which git works on a tree by its own defaults.

    Neither a repository around the tree nor anybody's settings have a say.
    """
    return inherited("GIT_") | {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        # The first two have a default place among the user's files; the last two
        # would tidy up in the background what somebody may be copying or removing.
        "GIT_CONFIG_COUNT": "4",
        "GIT_CONFIG_KEY_0": "core.attributesFile",
        "GIT_CONFIG_VALUE_0": os.devnull,
        "GIT_CONFIG_KEY_1": "core.excludesFile",
        "GIT_CONFIG_VALUE_1": os.devnull,
        "GIT_CONFIG_KEY_2": "gc.auto",
        "GIT_CONFIG_VALUE_2": "0",
        "GIT_CONFIG_KEY_3": "maintenance.auto",
        "GIT_CONFIG_VALUE_3": "false",
        "LC_ALL": "C",
    }


def apply_patches(tree: Path, patches: Iterable[Path], allow_offset: bool) -> None:
    """Apply patches to a tree, in order, never with fuzz.

    Args:
        tree: The source tree, changed in place.
        patches: The patch files, with paths of the form a/… and b/….
        allow_offset: Whether a hunk may apply at other lines than it names; it is
            reported then.

    Raises:
        BuildError: A hunk does not apply; names the patch, the file and the hunk.
    """
    for patch in patches:
        # --reject tells which hunk fails, where a plain run names only a line.
        result = subprocess.run(
            ["git", "apply", "--verbose", "--reject", str(patch)],
            cwd=tree,
            env=git_environment(tree),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        report = result.stderr
        if result.returncode != 0:
            raise BuildError(f"{patch.name} does not apply: {explain(report)}")
        for file, hunk, place in offsets(report):
            found = f"{patch.name}: hunk #{hunk} of {file} applies only {place}"
            if not allow_offset:
                raise BuildError(f"{found}; refresh the patch")
            print(f"cpu_wheel: {found}", file=sys.stderr)


def explain(report: str) -> str:
    """Return which hunks of which files `git apply --reject --verbose` rejected."""
    rejected = []
    file = ""
    for line in report.splitlines():
        if match := re.match(r"Applying patch (.+) with \d+ rejects?\.\.\.", line):
            file = match[1]
        elif match := re.match(r"Rejected hunk #(\d+)", line):
            rejected.append(f"hunk #{match[1]} of {file}")
    if rejected:
        return f"{', '.join(rejected)} does not match the source"
    errors = [line for line in report.splitlines() if line.startswith("error: ")]
    return (errors or [report.strip()])[0].removeprefix("error: ")


def offsets(report: str) -> list[tuple[str, str, str]]:
    """Return (file, hunk, place) of each hunk that `git apply` found elsewhere."""
    found = []
    file = ""
    for line in report.splitlines():
        if match := re.match(
            r"(?:Checking|Applying) patch (.+?)(?: cleanly|\.\.\.)", line
        ):
            file = match[1].removesuffix("...")
        elif match := re.match(r"Hunk #(\d+) succeeded (at \d+ \(offset .+\))", line):
            found.append((file, match[1], match[2]))
    return found


def overlay_files(release: Release) -> list[Path]:
    """Return the files that land at the same path in a release's tree, relative."""
    files = []
    for pattern in OVERLAY:
        for path in sorted(ROOT.glob(pattern)):
            relative = path.relative_to(ROOT)
            name = relative.as_posix()
            if name.startswith(NOT_OVERLAY):
                continue
            if release.whole_overlay or name.startswith(OVERLAY_OF_EVERY_RELEASE):
                files.append(relative)
    return files


def add_overlay(tree: Path, files: Iterable[Path]) -> None:
    """Copy overlay files, relative to the repository, into a tree.

    Raises:
        BuildError: Upstream has a file at one of its paths; that needs a patch.
    """
    for relative in files:
        target = tree / relative
        if target.exists():
            raise BuildError(
                f"{relative} is upstream's file; a change to it belongs in patches/"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / relative, target)


def make_source(sdist: Path, release: Release, destination: Path) -> None:
    """Make the patched tree from a verified sdist; a failure leaves none behind.

    Args:
        sdist: Upstream's sources.
        release: The release, for its series and overlay. If it is the pinned one,
            no hunk may apply at an offset.
        destination: The folder to make; it must not exist.
    """
    with making(destination) as scratch:
        unpack(sdist, scratch)
        apply_patches(scratch, release.series, allow_offset=not release.pinned)
        add_overlay(scratch, overlay_files(release))
