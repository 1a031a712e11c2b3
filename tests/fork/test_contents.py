# SPDX-License-Identifier: Apache-2.0
"""The bill of materials in the wheel, and that `verify` names whatever differs."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom

from cpu_wheel import contents
from cpu_wheel.fetch import sha256
from cpu_wheel.pins import PATCHES, ROOT, BuildError, Release
from tests.fork.conftest import Run

INFO = "vllm-0.32.0+cpu.kv1.dist-info/"


@pytest.fixture
def sources(
    release: Release, sdist: Path, native_wheel: Path, tree: Path
) -> dict[str, Any]:
    """What a wheel is checked against."""
    return {
        "release": release,
        "sdist": sdist,
        "native_wheel": native_wheel,
        "tree": tree,
    }


def test_bill_of_materials(wheel: Path, release: Release) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(INFO + contents.SBOM)
    bom = Bom.from_json(json.loads(text))  # type: ignore[attr-defined]

    assert bom.metadata.component.version == release.wheel_version
    hashes = {c.name: next(iter(c.hashes)).content for c in bom.components}
    overlay = hashes.pop("overlay")
    assert hashes == {
        release.sdist.file: release.sdist.sha256,
        release.native_wheel.file: release.native_wheel.sha256,
        **{
            f"patches/{patch.relative_to(PATCHES)}": sha256(patch)
            for patch in release.series
        },
    }
    assert overlay == contents.overlay_digest(release)


def test_each_file_has_an_origin(wheel: Path, sources: dict[str, Any]) -> None:
    kinds, wrong = contents.verify(wheel, **sources)

    assert wrong == []
    with zipfile.ZipFile(wheel) as archive:
        assert kinds.total() == len(archive.namelist())
    assert kinds["the native wheel"] == 5
    assert kinds["generated, as in RECORD"] == 6
    assert kinds["upstream and patches"] > 5
    assert kinds["the overlay"] >= 5


def test_what_differs_is_named(
    wheel: Path, sources: dict[str, Any], tmp_path: Path
) -> None:
    changed = {
        "vllm/version.py": "upstream",
        "vllm/platforms/cpu.py": "upstream and patches",
        "vllm/v1/core/kv_budget.py": "the overlay",
        "vllm/spinloop.abi3.so": "the native wheel",
        "vllm/_version.py": "RECORD",
        f"{INFO}METADATA": "RECORD",
        f"{INFO}{contents.SBOM}": "the bill of materials",
    }
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            content = bytearray(before.read(name))
            if name in changed:
                content[len(content) // 2] ^= 1
            if name != "vllm/envs.py":
                after.writestr(name, bytes(content))
        after.writestr("vllm/extra.py", "")

    _, wrong = contents.verify(other, **sources)

    assert sorted(wrong) == sorted(
        [
            *(f"{name}: differs from {origin}" for name, origin in changed.items()),
            "vllm/envs.py: missing",
            "vllm/extra.py: comes from nowhere",
        ]
    )


@pytest.mark.parametrize("size", [0, 1000, -1000])
def test_truncated_wheel(
    wheel: Path, sources: dict[str, Any], tmp_path: Path, size: int
) -> None:
    cut = tmp_path / wheel.name
    cut.write_bytes(wheel.read_bytes()[:size])

    with pytest.raises(BuildError, match="is no wheel"):
        contents.verify(cut, **sources)


def test_verify_says_what_is_wrong(run: Run, native_wheel: Path) -> None:
    result = run("python", "-m", "cpu_wheel", "verify", native_wheel, cwd=ROOT)

    assert result.returncode == 1
    said = f"cpu_wheel: {native_wheel} is not vLLM 0.32.0+cpu.kv1\n"
    assert result.stderr == said
