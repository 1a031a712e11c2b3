# SPDX-License-Identifier: Apache-2.0
"""`make package-check`: what distributions' tools make of packaging/ and the series.

Each tool goes on the pinned sdist as far as it can here, and the table says where
that is and why. The tests call the same functions and compare the trees.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from checks.recipes import PACKAGING, RECIPE, SPEC
from cpu_wheel import packager, source, steps
from cpu_wheel.fetch import fetch
from cpu_wheel.pins import BuildError, Settings, load_release

# The Debian package of a tool.
PACKAGES = {
    "dpkg-buildpackage": "dpkg-dev",
    "dpkg-source": "dpkg-dev",
    "dh_testdir": "debhelper",
    "git": "git",
    "lintian": "lintian",
    "make": "make",
    "patch": "patch",
    "pybuild": "dh-python",
    "quilt": "quilt",
    "rpmbuild": "rpm",
    "rpmlint": "rpmlint",
    "rpmspec": "rpm",
}
# What a tool leaves in its tree for itself.
OF_TOOLS = (".git/", ".pc/", ".source_info.json", "SPECPARTS", "debian/")
# What conda-forge's pinning says, as far as the recipe asks for it.
VARIANTS = {"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
PERSON = {"NAME": "A Packager", "EMAIL": "packager@example.org"}


class ToolMissingError(BuildError):
    """A tool is not installed; names the Debian package that has it."""


class ToolFailedError(BuildError):
    """A tool ended with an error; the message begins with what it said."""


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
        ToolMissingError: It is not installed.
        ToolFailedError: It ends with an error.
    """
    tool = str(command[0])
    if shutil.which(tool) is None:
        raise ToolMissingError(
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
        raise ToolFailedError(f"{tool}: {result.stdout[-4000:].strip()}")
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
        raise ToolFailedError(f"rattler-build: {error}") from None
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
        raise ToolFailedError(f"rattler-build: {why}")
    return trees[0], why


class Row(NamedTuple):
    """What came out of one tool.

    Attributes:
        tool: What was run, as the docs have it.
        result: "passes"; "ends early", for a reason that is not ours; "missing", the
            tool that is; or "failed".
        where: How far it went, and why no further.
        seconds: How long that took.
    """

    tool: str
    result: str
    where: str
    seconds: int


Outcome = tuple[str, str]


def check_patch(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    tree, said = patch(inputs, folder)
    if "offset" in said:
        raise ToolFailedError("patch: a hunk is at an offset")
    return (
        "passes",
        f"{len(inputs.names)} patches without an offset; {same(tree, ours)}",
    )


def check_quilt(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    tree = quilt(inputs, folder)
    where = same(tree, ours)
    quilt_pop(inputs, tree)
    return "passes", f"{where}; popped again"


def check_git(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    return "passes", same(git_am(inputs, folder), ours)


def check_dpkg_source(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    tree = debian(inputs, folder / "before")
    run(tree, "dpkg-source", "--before-build", ".")
    same(tree, ours)
    return (
        "passes",
        f"--before-build, -b and -x: {same(dpkg_source(inputs, folder), ours)}",
    )


def check_source_package(inputs: Inputs, folder: Path, _: dict[str, bytes]) -> Outcome:
    for tool in ("dh_testdir", "pybuild"):
        if shutil.which(tool) is None:
            raise ToolMissingError(
                f"debian/rules clean needs Debian's package {PACKAGES[tool]}"
            )
    tree = debian(inputs, folder)
    run(tree, "dpkg-buildpackage", "-S", "-us", "-uc", "-d")
    return "passes", "a source package, after debian/rules clean"


def check_binary_package(inputs: Inputs, folder: Path, _: dict[str, bytes]) -> Outcome:
    tree = debian(inputs, folder)
    try:
        run(tree, "dpkg-buildpackage", "-b", "-us", "-uc")
    except ToolFailedError as error:
        unmet = re.search(r"Unmet build dependencies: (.+)", str(error))
        if unmet is None:
            raise
        return "ends early", f"patched, then at build dependencies: {unmet[1]}"
    return "passes", "a binary package"


def check_lintian(inputs: Inputs, folder: Path, _: dict[str, bytes]) -> Outcome:
    dpkg_source(inputs, folder)
    dsc = folder / f"vllm_{inputs.version}-1.dsc"
    said = run(folder, "lintian", "--fail-on", "none", "--tag-display-limit", "0", dsc)
    tags = re.findall(r"^([EW]): \S+ source: (\S+)", said, re.MULTILINE)
    found = {f"{kind}: {tag} ({tags.count((kind, tag))})" for kind, tag in tags}
    return "passes", f"of the source package: {', '.join(sorted(found)) or 'no tags'}"


def check_rpm_prep(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    return "passes", f"sha256 checked; {same(rpm_tree(inputs, folder), ours)}"


def check_rpm_source(inputs: Inputs, folder: Path, _: dict[str, bytes]) -> Outcome:
    rpm(inputs, folder, "-bs", "--nodeps")
    (made,) = (folder / "SRPMS").iterdir()
    return "passes", made.name


def check_rpm_build(inputs: Inputs, folder: Path, _: dict[str, bytes]) -> Outcome:
    try:
        rpm(inputs, folder, "-bc")
    except ToolFailedError as error:
        unmet = re.findall(r"^\s+(\S+).* is needed by vllm-", str(error), re.MULTILINE)
        if not unmet:
            raise
        return (
            "ends early",
            f"at BuildRequires: no RPM of {', '.join(unmet)} is installed here",
        )
    return "passes", "compiled"


def check_rpmlint(_: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    run(folder, "rpmspec", "--parse", SPEC)
    said = run(folder, "rpmlint", SPEC)
    tags = re.findall(r"^\S+: (?:\d+: )?([EW]: .+)$", said, re.MULTILINE)
    return "passes", f"the spec is read: {', '.join(tags) or 'no tags'}"


def check_rattler(inputs: Inputs, folder: Path, ours: dict[str, bytes]) -> Outcome:
    tree, why = rattler(inputs, folder)
    where = f"rendered, sha256 checked, patched; {same(tree, ours)}"
    if why:
        return "ends early", f"{where}; then: {why} (no channel is given)"
    return "passes", f"{where}; built"


Check = Callable[[Inputs, Path, dict[str, bytes]], Outcome]
CHECKS: dict[str, Check] = {
    "patch -p1 --fuzz=0": check_patch,
    "quilt push, pop": check_quilt,
    "git am --keep-non-patch": check_git,
    "dpkg-source": check_dpkg_source,
    "dpkg-buildpackage -S": check_source_package,
    "dpkg-buildpackage -b": check_binary_package,
    "lintian": check_lintian,
    "rpmbuild -bp": check_rpm_prep,
    "rpmbuild -bs": check_rpm_source,
    "rpmbuild -bc": check_rpm_build,
    "rpmspec, rpmlint": check_rpmlint,
    "rattler-build": check_rattler,
}


def same(tree: Path, ours: dict[str, bytes]) -> str:
    """Say that a tree is the one that our wheel is built from.

    Raises:
        ToolFailedError: It is not.
    """
    theirs = content(tree, *OF_TOOLS)
    if theirs != ours:
        names = [n for n in sorted({*theirs, *ours}) if theirs.get(n) != ours.get(n)]
        raise ToolFailedError(
            f"{len(names)} files are not the wheel's, {names[0]} the first"
        )
    return "the tree of our wheel"


def row(name: str, check: Check, inputs: Inputs, ours: dict[str, bytes]) -> Row:
    """Run one check in a folder of its own."""
    print(f"package-check: {name} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="package-check-") as folder:
        try:
            result, where = check(inputs, Path(folder).resolve(), ours)
        except ToolMissingError as error:
            result, where = "missing", str(error)
        except (BuildError, OSError) as error:
            result, where = "failed", " ".join(str(error).split())[-300:]
    return Row(name, result, where, round(time.monotonic() - start))


def table(rows: list[Row]) -> str:
    """Return the rows as a table."""
    lines = ["| tool | result | where it ends | seconds |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Check all tools; what stops it is one line on standard error."""
    parser = argparse.ArgumentParser(
        prog="checks.package",
        description="Run each distribution's tools on packaging/ and the series.",
        epilog="Exit status 1 when a tool that is installed fails.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parsed = parser.parse_args(arguments)
    settings = Settings(cache=Settings.from_environment().cache)
    release = load_release()
    try:
        ours = content(steps.make_source(settings), *OF_TOOLS)
        with tempfile.TemporaryDirectory(prefix="package-check-") as folder:
            series = Path(folder).resolve() / "patches"
            packager.write_series(release, series)
            sdist = fetch(release.sdist, settings.cache)
            inputs = Inputs(sdist, series, release.version)
            rows = [row(name, check, inputs, ours) for name, check in CHECKS.items()]
    except (BuildError, OSError) as error:
        print(f"package-check: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
    else:
        print(table(rows))
    return 1 if any(row.result == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
