# SPDX-License-Identifier: Apache-2.0
"""The bill of materials in the wheel, and that `verify` names whatever differs."""

import csv
import io
import json
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom

from cpu_wheel import contents
from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.paths import PATCHES, ROOT
from cpu_wheel.pins import Release
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
    wheel: Path, release: Release, tmp_path: Path, size: int
) -> None:
    cut = tmp_path / wheel.name
    cut.write_bytes(wheel.read_bytes()[:size])

    with pytest.raises(BuildError, match="is no wheel"):
        contents.read_wheel(cut, release)


def test_one_byte_of_a_wheel(wheel: Path, release: Release, tmp_path: Path) -> None:
    """Wherever in a file's compressed bytes, the file is named."""
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("vllm/platforms/cpu.py")
    content = bytearray(wheel.read_bytes())
    for place in range(100, 2100, 500):
        start = member.header_offset + place
        content[start] ^= 0x55
        other.write_bytes(content)
        content[start] ^= 0x55
        with pytest.raises(BuildError, match=r"vllm/platforms/cpu\.py is damaged"):
            contents.read_wheel(other, release)


def copy_wheel(wheel: Path, other: Path, but: Container[str]) -> None:
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            if name not in but:
                after.writestr(name, before.read(name))


def test_what_is_missing_is_named(
    wheel: Path, sources: dict[str, Any], tmp_path: Path
) -> None:
    gone = [
        "vllm/_C_AVX2.abi3.so",
        f"{INFO}METADATA",
        f"{INFO}licenses/licenses/third-party.txt",
    ]
    copy_wheel(wheel, tmp_path / wheel.name, gone)

    _, wrong = contents.verify(tmp_path / wheel.name, **sources)

    assert wrong == sorted(f"{name}: missing" for name in gone)


def test_native_modules_that_were_compiled(
    wheel: Path, sources: dict[str, Any], tmp_path: Path
) -> None:
    """They pass only for who says that they were, and no other than the known ones."""
    modules = [f"vllm/{m}.abi3.so" for m in ("_C", "_C_AVX512", "_C_AVX2", "spinloop")]
    other = tmp_path / wheel.name
    copy_wheel(wheel, other, [INFO + contents.SBOM, *modules, f"{INFO}RECORD"])
    with zipfile.ZipFile(other, "a") as archive:
        native = [contents.compiled_component("compiler: GNU", "14.4.0", None)]
        sbom = contents.make_sbom(sources["release"], 1 << 30, native)
        archive.writestr(INFO + contents.SBOM, sbom)
        for name in ("vllm/spinloop.abi3.so", "vllm/other.abi3.so"):
            archive.writestr(name, "compiled")
        rows = [contents.record(n, archive.read(n)) for n in archive.namelist()]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [*rows, (f"{INFO}RECORD", "", "")]
        )
        archive.writestr(f"{INFO}RECORD", text.getvalue())

    _, wrong = contents.verify(other, **sources)
    assert "vllm/spinloop.abi3.so: differs from the native wheel" in wrong
    assert f"{INFO}{contents.SBOM}: differs from the bill of materials" in wrong

    kinds, wrong = contents.verify(other, **sources | {"native_wheel": None})
    assert wrong == [
        "vllm/other.abi3.so: comes from nowhere",
        "vllm/_C*.abi3.so: missing, so there are no kernels",
    ]
    assert kinds["compiled, as in RECORD"] == 2  # fs_io_C too


def test_verify_says_what_is_wrong(run: Run, native_wheel: Path) -> None:
    result = run("python", "-m", "cpu_wheel", "verify", native_wheel, cwd=ROOT)

    assert result.returncode == 1
    said = f"cpu_wheel: {native_wheel} is not vLLM 0.32.0+cpu.kv1\n"
    assert result.stderr == said
