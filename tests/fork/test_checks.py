# SPDX-License-Identifier: Apache-2.0
"""The tools behind `make matrix`, `make upstream-tests` and `make pr`.

What they say of a real build takes minutes; here they judge made-up results.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from checks import junit, matrix, upstream_tests
from checks.junit import Outcome
from cpu_wheel import queue
from cpu_wheel.errors import BuildError
from cpu_wheel.pins import load_release, read_pins
from cpu_wheel.settings import Settings
from pull_request import make as pr

PINNED = load_release()
NEWEST = load_release(next(iter(read_pins()["release"])))
PASSED, FAILED = Outcome("passed"), Outcome("failed", "why")

SAMPLE = """
import os, sys
import pytest

@pytest.fixture
def broken():
    raise OSError("no such thing\\nsecond line")

@pytest.fixture
def breaks_later():
    yield
    raise OSError("too late")

class TestGroup:
    @pytest.mark.parametrize("x", ["a.b", "c/d::e"])
    def test_one(self, x):
        assert x == "a.b", f"{x} at {id(x):#x}"

def test_error(broken):
    pass

def test_twice(breaks_later):
    raise ValueError("first")

@pytest.mark.skip(reason="not here")
def test_skip():
    pass

def test_build():
    import vllm
    assert vllm.__file__.endswith("a build/vllm/__init__.py")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
