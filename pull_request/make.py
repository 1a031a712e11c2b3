# SPDX-License-Identifier: Apache-2.0
"""`make pr NAME=X`: one of the pull requests to vLLM, in build/pr/X/.

The branch has the tree of the newest release as its base, or a git repository's. It
holds one commit: the patches that pulls.toml names, and their tests. PR.md follows the
template of that tree. Sign-off is left to the human who submits.
"""

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from checks import upstream_tests
from checks.junit import count, run_pytest
from cpu_wheel import queue
from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.packager import new_file
from cpu_wheel.paths import BUILD, PATCHES, ROOT
from cpu_wheel.pins import Release, load_release, read_pins, read_series
from cpu_wheel.settings import Settings

WORK = BUILD / "pr"
TEXT = Path(__file__).with_name("template.md")
# What only a pull request needs: the job that runs our tests, for one.
EXTRA = PATCHES / "pull-request" / "series"
BASE = "base"
MADE = "refs/made/pull-request"
TRAILER = re.compile(r"[A-Z][A-Za-z-]+: .+")


@dataclasses.dataclass(frozen=True)
class Pull:
    """A pull request, as pulls.toml describes it."""

    title: str
    patches: list[str]
    tests: list[str]
    suites: list[str]
    overview: str
    details: str
    duplicates: str
    search: list[str]
    after: list[str] = dataclasses.field(default_factory=list)
    job: list[str] = dataclasses.field(default_factory=list)
    allocation: bool = False


def read_pulls() -> dict[str, Pull]:
    """Return the pull requests by name, in the order in which they can be sent."""
    with Path(__file__).with_name("pulls.toml").open("rb") as file:
        return {name: Pull(**pull) for name, pull in tomllib.load(file).items()}


def split(patch: bytes) -> tuple[str, dict[str, str], str]:
    """Split a mailbox patch into what precedes its DEP-3 trailers, them, and the rest.

    Returns:
        The head and message, the trailers by name, and the diff from its "---" on.
    """
    head, _, diff = patch.decode().partition("\n---\n")
    message, _, last = head.rstrip().rpartition("\n\n")
    lines = last.splitlines()
    if not all(TRAILER.fullmatch(line) for line in lines):
        return head, {}, f"---\n{diff}"
    trailers = dict(line.split(": ", 1) for line in lines)
    return message, trailers, f"---\n{diff}"


def forwarded(patch: bytes) -> bool:
    """Return whether a patch goes upstream: it is neither there nor ours alone."""
    _, trailers, _ = split(patch)
    return trailers.get("Forwarded") == "no"


def patches(release: Release, parts: list[str]) -> list[Path]:
    """Return the patches of a release's series with these parts in their names.

    Raises:
        BuildError: One is not in the series, or does not go upstream.
    """
    found = []
    for part in parts:
        named = [p for p in (*release.series, *read_series(EXTRA)) if part in p.name]
        if len(named) != 1 or not forwarded(named[0].read_bytes()):
            raise BuildError(
                f"pulls.toml: {part!r} is not one patch of {release.version} "
                f"with Forwarded: no, but {[p.name for p in named]}"
            )
        found += named
    return found


def newest_release(name: str) -> Release:
    """Return the newest release whose series has all that a pull request needs."""
    pulls = read_pulls()
    for version in read_pins()["release"]:
        release = load_release(version)
        try:
            for needed in (*pulls[name].after, name):
                patches(release, pulls[needed].patches)
        except BuildError as error:
            why = error
        else:
            return release
    raise why


def commit(folder: Path, files: list[Path], tests: list[str], title: str) -> None:
    """Commit patches, and tests of this repository, as one commit."""
    base = queue.git(folder, "rev-parse", "HEAD").strip()
    bodies = []
    with tempfile.TemporaryDirectory(prefix=".patches-", dir=folder.parent) as scratch:
        written: list[Path] = []
        for patch in files:
            head, _, diff = split(patch.read_bytes())
            bodies.append(head.partition("\n\n")[2].strip())
            for test in [] if written else tests:
                diff += new_file(test, (ROOT / test).read_text())
            written.append(Path(scratch) / patch.name)
            written[-1].write_bytes(f"{head}\n{diff}".encode())
        queue.apply(folder, written)
    queue.git(folder, "reset", "--quiet", "--soft", base)
    message = "\n\n".join([title, *bodies])
    queue.git(folder, "commit", "--quiet", "--message", message)


