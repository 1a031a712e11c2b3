# SPDX-License-Identifier: Apache-2.0
"""The patch queue as a git repository to edit, and back again.

The first commit of such a repository is upstream's sdist as it is, each one after
it a patch of the series. The way there and back changes no byte of a patch,
whatever the user's git settings are. The overlay and the native modules are there
too, ignored by git, so that tests run on the very tree that is edited.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.files import making
from cpu_wheel.paths import BUILD, PATCHES, ROOT
from cpu_wheel.pins import Release, read_pins, read_series
from cpu_wheel.source import git_environment, overlay_files, unpack

UPSTREAM = "upstream"
BRANCH = "patched"
# A patch depends on the commit alone: no hash of a commit, no version of git.
FORMAT = ("--zero-commit", "--no-signature", "--full-index", "-N")
LAST_UPDATE = re.compile(rb"^Last-Update: (.*)$", re.MULTILINE)


def git(tree: Path, *arguments: str | Path) -> str:
    """Run git on a tree by its own defaults and return its output.

    Raises:
        BuildError: It failed; says why in git's first words.
    """
    result = subprocess.run(
        ["git", *arguments],
        cwd=tree,
        env=git_environment(tree)
        | {
            "GIT_AUTHOR_NAME": "vLLM",
            "GIT_AUTHOR_EMAIL": "",
            "GIT_COMMITTER_NAME": "cpu_wheel",
            "GIT_COMMITTER_EMAIL": "",
        },
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if result.returncode != 0:
        words = (result.stderr or result.stdout).strip() or "no output"
        raise BuildError(f"git {arguments[0]} in {tree}: {words.splitlines()[0]}")
    return result.stdout


def worktree(release: Release) -> Path:
    """Return the folder of a release's worktree."""
    return BUILD / f"worktree-{release.version}"


def apply(tree: Path, patches: Iterable[Path]) -> None:
    """Make a commit of each patch.

    Raises:
        BuildError: One does not apply; names it.
    """
    for patch in patches:
        try:
            git(tree, "am", "--quiet", "--keep-non-patch", "--keep-cr", patch)
        except BuildError as error:
            raise BuildError(f"{patch.name} does not apply ({error})") from None


def make_worktree(
    sdist: Path,
    release: Release,
    folder: Path,
    importable: bool = False,
    native_wheel: Path | None = None,
) -> None:
    """Make a git repository with upstream's files and one commit a patch.

    Args:
        sdist: The verified sources of the release.
        release: The release, for its series.
        folder: The folder to make; a failure leaves none behind.
        importable: Whether `import vllm` is to work in the folder.
        native_wheel: The verified wheel of the native modules for that, if any.

    Raises:
        BuildError: The folder exists, or a patch does not apply.
    """
    if folder.exists():
        raise BuildError(f"{folder} exists and may hold work; move or remove it first")
    with making(folder) as scratch:
        unpack(sdist, scratch)
        git(scratch, "init", "--quiet", f"--initial-branch={UPSTREAM}")
        # Upstream's files as they are: ignored ones too, and their line ends.
        attributes = scratch / ".git" / "info" / "attributes"
        attributes.write_text("* -text\n")
        git(scratch, "config", "gc.auto", "0")  # also for the user's own git
        git(scratch, "add", "--all", "--force")
        git(scratch, "commit", "--quiet", "-m", f"vLLM {release.version}")
        git(scratch, "checkout", "--quiet", "-b", BRANCH)
        apply(scratch, release.series)
        if importable:
            make_importable(scratch, release, native_wheel)


def make_importable(tree: Path, release: Release, native_wheel: Path | None) -> None:
    """Add to a worktree what `import vllm` needs, ignored by git.

    Files of the overlay are links: who edits one edits it in this repository.
    """
    overlay = overlay_files(release)
    for path in overlay:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).symlink_to(ROOT / path)
    modules = []
    if native_wheel:
        with zipfile.ZipFile(native_wheel) as archive:
            modules = [name for name in archive.namelist() if name.endswith(".so")]
            archive.extractall(tree, modules)
    # The sdist's own metadata has no "+cpu", by which vLLM knows its platform.
    info = tree / f"vllm-{release.wheel_version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {release.wheel_version}\n"
    )
    shutil.copyfile(tree / "vllm.egg-info/entry_points.txt", info / "entry_points.txt")
    ignored = [*map(Path.as_posix, overlay), *modules, f"{info.name}/"]
    exclude = tree / ".git" / "info" / "exclude"
    exclude.write_text("".join(f"/{name}\n" for name in ignored))


