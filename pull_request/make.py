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

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks import allocation
from checks import upstream_tests
from checks.junit import count, run_pytest
from cpu_wheel import queue, steps
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
# Those that upstream's tests name, as stubs.
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen1.5-7B",
    "facebook/opt-125m",
    "vllm-project/tiny-random-LlamaForCausalLM",
)
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
    files: list[str] = dataclasses.field(default_factory=list)
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
            if patch.parent != EXTRA.parent:  # those say what they test, no more
                bodies.append(head.partition("\n\n")[2].strip())
            for test in [] if written else tests:
                if (ROOT / test).is_file():
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
        added = pull.tests + pull.files
        commit(folder, patches(release, pull.patches), added, pull.title)
    queue.git(folder, "branch", "--force", BASE)
    pull = pulls[name]
    files = patches(release, pull.patches + pull.job)
    commit(folder, files, pull.tests + pull.files, pull.title)
    queue.git(folder, "update-ref", MADE, "HEAD")


def measured(release: Release, pull: Pull, folder: Path) -> Path:
    """Return a folder to import vLLM from: as published, with this change alone."""
    stock = steps.make_stock(Settings.from_environment())
    tree = folder / "measured"
    shutil.rmtree(tree, ignore_errors=True)
    alone = dataclasses.replace(release, series=tuple(patches(release, pull.patches)))
    queue.make_worktree(
        fetch(release.sdist, Settings.from_environment().cache), alone, tree
    )
    build = folder / "measured-build"
    shutil.rmtree(build, ignore_errors=True)
    shutil.copytree(stock, build, symlinks=True)
    for path in queue.git(tree, "diff", "--name-only", queue.UPSTREAM).split():
        if path.startswith("vllm/"):
            shutil.copyfile(tree / path, build / path)
    return build


def allocated(pull: Pull, folder: Path) -> str:
    """Return a table of what engines allocate before and after, measured now."""
    release = load_release(Settings.from_environment().release)
    print("pr: measuring what the engine allocates ...", file=sys.stderr)
    builds: dict[str, Path | None] = {
        "before": steps.make_stock(Settings.from_environment()),
        "after": measured(release, pull, folder),
    }
    table = allocation.compare(builds, folder)
    return (
        "\nKV cache tokens that engines started through `LLM` allocate, vLLM "
        f"{release.version} as published and with this change, a test model of 35 "
        f"layers with dummy weights:\n\n{table}\n"
    )


def write_models(folder: Path) -> None:
    """Write stubs of the models that upstream's tests name, for tests run there."""
    words = ["hello", "user", "assistant", "<unk>"]
    model = WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(model)
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config = LlamaConfig(
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1 << 15,
        architectures=["LlamaForCausalLM"],
    )
    for name in MODELS:
        config.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def without_triton(release: Release, pull: Pull) -> list[Path]:
    """Return the patch that lets a release start on x86 without triton-cpu.

    Without triton-cpu, which no package index has, 0.34.0 stops there. The pull
    request that is this patch needs no other.
    """
    from vllm.triton_utils import HAS_TRITON  # as the installed vLLM sees it

    (part,) = read_pulls()["triton"].patches
    if HAS_TRITON or part in pull.patches:
        return []
    return [p for p in release.series if part in p.name]


def trees(branch: Path, release: Release, pull: Pull) -> dict[str, Path]:
    """Return the trees before and after, both with the tests of the branch."""
    made = {}
    for side, commit in (("before", BASE), ("after", queue.BRANCH)):
        tree = branch.with_name(side)
        shutil.rmtree(tree, ignore_errors=True)
        queue.git(branch, "worktree", "prune")
        queue.git(branch, "worktree", "add", "--detach", tree, commit)
        for test in pull.tests:
            path = test.partition("::")[0]
            queue.git(tree, "checkout", "--quiet", queue.BRANCH, "--", path)
        if queue.git(tree, "status", "--porcelain"):
            queue.git(tree, "commit", "--quiet", "-m", "The tests")
        queue.apply(tree, without_triton(release, pull))
        made[side] = tree
    return made


