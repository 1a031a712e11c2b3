# SPDX-License-Identifier: Apache-2.0
"""What is in a wheel: the bill of materials that it carries, and the check of it."""

import base64
import csv
import hashlib
import json
import re
import tarfile
import uuid
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from cpu_wheel import source
from cpu_wheel.errors import BuildError
from cpu_wheel.files import sha256
from cpu_wheel.paths import PATCHES, ROOT
from cpu_wheel.pins import Archive, Release

# What upstream's build writes into a wheel, beside what it copies.
GENERATED = ("vllm/_version.py",)
DIST_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")
SBOM = "sboms/vllm.cdx.json"
# What is compiled whatever the variants of the kernels; the kernels; and all of it,
# with the host's tcmalloc if that was asked for.
COMPILED_MODULES = ("spinloop", "fs_io_C")
KERNELS = r"vllm/_C(_AVX512|_AVX2)?\.abi3\.so"
COMPILED = rf"vllm/(spinloop|fs_io_C)\.abi3\.so|{KERNELS}|vllm/libs/libtcmalloc.*"


class Natives(NamedTuple):
    """Native modules to build a wheel from.

    Attributes:
        archive: A zip that has them where a wheel has.
        modules: Those that the wheel must have, at least.
        components: What they come from, for the bill of materials.
        torch: The torch that the wheel requires instead of upstream's, if any.
    """

    archive: Path
    modules: tuple[str, ...]
    components: list[Component]
    torch: str | None = None


def sha256_component(kind: ComponentType, name: str, digest: str) -> Component:
    digests = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    return Component(type=kind, name=name, bom_ref=name, hashes=digests)


def archive_component(archive: Archive, version: str) -> Component:
    component = sha256_component(ComponentType.LIBRARY, archive.file, archive.sha256)
    component.version = version
    component.purl = PackageURL(
        "pypi", None, archive.project, version, {"file_name": archive.file}
    )
    return component


def overlay_digest(release: Release) -> str:
    """Return a hash of the names and contents of all overlay files."""
    digest = hashlib.sha256()
    for path in source.overlay_files(release):
        digest.update(f"{sha256(ROOT / path)}  {path.as_posix()}\n".encode())
    return digest.hexdigest()


def native_wheel_component(release: Release) -> Component:
    return archive_component(release.native_wheel, release.version)


def compiled_component(name: str, version: str, digest: str | None) -> Component:
    """Return what native modules were compiled with; the digest is of its files."""
    component = Component(
        type=ComponentType.LIBRARY if digest else ComponentType.APPLICATION,
        name=name,
        version=version,
        bom_ref=name,
    )
    if digest:
        component.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    return component


def compiled_with(sbom: bytes) -> list[Component]:
    """Return with what a wheel's native modules were compiled, if they were."""
    try:
        items = json.loads(sbom)["components"]
        return [
            compiled_component(
                item["name"],
                item["version"],
                item["hashes"][0]["content"] if "hashes" in item else None,
            )
            for item in items
            if item["name"] == "oneDNN" or item["name"].startswith("compiler: ")
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def make_sbom(release: Release, epoch: int, native: Iterable[Component]) -> bytes:
    """Return the bill of materials of a release's wheel, as CycloneDX JSON (PEP 770).

    The same inputs give the same bytes: its time is the epoch, and its serial number
    is made from the components.

    Args:
        release: The release.
        epoch: The time of the wheel's members, in seconds since 1970.
        native: Where the native modules come from.
    """
    components = [
        archive_component(release.sdist, release.version),
        *native,
        *(
            sha256_component(
                ComponentType.FILE,
                f"patches/{patch.relative_to(PATCHES).as_posix()}",
                sha256(patch),
            )
            for patch in release.series
        ),
        sha256_component(ComponentType.FILE, "overlay", overlay_digest(release)),
    ]
    names = "\n".join(
        f"{c.name} {next(iter(c.hashes)).content if c.hashes else c.version}"
        for c in components
    )
    bom = Bom(
        components=components,
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, names),
    )
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    wheel = Component(
        type=ComponentType.LIBRARY, name="vllm", version=release.wheel_version
    )
    wheel.purl = PackageURL("pypi", None, "vllm", release.wheel_version)
    wheel.bom_ref.value = "vllm"
    bom.metadata.component = wheel
    bom.register_dependency(wheel, components)
    return JsonV1Dot6(bom).output_as_string(indent=1).encode() + b"\n"