def make_branch(
    release: Release, cache: Path, upstream: str, folder: Path, name: str
) -> None:
    """Make the git repository whose branch is the pull request.

    Args:
        release: The release whose series is taken.
        cache: The folder of downloads.
        upstream: A git repository to clone, or nothing for the release's sdist.
        folder: The repository to make; one that nobody changed is made anew.
        name: The pull request. Those that it needs come before it, below BASE.

    Raises:
        BuildError: Somebody worked in the folder, or a patch does not apply.
    """
    if folder.exists():
        tip = queue.git(folder, "rev-parse", "HEAD", MADE).split()
        if len(set(tip)) != 1 or queue.git(folder, "status", "--porcelain"):
            raise BuildError(f"{folder} has work in it; move it or remove it first")
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if upstream:
        queue.git(folder.parent, "clone", "--quiet", Path(upstream).absolute(), folder)
        queue.git(folder, "checkout", "--quiet", "-B", queue.BRANCH)
    else:
        empty = dataclasses.replace(release, series=())
        queue.make_worktree(fetch(release.sdist, cache), empty, folder)
    pulls = read_pulls()
    for needed in pulls[name].after:
        pull = pulls[needed]
        commit(folder, patches(release, pull.patches), pull.tests, pull.title)
    queue.git(folder, "branch", "--force", BASE)
    pull = pulls[name]
    files = patches(release, pull.patches + pull.job)
    commit(folder, files, pull.tests, pull.title)
    queue.git(folder, "update-ref", MADE, "HEAD")


