# SPDX-License-Identifier: Apache-2.0
"""What packaging/ repeats of the pins, the series and vLLM.

The spec and the recipe take a list of patches, a hash and requirements in their own
syntax. A test fails when one of them is not what this writes.
"""

import email
import re
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from cpu_wheel import packager
from cpu_wheel.errors import BuildError
from cpu_wheel.paths import ROOT
from cpu_wheel.pins import Release

PACKAGING = ROOT / "packaging"
SPEC = PACKAGING / "rpm" / "vllm.spec"
RECIPE = PACKAGING / "conda" / "recipe.yaml"
# Requirements whose package has another name in conda-forge.
CONDA = {
    "mistral_common": "mistral-common",
    "opencv-python-headless": "py-opencv",
    "outlines_core": "outlines-core",
}
# A proprietary build of what comes with conda-forge's compilers; torch is the
# recipe's context.torch.
NOT_THERE = {"intel-openmp", "torch"}
MACHINE = {"platform_machine": "x86_64", "platform_system": "Linux", "extra": ""}
PYTHONS = [{"python_version": f"3.{minor}"} for minor in range(11, 15)]


def onednn(tree: Path) -> str:
    """Return the version of oneDNN that vLLM's CMake names for x86.

    Raises:
        BuildError: It names none in the way that is known here.
    """
    path = tree / "cmake" / "cpu_extension.cmake"
    match = re.search(r"oneDNN\.git\n +GIT_TAG +v([\d.]+)\n", path.read_text())
    if match is None:
        raise BuildError(f"{path} names no oneDNN in the form `GIT_TAG vX`")
    return match[1]


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires on x86-64 Linux, as a conda recipe writes it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found = ["python", "pytorch ==${{ torch }}"]
    for wanted in map(Requirement, metadata.get_all("Requires-Dist", [])):
        # Any Python: what only some of them need does the others no harm.
        if wanted.name in NOT_THERE or not any(
            wanted.marker is None or wanted.marker.evaluate(MACHINE | python)
            for python in PYTHONS
        ):
            continue
        name = CONDA.get(wanted.name, wanted.name).lower()
        versions = ",".join(sorted(map(str, wanted.specifier), reverse=True))
        found.append(f"{name} {versions}".strip())
    return sorted(found)


def replace(text: str, pattern: str, new: str) -> str:
    """Replace the one place of a text that matches a pattern.

    Raises:
        BuildError: There is none, or more than one.
    """
    made, count = re.subn(pattern, lambda match: new, text, flags=re.MULTILINE)
    if count != 1:
        raise BuildError(f"{pattern!r} matches {count} places, expected one")
    return made


def spec(text: str, release: Release, tree: Path) -> str:
    """Return an RPM spec with a release's version, hash, oneDNN and patches."""
    names = "".join(f"{name}\n" for name in packager.series_names(release))
    text = replace(
        text, r"^%global sha256 .*$", f"%global sha256 {release.sdist.sha256}"
    )
    text = replace(text, r"^%global onednn .*$", f"%global onednn {onednn(tree)}")
    text = replace(text, r"^Version: .*$", f"Version:        {release.version}")
    return replace(text, r"^%patchlist\n(?:.+\n)*", f"%patchlist\n{names}")


def recipe(text: str, release: Release, wheel: Path) -> str:
    """Return a recipe with a release's version, hash, patches and requirements."""
    names = "".join(f"    - patches/{n}\n" for n in packager.series_names(release))
    run = "".join(f"    - {wanted}\n" for wanted in requirements(wheel))
    torch = release.torch.removesuffix("+cpu")
    text = replace(text, r"^  version: \".*\"$", f'  version: "{release.version}"')
    text = replace(text, r"^  torch: \".*\"$", f'  torch: "{torch}"')
    text = replace(text, r"^  sha256:.*$", f"  sha256: {release.sdist.sha256}")
    text = replace(text, r"^  patches:\n(?:    - .*\n)*", f"  patches:\n{names}")
    return replace(text, r"^  run:\n(?:    - .*\n)*", f"  run:\n{run}")


def written(release: Release, tree: Path, wheel: Path) -> dict[Path, str]:
    """Return what each file must be.

    Args:
        release: The release that it is for.
        tree: Its patched tree.
        wheel: The wheel that is built from it.
    """
    return {
        SPEC: spec(SPEC.read_text(), release, tree),
        RECIPE: recipe(RECIPE.read_text(), release, wheel),
    }
