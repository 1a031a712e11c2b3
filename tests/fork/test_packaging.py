# SPDX-License-Identifier: Apache-2.0
"""packaging/: each file does what it is for, by the tool that it is for."""

import email.utils
import re
import shutil
from pathlib import Path

import pytest
from debian.changelog import Changelog
from debian.copyright import Copyright, FilesParagraph, LicenseParagraph

from cpu_wheel import recipes
from cpu_wheel.errors import BuildError
from cpu_wheel.pins import Release, load_release
from tests.fork import packaging_tools as package
from tests.fork.packaging_tools import Inputs, content

VERSION = load_release().version
DEBIAN = recipes.PACKAGING / "debian"
# What a file says that is not, or not only, under Apache-2.0.
OTHER_LICENCE = re.compile(
    rb"SPDX-License-Identifier: *(?:BSD|MIT)|(?:MIT|BSD-[a-z0-9-]+) licen[cs]e"
    rb"|permission is hereby granted|redistribution and use in source",
    re.IGNORECASE,
)


@pytest.mark.packaging_test
def test_debian_source_package(
    inputs: Inputs, ours: dict[str, bytes], tmp_path: Path
) -> None:
    """-b, which refuses a tree with changes that no patch has, and back."""
    extracted = package.dpkg_source(inputs, tmp_path)

    assert content(extracted, "debian/", ".pc/") == ours
    assert content(extracted / "debian", "patches/") == content(DEBIAN)
    assert content(extracted / "debian/patches") == content(inputs.series)
    patched = (extracted / ".pc/applied-patches").read_text().splitlines()
    assert patched == inputs.names


@pytest.mark.packaging_test
def test_dpkg_source_before_build(
    inputs: Inputs, ours: dict[str, bytes], tmp_path: Path
) -> None:
    tree = package.debian(inputs, tmp_path)

    said = package.run(tree, "dpkg-source", "--before-build", ".")

    assert said.count("applying") == len(inputs.names)
    assert content(tree, "debian/", ".pc/") == ours


@pytest.mark.packaging_test
def test_debian_rules_set_what_the_build_reads(tmp_path: Path) -> None:
    shutil.copytree(DEBIAN, tmp_path / "debian")
    (tmp_path / "show.mk").write_text("include debian/rules\nshow: ; @env\n")

    said = package.run(
        *(tmp_path, "make", "-f", "show.mk", "show"),
        DEB_BUILD_OPTIONS="nocheck parallel=3",
    )

    build = dict(line.partition("=")[::2] for line in said.splitlines())
    assert build["VLLM_VERSION_OVERRIDE"] == f"{VERSION}+cpu"
    assert build["VLLM_TARGET_DEVICE"] == "cpu"
    assert build["FETCHCONTENT_SOURCE_DIR_ONEDNN"] == f"{tmp_path}/onednn"
    assert build["MAX_JOBS"] == "3"


@pytest.mark.packaging_test
def test_debian_rules_ask_for_onednn(tmp_path: Path) -> None:
    shutil.copytree(DEBIAN, tmp_path / "debian")
    target = "execute_before_dh_auto_configure"

    with pytest.raises(BuildError, match=r"no oneDNN sources in .*/onednn, see debian"):
        package.run(tmp_path, "make", "-f", "debian/rules", target)


@pytest.mark.packaging_test
def test_rpmbuild(inputs: Inputs, ours: dict[str, bytes], tmp_path: Path) -> None:
    made = package.rpm_tree(inputs, tmp_path)

    assert content(made, "SPECPARTS") == ours


@pytest.mark.packaging_test
def test_rpmbuild_refuses_another_archive(inputs: Inputs, tmp_path: Path) -> None:
    other = tmp_path / inputs.sdist.name
    other.write_bytes(inputs.sdist.read_bytes()[:-1])

    with pytest.raises(BuildError, match="FAILED"):
        package.rpm_tree(inputs._replace(sdist=other), tmp_path / "rpm")


@pytest.mark.packaging_test
def test_rattler_build(inputs: Inputs, ours: dict[str, bytes], tmp_path: Path) -> None:
    tree, why = package.rattler(inputs, tmp_path)

    assert content(tree, ".source_info.json") == ours
    assert why == "Failed to resolve dependencies"


def test_lists_are_up_to_date(release: Release, tree: Path, wheel: Path) -> None:
    """Versions, hashes, patches and requirements are what they repeat."""
    for path, text in recipes.written(release, tree, wheel).items():
        assert path.read_text() == text, f"{path.name}: run `make packaging`"


def test_place_that_is_not_there(release: Release, tree: Path) -> None:
    text = recipes.SPEC.read_text().replace("%patchlist", "%patches")

    with pytest.raises(BuildError, match=r"patchlist.* matches 0 places, expected one"):
        recipes.spec(text, release, tree)


def test_version_is_upstreams(release: Release) -> None:
    changelog = Changelog((DEBIAN / "changelog").read_text(), strict=True)
    assert str(changelog.version) == f"{release.version}-1"
    assert email.utils.parsedate_to_datetime(str(changelog.date))
    (entry,) = re.findall(r"^\* .+ - (\S+)$", recipes.SPEC.read_text(), re.MULTILINE)
    assert entry == f"{release.version}-1"


def licence(paragraph: FilesParagraph | LicenseParagraph) -> str:
    """Return a paragraph's short name of a licence, or of several."""
    return str(paragraph["License"]).partition("\n")[0]


def test_copyright_covers_the_tree(ours: dict[str, bytes]) -> None:
    """As DEP-5 has it: the last paragraph that matches a file is the file's."""
    with (DEBIAN / "copyright").open() as file:
        parsed = Copyright(file, strict=True)
    texts = {licence(p) for p in parsed.all_license_paragraphs()}
    mine = content(DEBIAN)
    names = [*ours, *(f"debian/{name}" for name in mine)]
    paragraphs = list(parsed.all_files_paragraphs())
    for paragraph in paragraphs:
        assert set(re.split(" and | or ", licence(paragraph))) <= texts
        for pattern in paragraph.files:
            only = re.compile(
                re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL
            )
            assert any(map(only.fullmatch, names)), f"{pattern} is no file's"
    for name, data in ours.items():
        found = parsed.find_files_paragraph(name)
        assert found is not None, name
        if OTHER_LICENCE.search(data):
            assert found is not paragraphs[0], f"{name} is not only under Apache-2.0"


@pytest.mark.packaging_test
def test_rattler_build_refuses_another_archive(inputs: Inputs, tmp_path: Path) -> None:
    other = tmp_path / inputs.sdist.name
    other.write_bytes(inputs.sdist.read_bytes()[:-1])
    folder = tmp_path / "recipe"

    with pytest.raises(BuildError, match="sha256 checksum validation failed"):
        package.rattler(inputs._replace(sdist=other), folder)