def allocation() -> str:
    """Return the table of benchmarks.allocation, measured now."""
    print("pr: measuring what the engine allocates ...", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.allocation"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise BuildError("the allocation is not as expected, see above")
    return result.stdout.replace("| stock | fork |", "| before | after |").strip()


def tested_tree(branch: Path, release: Release) -> tuple[Path, str]:
    """Return a tree to test a branch in, and what is in it.

    Without triton-cpu, which no package index has, 0.34.0 stops on x86: then the pull
    request `triton` lies on top of the branch.
    """
    tree = branch.with_name("tested")
    shutil.rmtree(tree, ignore_errors=True)
    queue.git(branch, "worktree", "add", "--force", "--detach", tree, queue.BRANCH)
    from vllm.triton_utils import HAS_TRITON  # as the installed vLLM sees it

    (without_triton,) = read_pulls()["triton"].patches
    needed = [patch for patch in release.series if without_triton in patch.name]
    if HAS_TRITON or not needed:
        return tree, "this branch"
    queue.apply(tree, needed)
    return tree, "this branch and pull request `triton`, as triton-cpu is not installed"


def validation(folder: Path, release: Release, pull: Pull) -> str:
    """Return the results of the pull request's tests and of upstream's suites.

    Raises:
        BuildError: A test of the pull request fails.
    """
    said = []
    if pull.tests:
        print("pr: testing the branch ...", file=sys.stderr)
        tree, where = tested_tree(folder, release)
        build = upstream_tests.link(tree / "vllm", folder.parent / "build")
        tests = [f"{tree}/{test}" for test in pull.tests]
        report = folder.parent / "tests.xml"
        counts = count(run_pytest(tests, build, ROOT, report, 600).values())
        if counts["failed"] or not counts["passed"]:
            raise BuildError(f"{pull.tests} on {tree}: {counts}, see {report}")
        said.append(
            f"`pytest {' '.join(pull.tests)}` on {where}: "
            f"{counts['passed']} passed, {counts['failed']} failed."
        )
    if pull.suites:
        results = upstream_tests.check(upstream_tests.RELEASES[0], pull.suites)
        said += [
            "Upstream's own suites, before and after all patches of the series, test "
            "by test. What fails on both sides mostly needs a model hub:",
            upstream_tests.table({upstream_tests.RELEASES[0]: results}),
        ]
    return "\n\n".join(said) or "See below."


def size(branch: Path) -> str:
    """Return how many lines the branch adds and takes, by kind of file."""
    sums: dict[str, list[int]] = {}
    numbers = queue.git(branch, "diff", "--numstat", BASE, queue.BRANCH)
    for line in numbers.splitlines():
        added, taken, path = line.split("\t")
        both = sums.setdefault(path.partition("/")[0], [0, 0])
        both[0] += int(added)
        both[1] += int(taken)
    return ", ".join(f"`{k}/`: +{a} -{t}" for k, (a, t) in sorted(sums.items())) + "."


def write_text(branch: Path, release: Release, pull: Pull) -> str:
    """Return the text of the pull request.

    Raises:
        BuildError: A test fails, or the template has other sections.
    """
    template = (branch / ".github/PULL_REQUEST_TEMPLATE.md").read_text()
    text = TEXT.read_text()
    sections, ours = (re.findall(r"^## .*", t, re.MULTILINE) for t in (template, text))
    if sections != ours:
        raise BuildError(f"upstream's template has {sections}, {TEXT.name} {ours}")
    subjects = [
        " ".join(re.findall(r"^Subject: \[PATCH\] (.*(?:\n .*)*)", p, re.MULTILINE))
        for p in (path.read_text() for path in patches(release, pull.patches))
    ]
    allocated = (
        "\nKV cache tokens that the engine allocates, before and after (0.32.0, test "
        f"model of 35 layers, dummy weights):\n\n{allocation()}\n"
    )
    search = 'gh pr list --repo vllm-project/vllm --state open --search "{}"'
    filled = text.format(
        overview=pull.overview,
        commits="\n".join(f"- {' '.join(s.split())}" for s in subjects),
        allocation=allocated if pull.allocation else "",
        validation=validation(branch, release, pull),
        details=pull.details,
        size=size(branch),
        duplicates=pull.duplicates.strip(),
        searches="\n".join(map(search.format, pull.search)),
    )
    _, line, checklist = template.partition("\n---\n")
    checklist = re.sub(r"- \[ \] (AI assistance)", r"- [x] \1", line + checklist)
    return filled + checklist


def run_hooks(branch: Path) -> int:
    """Run the hooks of upstream's pre-commit settings on what the branch changes.

    Returns:
        pre-commit's status; its output says what failed, or cannot be downloaded.
    """
    command = [sys.executable, "-m", "pre_commit", "run"]
    command += ["--from-ref", BASE, "--to-ref", queue.BRANCH]
    return subprocess.run(command, cwd=branch).returncode


def main() -> int:
    pulls = read_pulls()
    parser = argparse.ArgumentParser(
        prog="pull_request.make",
        description=__doc__,
        epilog="names: " + ", ".join(pulls),
    )
    parser.add_argument("name", choices=pulls, metavar="NAME")
    parser.add_argument("--upstream", default="", metavar="REPOSITORY")
    arguments = parser.parse_args()
    release = newest_release(arguments.name)
    cache = Settings.from_environment().cache
    pull, folder = pulls[arguments.name], WORK / arguments.name
    branch = folder / "branch"
    try:
        make_branch(release, cache, arguments.upstream, branch, arguments.name)
        (folder / "PR.md").write_text(write_text(branch, release, pull))
        status = run_hooks(branch)
    except BuildError as error:
        sys.exit(f"pr: {error}")
    print(f"""
{branch}, branch {queue.BRANCH}; {folder / "PR.md"}
Yours to do: review each line, then make the commit yours and push it:
git commit --amend --no-edit --reset-author --signoff --trailer 'Assisted-by: TOOL'""")
    return status


if __name__ == "__main__":
    sys.exit(main())
