# SPDX-License-Identifier: Apache-2.0
"""That a distribution's own tools take the series, and make the tree that we build.

A missing tool fails: the message names the package that has it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cpu_wheel import packager, source, steps
from cpu_wheel.fetch import fetch, sha256
from cpu_wheel.pins import BuildError, Release, Settings, load_release, read_pins

PACKAGES = {
    "dpkg-source": "dpkg-dev",
    "git": "git",
    "patch": "patch",
    "quilt": "quilt",
    "rpmbuild": "rpm",
}
VERSION = load_release().version


def run(folder: Path, *command: str | Path, **environment: str | Path) -> str:
    """Run a distribution's tool and return what it says."""
    tool = str(command[0])
    assert shutil.which(tool), f"{tool} is not installed; it is in {PACKAGES[tool]}"
    result = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=source.git_environment(folder)
        | {k: str(v) for k, v in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


def content(tree: Path, *but: str) -> dict[str, bytes]:
    """Return a tree's files, less what a tool keeps for itself."""
    return {
        name: path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and not (name := str(path.relative_to(tree))).startswith(but)
    }


@pytest.fixture(scope="module")
def ours(tree: Path) -> dict[str, bytes]:
    """The tree that the wheel is built from."""
    return content(tree, "nothing")


@pytest.fixture
def series(release: Release, tmp_path: Path) -> Path:
    packager.write_series(release, tmp_path / "patches")
    return tmp_path / "patches"


@pytest.fixture
def unpacked(sdist: Path, tmp_path: Path) -> Path:
    """The sdist as a packager unpacks it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    return tmp_path / "unpacked" / f"vllm-{VERSION}"


def names(series: Path) -> list[str]:
    return (series / "series").read_text().splitlines()


@pytest.mark.parametrize("version", read_pins()["release"])
def test_patch_without_fuzz(version: str, tmp_path: Path) -> None:
    """On the pinned release no hunk is at another line, and the tree is ours."""
    release = load_release(version)
    tree = tmp_path / "tree"
    source.unpack(fetch(release.sdist, Settings.from_environment().cache), tree)
    packager.write_series(release, tmp_path / "patches")

    options = ("-p1", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "--input")
    said = ""
    for name in names(tmp_path / "patches"):
        said += run(tree, "patch", *options, tmp_path / "patches" / name)

    assert "fuzz" not in said
    assert ("offset" in said) is not release.pinned
    made = tmp_path / "made"
    source.make_source(
        fetch(release.sdist, Settings.from_environment().cache),
        release.series,
        release.pinned,
        made,
    )
    assert content(tree, "nothing") == content(made, "nothing")


def test_quilt(
    unpacked: Path, series: Path, ours: dict[str, bytes], tmp_path: Path
) -> None:
    before = content(unpacked, ".pc/")
    settings: dict[str, str | Path] = {"QUILT_PATCHES": series, "QUILTRC": "-"}

    run(unpacked, "quilt", "push", "-a", "--fuzz=0", **settings)

    assert content(unpacked, ".pc/") == ours
    run(unpacked, "quilt", "pop", "-a", **settings)
    assert content(unpacked, ".pc/") == before


def test_git_am(unpacked: Path, series: Path, ours: dict[str, bytes]) -> None:
    person = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org"}
    person |= {"GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org"}
    run(unpacked, "git", "init", "--quiet")
    (unpacked / ".git/info/attributes").write_text("* -text\n")
    run(unpacked, "git", "add", "--all", "--force")
    run(unpacked, "git", "commit", "--quiet", "-m", "upstream", **person)

    patches = [series / name for name in names(series)]
    run(unpacked, "git", "am", "--quiet", "--keep-non-patch", *patches, **person)

    assert content(unpacked, ".git/") == ours
    trailers = "--format=%(trailers:key=Origin)%(trailers:key=Forwarded)"
    last = run(unpacked, "git", "log", "-1", trailers)
    assert last.split() == ["Origin:", "vendor", "Forwarded:", "not-needed"]


def test_dep_3_fields(series: Path) -> None:
    """As a tool reads them: the trailers, and what the mail's header stands for."""
    for name in names(series):
        message = (series / name).read_text().partition("\n---\n")[0]
        assert re.search(r"^From: .+", message, re.M), name
        assert re.search(r"^Subject: \[PATCH\] \[.+", message, re.M), name
        parsed = subprocess.run(
            ["git", "interpret-trailers", "--parse"],
            input=message,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        fields = dict(line.split(": ", 1) for line in parsed.splitlines())
        assert re.match(r"vendor|upstream|backport|other", fields["Origin"]), name
        assert "Forwarded" in fields or "Applied-Upstream" in fields, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", fields["Last-Update"]), name


def test_dpkg_source(
    unpacked: Path, series: Path, sdist: Path, ours: dict[str, bytes]
) -> None:
    """A 3.0 (quilt) source package, whose version is upstream's."""
    debian = unpacked / "debian"
    (debian / "source").mkdir(parents=True)
    (debian / "source/format").write_text("3.0 (quilt)\n")
    (debian / "control").write_text(
        "Source: vllm\nMaintainer: A Packager <a@example.org>\n"
        "Standards-Version: 4.7.0\nBuild-Depends: debhelper-compat (= 13)\n\n"
        "Package: python3-vllm\nArchitecture: amd64\nDescription: a test\n"
    )
    (debian / "changelog").write_text(
        f"vllm ({VERSION}-1) unstable; urgency=medium\n\n  * A test.\n\n"
        " -- A Packager <a@example.org>  Mon, 30 Nov 2026 00:00:00 +0000\n"
    )
    shutil.copyfile(sdist, unpacked.parent / f"vllm_{VERSION}.orig.tar.gz")
    series.rename(debian / "patches")

    said = run(unpacked, "dpkg-source", "--before-build", ".")

    assert said.count("applying") == len(names(debian / "patches"))
    assert content(unpacked, "debian/", ".pc/") == ours
    run(unpacked.parent, "dpkg-source", "-b", unpacked)
    dsc = unpacked.parent / f"vllm_{VERSION}-1.dsc"
    run(unpacked.parent, "dpkg-source", "--no-check", "-x", dsc, "extracted")
    assert content(unpacked.parent / "extracted", "debian/", ".pc/") == ours


def test_rpmbuild(
    series: Path, sdist: Path, tmp_path: Path, ours: dict[str, bytes]
) -> None:
    patches = "".join(f"Patch: {name}\n" for name in names(series))
    spec = tmp_path / "vllm.spec"
    spec.write_text(
        f"Name: vllm\nVersion: {VERSION}\nRelease: 1\nSummary: A test\n"
        f"License: Apache-2.0\nSource: {sdist.name}\n{patches}"
        "%description\nA test.\n%prep\n%autosetup -p1\n"
    )
    shutil.copyfile(sdist, series / sdist.name)

    run(
        tmp_path,
        *("rpmbuild", "-bp", "--nodeps", spec),
        *("--define", f"_topdir {tmp_path}/rpm", "--define", f"_sourcedir {series}"),
    )

    (made,) = (tmp_path / "rpm/BUILD").glob(f"vllm-{VERSION}*")
    if not (made / "setup.py").exists():  # newer rpm has a folder a build
        made = made / f"vllm-{VERSION}"
    assert content(made, "SPECPARTS") == ours


def test_wheel_of_a_patched_tree(
    unpacked: Path,
    series: Path,
    native_wheel: Path,
    wheel: Path,
    tmp_path: Path,
) -> None:
    """No archive is fetched, and the bytes are those of the wheel that make builds."""
    run(unpacked, "quilt", "push", "-a", "-q", QUILT_PATCHES=series, QUILTRC="-")

    result = subprocess.run(
        [sys.executable, "-m", "cpu_wheel", "wheel", "--dist-dir", tmp_path / "dist"],
        env=os.environ
        | {
            "CPU_WHEEL_TREE": str(unpacked),
            "CPU_WHEEL_NATIVE_WHEEL": str(native_wheel),
            "CPU_WHEEL_SDIST": "/nowhere",
            "PIP_NO_INDEX": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert sha256(Path(result.stdout.strip())) == sha256(wheel)


@pytest.mark.parametrize("fault", ["other release", "not patched", "no sdist"])
def test_tree_that_no_wheel_is_built_from(
    unpacked: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = unpacked / "PKG-INFO"
    message = "apply the series"
    if fault == "other release":
        text = information.read_text().replace(f"Version: {VERSION}", "Version: 0.1.0")
        information.write_text(text)
        message = rf"is vLLM 0\.1\.0, expected {VERSION}"
    elif fault == "no sdist":
        information.unlink()
        message = "no unpacked sdist"
    monkeypatch.setenv("CPU_WHEEL_TREE", str(unpacked))

    with pytest.raises(BuildError, match=message):
        steps.make_source(Settings.from_environment())


def test_series_is_not_written_over(release: Release, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")

    with pytest.raises(BuildError, match="name a new folder"):
        packager.write_series(release, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
