# SPDX-License-Identifier: Apache-2.0
"""`make pr`: what goes into the pull request to vLLM, in build/pr/.

The branch has upstream's tree as its base, the pinned sdist or a git repository, and
one commit for each patch that belongs into the pull request, with our tests of the
CPU platform in the commit after which they pass. PR.md follows the template of that
tree. Sign-off is left to the human who submits.
"""

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import matrix, upstream_tests
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
# What only the pull request needs: the job that runs our tests, for one.
EXTRA = PATCHES / "pull-request" / "series"
MADE = "refs/made/pull-request"
# The patch after which a test file passes, or with which a helper of tests comes.
TESTS = {
    "tests/platforms/cpu_kv_cache_child.py": "Leave-the-null-block",
    "tests/platforms/cpu_kv_cache_jobs.py": "Leave-the-null-block",
    "tests/platforms/cpu_kv_cache_server.py": "Leave-the-null-block",
    "tests/platforms/cpu_kv_cache_utils.py": "Keep-VLLM_CPU",
    "tests/platforms/test_cpu_kv_cache_space.py": "Reject-a-kv_cache",
    "tests/platforms/test_cpu_kv_cache_budget.py": "Keep-VLLM_CPU",
    "tests/platforms/test_cpu_kv_cache_allocation.py": "Keep-VLLM_CPU",
    "tests/platforms/test_cpu_kv_cache_messages.py": "Leave-the-null-block",
    "tests/platforms/test_cpu_kv_cache_server.py": "Leave-the-null-block",
    "tests/platforms/test_cpu_kv_cache_entry_points.py": "Leave-the-null-block",
}
TRAILER = re.compile(r"[A-Z][A-Za-z-]+: .+")


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


def left_out(patch: bytes) -> str:
    """Return why a patch is not part of the pull request, or nothing if it is."""
    head, trailers, _ = split(patch)
    if release := trailers.get("Applied-Upstream"):
        return f"upstream has it since {release}"
    if trailers["Forwarded"] == "not-needed":
        return "only this fork needs it"
    if "] [Build]" in head:
        return "the build is a pull request of its own"
    if "] [Core]" in head:
        return "sleep is a pull request of its own"
    return ""


