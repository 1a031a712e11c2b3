# SPDX-License-Identifier: Apache-2.0
"""Distributions' tools, on packaging/ and the series, as far as each goes here."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from cpu_wheel import source
from cpu_wheel.errors import BuildError
from cpu_wheel.recipes import PACKAGING, RECIPE, SPEC

# The Debian package of a tool.
PACKAGES = {
    "dpkg-source": "dpkg-dev",
    "git": "git",
    "make": "make",
    "patch": "patch",
    "quilt": "quilt",
    "rpmbuild": "rpm",
}
# What conda-forge's pinning says, as far as the recipe asks for it.
VARIANTS = {"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
PERSON = {"NAME": "A Packager", "EMAIL": "packager@example.org"}


class Inputs(NamedTuple):
    """What a packager starts from.

    Attributes:
        sdist: Upstream's archive.
        series: The folder that `make packager-series` writes.
        version: Upstream's version.
    """

    sdist: Path
    series: Path
    version: str

    @property
    def names(self) -> list[str]:
        """The names of the patches, in order."""
        return (self.series / "series").read_text().splitlines()


def run(folder: Path, *command: str | Path, **environment: str | Path) -> str:
    """Run a tool in a folder, free of the user's settings, and return what it says.

    Raises:
        BuildError: It is not installed, or ends with an error; says which package has
            it, or what it said.
    """
    tool = str(command[0])
    if shutil.which(tool) is None:
        raise BuildError(
            f"{tool} is not installed; Debian's package {PACKAGES[tool]} has it"
        )
    result = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=source.git_environment(folder)
        | {k: str(v) for k, v in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise BuildError(f"{tool}: {result.stdout[-4000:].strip()}")
    return result.stdout


def content(tree: Path, *but: str) -> dict[str, bytes]:
    """Return a tree's files by name, less those whose name begins with one of `but`."""
    return {
        name: path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and not (name := str(path.relative_to(tree))).startswith(but)
    }


def unpack(inputs: Inputs, folder: Path) -> Path:
    """Unpack the sdist as a packager does and return its tree."""
    tree = folder / f"vllm-{inputs.version}"
    folder.mkdir(parents=True, exist_ok=True)
    source.unpack(inputs.sdist, tree)
    return tree


def patch(inputs: Inputs, folder: Path) -> tuple[Path, str]:
    """Apply the series with patch; return the tree and what patch says."""
    tree = unpack(inputs, folder)
    options = ("-p1", "--fuzz=0", "--batch", "--no-backup-if-mismatch", "--input")
    said = [run(tree, "patch", *options, inputs.series / n) for n in inputs.names]
    return tree, "".join(said)


def quilt(inputs: Inputs, folder: Path) -> Path:
    """Push the series with quilt."""
    tree = unpack(inputs, folder)
    settings: dict[str, str | Path] = {"QUILT_PATCHES": inputs.series, "QUILTRC": "-"}
    run(tree, "quilt", "push", "-a", "--fuzz=0", **settings)
    return tree


def quilt_pop(inputs: Inputs, tree: Path) -> None:
    """Take the series off again."""
    run(tree, "quilt", "pop", "-a", QUILT_PATCHES=inputs.series, QUILTRC="-")


def git_am(inputs: Inputs, folder: Path) -> Path:
    """Make the series commits."""
    tree = unpack(inputs, folder)
    person = {f"GIT_AUTHOR_{k}": v for k, v in PERSON.items()}
    person |= {f"GIT_COMMITTER_{k}": v for k, v in PERSON.items()}
    run(tree, "git", "init", "--quiet")
    # Two of upstream's files have CRLF ends.
    (tree / ".git/info/attributes").write_text("* -text\n")
    run(tree, "git", "add", "--all", "--force")
    run(tree, "git", "commit", "--quiet", "-m", "upstream", **person)
    patches = [inputs.series / name for name in inputs.names]
    run(tree, "git", "am", "--quiet", "--keep-non-patch", *patches, **person)
    return tree


def debian(inputs: Inputs, folder: Path) -> Path:
    """Lay out a Debian source package and return its tree, not patched yet."""
    tree = unpack(inputs, folder)
    shutil.copytree(PACKAGING / "debian", tree / "debian")
    shutil.copytree(inputs.series, tree / "debian" / "patches")
    shutil.copyfile(inputs.sdist, folder / f"vllm_{inputs.version}.orig.tar.gz")
    return tree


def dpkg_source(inputs: Inputs, folder: Path) -> Path:
    """Build a source package, and return the tree that it unpacks to."""
    tree = debian(inputs, folder)
    run(folder, "dpkg-source", "-b", tree)
    dsc = folder / f"vllm_{inputs.version}-1.dsc"
    run(folder, "dpkg-source", "--no-check", "-x", dsc, "extracted")
    return folder / "extracted"


def rpm(inputs: Inputs, folder: Path, *options: str) -> Path:
    """Run rpmbuild on our spec without oneDNN's archive and return its top folder."""
    sources = folder / "SOURCES"
    shutil.copytree(inputs.series, sources)
    shutil.copyfile(inputs.sdist, sources / inputs.sdist.name)
    defines = (f"_topdir {folder}", f"_dbpath {folder}/db", f"_tmppath {folder}/tmp")
    defined = [argument for define in defines for argument in ("--define", define)]
    run(folder, "rpmbuild", *options, "--without", "onednn", *defined, SPEC)
    return folder


def rpm_tree(inputs: Inputs, folder: Path) -> Path:
    """Return the tree that rpmbuild prepares."""
    rpm(inputs, folder, "-bp", "--nodeps")
    (made,) = (folder / "BUILD").glob(f"vllm-{inputs.version}*")
    if not (made / "setup.py").exists():  # newer rpm has a folder a build
        made = made / f"vllm-{inputs.version}"
    return made


def rattler(inputs: Inputs, folder: Path) -> tuple[Path, str]:
    """Run our recipe with a local sdist and no channels.

    Returns:
        The tree that was patched, and why the build ended there.
    """
    import rattler_build

    shutil.copytree(inputs.series, folder / "patches")
    text, count = re.subn(
        r"^  url: .*$",
        f"  url: {inputs.sdist.as_uri()}",
        RECIPE.read_text(),
        flags=re.MULTILINE,
    )
    if count != 1:
        raise BuildError(f"{RECIPE} has {count} sources with a url, expected one")
    (folder / RECIPE.name).write_text(text)
    try:
        recipe = rattler_build.Stage0Recipe.from_file(folder / RECIPE.name)
        (variant,) = recipe.render(rattler_build.VariantConfig(VARIANTS))
    except rattler_build.RattlerBuildError as error:
        raise BuildError(f"rattler-build: {error}") from None
    why = ""
    try:
        variant.run_build(
            tool_config=rattler_build.ToolConfiguration(keep_build=True),
            output_dir=folder / "output",
            channels=[],
            no_build_id=True,
        )
    except rattler_build.RattlerBuildError as error:
        why = str(error).partition(": ")[2]
    trees = list((folder / "output" / "bld").glob("*/work"))
    if not trees or not any(trees[0].iterdir()):
        raise BuildError(f"rattler-build: {why}")
    return trees[0], why