def record(name: str, content: bytes) -> tuple[str, str, str]:
    """Return the row of a file in RECORD (the binary distribution format)."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return name, f"sha256={digest.rstrip('=')}", str(len(content))


def read_wheel(wheel: Path, release: Release) -> dict[str, bytes]:
    """Return the files of a wheel by name.

    Raises:
        BuildError: It is no wheel of this release, or damaged.
    """
    if not wheel.is_file():
        raise BuildError(f"{wheel}: no such file")
    bad = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
    name = ""
    members = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                members[name] = archive.read(name)
        name = f"vllm-{release.wheel_version}.dist-info/RECORD"
        members.get(name, b"").decode()
    except bad as error:
        what = f"{name} is damaged" if name else "is no wheel"
        raise BuildError(f"{wheel} {what}: {error}") from None
    if name not in members:
        raise BuildError(f"{wheel} is not vLLM {release.wheel_version}")
    return members


def verify(
    wheel: Path, release: Release, sdist: Path, native_wheel: Path | None, tree: Path
) -> tuple[Counter[str], list[str]]:
    """Check each file of a wheel against what it is made from.

    Args:
        wheel: The wheel.
        release: The release that it claims to be.
        sdist: Upstream's sources, verified.
        native_wheel: The wheel of the native modules, verified; None if they were
            compiled: then they are what RECORD says.
        tree: The patched tree.

    Returns:
        How many files come from where, and a line for each file that does not.

    Raises:
        BuildError: It is no wheel of this release.
    """
    info = f"vllm-{release.wheel_version}.dist-info/"
    members = read_wheel(wheel, release)
    sources = Sources(release, sdist, native_wheel, tree)
    kinds: Counter[str] = Counter()
    wrong = []
    rows = csv.reader(members[f"{info}RECORD"].decode().splitlines())
    recorded = {tuple(row) for row in rows}
    for name, content in members.items():
        kind, expected = sources.origin(name, info, content)
        if kind is None:
            wrong.append(f"{name}: comes from nowhere")
        elif expected is not None and content != expected:
            wrong.append(f"{name}: differs from {kind}")
        elif name != f"{info}RECORD" and record(name, content) not in recorded:
            wrong.append(f"{name}: differs from RECORD")
        else:
            kinds[kind] += 1
    needed = {*sources.needed(info), *(row[0] for row in recorded if row)}
    wrong += [f"{name}: missing" for name in sorted(needed - members.keys())]
    if not any(re.fullmatch(KERNELS, name) for name in members):
        wrong.append("vllm/_C*.abi3.so: missing, so there are no kernels")
    return kinds, wrong


class Sources:
    """Where each file of a release's wheel comes from."""

    def __init__(
        self, release: Release, sdist: Path, native_wheel: Path | None, tree: Path
    ) -> None:
        self.release = release
        self.tree = tree
        self.native: dict[str, bytes] = {}
        with tarfile.open(sdist) as archive:
            self.upstream = {
                member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
                for member in archive
                if member.isfile()
            }
        if native_wheel:
            with zipfile.ZipFile(native_wheel) as archive:
                self.native = {
                    name: archive.read(name)
                    for name in archive.namelist()
                    if name.endswith(".so")
                }
        self.patches: dict[str, list[str]] = {}
        for patch in release.series:
            for file in re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.M):
                self.patches.setdefault(file, []).append(patch.name[:4])
        self.overlay = {p.as_posix() for p in source.overlay_files(release)}

    def origin(
        self, name: str, info: str, content: bytes
    ) -> tuple[str | None, bytes | None]:
        """Return what a member is, and its content if that is known."""
        if name == info + SBOM:
            return "the bill of materials", self.sbom(content)
        if name in GENERATED or name in [info + file for file in DIST_INFO]:
            return "generated, as in RECORD", None
        name = name.replace(f"{info}licenses/", "")
        if name in self.native:
            return "the native wheel", self.native[name]
        if not self.native and re.fullmatch(COMPILED, name):
            return "compiled, as in RECORD", None
        if name in self.overlay:
            return "the overlay", (ROOT / name).read_bytes()
        if name in self.patches and (self.tree / name).is_file():
            return "upstream and patches", (self.tree / name).read_bytes()
        if name in self.upstream:
            return "upstream", self.upstream[name]
        return None, None

    def sbom(self, content: bytes) -> bytes:
        """Return the bill of materials that there must be, at the time it gives."""
        time = re.search(rb'"timestamp": "([^"]+)"', content)
        try:
            epoch = datetime.fromisoformat(time[1].decode()).timestamp() if time else 0
        except ValueError:
            epoch = 0
        native = (
            [native_wheel_component(self.release)]
            if self.native
            else compiled_with(content)
        )
        return make_sbom(self.release, int(epoch), native)

    def needed(self, info: str) -> list[str]:
        """Return what a wheel must have: modules, licences, what describes it."""
        native = self.native or [f"vllm/{name}.abi3.so" for name in COMPILED_MODULES]
        files = {*self.upstream, *self.overlay, *self.patches, *native}
        licences = [f for f in files if f == "LICENSE" or f.startswith("licenses/")]
        return [
            *(f for f in files if f.startswith("vllm/") and f.endswith((".py", ".so"))),
            *(f"{info}licenses/{name}" for name in licences),
            *(info + name for name in (*DIST_INFO, SBOM)),
        ]
