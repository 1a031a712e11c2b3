# SPDX-License-Identifier: Apache-2.0
"""A build from source ends with one clear line where something is missing.

A whole one takes an hour; docs/packaging.md says where it was done.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu_wheel import compiled, contents, wheel
from cpu_wheel.errors import BuildError
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release, load_release
from cpu_wheel.settings import Settings
from tests.fork.conftest import Run


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that come first, of a host without a network."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "git").write_text(
        f"#!/bin/sh\necho \"$1\" >> '{tmp_path}/git'\n"
        '[ "$1" = --version ] && echo git version 2.39.5 && exit\nexit 128\n'
    )
    (programs / "cargo").write_text(f"#!/bin/sh\ntouch '{tmp_path}/cargo was run'\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    tools = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}:{tools}:/usr/bin:/bin")
    return programs


@pytest.fixture
def compiler(host: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The g++ of this host, which says that it is version 14.2."""
    return say_version(host / "g++", 14, 2, monkeypatch)


def say_version(
    path: Path, major: int, minor: int, monkeypatch: pytest.MonkeyPatch
) -> Path:
    real = shutil.which("g++", path="/usr/bin:/bin")
    assert real, "g++ is missing: install g++"
    path.write_text(
        f"#!/bin/sh\nexec {real} -U__GNUC__ -D__GNUC__={major} -U__GNUC_MINOR__ "
        f'-D__GNUC_MINOR__={minor} "$@"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


@pytest.fixture
def build(tree: Path, release: Release, tmp_path: Path) -> Callable[..., str]:
    """Build from source and return the one line with which that ends."""

    def build(tree: Path = tree, release: Release = release) -> str:
        path = tmp_path / "native.zip"
        with pytest.raises(BuildError) as error:
            settings = Settings.from_environment()
            compiled.build(tree, release, 1 << 30, settings, tmp_path, path)
        assert not path.exists()
        assert not (tmp_path / "cargo was run").exists()
        (line,) = str(error.value).splitlines()
        return line

    return build


def test_compiler_too_old(
    host: Path, build: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = say_version(host / "g++", 12, 2, monkeypatch)
    line = build()
    assert "X86 backend requires gcc/g++ >= 12.3, found GNU 12.2" in line
    assert f"({old}): set CC and CXX to a newer one" in line


def test_no_compiler(
    host: Path, build: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++-of-another-host")
    assert "g++-of-another-host" in build()


def test_onednn_out_of_reach(
    compiler: Path, build: Callable[..., str], tmp_path: Path
) -> None:
    """The configuration says what to set before it downloads, and probes nothing."""
    assert "onednn" in build().replace(str(tmp_path), "").lower()
    (log,) = tmp_path.rglob("*.log")
    said = "set FETCHCONTENT_SOURCE_DIR_ONEDNN to a oneDNN source tree"
    assert said in " ".join(log.read_text().split())
    assert "ls-remote" not in (tmp_path / "git").read_text()


@pytest.mark.slow_test
def test_what_was_wrong_is_not_remembered(
    compiler: Path,
    host: Path,
    build: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder stays for the next run, but not CMake's choices of the last one."""
    old = say_version(host / "an-old-g++", 12, 2, monkeypatch)
    assert f"({old})" in build()
    monkeypatch.setenv("CXX", str(compiler))
    assert "onednn" in build().replace(str(tmp_path), "").lower()
    monkeypatch.chdir(host.parent)
    monkeypatch.setenv("FETCHCONTENT_SOURCE_DIR_ONEDNN", "bin")
    line = build()
    assert f"FETCHCONTENT_SOURCE_DIR_ONEDNN={host} is not a oneDNN source tree" in line


def configure(tree: Path, folder: Path, first: str, last: str, set_up: str) -> str:
    """Return what CMake says of the lines of upstream's file between two others."""
    text = (tree / "cmake/cpu_extension.cmake").read_text()
    block = text[text.index(first) : text.index(last)]
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.26)\nproject(part CXX)\n{set_up}\n{block}\n"
        'message(STATUS "libgomp ${OPEN_MP} sleef ${SLEEF_LIBRARY}.")\n'
    )
    result = subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build"],
        capture_output=True,
        text=True,
        check=False,
    )
    return " ".join((result.stdout + result.stderr).split())


def test_libgomp_is_found_where_the_compiler_keeps_it(
    host: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "a compiler's own/libgomp.so"
    library.parent.mkdir()
    library.touch()
    compiler = host / "g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = -print-file-name=libgomp.so ] && echo "{library}" ||\n'
        f'exec {shutil.which("g++", path="/usr/bin:/bin")} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    said = configure(
        tree,
        tmp_path / "part",
        "        # Fall back to system / toolchain libgomp",
        "    endif()\nendif()\n\nif (NOT MACOSX_FOUND)",
        "",
    )
    assert f"libgomp {library} sleef" in said


@pytest.mark.parametrize("place", ["torch", "system", "both", "one", "nowhere"])
def test_sleef(place: str, host: Path, tree: Path, tmp_path: Path) -> None:
    """PyTorch's own first; with both in one folder, as in conda-forge, it is linked."""
    torch, system = tmp_path / "torch/include", tmp_path / "system"
    if place == "one":
        torch = system / "include"
    for folder in (torch, system / "include", system / "lib"):
        folder.mkdir(parents=True, exist_ok=True)
    if place in ("torch", "both"):
        (torch / "sleef.h").touch()
    if place in ("system", "both", "one"):
        (system / "include/sleef.h").touch()
    (system / "lib/libsleef.so").touch()
    said = configure(
        tree,
        tmp_path / "part",
        "# PyTorch's own wheels bring sleef.h",
        "# Build oneDNN for GEMM kernels",
        f"set(ENABLE_X86_ISA ON)\nset(TORCH_INCLUDE_DIRS {torch})\n"
        f"set(CMAKE_PREFIX_PATH {system})\nset(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH OFF)",
    )
    if place == "nowhere":
        assert f"sleef.h is neither in PyTorch's {torch} nor in the system" in said
    else:
        found = re.search(r"sleef (\S*)\.(?: |$)", said)
        assert found
        linked = "" if place in ("torch", "both") else str(system / "lib/libsleef.so")
        assert found[1].replace("include/../", "") == linked


def functions(tree: Path, *names: str) -> dict[str, Any]:
    """Return functions of upstream's setup.py, which cannot be imported."""
    module = ast.parse((tree / "setup.py").read_text())
    module.body = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    space = {"os": os, "re": re, "sys": sys, "VLLM_TARGET_DEVICE": "cpu"}
    exec(compile(module, "setup.py", "exec"), space)
    return space


@pytest.mark.parametrize(
    ("value", "bundled"), [(None, True), ("1", True), ("0", False), ("false", False)]
)
def test_tcmalloc_of_the_host(
    value: str | None, bundled: bool, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_BUNDLE_TCMALLOC", raising=False)
    if value:
        monkeypatch.setenv("VLLM_CPU_BUNDLE_TCMALLOC", value)
    upstream = functions(tree, "should_bundle_tcmalloc")
    assert upstream["should_bundle_tcmalloc"]() is bundled


@pytest.mark.parametrize(
    ("value", "modules"),
    [
        ("", ["vllm._C", "vllm._C_AVX512", "vllm._C_AVX2"]),
        ("avx2", ["vllm._C_AVX2"]),
        ("AVX2, amx,", ["vllm._C", "vllm._C_AVX2"]),
        ("avx512;avx2", ["vllm._C_AVX512", "vllm._C_AVX2"]),
    ],
)
def test_variants_are_chosen(
    value: str, modules: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_X86_VARIANTS", value)
    upstream = functions(tree, "cpu_x86_modules")
    assert upstream["cpu_x86_modules"]() == modules


def test_unknown_variant(
    host: Path, build: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_X86_VARIANTS", "avx2,avx3")
    line = build()
    assert "VLLM_CPU_X86_VARIANTS='avx2,avx3': expected some of" in line
    assert "amx, avx512, avx2" in line


def test_variants_of_an_older_release(
    build: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_X86_VARIANTS", "avx2")
    (tmp_path / "setup.py").touch()
    line = build(tmp_path, load_release("0.30.0"))
    assert "VLLM_CPU_X86_VARIANTS is for vLLM 0.31.0 and newer, 0.30.0 has no" in line


def test_bad_choice_of_native_modules(run: Run) -> None:
    result = run(
        *("python", "-m", "cpu_wheel", "wheel"),
        cwd=ROOT,
        env={"VLLM_USE_PRECOMPILED": "no"},
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "VLLM_USE_PRECOMPILED='no': expected 1" in line
    assert "or 0, to compile them" in line


@pytest.mark.parametrize(
    ("value", "compiles"),
    [("0", (1, 1)), ("false", (1, 1)), ("1", (0, 0)), ("", (0, 1))],
)
def test_choice_of_native_modules(
    value: str, compiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing is said, they are compiled where no wheel has them."""
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", value)
    settings = Settings.from_environment()
    releases = load_release("0.32.0"), load_release("0.34.0")
    assert tuple(map(settings.compiles, releases)) == compiles
    assert "-linux_" in wheel.wheel_name("0.32.0+cpu.kv1", precompiled=False)


def test_only_what_differs_is_compiled_again(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    work = tmp_path / "work"
    for name in ("csrc/a.cpp", "csrc/b.cpp"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    compiled.update(tree, work)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*.cpp")}
    (tree / "csrc/b.cpp").write_text("changed")
    compiled.update(tree, work)
    after = {path: path.stat().st_mtime_ns for path in work.rglob("*.cpp")}
    assert {p.name for p in before if before[p] != after[p]} == {"b.cpp"}
    assert (work / "csrc/b.cpp").read_text() == "changed"


def test_key_is_of_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a change of Python files compiles nothing, and one of anything else does."""
    tree = tmp_path / "tree"
    for name in (
        "setup.py",
        "csrc/a.cpp",
        "cmake/b.cmake",
        "vllm/c.py",
        "oneDNN/d.hpp",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    settings = Settings(onednn=tree / "oneDNN")
    keys = [compiled.native_key(tree, "2.14.0+cpu", settings)]
    (tree / "vllm/c.py").write_text("changed")
    assert compiled.native_key(tree, "2.14.0+cpu", settings) == keys[0]

    for name in ("setup.py", "csrc/a.cpp", "cmake/b.cmake", "oneDNN/d.hpp"):
        (tree / name).write_text("changed")
        keys.append(compiled.native_key(tree, "2.14.0+cpu", settings))
    keys.append(compiled.native_key(tree, "2.14.1+debian", settings))
    keys.append(compiled.native_key(tree, "2.14.0+cpu", Settings(variants="avx2")))
    monkeypatch.setenv("CXXFLAGS", "-O1")
    keys.append(compiled.native_key(tree, "2.14.0+cpu", settings))
    assert len({*keys}) == len(keys)


# A setup.py that does one part of two, and the other the next time.
HALVES = """
import os, pathlib, time
build = pathlib.Path("build")
build.mkdir(exist_ok=True)
with (build / "pid").open("a") as pids:
    print(os.getpid(), file=pids)
if not (build / "part").exists():
    (build / "part").touch()
    {first_run}
temp = build / "temp"
(temp / "CMakeFiles/4").mkdir(parents=True)
(temp / "CMakeFiles/4/CMakeCXXCompiler.cmake").write_text(
    'set(CMAKE_CXX_COMPILER_ID "GNU")\\nset(CMAKE_CXX_COMPILER_VERSION "14.2")'
)
(temp / "CMakeCache.txt").write_text(
    "oneDNN_SOURCE_DIR:STATIC={{0}}\\noneDNN_BINARY_DIR:STATIC={{0}}\\n".format(
        pathlib.Path("oneDNN").absolute()
    )
)
version = pathlib.Path("oneDNN/include/oneapi/dnnl/dnnl_version.h")
version.parent.mkdir(parents=True)
version.write_text("#define DNNL_VERSION_MAJOR 3\\n")
(build / "lib").mkdir()
(build / "lib/_C.so").touch()
"""
COMPILE = """
import sys
from pathlib import Path
from cpu_wheel import compiled, pins, settings
tree, folder = map(Path, sys.argv[1:])
compiled.build(
    tree,
    pins.load_release("0.34.0"),
    1 << 30,
    settings.Settings(),
    folder,
    folder / "native.zip",
)
"""


@pytest.mark.parametrize(
    ("first_run", "said"),
    [
        pytest.param("time.sleep(60)", "KeyboardInterrupt", id="ctrl-c"),
        pytest.param(
            "raise SystemExit('as: fatal error: x.o: No space left on device')",
            "fatal error: x.o: No space left on device",
            id="full-disk",
        ),
    ],
)
def test_compilation_that_ends_early_goes_on(
    tmp_path: Path, first_run: str, said: str
) -> None:
    """No archive and no process are left, and the next run begins where it was."""
    tree, folder = tmp_path / "tree", tmp_path / "build"
    tree.mkdir()
    (tree / "setup.py").write_text(HALVES.format(first_run=first_run))
    command = [sys.executable, "-c", COMPILE, str(tree), str(folder)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    work = folder / "compiled-0.34.0/build"
    while "sleep" in first_run and not (work / "part").exists():
        assert process.poll() is None
        time.sleep(0.05)
    if "sleep" in first_run:
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)

    assert process.returncode
    assert said in errors.splitlines()[-1]
    assert not (folder / "native.zip").exists()
    (pid,) = (work / "pid").read_text().split()
    assert not Path(f"/proc/{pid}").exists()

    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    assert compiled.native_modules(folder / "native.zip", None).components


def test_wheel_asks_for_the_torch_that_was_linked(tmp_path: Path) -> None:
    requirements = tmp_path / "cpu.txt"
    requirements.write_text("numba\ntorch==2.14.0+cpu; sys\ntorchvision\n")
    wheel.require_torch(requirements, "2.14.1+debian")
    assert "\ntorch==2.14.1+debian; sys\ntorchvision\n" in requirements.read_text()


def test_bill_of_materials_names_the_compiler(release: Release) -> None:
    native = [
        contents.compiled_component("compiler: GNU", "14.4.0", None),
        contents.compiled_component("oneDNN", "3.7.2", "0" * 64),
    ]
    sbom = contents.make_sbom(release, 1 << 30, native)
    assert b"vllm_cpu" not in sbom
    found = contents.compiled_with(sbom)
    assert [(c.name, c.version) for c in found] == [
        ("compiler: GNU", "14.4.0"),
        ("oneDNN", "3.7.2"),
    ]
    assert contents.make_sbom(release, 1 << 30, found) == sbom


@pytest.mark.parametrize(
    ("output", "line"),
    [
        pytest.param(
            "-- Found\nCMake Error at CMakeLists.txt:3 (message):\n  A is missing:\n"
            "  install B\nCall Stack\n\n\n-- Configuring incomplete\n",
            r"A is missing: install B\b.*",
            id="cmake",
        ),
        pytest.param("x.cpp:1:2: error: no\nninja: stopped\n", "x.cpp.* no", id="g++"),
        pytest.param("a\nb\n", "b", id="other"),
        pytest.param("", "no output", id="nothing"),
    ],
)
def test_first_error(output: str, line: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(output)
    assert re.fullmatch(line, wheel.first_error(log))