def refresh(release: Release, folder: Path, patches: Path = PATCHES) -> list[Path]:
    """Write the commits of a worktree back as the patches of a release.

    The pinned release decides what the patches are called and which there are. A
    patch that gets another number gets it in the series of every release. Another
    release has its own say only in what lies in a subfolder.

    Args:
        release: The release that the worktree was made for.
        folder: The worktree, with all work committed.
        patches: The folder that holds the series.

    Returns:
        The files that changed, are new or are gone.

    Raises:
        BuildError: Work is not committed, or the commits do not fit the series.
    """
    if not (folder / ".git").is_dir():
        raise BuildError(f"{folder} is no worktree; `make worktree` makes one")
    if changed_files := git(folder, "status", "--porcelain").splitlines():
        raise BuildError(f"{folder} has what is not committed: {changed_files[0][3:]}")
    for path in overlay_files(release):
        if (folder / path).is_file() and not (folder / path).is_symlink():
            raise BuildError(
                f"{folder / path} is not a link any more and no commit holds it: move "
                f"it to {ROOT / path}"
            )
    branch = git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
    if branch != BRANCH:
        raise BuildError(f"{folder} is on {branch}, the patches are those of {BRANCH}")
    with tempfile.TemporaryDirectory(prefix=".refresh-", dir=patches) as scratch:
        commits = f"{UPSTREAM}..{BRANCH}"
        git(folder, "format-patch", "--quiet", *FORMAT, "-o", scratch, commits)
        made = sorted(Path(scratch).iterdir())
        content = {path.name: path.read_bytes() for path in made}
    stems: dict[str, str] = {}
    for name, patch in content.items():
        if b"\ndiff --git " not in patch:
            raise BuildError(f"{name} changes nothing")
        if (other := stems.setdefault(stem(name), name)) != name:
            raise BuildError(f"{other} and {name} have subjects that begin alike")
    series = patches / release.series_file.name
    old = [str(path.relative_to(patches)) for path in read_series(series)]
    if release.pinned:
        return refresh_pinned(content, old, series)
    if len(old) != len(content):
        raise BuildError(
            f"{folder} has {len(content)} commits, {series.name} {len(old)} patches: "
            "name each in the series first"
        )
    named = [
        patch
        for pin in read_pins()["release"].values()
        for patch in read_series(patches / pin["series"])
    ]
    changed = []
    for name, text in zip(old, content.values(), strict=True):
        own = "/" in name
        if own and write(patches / name, text, named.count(patches / name) > 1):
            changed.append(patches / name)
        elif not own and changes(text) != changes((patches / name).read_bytes()):
            raise BuildError(
                f"{name} serves other releases too: change it in the worktree of the "
                f"pinned release, or give {release.version} a copy in a subfolder"
            )
    return changed


def refresh_pinned(
    content: dict[str, bytes], old: list[str], series: Path
) -> list[Path]:
    """Replace the patches of the pinned release, see refresh."""
    patches = series.parent
    renamed = {stem(name): name for name in content}
    others = {
        path: path.read_text()
        for path in {patches / pin["series"] for pin in read_pins()["release"].values()}
        if path != series and path.exists()
    }
    changed = []
    for path, text in others.items():
        lines = [
            renamed.get(stem(line), line) if line in old else line
            for line in text.splitlines()
        ]
        named = set(lines)
        for name in content:
            if name not in named and name not in old:
                print(f"cpu_wheel: {path.name} does not name {name}", file=sys.stderr)
        for name in named & (set(old) - set(content)):
            raise BuildError(f"{path.name} still names {name}, which has no commit")
        others[path] = "".join(f"{line}\n" for line in lines)
    for path, text in (
        (series, "".join(f"{name}\n" for name in content)),
        *others.items(),
    ):
        if path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    for name in old:
        if name not in content:
            changed.append(patches / name)
            if new := renamed.get(stem(name)):
                changed.append((patches / name).rename(patches / new))
            else:
                (patches / name).unlink()
    for name, patch in content.items():
        path = patches / name
        before = changes(path.read_bytes()) if path.exists() else changes(patch)
        if write(path, patch):
            changed.append(path)
        if changes(patch) != before:
            for copy in patches.glob(f"v*/*-{stem(name)}"):
                print(
                    f"cpu_wheel: {copy.relative_to(patches)} did not follow {name}: "
                    "make the same change in the worktree of its release",
                    file=sys.stderr,
                )
    return changed


def write(path: Path, patch: bytes, shared: bool = False) -> bool:
    """Write a patch unless it says what is there, and return whether it was written.

    What it says has today as its Last-Update. The lines around a change, or the
    hashes of the files, may be others without another date. In a copy that several
    releases share line numbers stay, as each release would write its own.
    """
    before = path.read_bytes() if path.exists() else b""
    if substance(before, shared) == substance(patch, shared):
        return False
    date = time.strftime("%Y-%m-%d", time.gmtime()).encode()
    if said(before) == said(patch) and (match := LAST_UPDATE.search(before)):
        date = match[1]
    path.write_bytes(LAST_UPDATE.sub(b"Last-Update: " + date, patch, count=1))
    return True


def said(patch: bytes) -> tuple[bytes, list[bytes]]:
    """Return a patch's message, without its date, and the lines that it changes."""
    return LAST_UPDATE.sub(b"", patch.partition(b"\n---\n")[0]), changes(patch)


def substance(patch: bytes, shared: bool = False) -> bytes:
    """Return a patch without its date, the hashes of files, and line numbers if shared.

    Git repeats a line of the file behind the numbers, which may be another one too.
    """
    left_out = rb"^index [0-9a-f]+\.\.[0-9a-f]+" + (rb"|^@@ .*" if shared else b"")
    return LAST_UPDATE.sub(b"", re.sub(left_out, b"", patch, flags=re.MULTILINE))


def stem(name: str) -> str:
    """Return a patch file's name without its number."""
    return re.sub(r"^\d+-", "", name)


def changes(patch: bytes) -> list[bytes]:
    """Return the lines that a patch takes and adds, wherever its hunks lie."""
    _, _, diff = patch.partition(b"\ndiff --git ")
    return [line for line in diff.splitlines() if line[:1] in (b"+", b"-")]