def tested(sides: dict[str, Path], pull: Pull) -> str:
    """Return what the pull request's tests say before the change and after it.

    Raises:
        BuildError: One fails after the change, or none fails before it.
    """
    print("pr: testing the branch ...", file=sys.stderr)
    lines = []
    for side, tree in sides.items():
        folder = tree.parent
        write_models(folder / "models")
        outcomes = run_pytest(
            [f"{tree}/{test}" for test in pull.tests],
            upstream_tests.link(tree / "vllm", folder / f"build-{side}"),
            folder / "models",
            folder / f"tests-{side}.xml",
            600,
            also=[tree, tree / "tests" / "vllm_test_utils"],
        )
        counts = count(outcomes.values())
        lines.append(f"{counts['passed']} passed, {counts['failed']} failed {side} it")
        failed = [
            f"FAILED {test.partition(tree.name + '/')[2] or test} - {outcome.reason}"
            for test, outcome in outcomes.items()
            if outcome.result == "failed"
        ]
        if side == "before":
            output = "\n".join(failed)
        if bool(failed) != (side == "before") or not counts["passed"] + len(failed):
            raise BuildError(f"{side}: {counts}, see {folder}/tests-{side}.log")
    return (
        f"`pytest {' '.join(pull.tests)}`: {lines[0]}, {lines[1]}.\n\n"
        "<details>\n<summary>What fails before the change</summary>\n\n"
        f"```\n{output}\n```\n</details>"
    )


def compared(sides: dict[str, Path], release: Release, pull: Pull) -> str:
    """Return what existing suites say before the change and after it."""
    cache = Settings.from_environment().cache
    tests = upstream_tests.WORK / release.version
    tests = tests / f"pr-{release.sdist.sha256[:12]}"
    upstream_tests.unpack_tests(fetch(release.sdist, cache), tests, [])
    write_models(tests)
    builds = {
        name: upstream_tests.link(tree / "vllm", tree.parent / f"build-{side}")
        for name, (side, tree) in zip(("stock", "patched"), sides.items(), strict=True)
    }
    results = {
        suite: upstream_tests.judge(tests, builds, suite) for suite in pull.suites
    }
    table = upstream_tests.table({release.version: {"suites": results}})
    table = table.replace("| stock | patched |", "| before | after |")
    return (
        "Existing tests before and after, one by one. What fails on both sides needs "
        f"a model hub or native code:\n\n{table}"
    )


def validation(branch: Path, release: Release, pull: Pull) -> str:
    """Return the results of the pull request's tests and of upstream's suites."""
    said = []
    sides = trees(branch, release, pull)
    if pull.tests:
        said.append(tested(sides, pull))
    if pull.suites:
        said.append(compared(sides, release, pull))
    if said:
        said.append(
            f"The tree is {release.version}, without native code; models that tests "
            "name are stubs, as no hub could be reached."
        )
        if without_triton(release, pull):
            said[-1] += (
                " triton-cpu could not be installed, so both sides ran with the "
                "check for it taken out."
            )
    return "\n\n".join(said) or "See below."


def size(branch: Path) -> str:
    """Return how many lines the branch adds and takes, by kind of file."""
    sums: dict[str, list[int]] = {}
    numbers = queue.git(branch, "diff", "--numstat", BASE, queue.BRANCH)
    for line in numbers.splitlines():
        added, taken, path = line.split("\t")
        top, slash, _ = path.partition("/")
        both = sums.setdefault(top + slash, [0, 0])
        both[0] += int(added)
        both[1] += int(taken)
    return ", ".join(f"`{k}`: +{a} -{t}" for k, (a, t) in sorted(sums.items())) + "."


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
    search = 'gh pr list --repo vllm-project/vllm --state open --search "{}"'
    filled = text.format(
        overview=pull.overview,
        commits="\n".join(f"- {' '.join(s.split())}" for s in subjects),
        allocation=allocated(pull, branch.parent) if pull.allocation else "",
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
git commit --amend --no-edit --reset-author --signoff --trailer 'Co-authored-by: X'""")
    return status


if __name__ == "__main__":
    sys.exit(main())
