# SPDX-License-Identifier: Apache-2.0
"""That every release of upstream.toml takes its series, and the way to git and back.

The sources come the way a build gets them: from the cache, or from an index.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpu_wheel import queue, releases, source
from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.paths import PATCHES, ROOT
from cpu_wheel.pins import Release, load_release, read_pins, read_series
from cpu_wheel.settings import Settings
from pull_request import make as pr

PINNED = load_release()
RELEASES = list(read_pins()["release"])
# A file with the line ends of another system.
DOS = "vllm/config/fault_tolerance.py"


def sdist(release: Release) -> Path:
    return fetch(release.sdist, Settings.from_environment().cache)


def files(folder: Path) -> dict[str, bytes]:
    """The content of every file of a tree, but for git's own."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts[:1]
    }


def cpu_wheel(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpu_wheel", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("version", RELEASES)
def test_series_applies(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = load_release(version)

    source.make_source(sdist(release), release, tmp_path / "tree")

    text = (tmp_path / "tree/vllm/platforms/cpu.py").read_text()
    assert "Legacy setting: the default of --kv-cache-memory-bytes" in text
    reported = "applies only at" in capsys.readouterr().err
    assert reported is not release.pinned
    # A patch may apply where a name that it uses is not imported.
    changed = {
        name
        for patch in release.series
        for name in re.findall(r"^\+\+\+ b/(.+\.py)$", patch.read_text(), re.M)
    }
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F"]
    subprocess.run([*ruff, *changed], cwd=tmp_path / "tree", check=True)
    if release.whole_overlay:
        # What the `vllm` command imports first: without it no subcommand starts.
        assert not unknown_imports(
            tmp_path / "tree", "vllm/entrypoints/cli/kv_budget.py"
        )


def unknown_imports(tree: Path, module: str) -> list[str]:
    """Return what a module imports of vLLM that a tree does not have."""

    def missing(nodes: list[ast.stmt]) -> list[str]:
        names = []
        for node in nodes:
            if isinstance(node, ast.Try):  # for releases that differ
                other = missing(node.handlers[0].body)
                names += other if missing(node.body) else []
            elif isinstance(node, ast.ImportFrom) and node.module:
                path = tree / node.module.replace(".", "/")
                path = (
                    path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                )
                text = path.read_text() if path.exists() else ""
                names += [a.name for a in node.names if a.name not in text]
        return names

    code = ast.parse((tree / module).read_text()).body
    return missing([n for n in code if "vllm" in ast.unparse(n)])


@pytest.mark.slow_test
@pytest.mark.parametrize("version", [v for v in RELEASES if v != "0.34.0"])
def test_slot_mapping_fallback_takes_what_its_caller_gives(
    version: str, tmp_path: Path
) -> None:
    """Only 0.32.0 needs a patch for that; see there. 0.34.0 has no fallback."""
    release = load_release(version)
    tree = tmp_path / "tree"
    source.make_source(sdist(release), release, tree)

    fallback = (tree / "vllm/utils/cpu_triton_utils.py").read_text()
    kernel = (tree / "vllm/v1/worker/block_table.py").read_text()

    given = re.search(r"\bblock_table_stride,.*\n\s+block_size,\n\s+slot_map", kernel)
    taken = re.search(r"\bblock_size: int,\n\s+slot_mapping: ", fallback)
    assert bool(taken) == bool(given)
    assert bool(taken) == (version in ("0.28.0", "0.29.0", "0.30.0", "0.31.0"))


def test_every_stored_patch_is_named_by_a_series() -> None:
    named = {path for version in RELEASES for path in load_release(version).series}
    named |= set(read_series(pr.EXTRA))

    assert set(PATCHES.rglob("*.patch")) == named


@pytest.mark.parametrize("version", RELEASES)
def test_series_command(version: str) -> None:
    result = cpu_wheel("series", CPU_WHEEL_RELEASE=version)

    assert result.stdout.splitlines() == [str(p) for p in load_release(version).series]


def test_unknown_release_is_refused_in_one_line() -> None:
    result = cpu_wheel("series", CPU_WHEEL_RELEASE="0.1.0")

    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "'0.1.0'" in line and PINNED.version in line


def test_compiler_that_is_too_old_is_refused_before_any_download(
    tmp_path: Path,
) -> None:
    """A release without a native wheel is compiled, without being asked to."""
    pins = read_pins()["release"]
    version = next(v for v, pin in pins.items() if "native-wheel" not in pin)

    compiler = tmp_path / "g++-12"
    compiler.write_text("#!/bin/sh\necho 12 2 __clang_major__\n")
    compiler.chmod(0o755)

    for command in ("torch", "wheel"):
        result = cpu_wheel(command, CPU_WHEEL_RELEASE=version, CXX=str(compiler))

        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert f"g++ 12.3 or newer, named by CXX ({compiler} is 12.2)" in line
        assert f"(to compile vLLM {version})" in line


@pytest.fixture
def hostile_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a user that change what git reads, writes and calls its files."""
    home = tmp_path / "home"
    (home / ".config/git").mkdir(parents=True)
    (home / ".gitconfig").write_text(
        "[core]\n\tautocrlf = true\n\tabbrev = 5\n\tquotePath = false\n"
        f"\thooksPath = {home}/hooks\n\texcludesFile = {home}/ignore\n"
        "[diff]\n\tnoprefix = true\n\tmnemonicPrefix = true\n\tcontext = 1\n"
        "\talgorithm = patience\n\tinterHunkContext = 9\n"
        "[format]\n\tsignOff = true\n\tnumbered = true\n\tattach = true\n"
        "\tsubjectPrefix = MINE\n\tsuffix = .txt\n\tfrom = me <me@example.org>\n"
        "\tto = list@example.org\n\tcoverLetter = true\n"
        "[am]\n\tkeepcr = false\n\tthreeWay = true\n"
        "[apply]\n\twhitespace = fix\n"
        "[commit]\n\tgpgSign = true\n[gpg]\n\tprogram = /bin/false\n"
        "[i18n]\n\tcommitEncoding = latin1\n\tlogOutputEncoding = latin1\n"
        f"[init]\n\tdefaultBranch = mine\n\ttemplateDir = {home}/template\n"
    )
    (home / "ignore").write_text("*.py\n")
    (home / ".config/git/ignore").write_text("*.toml\n")
    (home / ".config/git/attributes").write_text(
        "*.py diff=ada\n* text=auto eol=crlf\n"
    )
    for folder in ("hooks", "template/hooks"):
        (home / folder).mkdir(parents=True)
        for name in ("applypatch-msg", "pre-commit", "pre-applypatch", "commit-msg"):
            hook = home / folder / name
            hook.write_text("#!/bin/sh\nexit 1\n")
            hook.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u7")
    monkeypatch.setenv("GIT_DIR", str(home / "elsewhere"))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00")
    monkeypatch.setenv("LC_ALL", "C")


Part = Callable[[Release], Path]


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Makes an sdist of what patches touch, of which a worktree takes a second."""
    folder = tmp_path_factory.mktemp("part")

    def make(release: Release) -> Path:
        path = folder / release.sdist.file
        text = "".join(patch.read_text() for patch in release.series)
        names = {*re.findall(r"^--- a/(.+)$", text, re.M), ".gitignore", "README.md"}
        with tarfile.open(sdist(release)) as whole, tarfile.open(path, "w") as out:
            for member in whole:
                if member.name.partition("/")[2] in names | {DOS}:
                    out.addfile(member, whole.extractfile(member))
        return path

    return make


def test_own_copies_differ_or_the_shared_patch_does_not_apply(
    tmp_path: Path, part: Part
) -> None:
    compared = 0
    for version in RELEASES:
        release = load_release(version)
        same = {}  # shared patches that change what the release's own copies do
        for number, own in enumerate(release.series):
            shared = PATCHES / own.name
            if own != shared and shared.exists():
                compared += 1
                if queue.changes(own.read_bytes()) == queue.changes(
                    shared.read_bytes()
                ):
                    same[number] = shared
        if same:
            touched = part(replace(release, series=(*release.series, *same.values())))
        for number, shared in same.items():
            series = (*release.series[:number], shared)
            with pytest.raises(BuildError, match="does not match the source"):
                source.make_source(
                    touched, replace(release, series=series), tmp_path / "tree"
                )
    assert compared


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A copy of patches/, for a test to write to."""
    copy = tmp_path / "patches"
    for path in (*PATCHES.rglob("*.patch"), *PATCHES.glob("series*")):
        target = copy / path.relative_to(PATCHES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return copy


def substances(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without what says when a patch was written."""
    return {name: queue.substance(text) for name, text in files(folder).items()}


def edit(tree: Path, text: str, *commit: str, file: str = "README.md") -> None:
    """Append to a file that no patch touches, and commit."""
    with (tree / file).open("a", newline="") as out:
        out.write(text)
    queue.git(tree, "commit", "--quiet", "--all", *commit)


@pytest.mark.usefixtures("hostile_git")
def test_round_trip_changes_no_byte(tmp_path: Path, patches: Path, part: Part) -> None:
    before = files(patches)
    tree = tmp_path / "tree"

    queue.make_worktree(part(PINNED), PINNED, tree)

    assert queue.refresh(PINNED, tree, patches) == []
    assert files(patches) == before
    # Written anew, not only left alone:
    for path in patches.glob("*.patch"):
        path.write_text("gone")
    assert len(queue.refresh(PINNED, tree, patches)) == len(PINNED.series)
    assert substances(patches) == {n: queue.substance(b) for n, b in before.items()}


@pytest.mark.usefixtures("hostile_git")
def test_worktree_is_the_patched_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "overlay_files", lambda release: [])
    source.make_source(sdist(PINNED), PINNED, tmp_path / "source")

    tree = tmp_path / "tree"
    queue.make_worktree(sdist(PINNED), PINNED, tree)

    assert files(tree) == files(tmp_path / "source")
    log = queue.git(tree, "log", "--format=%s", f"{queue.UPSTREAM}..{queue.BRANCH}")
    assert len(log.splitlines()) == len(PINNED.series)
    first = queue.git(tree, "ls-tree", "-r", "--name-only", "-z", queue.UPSTREAM)
    source.unpack(sdist(PINNED), tmp_path / "upstream")
    upstream = files(tmp_path / "upstream")
    assert set(first.rstrip("\0").split("\0")) == set(upstream)
    assert b"\r\n" in b"".join(upstream.values())


PLAN = """
import json, sys
from pathlib import Path
from tests.v1.core.kv_budget_engine import engine_args, plan_for
import vllm
from vllm.v1.worker import kv_cache_spec_discovery

# The newest release's tree has no kernels that could be asked.
kv_cache_spec_discovery.check_backends = lambda *_: None
plans = [vllm.__file__]
for kind in ("talker", "reference", "mla"):
    args = engine_args(Path(sys.argv[1]), kind, max_model_len=2048)
    budget = plan_for(args).budget
    plans.append([budget.start_bytes, budget.num_bytes, budget.num_blocks])
print(json.dumps(plans))
"""


@pytest.mark.slow_test
def test_planner_of_the_newest_release(tmp_path: Path) -> None:
    """Its engine has the functions elsewhere, and plans the same budgets."""
    newest = load_release(RELEASES[0])
    tree = tmp_path / "tree"
    source.make_source(sdist(newest), newest, tree)
    shutil.rmtree(tree / "vllm.egg-info")  # the version that it says has no +cpu

    def plans(folder: Path) -> list[Any]:
        result = subprocess.run(
            [sys.executable, "-c", PLAN, tmp_path],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        found: list[Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    imported, *newest_plans = plans(tree)
    assert imported == str(tree / "vllm/__init__.py")
    assert newest_plans[0] == [249_561_088, 484_442_112, 33]
    assert newest_plans == plans(ROOT)[1:]


def test_git_does_not_tidy_up_behind_a_worktree(tmp_path: Path) -> None:
    """By its own defaults it does, in the background, from 6,700 objects on."""
    tree = tmp_path / "tree"

    queue.make_worktree(sdist(PINNED), PINNED, tree)

    assert not (tree / ".git/gc.pid").exists()
    assert list((tree / ".git/objects/pack").iterdir()) == []


def last_shared_and_own() -> list[str]:
    """The last patch of the pinned release that others share, and those after it."""
    names = [path.name for path in PINNED.series]
    series = [other.read_text().splitlines() for other in PATCHES.glob("series-*")]
    shared = {name for lines in series for name in lines}
    return names[max(number for number, name in enumerate(names) if name in shared) :]


def test_refresh_adds_and_renumbers(
    tmp_path: Path, patches: Path, part: Part, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    last, *own = last_shared_and_own()
    number, _, rest = last.partition("-")
    renumbered = f"{int(number) + 1:04d}-{rest}"
    message = "[Doc][CPU] Say more\n\nWhy.\n\nForwarded: no"
    # A commit before the last shared one, as `git rebase -i` would put it.
    queue.git(tree, "reset", "--quiet", "--hard", f"HEAD~{1 + len(own)}")
    edit(tree, "more\n", "-m", message)
    for name in (last, *own):
        queue.git(tree, "am", "--quiet", "--keep-non-patch", PATCHES / name)

    others = {
        other: other.read_text().splitlines() for other in patches.glob("series-*")
    }

    changed = queue.refresh(PINNED, tree, patches)

    assert not (patches / last).exists()
    assert patches / renumbered in changed
    new = f"{number}-Doc-CPU-Say-more.patch"
    assert b"\n+more\n" in (patches / new).read_bytes()
    assert b"Subject: [PATCH] [Doc][CPU] Say more\n" in (patches / new).read_bytes()
    lines = (patches / "series").read_text().splitlines()
    assert lines[-2 - len(own) :][:2] == [new, renumbered]
    said = capsys.readouterr().err
    assert any(last in names for names in others.values())
    for other, names in others.items():
        after = [renumbered if name == last else name for name in names]
        assert other.read_text().splitlines() == after
        assert f"{other.name} does not name {new}" in said


def test_refresh_writes_only_what_changed(
    tmp_path: Path, patches: Path, part: Part, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the later patches of the same file; a release's own copy is named."""
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    first = patches / PINNED.series[0].name
    copies = list(patches.glob(f"v*/{first.name}"))
    assert copies
    position = f"{queue.BRANCH}~{len(PINNED.series) - 1}"
    queue.git(tree, "checkout", "--quiet", "--detach", position)
    edit(tree, "# more\n", "--amend", "--no-edit", file="vllm/platforms/cpu.py")
    queue.git(tree, "rebase", "--quiet", "--onto", "HEAD", position, queue.BRANCH)

    assert queue.refresh(PINNED, tree, patches) == [first]

    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert f"\nLast-Update: {today}\n---\n" in first.read_text()
    assert "\n+# more\n" in first.read_text()
    said = capsys.readouterr().err
    for copy in copies:
        assert f"{copy.relative_to(patches)} did not follow {first.name}" in said
    assert queue.refresh(PINNED, tree, patches) == []


def test_worktree_imports_its_own_vllm(tmp_path: Path, patches: Path) -> None:
    tree = tmp_path / "tree"
    native_wheel = fetch(PINNED.native_wheel, Settings.from_environment().cache)

    queue.make_worktree(sdist(PINNED), PINNED, tree, True, native_wheel)

    code = "from importlib.util import find_spec; print(find_spec('vllm._C').origin)"
    code += "; import vllm.platforms as p; print(p.__file__, p.current_platform)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    modules = [f"{tree}/vllm/_C.abi3.so", f"{tree}/vllm/platforms/__init__.py"]
    assert [word for word in found if word in modules] == modules
    assert "<vllm.platforms.cpu.CpuPlatform" in found
    for name in source.overlay_files(PINNED):
        path = tree / name
        assert path.samefile(ROOT / name)
    queue.git(tree, "add", "--all")
    assert queue.git(tree, "status", "--porcelain") == ""
    assert queue.refresh(PINNED, tree, patches) == []
    # As an editor leaves it that writes beside and renames.
    path.with_suffix(".new").write_text("edited")
    path.with_suffix(".new").replace(path)
    with pytest.raises(BuildError, match="is not a link any more"):
        queue.refresh(PINNED, tree, patches)


def test_refresh_drops_a_patch_that_no_other_release_has(
    tmp_path: Path, patches: Path, part: Part
) -> None:
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    last, *own = last_shared_and_own()
    queue.git(tree, "reset", "--quiet", "--hard", f"HEAD~{1 + len(own)}")
    before = files(patches)

    with pytest.raises(BuildError, match=f"still names {last}"):
        queue.refresh(PINNED, tree, patches)

    assert files(patches) == before
    for other in patches.glob("series-*"):
        lines = other.read_text().splitlines()
        other.write_text("".join(f"{line}\n" for line in lines if line != last))
    queue.refresh(PINNED, tree, patches)
    assert not (patches / last).exists()
    left = (patches / "series").read_text().splitlines()
    assert len(left) == len(PINNED.series) - 1 - len(own)


def test_refresh_of_another_release_writes_only_its_own(
    tmp_path: Path, patches: Path, part: Part
) -> None:
    release = next(
        release
        for release in map(load_release, RELEASES)
        if release.series[0].parent != PATCHES and release.series[-1].parent == PATCHES
    )
    own = patches / release.series[0].relative_to(PATCHES)
    substance = substances(patches)
    tree = tmp_path / "tree"
    queue.make_worktree(part(release), release, tree)

    own.write_bytes(b"gone")
    assert queue.refresh(release, tree, patches) == [own]
    assert substances(patches) == substance
    before = files(patches)

    edit(tree, "more\n", "--amend", "--no-edit")
    with pytest.raises(BuildError, match="serves other releases too"):
        queue.refresh(release, tree, patches)
    edit(tree, "more\n", "-m", "one too many")
    with pytest.raises(BuildError, match="name each in the series first"):
        queue.refresh(release, tree, patches)
    assert files(patches) == before


def test_copy_that_releases_share_keeps_its_line_numbers(tmp_path: Path) -> None:
    """And follows in the lines around a change: it would not apply otherwise."""
    copy = tmp_path / "copy.patch"
    text = (
        b"Subject: x\n\nLast-Update: 2026-01-01\n---\ndiff --git a b\n"
        b"@@ -%d @@ def f\n 0\n+1\n"
    )
    copy.write_bytes(text % 1)

    assert not queue.write(copy, (text % 2).replace(b"def f", b"def g"), shared=True)
    assert copy.read_bytes() == text % 1
    assert queue.write(copy, text % 2)
    assert queue.write(copy, text.replace(b"+1", b"+2") % 1, shared=True)
    around = text.replace(b" 0", b" 3") % 1
    copy.write_bytes(text % 1)
    assert queue.write(copy, around, shared=True)
    assert copy.read_bytes() == around


@pytest.mark.usefixtures("hostile_git")
def test_refreshed_series_makes_the_same_worktree(
    tmp_path: Path, patches: Path, part: Part
) -> None:
    """Also where upstream's file has line ends of another system."""
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    assert (tree / DOS).read_bytes().endswith(b"\r\n")
    edit(tree, "# more\r\n", "-m", "[Misc] Say more", file=DOS)
    edit(tree, "größer\n", "-m", "[Doc] Say it in UTF-8: größer")

    queue.refresh(PINNED, tree, patches)

    series = read_series(patches / "series")
    again = tmp_path / "again"
    queue.make_worktree(part(PINNED), replace(PINNED, series=series), again)
    assert files(again) == files(tree)
    subjects = [
        queue.git(folder, "log", "--format=%an %ae %ad %B", queue.BRANCH)
        for folder in (tree, again)
    ]
    assert subjects[0].split("vLLM  ")[0] == subjects[1].split("vLLM  ")[0]
    before = substances(patches)
    for path in series[:-2]:
        path.write_text("gone")
    queue.refresh(PINNED, again, patches)
    assert substances(patches) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["checkout", "-q", "-b", "other"], "is on other"),
        (["checkout", "-q", "--detach"], "is on HEAD"),
        (["commit", "-q", "--allow-empty", "-m", "Nothing"], "changes nothing"),
    ],
)
def test_refresh_refuses_what_is_no_series(
    tmp_path: Path, patches: Path, part: Part, command: list[str], message: str
) -> None:
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    before = files(patches)
    queue.git(tree, *command)

    with pytest.raises(BuildError, match=message):
        queue.refresh(PINNED, tree, patches)

    assert files(patches) == before


def test_refresh_refuses_subjects_that_begin_alike(
    tmp_path: Path, patches: Path, part: Part
) -> None:
    """The number of a patch may change, so it is known by the rest of its name."""
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    before = files(patches)
    subject = "[Bugfix] Leave the null block out of the maximum concurrency of all"
    edit(tree, "more\n", "-m", subject)

    with pytest.raises(BuildError, match="begin alike"):
        queue.refresh(PINNED, tree, patches)

    assert files(patches) == before


def test_refresh_refuses_what_is_not_committed(
    tmp_path: Path, patches: Path, part: Part
) -> None:
    tree = tmp_path / "tree"
    queue.make_worktree(part(PINNED), PINNED, tree)
    before = files(patches)
    for name in ("README.md", "a-new-file.py"):
        (tree / name).write_text("edited")

        with pytest.raises(BuildError, match=f"not committed: {name}"):
            queue.refresh(PINNED, tree, patches)

        queue.git(tree, "checkout", "--quiet", ".")

    assert files(patches) == before


def test_worktree_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("mine")

    with pytest.raises(BuildError, match="may hold work"):
        queue.make_worktree(sdist(PINNED), PINNED, tmp_path)

    assert (tmp_path / "work").read_text() == "mine"


def changed_files(patch: Path) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.M))


