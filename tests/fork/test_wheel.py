# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what it must, whichever entry point built it and wherever."""

import email
import hashlib
import os
import stat
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release
from tests.fork.conftest import Run

NATIVE_MODULES = {
    f"vllm/{name}.abi3.so"
    for name in ("_C", "_C_AVX2", "_C_AVX512", "spinloop", "fs_io_C")
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_name_version_and_tag(wheel: Path, metadata: Message) -> None:
    assert wheel.name == ("vllm-0.32.0+cpu.kv1-cp311-abi3-manylinux_2_28_x86_64.whl")
    assert metadata["Name"] == "vllm"
    assert metadata["Version"] == "0.32.0+cpu.kv1"
    with zipfile.ZipFile(wheel) as archive:
        tag = archive.read("vllm-0.32.0+cpu.kv1.dist-info/WHEEL").decode()
    assert "Tag: cp311-abi3-manylinux_2_28_x86_64\n" in tag


def test_native_modules_are_the_pinned_ones(wheel: Path, native_wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(native_wheel) as theirs:
        members = {n for n in ours.namelist() if n.endswith(".so")}
        assert members == NATIVE_MODULES
        for name in members:
            assert ours.getinfo(name).CRC == theirs.getinfo(name).CRC


def test_python_files_are_the_patched_trees(wheel: Path, tree: Path) -> None:
    generated = {"vllm/_version.py"}
    with zipfile.ZipFile(wheel) as archive:
        packed = {n for n in archive.namelist() if n.endswith(".py")} - generated
        on_disk = {
            path.relative_to(tree).as_posix() for path in (tree / "vllm").rglob("*.py")
        }
        assert packed == on_disk - generated
        for name in packed:
            assert archive.read(name) == (tree / name).read_bytes(), name


def test_requirements_come_from_ordinary_indexes(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    needed = [r for r in requirements if "extra" not in str(r.marker)]
    assert not [r for r in needed if r.url]
    names = {r.name for r in needed}
    assert names.isdisjoint({"triton", "torchvision", "torchaudio", "torchcodec"})
    assert {"numba", "torch", "transformers", "numpy"} <= names
    torch = {str(r.specifier) for r in needed if r.name == "torch"}
    assert "==2.13.0+cpu" in torch

    moved = {r.name for r in requirements if 'extra == "cpu-full"' in str(r.marker)}
    assert moved == {"triton", "torchvision", "torchaudio", "torchcodec"}
    deploy = tomllib.loads((ROOT / "deploy/pyproject.toml").read_text())["project"]
    named = [
        f"{r.name}{r.specifier}"
        for r in requirements
        if 'extra == "kv-budget"' in str(r.marker)
    ]
    # Of a local version the package index takes none, from anybody.
    assert named == [f"{deploy['name']}=={deploy['version']}"]
    assert Version(deploy["version"]).local


def test_limited_api_is_that_of_the_tag(wheel: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--report", str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "_C_AVX2.abi3.so" in result.stdout


def test_members_do_not_depend_on_the_host(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
    assert {member.date_time for member in members} == {members[0].date_time}
    modes = {stat.S_IMODE(member.external_attr >> 16) for member in members}
    assert modes == {0o644}


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    """Settings of a host that must not change the wheel."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cargo", "rustc", "ldconfig", "curl"):
        (tools / name).write_text(
            f"#!/bin/sh\ntouch $HOME/{name}.was-called\nexit 66\n"
        )
        (tools / name).chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".pydistutils.cfg").write_text("[bdist_wheel]\ncompression = stored\n")
    (home / ".gitconfig").write_text("[core]\n\tautocrlf = true\n")
    (home / "extra.cfg").write_text("[bdist_wheel]\ncompression = stored\n")
    return {
        "PATH": f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}"
        f"{os.environ['PATH']}",
        "HOME": str(home),
        "DIST_EXTRA_CONFIG": str(home / "extra.cfg"),
        "TZ": "Pacific/Kiritimati",
        "LC_ALL": "C",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_REQUIRE_RUST_FRONTEND": "1",
        "VLLM_VERSION_OVERRIDE": "6.6.6",
        "SETUPTOOLS_SCM_PRETEND_VERSION": "6.6.6",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def another_user(*folders: Path) -> tuple[str, ...]:
    """Give folders to another user, and return what makes a command run as that one.

    Only root can. The command may read what root may, such as its Python.
    """
    if os.getuid() != 0:
        return ()
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)
    capability = "+dac_read_search"
    options = ("--reuid=12345", "--regid=12345", "--clear-groups", "--ambient-caps")
    return ("setpriv", *options, capability, "--inh-caps", capability)


def test_setup_py_on_another_host_builds_the_same_bytes(
    wheel: Path, checkout: Path, run: Run, hostile: dict[str, str], release: Release
) -> None:
    user = another_user(checkout, Path(hostile["HOME"]))
    result = run(
        *(*user, "python", "setup.py", "bdist_wheel"),
        cwd=checkout,
        env=hostile,
        umask=0o077,
    )

    assert result.returncode == 0, result.stderr
    built = checkout / "dist" / wheel.name
    assert digest(built) == digest(wheel)
    if user:
        assert built.stat().st_uid == 12345
    assert list(Path(hostile["HOME"]).glob("*.was-called")) == []


@pytest.mark.slow_test
def test_pip_and_a_git_clone_build_the_same_bytes(
    wheel: Path, checkout: Path, run: Run, tmp_path: Path
) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b.invalid")
    for command in (("init",), ("add", "--all"), ("commit", "--message=a clone")):
        assert run(*git, *command, cwd=checkout).returncode == 0

    result = run(
        *("python", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", tmp_path / "wheels", "."),
        cwd=checkout,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert digest(tmp_path / "wheels" / wheel.name) == digest(wheel)


@pytest.mark.slow_test
def test_cmake_builds_the_same_bytes(
    wheel: Path, checkout: Path, tmp_path: Path, run: Run, tree: Path, sdist: Path
) -> None:
    build = tmp_path / "cmake build"
    environment = {"CPU_WHEEL_SDIST": ""}  # given as a cache variable instead
    configured = run(
        *("cmake", "-S", checkout, "-B", build, f"-DSDIST={sdist}"),
        f"-DPython3_EXECUTABLE={sys.executable}",
        env=environment,
    )
    assert configured.returncode == 0, configured.stderr

    made = run("cmake", "--build", build, "--target", "source", env=environment)
    assert made.returncode == 0, made.stderr
    assert (checkout / "build" / tree.name / "vllm" / "platforms" / "cpu.py").exists()

    built = run("cmake", "--build", build, "--target", "wheel", env=environment)
    assert built.returncode == 0, built.stderr
    assert digest(build / "dist" / wheel.name) == digest(wheel)

    root, prefix = tmp_path / "a root", tmp_path / "prefix"
    installed = run(
        *("cmake", "--install", build, "--prefix", prefix),
        env={"DESTDIR": str(root)},
    )
    assert installed.returncode == 0, installed.stderr
    placed = root / prefix.relative_to(prefix.anchor)
    (module,) = placed.glob("lib/python3.*/site-packages/vllm/platforms/cpu.py")
    assert module.read_bytes() == (tree / "vllm/platforms/cpu.py").read_bytes()

    tested = run(
        *("ctest", "--test-dir", build, "--verbose"),
        env={"PYTEST_ADDOPTS": "-k 'first_error and cmake'"},
    )
    assert tested.returncode == 0, tested.stdout
    assert " 1 passed" in tested.stdout


def test_nothing_is_built_twice(wheel: Path, run: Run) -> None:
    before = wheel.stat()
    result = run("make", "wheel")
    assert result.returncode == 0, result.stderr
    assert "setup.py" not in result.stderr
    assert "unpack" not in result.stderr
    assert wheel.stat().st_mtime_ns == before.st_mtime_ns
