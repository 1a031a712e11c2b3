# SPDX-License-Identifier: Apache-2.0
"""Hand a patched tree to upstream's own build, and check what comes out."""

import contextlib
import email
import importlib.metadata
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cpu_wheel import contents, host
from cpu_wheel.errors import BuildError
from cpu_wheel.files import making
from cpu_wheel.settings import inherited

# What is true of the pinned native modules: two use the limited API of 3.11, all
# use symbols of glibc 2.28 at most. libnuma and libtorch stay outside (README).
PYTHON_TAG = "cp311"
PRECOMPILED_TAG = "manylinux_2_28_x86_64"
NATIVE_MODULES = ("_C", "_C_AVX512", "_C_AVX2", "spinloop", "fs_io_C")
# What upstream's setup.py imports or runs, and what writes the bill of materials.
BUILD_TOOLS = (
    "setuptools",
    "setuptools-rust",
    "setuptools-scm",
    "wheel",
    "cyclonedx-python-lib",
)


# How often a compilation is looked at.
PROGRESS_SECONDS = 20


def check_host(torch: str) -> None:
    """Check that this host can build, and run what it builds.

    Args:
        torch: The version of torch that must be installed.

    Raises:
        BuildError: Something is missing; names what, and how to get it.
    """
    library = "libnuma.so.1"
    if lacks := host.missing({library: host.BUILD_AND_TEST[library]}):
        raise BuildError(f"{lacks} (without it vLLM has no CPU kernels)")
    check_tools()
    if (found := installed_version("torch")) != torch:
        raise BuildError(
            f"torch {found or 'none'} is installed for {sys.executable}, {torch} is "
            "needed: run `python -m cpu_wheel torch`"
        )


def check_tools() -> None:
    """Check that what upstream's setup.py imports is installed.

    Raises:
        BuildError: Something is missing; names what, and how to get it.
    """
    missing = [name for name in BUILD_TOOLS if not installed_version(name)]
    if missing:
        raise BuildError(
            f"{', '.join(missing)} not installed for {sys.executable}: run "
            "`pip install --group build`, or `make` for an environment of its own"
        )


def installed_version(project: str) -> str | None:
    """Return the version of an installed distribution, if it is installed."""
    try:
        return importlib.metadata.version(project)
    except importlib.metadata.PackageNotFoundError:
        return None


def platform_tag(precompiled: bool) -> str:
    """Return the platform that a wheel is for; what is compiled here runs here."""
    if precompiled:
        return PRECOMPILED_TAG
    return re.sub("[-.]", "_", sysconfig.get_platform())


def wheel_name(version: str, precompiled: bool = True) -> str:
    """Return the file name of the wheel of a version such as 0.32.0+cpu.kv1."""
    return f"vllm-{version}-{PYTHON_TAG}-abi3-{platform_tag(precompiled)}.whl"


def build_environment(version: str, epoch: int) -> dict[str, str]:
    """Return the environment of upstream's build: the host must not change the wheel.

    Args:
        version: The wheel's version.
        epoch: The time of every member, in seconds since 1970.
    """
    foreign = ("VLLM_", "SETUPTOOLS_", "DIST_EXTRA_CONFIG", "LC_", "LANG", "GIT_")
    return inherited(*foreign) | {
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(epoch),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_VERSION_OVERRIDE": version,
    }


def run_setup(
    tree: Path, arguments: list[str], environment: dict[str, str], log: Path
) -> None:
    """Run upstream's setup.py in a tree, and show how far a compilation is.

    Args:
        tree: The tree, which is written to.
        arguments: The command of setup.py with its options.
        environment: All variables of the build.
        log: The file that takes upstream's output.

    Raises:
        BuildError: Upstream's build failed; gives its first error.
    """
    command = [sys.executable, "setup.py", "--quiet", "--no-user-cfg", *arguments]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # So that what it started ends with it.
            start_new_session=True,
        ) as process,
    ):
        try:
            shown = ""
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PROGRESS_SECONDS)
                text = log.read_text(errors="replace")
                steps = re.findall(r"^\[\d+/\d+\]|^\[ *\d+%\]", text, re.M)
                if process.returncode is None and steps and steps[-1] != shown:
                    shown = steps[-1]
                    print(f"cpu_wheel: compiling {shown}", file=sys.stderr, flush=True)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise
    if process.returncode != 0:
        raise BuildError(f"upstream's build failed ({log}): {first_error(log)}")