def test_add_release_pins_it_and_says_what_does_not_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = RELEASES[0]
    pins = read_pins()
    was = pins["release"].pop(version)
    pins["release"] = {PINNED.version: pins["release"][PINNED.version]}
    monkeypatch.setattr(releases, "read_pins", lambda: pins)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    cache = tmp_path / "downloads"
    cache.mkdir()
    (cache / was["sdist"]["file"]).symlink_to(sdist(load_release(version)))
    text = (ROOT / "upstream.toml").read_text()
    start = text.index(f'[release."{version}"]')
    file = tmp_path / "upstream.toml"
    rest = text[text.index(f'[release."{PINNED.version}"]') :]
    text = text[: text.index(f'[release."{RELEASES[1]}"]')] + rest
    file.write_text(text[:start] + rest)

    report = releases.add(version, cache, file)

    same = text.replace(f'series = "{was["series"]}"', 'series = "series"')
    assert file.read_text() == same
    first, second, *lines = report.splitlines()
    assert first == f"pinned {was['sdist']['file']}"
    assert second == f"series fits best; {len(lines)} patches do not apply"
    named = [line.partition(" does not apply: ")[0] for line in lines]
    # Those shared with the release apply, unless they change what one of its own does.
    patches: dict[bool, list[Path]] = {True: [], False: []}
    for patch in load_release(version).series:
        patches[patch.parent == PATCHES].append(patch)
    elsewhere = set[str]().union(*map(changed_files, patches[False]))
    alone = {p.name for p in patches[True] if elsewhere.isdisjoint(changed_files(p))}
    assert alone
    assert alone.isdisjoint(named)
    assert [name for name in named if "slot-mapping" in name]  # 0.33.0 has that change

    with pytest.raises(BuildError, match="already"):
        releases.add(PINNED.version, cache, file)
    with pytest.raises(BuildError, match=r"vllm-9\.9\.9\.tar\.gz"):
        releases.add("9.9.9", cache, file)
