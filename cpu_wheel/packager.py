# SPDX-License-Identifier: Apache-2.0
"""The series for those who unpack and patch with their own tools.

The overlay is its last patch, so that quilt, dpkg-source, rpmbuild or a conda recipe
make the very tree that the wheel is built from.
"""

import shutil
from pathlib import Path

from cpu_wheel import source
from cpu_wheel.errors import BuildError
from cpu_wheel.files import making
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release

OVERLAY_PATCH = """\
{head}
Subject: [PATCH] [Misc][CPU] Add the modules and tests of the fork

What the fork adds lies in files of its own at the path where they land in
vLLM's tree: tests of the CPU platform and, on the release that the fork is
built from, its modules. As a patch, for those who build from a patched tree.

Origin: vendor
Forwarded: not-needed
Last-Update: {date}
---

{diff}"""


def new_file(path: str, content: str) -> str:
    """Return the diff that adds a file."""
    lines = content.splitlines()
    added = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{added}"
    )


def series_names(release: Release) -> list[str]:
    """Return the names of the patches of a release's whole series, in order."""
    names = [patch.name for patch in release.series]
    number = int(names[-1].partition("-")[0]) + 1
    return [
        *names,
        f"{number:04d}-Misc-CPU-Add-the-modules-and-tests-of-the-fork.patch",
    ]


def write_series(release: Release, folder: Path) -> None:
    """Write a release's whole series, flat and in quilt's order, to a new folder.

    Args:
        release: The release that it is for.
        folder: The folder to make, with a file `series`; a failure leaves none.

    Raises:
        BuildError: The folder exists.
    """
    if folder.exists():
        raise BuildError(f"{folder} exists; name a new folder")
    with making(folder) as scratch:
        scratch.mkdir()
        names = series_names(release)
        for patch in release.series:
            shutil.copyfile(patch, scratch / patch.name)
        last = release.series[-1].read_text()
        diff = "".join(
            new_file(path.as_posix(), (ROOT / path).read_text())
            for path in source.overlay_files(release)
        )
        text = OVERLAY_PATCH.format(
            head=last.partition("\nSubject: ")[0],
            date=last.partition("\nLast-Update: ")[2].partition("\n")[0],
            diff=diff,
        )
        (scratch / names[-1]).write_text(text)
        (scratch / "series").write_text("".join(f"{name}\n" for name in names))


def check_tree(tree: Path, release: Release) -> None:
    """Check that a tree which somebody else patched is what a wheel is built from.

    Raises:
        BuildError: It is another release's, or not patched.
    """
    try:
        said = (tree / "PKG-INFO").read_text().split("\nVersion: ", 1)[1].split("\n")[0]
    except (OSError, IndexError):
        raise BuildError(f"{tree} is no unpacked sdist: it has no PKG-INFO") from None
    if said != release.version:
        raise BuildError(f"{tree} is vLLM {said}, expected {release.version}")
    for path in source.overlay_files(release):
        if not (tree / path).is_file():
            raise BuildError(
                f"{tree} lacks {path}: apply the series that `python -m cpu_wheel "
                f"packager-series` writes"
            )
