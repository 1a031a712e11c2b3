# SPDX-License-Identifier: Apache-2.0
"""The pages and the forge's settings agree with the tree that they describe."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from cpu_wheel.paths import ROOT

PAGES = sorted(
    path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a forge gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"https?:", link):
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)

    assert broken == []


def test_workflow_runs_the_two_commands_on_what_the_readme_lists() -> None:
    readme = (ROOT / "README.md").read_text()
    packages = re.search(r"`apt install (.+?)`", readme)
    commands = re.search(r"^```\n(make) .*\n(make test) .*\n```$", readme, re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]

    assert packages is not None
    assert steps[0].splitlines()[-1] == f"apt-get install -y {packages[1]}"
    assert commands is not None
    assert tuple(steps[-2:]) == commands.groups()


def test_pre_commit_has_the_ruff_of_the_lint_group() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (rev,) = [r["rev"] for r in config["repos"] if "ruff-pre-commit" in r["repo"]]

    assert f"ruff=={rev.removeprefix('v')}" in groups["lint"]


def test_map_names_every_folder() -> None:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = [Path(name) for name in listing.stdout.splitlines()]
    folders = {f"{file.parts[0]}/" for file in files if len(file.parts) > 1}
    text = (ROOT / "CONTRIBUTING.md").read_text()

    assert {f for f in folders if f"`{f}" not in text and f[0] != "."} == set()