def write_patches(release: Release, folder: Path) -> list[Path]:
    """Write the patches of the pull request to a folder, and say which are left out.

    Raises:
        BuildError: A test of the CPU platform belongs to no patch.
    """
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/platforms/*.py")}
    if tests != set(TESTS):
        raise BuildError(f"{Path(__file__).name}: TESTS is not {sorted(tests)}")
    written = []
    for patch in (*release.series, *read_series(EXTRA)):
        content = patch.read_bytes()
        if why := left_out(content):
            print(f"pr: without {patch.name}: {why}", file=sys.stderr)
            continue
        head, _, diff = split(content)
        for test, title in TESTS.items():
            if title in patch.name:
                diff += new_file(test, (ROOT / test).read_text())
        path = folder / patch.name
        path.write_bytes(f"{head}\n{diff}".encode())
        written.append(path)
    return written


def make_branch(release: Release, cache: Path, upstream: str, folder: Path) -> None:
    """Make the git repository whose branch is the pull request.

    Args:
        release: The release whose series is taken.
        cache: The folder of downloads.
        upstream: A git repository to clone, or nothing for the release's sdist.
        folder: The repository to make; one that nobody changed is made anew.

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
        queue.git(folder, "branch", "--force", queue.UPSTREAM)
    else:
        empty = dataclasses.replace(release, series=())
        queue.make_worktree(fetch(release.sdist, cache), empty, folder)
    with tempfile.TemporaryDirectory(prefix=".patches-", dir=folder.parent) as scratch:
        queue.apply(folder, write_patches(release, Path(scratch)))
    queue.git(folder, "update-ref", MADE, "HEAD")


def allocation() -> str:
    """Return the table of benchmarks.allocation, measured now."""
    print("pr: measuring what the engine allocates ...", file=sys.stderr)
    command = [sys.executable, "-m", "benchmarks.allocation"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise BuildError("the allocation is not as expected, see above")
    return result.stdout.replace("| stock | fork |", "| before | after |").strip()


def stored(path: Path, command: str) -> dict[str, Any]:
    """Return stored results.

    Raises:
        BuildError: There are none.
    """
    if not path.exists():
        raise BuildError(f"{path} does not exist; run `{command}` first")
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def own_tests(branch: Path, version: str) -> str:
    """Return the results of our tests, as a list."""
    print("pr: testing the branch ...", file=sys.stderr)
    test = next(name for name in TESTS if name.endswith("budget.py"))
    build = upstream_tests.link(branch / "vllm", WORK / "build")
    outcomes = run_pytest([f"{branch}/{test}"], build, ROOT, WORK / "budget.xml", 120)
    counts = count(outcomes.values())
    if counts["failed"] or not counts["passed"]:
        raise BuildError(f"{test} fails on {branch}, see {WORK / 'budget.log'}")
    results = stored(matrix.RESULTS, "make matrix")
    cell = matrix.show(results["releases"][version], "allocation")
    return (
        f"- `{test}` on this branch: {counts['passed']} passed, "
        f"{counts['failed']} failed\n"
        f"- engines, `test_cpu_kv_cache_allocation.py` on {version} built with these "
        f"patches: {cell} ({results['machine']}, {results['date']})"
    )


def size(branch: Path) -> str:
    """Return how many lines the branch adds and takes, by kind of file."""
    sums: dict[str, list[int]] = {}
    numbers = queue.git(branch, "diff", "--numstat", queue.UPSTREAM, queue.BRANCH)
    for line in numbers.splitlines():
        added, taken, path = line.split("\t")
        kind = path.partition("/")[0]
        both = sums.setdefault(kind, [0, 0])
        both[0] += int(added)
        both[1] += int(taken)
    return ", ".join(f"`{k}/`: +{a} -{t}" for k, (a, t) in sorted(sums.items())) + "."


def write_text(branch: Path, release: Release) -> str:
    """Return the text of the pull request.

    Raises:
        BuildError: A result is missing, or the template has other sections.
    """
    template = (branch / ".github/PULL_REQUEST_TEMPLATE.md").read_text()
    text = TEXT.read_text()
    sections, ours = (re.findall(r"^## .*", t, re.MULTILINE) for t in (template, text))
    if sections != ours:
        raise BuildError(f"upstream's template has {sections}, {TEXT.name} {ours}")
    log = queue.git(
        branch, "log", "--reverse", "--format=%s", f"{queue.UPSTREAM}..{queue.BRANCH}"
    )
    measured, tested = allocation(), own_tests(branch, release.version)
    judged = stored(upstream_tests.RESULTS, "make upstream-tests")
    compared = {release.version: judged["releases"][release.version]}
    filled = text.format(
        commits="\n".join(f"- {subject}" for subject in log.splitlines()),
        allocation=measured,
        commands="\n".join(f"pytest {test}" for test in TESTS if "/test_" in test),
        results=tested,
        base=release.version,
        where=f"{judged['machine']}, {judged['date']}",
        upstream_tests=upstream_tests.table(compared),
        size=size(branch),
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
    command += ["--from-ref", queue.UPSTREAM, "--to-ref", queue.BRANCH]
    return subprocess.run(command, cwd=branch).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="pull_request.make", description=__doc__)
    parser.add_argument("--upstream", default="", metavar="REPOSITORY")
    upstream = parser.parse_args().upstream
    settings = Settings.from_environment()
    newest = next(iter(read_pins()["release"]))
    release = load_release(newest if upstream else None)
    branch = WORK / "branch"
    try:
        make_branch(release, settings.cache, upstream, branch)
        (WORK / "PR.md").write_text(write_text(branch, release))
        status = run_hooks(branch)
    except BuildError as error:
        sys.exit(f"pr: {error}")
    print(f"\n{branch}, branch {queue.BRANCH}; {WORK / 'PR.md'}")
    print("Yours to do: review each line, `git rebase --signoff`, push, open.")
    return status


if __name__ == "__main__":
    sys.exit(main())
