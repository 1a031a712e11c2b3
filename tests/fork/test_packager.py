# SPDX-License-Identifier: Apache-2.0
"""That a distribution's own tools take the series, and make the tree that we build."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_wheel import packager, source, steps
from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.files import sha256
from cpu_wheel.pins import Release, load_release, read_pins
from cpu_wheel.settings import Settings
from tests.fork import packaging_tools as package
from tests.fork.packaging_tools import Inputs, content

VERSION = load_release().version


@pytest.mark.packaging_test
@pytest.mark.parametrize("version", read_pins()["release"])
def test_patch_without_fuzz(version: str, tmp_path: Path) -> None:
    """On the pinned release no hunk is at another line, and the tree is ours."""
    release = load_release(version)
    sdist = fetch(release.sdist, Settings.from_environment().cache)
    packager.write_series(release, tmp_path / "patches")

    tree, said = package.patch(
        Inputs(sdist, tmp_path / "patches", version), tmp_path / "unpacked"
    )

    assert "fuzz" not in said
    assert ("offset" in said) is not release.pinned
    made = tmp_path / "made"
    source.make_source(sdist, release, made)
    assert content(tree) == content(made)


@pytest.mark.packaging_test
def test_quilt(inputs: Inputs, ours: dict[str, bytes], tmp_path: Path) -> None:
    before = content(package.unpack(inputs, tmp_path / "before"))

    tree = package.quilt(inputs, tmp_path)

    assert content(tree, ".pc/") == ours
    package.quilt_pop(inputs, tree)
    assert content(tree, ".pc/") == before


def test_git_am(inputs: Inputs, ours: dict[str, bytes], tmp_path: Path) -> None:
    tree = package.git_am(inputs, tmp_path)

    assert content(tree, ".git/") == ours
    trailers = "--format=%(trailers:key=Origin)%(trailers:key=Forwarded)"
    last = package.run(tree, "git", "log", "-1", trailers)
    assert last.split() == ["Origin:", "vendor", "Forwarded:", "not-needed"]


def test_dep_3_fields(inputs: Inputs) -> None:
    """As a tool reads them: the trailers, and what the mail's header stands for."""
    for name in inputs.names:
        message = (inputs.series / name).read_text().partition("\n---\n")[0]
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


@pytest.mark.packaging_test
def test_wheel_of_a_patched_tree(
    inputs: Inputs,
    native_wheel: Path,
    wheel: Path,
    tmp_path: Path,
) -> None:
    """No archive is fetched, and the bytes are those of the wheel that make builds."""
    tree = package.quilt(inputs, tmp_path)

    result = subprocess.run(
        [sys.executable, "-m", "cpu_wheel", "wheel", "--dist-dir", tmp_path / "dist"],
        env=os.environ
        | {
            "CPU_WHEEL_TREE": str(tree),
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
    inputs: Inputs, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = package.unpack(inputs, tmp_path)
    information = tree / "PKG-INFO"
    message = "apply the series"
    if fault == "other release":
        text = information.read_text().replace(f"Version: {VERSION}", "Version: 0.1.0")
        information.write_text(text)
        message = rf"is vLLM 0\.1\.0, expected {VERSION}"
    elif fault == "no sdist":
        information.unlink()
        message = "no unpacked sdist"
    monkeypatch.setenv("CPU_WHEEL_TREE", str(tree))

    with pytest.raises(BuildError, match=message):
        steps.make_source(Settings.from_environment())


def test_tool_that_is_not_installed(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(BuildError, match=r"rpmbuild .* Debian's package rpm has it"):
        package.rpm(inputs, tmp_path, "-bp")


def test_series_is_not_written_over(release: Release, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")

    with pytest.raises(BuildError, match="name a new folder"):
        packager.write_series(release, tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
