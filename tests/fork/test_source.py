# SPDX-License-Identifier: Apache-2.0
"""The series applies to the pinned sdist, exactly, and nothing else does."""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from cpu_wheel import source
from cpu_wheel.errors import BuildError
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release, load_release, read_series

LINES = [f"line {number}\n" for number in range(1, 41)]


@pytest.fixture(scope="module")
def upstream(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    tree = tmp_path_factory.mktemp("upstream") / "vllm"
    source.unpack(sdist, tree)
    return tree


@pytest.fixture
def copy(upstream: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(upstream, tmp_path / "vllm", symlinks=True))


def checked(*command: str, **options: object) -> str:
    result = subprocess.run(  # type: ignore[call-overload]
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    assert result.returncode == 0, result.stdout
    return str(result.stdout)


def python_files(tree: Path, release: Release) -> dict[str, bytes]:
    """The content of each file that the series touches."""
    touched = set()
    for patch in release.series:
        touched |= set(re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.M))
    return {name: (tree / name).read_bytes() for name in touched}


def test_git_am_takes_the_series(copy: Path, tree: Path, release: Release) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.invalid")
    checked(*git, "init", "--quiet", cwd=copy)
    checked(*git, "add", "--all", "--force", cwd=copy)
    checked(*git, "commit", "--quiet", "--message=upstream", cwd=copy)

    checked(*git, "am", "--keep-non-patch", *map(str, release.series), cwd=copy)

    assert python_files(copy, release) == python_files(tree, release)
    subjects = checked(*git, "log", "--format=%s", "--reverse", cwd=copy).splitlines()
    assert len(subjects) == 1 + len(release.series)
    assert all(re.match(r"(\[[A-Z]\w+\])+ ", line) for line in subjects[1:])


def test_every_patch_says_where_it_stands(release: Release) -> None:
    for patch in release.series:
        message = patch.read_text().split("\n---\n")[0]
        trailers = checked(
            "git", "interpret-trailers", "--parse", input=message, cwd=ROOT
        )
        assert re.search(r"^Origin: ", trailers, re.M), patch
        assert re.search(r"^(Forwarded|Applied-Upstream): ", trailers, re.M), patch
        assert re.search(r"^Last-Update: \d{4}-\d\d-\d\d$", trailers, re.M), patch


def test_first_patch_is_a_few_lines(release: Release) -> None:
    diff = release.series[0].read_text().split("\ndiff --git ")[1]
    changed = re.findall(r"^[+-](?![+-]{2})", diff, re.M)
    assert len(changed) <= 40


def test_nothing_of_upstream_is_in_this_repository(upstream: Path) -> None:
    tracked = checked("git", "ls-files", "vllm", "tests", cwd=ROOT).splitlines()
    assert "tests/platforms/test_cpu_kv_cache_budget.py" in tracked
    assert [name for name in tracked if (upstream / name).exists()] == []


def make_patch(folder: Path, before: list[str], after: list[str]) -> Path:
    """Return a patch of a/file.txt made by git from two versions of it."""
    for name, lines in (("a", before), ("b", after)):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.txt").write_text("".join(lines))
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "a/file.txt", "b/file.txt"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    patch = folder / "0001-change.patch"
    patch.write_text(diff)
    return patch


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """A patch with two hunks, of lines 5 and 30."""
    after = LINES.copy()
    after[4] = after[29] = "changed\n"
    return make_patch(tmp_path / "patch", LINES, after)


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def test_second_hunk_does_not_apply(patch: Path, small_tree: Path) -> None:
    lines = LINES.copy()
    lines[29] = "what upstream says now\n"
    (small_tree / "file.txt").write_text("".join(lines))

    with pytest.raises(BuildError, match=r"0001-change.patch .* hunk #2 of file\.txt"):
        source.apply_patches(small_tree, [patch], allow_offset=True)


def test_fuzz_is_refused(patch: Path, small_tree: Path) -> None:
    """`patch` would take this hunk with its default fuzz."""
    lines = LINES.copy()
    lines[1] = "another context line\n"
    (small_tree / "file.txt").write_text("".join(lines))

    with pytest.raises(BuildError, match=r"hunk #1 of file\.txt"):
        source.apply_patches(small_tree, [patch], allow_offset=True)


def test_offset_is_refused_or_reported(
    patch: Path, small_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(["a new line\n", *LINES])
    (small_tree / "file.txt").write_text(text)

    with pytest.raises(
        BuildError, match=r"0001-change.patch: hunk #1 of file\.txt .*offset 1 line"
    ):
        source.apply_patches(small_tree, [patch], allow_offset=False)

    (small_tree / "file.txt").write_text(text)
    source.apply_patches(small_tree, [patch], allow_offset=True)
    assert "hunk #2 of file.txt applies only at" in capsys.readouterr().err
    assert (small_tree / "file.txt").read_text().count("changed\n") == 2


def test_missing_file_is_named(patch: Path, small_tree: Path) -> None:
    with pytest.raises(BuildError, match=r"0001-change.patch .*file\.txt"):
        source.apply_patches(small_tree, [patch], allow_offset=True)


def test_settings_of_git_have_no_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patch: Path
) -> None:
    """Neither the user's, nor a repository around the tree that ignores it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        "[apply]\n\twhitespace = error-all\n[core]\n\tautocrlf = true\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    repository = tmp_path / "repository"
    tree = repository / "build" / "tree"
    tree.mkdir(parents=True)
    monkeypatch.delenv("GIT_DIR")
    checked("git", "init", "--quiet", cwd=repository)
    (repository / ".gitignore").write_text("/build/\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    (tree / "file.txt").write_text("".join(LINES))
    patch.write_text(patch.read_text().replace("+changed\n", "+changed \t\n"))

    source.apply_patches(tree, [patch], allow_offset=False)

    assert (tree / "file.txt").read_bytes().count(b"changed \t\n") == 2


def test_archive_that_would_leave_its_folder(tmp_path: Path) -> None:
    archive = tmp_path / "bad.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("top/fine", "../escaped"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"evil"))
    (tmp_path / "in").mkdir()

    with pytest.raises(BuildError, match=r"bad\.tar\.gz .*escaped"):
        source.make_source(archive, load_release(), tmp_path / "in" / "tree")

    assert list((tmp_path / "in").iterdir()) == []
    assert not (tmp_path / "escaped").exists()


def test_interruption_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sdist: Path
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(source, "apply_patches", interrupt)
    with pytest.raises(KeyboardInterrupt):
        source.make_source(sdist, load_release(), tmp_path / "in" / "tree")

    assert list((tmp_path / "in").iterdir()) == []


def test_overlay_does_not_replace_upstreams_files(small_tree: Path) -> None:
    (small_tree / "vllm").mkdir()
    (small_tree / "vllm" / "envs.py").write_text("upstream's")

    with pytest.raises(BuildError, match=r"vllm/envs\.py .* patches/"):
        source.add_overlay(small_tree, [Path("vllm/envs.py")])


def test_overlay_is_in_the_tree(tree: Path) -> None:
    files = source.overlay_files(load_release())
    assert Path("tests/platforms/test_cpu_kv_cache_budget.py") in files
    assert not [path for path in files if path.parts[:2] == ("tests", "fork")]
    for path in files:
        assert (tree / path).read_bytes() == (ROOT / path).read_bytes()


@pytest.mark.parametrize("missing", ["series", "patch"])
def test_series_with_a_missing_file(tmp_path: Path, missing: str) -> None:
    if missing == "patch":
        (tmp_path / "series").write_text("# a comment\n\n0001-gone.patch\n")

    with pytest.raises(BuildError, match="does not exist"):
        read_series(tmp_path / "series")