"""


def fake_build(folder: Path) -> Path:
    (folder / "a build/vllm").mkdir(parents=True)
    (folder / "a build/vllm/__init__.py").touch()
    return folder / "a build"


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    (tmp_path / "tests/inner").mkdir(parents=True)
    (tmp_path / "tests/inner/test_sample.py").write_text(SAMPLE)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tests/test_broken.py").write_text("import no_such_module\n")
    return junit.run_pytest(
        ["tests", "--continue-on-collection-errors"],
        fake_build(tmp_path),
        tmp_path,
        tmp_path / "out/report.xml",
        60,
    )


def test_outcomes_by_node_id(sample: dict[str, Outcome]) -> None:
    file = "tests/inner/test_sample.py"
    broken = sample.pop("tests/test_broken.py")
    assert broken.result == "failed"
    assert "No module named 'no_such_module'" in broken.reason
    assert {test.removeprefix(file): o.result for test, o in sample.items()} == {
        "::TestGroup::test_one[a.b]": "passed",
        "::TestGroup::test_one[c/d::e]": "failed",
        "::test_error": "failed",
        "::test_twice": "failed",
        "::test_skip": "skipped",
        "::test_build": "passed",
    }
    assert "no such thing" in sample[f"{file}::test_error"].reason
    assert "first" in sample[f"{file}::test_twice"].reason
    assert "not here" in sample[f"{file}::test_skip"].reason
    assert not any("\n" in outcome.reason for outcome in sample.values())
    counts = {"passed": 2, "failed": 3, "skipped": 1}
    assert junit.count(sample.values()) == counts


def test_crash_leaves_no_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(
        "import os\ndef test_crash(): os.kill(os.getpid(), 9)\n"
    )

    report = tmp_path / "report.xml"
    report.write_text("<of-an-earlier-run/>")
    build = fake_build(tmp_path)
    outcomes = junit.run_pytest(["test_crash.py"], build, tmp_path, report, 60)

    assert outcomes == {}


def test_another_vllm_than_the_build_is_refused(tmp_path: Path) -> None:
    """.venv has one too, and so has a source tree in which pytest runs."""
    build = fake_build(tmp_path)
    with pytest.raises(BuildError, match="expected that of"):
        junit.run_pytest(["x.py"], tmp_path / "none", tmp_path, tmp_path / "r.xml", 60)

    in_the_way = tmp_path / "tree"
    fake_build(in_the_way)
    with pytest.raises(BuildError, match="expected that of"):
        junit.run_pytest(
            ["x.py"], build, in_the_way / "a build", tmp_path / "r.xml", 60
        )


def test_reason_does_not_hold_what_differs_between_runs() -> None:
    one = junit.first_line("<object at 0x7f01> in /tmp/a/model\nmore")
    two = junit.first_line("<object at 0x7f02> in /tmp/b/model")

    assert one == two == "<object at …> in …model"


@pytest.mark.parametrize(
    ("stock", "patched", "differs", "regressed"),
    [
        pytest.param(PASSED, PASSED, False, False, id="passes"),
        pytest.param(FAILED, Outcome("failed", "else"), False, False, id="fails"),
        pytest.param(PASSED, FAILED, True, True, id="regression"),
        pytest.param(PASSED, Outcome("skipped"), True, True, id="now-skipped"),
        pytest.param(PASSED, None, True, True, id="lost"),
        pytest.param(FAILED, PASSED, True, False, id="mended"),
        pytest.param(None, PASSED, True, False, id="new"),
    ],
)
def test_comparison(
    stock: Outcome | None, patched: Outcome | None, differs: bool, regressed: bool
) -> None:
    sides = [{"t": outcome} if outcome else {} for outcome in (stock, patched)]

    differences = junit.compare(*sides)

    assert bool(differences) is differs
    assert bool(junit.regressions(differences)) is regressed


@pytest.mark.parametrize(
    ("runs", "key"),
    [
        pytest.param([(PASSED, FAILED), (PASSED, FAILED)], "regressions", id="both"),
        pytest.param([(PASSED, FAILED), (PASSED, PASSED)], "flaky", id="first-only"),
        pytest.param(
            [(FAILED, PASSED), (FAILED, PASSED)], "other differences", id="mended"
        ),
    ],
)
def test_what_differs_is_run_once_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[Outcome, Outcome]],
    key: str,
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_envs.py").touch()
    asked = []

    def run(
        tests: Path, builds: object, name: str, arguments: list[str]
    ) -> dict[str, dict[str, Outcome]]:
        asked.append(arguments)
        stock, patched = runs[len(asked) - 1]
        same = {"same": FAILED, "fine": PASSED}
        return {"stock": {"t": stock} | same, "patched": {"t": patched} | same}

    monkeypatch.setattr(upstream_tests, "run", run)

    result = upstream_tests.judge(tmp_path, {}, "envs")

    assert asked == [["tests/test_envs.py"], ["t"]]
    for name in ("regressions", "flaky", "other differences"):
        assert list(result[name]) == (["t"] if name == key else [])
    assert result["failed on both"]["why"] == 1
    assert upstream_tests.good(result) is (key != "regressions")
    assert "of 3 |" in upstream_tests.table({"0": {"suites": {"envs": result}}})


@pytest.mark.parametrize("failed", [0, 1], ids=["crash", "not-collected"])
def test_suite_in_which_nothing_passes_is_no_success(failed: int) -> None:
    nothing = {"passed": 0, "failed": failed, "skipped": 0}
    result = {"stock": nothing, "patched": nothing, "regressions": {}}

    assert not upstream_tests.good(result)


def test_matrix_table() -> None:
    good = {"passed": 3, "failed": 0, "skipped": 0}
    results: dict[str, dict[str, Any]] = {
        "2": {"built": "wheel", "configuration": good, "allocation": good},
        "1": {
            "built": "tree",
            "configuration": good | {"failed": 1},
            "allocation": {"not run": "no native wheel"},
        },
        "0": {"error": "a patch does not apply"},
    }

    lines = matrix.table(results).splitlines()

    assert lines[2:] == [
        "| 2 | wheel | 3 passed, 0 failed | 3 passed, 0 failed |",
        "| 1 | tree | 3 passed, 1 failed | – (no native wheel) |",
        "| 0 | – | a patch does not apply | – |",
    ]
    assert [matrix.passed(result) for result in results.values()] == [
        True,
        False,
        False,
    ]


PULLS = pr.read_pulls()


@pytest.fixture(scope="module")
def branch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pull request that can be sent first, on the newest release."""
    folder = tmp_path_factory.mktemp("pr") / "branch"
    cache = Settings.from_environment().cache
    pr.make_branch(pr.newest_release("budget"), cache, "", folder, "budget")
    return folder


def test_branch_is_one_commit_with_its_tests(branch: Path) -> None:
    commits = queue.git(branch, "rev-list", "upstream..patched").split()
    assert len(commits) == 1
    message = queue.git(branch, "log", "-1", "--format=%B")
    assert message.startswith(f"{PULLS['budget'].title}\n\n")
    assert not re.search(
        r"^(Origin|Forwarded|Applied-Upstream|Last-Update|Signed-off-by):",
        message,
        re.MULTILINE,
    )
    changed = queue.git(branch, "diff", "--name-only", "upstream", "patched").split()
    (test,) = (path for path in changed if path.startswith("tests/"))
    assert [test] == PULLS["budget"].tests
    added = queue.git(branch, "diff", "--numstat", "upstream", "patched", "--", test)
    assert int(added.split()[0]) <= 60
    assert "setup.py" not in changed