def first_error(log: Path) -> str:
    """Return the line of a build's output that says what is wrong.

    It is CMake's first error, or the compiler's, or else the last line.
    """
    text = log.read_text(errors="replace")
    if match := re.search(r"^CMake Error[^\n]*\n((?:[^\n]*\n)+?)\n\n", text, re.M):
        return " ".join(match[1].partition("Call Stack")[0].split())
    if match := re.search(r"^.*\berror: .+$", text, re.M):
        return match[0]
    return (text.strip().splitlines() or ["no output"])[-1]


def build(
    source: Path,
    natives: contents.Natives,
    version: str,
    epoch: int,
    sbom: bytes,
    log: Path,
    wheel: Path,
) -> None:
    """Build a wheel with upstream's setup.py; a failure leaves none behind.

    Args:
        source: The patched tree; it is copied, never written to.
        natives: The native modules.
        version: The wheel's version.
        epoch: See build_environment.
        sbom: The bill of materials that the wheel is to carry.
        log: The file that takes upstream's output.
        wheel: The file to make.

    Raises:
        BuildError: Upstream's build failed, or the wheel is not what it must be.
    """
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=log.parent) as name:
        folder = Path(name)
        tree = folder / "tree"
        copy_tree(source, tree)
        environment = build_environment(version, epoch) | {
            "VLLM_USE_PRECOMPILED": "1",
            "VLLM_PRECOMPILED_WHEEL_LOCATION": str(natives.archive),
        }
        if natives.torch:
            require_torch(tree / "requirements/cpu.txt", natives.torch)
        command = ["bdist_wheel", "--dist-dir", str(folder), "--compression=stored"]
        command += ["--py-limited-api", PYTHON_TAG]
        command += ["--plat-name", wheel.stem.rpartition("-")[2]]
        run_setup(tree, command, environment, log)
        built = folder / wheel.name
        check_wheel(built, version, natives.modules)
        with making(wheel) as partial:
            pack(built, partial, epoch, sbom)


def require_torch(requirements: Path, version: str) -> None:
    """Let upstream's requirements ask for the torch that modules were linked with."""
    text = requirements.read_text()
    requirements.write_text(
        re.sub(r"^torch==[^;\s]+", f"torch=={version}", text, flags=re.M)
    )


def copy_tree(source: Path, tree: Path) -> None:
    """Copy what upstream's build needs of a tree, to where it can be written to."""
    shutil.copytree(
        source,
        tree,
        symlinks=True,
        ignore=not_needed,
        copy_function=shutil.copyfile,
    )
    for folder, _, _ in os.walk(tree):
        os.chmod(folder, 0o755)


def not_needed(folder: str, names: list[str]) -> list[str]:
    """Return what of the tree's top folder upstream's build of Python files ignores."""
    if "setup.py" not in names:
        return []
    return [
        name
        for name in names
        if (Path(folder) / name).is_dir()
        and name not in ("licenses", "requirements", "tools", "vllm", "vllm.egg-info")
    ]


def pack(stored: Path, wheel: Path, epoch: int, sbom: bytes) -> None:
    """Compress a wheel, with one mode and one time for every member.

    The bill of materials is added, and its row to RECORD, which is the last member.

    Args:
        stored: The wheel to read, not compressed.
        wheel: The file to write.
        epoch: The time of every member, in seconds since 1970.
        sbom: The bill of materials.
    """
    with (
        zipfile.ZipFile(stored) as source,
        zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        *names, record = source.namelist()
        added = record.replace("RECORD", contents.SBOM)
        for name in (*names, added, record):
            content = sbom if name == added else source.read(name)
            if name == record:
                content += f"{','.join(contents.record(added, sbom))}\n".encode()
            member = zipfile.ZipInfo(name, time.gmtime(epoch)[:6])
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            packed.writestr(member, content)


def check_wheel(wheel: Path, version: str, modules: Iterable[str]) -> None:
    """Check that a wheel has the native modules, the name and the version it must.

    Raises:
        BuildError: It has not; names what is missing or different.
    """
    if not wheel.is_file():
        made = ", ".join(path.name for path in wheel.parent.glob("*.whl")) or "none"
        raise BuildError(f"upstream's build made {made}, expected {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        metadata = archive.read(f"vllm-{version}.dist-info/METADATA")
    for module in modules:
        if f"vllm/{module}.abi3.so" not in members:
            raise BuildError(f"{wheel.name} lacks vllm/{module}.abi3.so")
    found = email.message_from_bytes(metadata)["Version"]
    if found != version:
        raise BuildError(f"{wheel.name} says Version: {found}, expected {version}")