def test_each_patch_that_goes_upstream_has_one_pull_request() -> None:
    """Those of any release, and none that only this fork needs."""
    for version in read_pins()["release"]:
        for patch in load_release(version).series:
            pulls = [
                name
                for name, pull in PULLS.items()
                if any(part in patch.name for part in pull.patches)
            ]
            goes = pr.forwarded(patch.read_bytes())
            assert len(pulls) == goes, f"{patch.name}: {pulls}"


@pytest.mark.parametrize("name", PULLS)
def test_what_a_pull_request_needs_comes_before_it(name: str) -> None:
    names = list(PULLS)
    assert all(names.index(needed) < names.index(name) for needed in PULLS[name].after)
    assert pr.newest_release(name)
    assert set(PULLS[name].suites) <= set(upstream_tests.SUITES)


@pytest.fixture
def upstream(branch: Path, tmp_path: Path) -> Path:
    """A git repository with as much of upstream as the patches touch."""
    folder = tmp_path / "upstream"
    difference = ("diff", "--name-only", "--diff-filter=M", "upstream", "patched")
    for path in queue.git(branch, *difference).split():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(queue.git(branch, "show", f"upstream:{path}"))
    queue.git(folder, "init", "--quiet", "--initial-branch=main")
    queue.git(folder, "add", "--all")
    queue.git(folder, "commit", "--quiet", "-m", "vLLM")
    return folder


def make(upstream: Path, folder: Path) -> None:
    release = pr.newest_release("budget")
    pr.make_branch(release, folder.parent, str(upstream), folder, "budget")


def test_branch_of_an_upstream_tree(
    branch: Path, upstream: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"

    make(upstream, made)

    base = queue.git(made, "rev-parse", pr.BASE)
    assert base == queue.git(upstream, "rev-parse", "main")
    difference = ("diff", "--numstat", pr.BASE, "patched")
    assert queue.git(made, *difference) == queue.git(branch, *difference)


def test_branch_is_made_anew_unless_somebody_worked_in_it(
    upstream: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for _ in range(2):
        make(upstream, made)
    queue.git(made, "commit", "--quiet", "--amend", "-m", "reworded")

    with pytest.raises(BuildError, match="has work in it"):
        make(upstream, made)


def test_tree_that_is_too_different_is_refused(upstream: Path, tmp_path: Path) -> None:
    (upstream / "vllm/envs.py").write_text("# another one\n")
    queue.git(upstream, "commit", "--quiet", "--all", "-m", "Change")

    with pytest.raises(BuildError, match=r"0001-.* does not apply"):
        make(upstream, tmp_path / "made")


def test_report_of_a_compiled_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, report = tmp_path / "results.json", tmp_path / "report.xml"
    monkeypatch.setattr(matrix, "RESULTS", results)
    group, tests, _ = matrix.GROUPS[-1]
    name = next(iter(read_pins()["release"]))
    results.write_text(json.dumps({"releases": {name: {"built": "tree"}}}))
    assert matrix.compiled(name, group) == {"not run": "no native wheel is published"}

    report.write_text("<testsuites/>")
    with pytest.raises(BuildError, match="has no outcome of tests/platforms"):
        matrix.take_report(name, report, "a root")
    module = tests.removesuffix(".py").replace("/", ".")
    report.write_text(
        f'<testsuites><testcase file="{tests}" classname="{module}" name="test_a"/>'
        f'<testcase file="{tests}" classname="{module}" name="test_b">'
        '<failure message="why"/></testcase></testsuites>'
    )
    matrix.take_report(name, report, "a root")

    stored = matrix.compiled(name, group)
    assert stored["tests"] == {"test_a": "passed", "test_b": "failed why"}
    assert matrix.show({group: stored}, group) == "1 passed, 1 failed (a root)"


def test_commands_explain_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (matrix.main, upstream_tests.main):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr(sys, "argv", ["x", "--help"])
            main()
        assert end.value.code == 0
        assert "Exit status 1" in capsys.readouterr().out
