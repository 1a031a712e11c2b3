# SPDX-License-Identifier: Apache-2.0
"""Run the hooks of upstream's own .pre-commit-config.yaml on a branch.

pre-commit runs them, on the files that the branch changes. It would clone the
repository of each hook that is not upstream's own; those that are published on a
package index are taken from there instead, in the version that upstream pins.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from cpu_wheel import queue, source
from cpu_wheel.pins import BuildError

CONFIG = ".pre-commit-config.yaml"
PYTHON_FILES = {"types_or": ["python", "pyi", "jupyter"]}
# What the manifests of these hooks' repositories say, as far as it is needed; the
# rest of it is in upstream's configuration. {} is the pinned version.
PUBLISHED: dict[str, dict[str, Any]] = {
    "ruff-check": {
        "language": "python",
        "entry": "ruff check --force-exclude",
        "additional_dependencies": ["ruff=={}"],
        **PYTHON_FILES,
    },
    "ruff-format": {
        "language": "python",
        "entry": "ruff format --force-exclude",
        "additional_dependencies": ["ruff=={}"],
        **PYTHON_FILES,
    },
    "typos": {
        "language": "python",
        "entry": "typos",
        "additional_dependencies": ["typos=={}"],
        "types": ["text"],
    },
    "markdownlint-cli2": {
        "language": "node",
        "language_version": "system",
        "entry": "markdownlint-cli2",
        "additional_dependencies": ["markdownlint-cli2@{}"],
        "types": ["markdown"],
    },
}
# The others fail here if there is a file for them, and then it is said why.
FILES: dict[str, dict[str, Any]] = {
    "shellcheck": {"types": ["shell"]},
    "actionlint": {"files": r"^\.github/workflows/"},
}
LEFT_TO_HUMAN = {"signoff-commit": "left to the human who submits"}


def local(hook: dict[str, Any], revision: str) -> dict[str, Any]:
    """Return a hook of another repository as one that needs no clone of it."""
    if published := PUBLISHED.get(hook["id"]):
        version = revision.removeprefix("v")
        packages = [p.format(version) for p in published["additional_dependencies"]]
        ours = published | {"additional_dependencies": packages}
    else:
        ours = {"language": "fail", "entry": "is not on a package index"}
        ours |= FILES.get(hook["id"], {})
    return {"name": hook["id"], **hook, **ours}


def configuration(branch: Path) -> dict[str, Any]:
    """Return upstream's configuration with each hook as a local one.

    Raises:
        BuildError: The tree has none.
    """
    if not (branch / CONFIG).exists():
        raise BuildError(f"{branch} has no {CONFIG}, so upstream's hooks cannot be run")
    config: dict[str, Any] = yaml.safe_load((branch / CONFIG).read_text())
    hooks = [
        hook if repository["repo"] == "local" else local(hook, repository["rev"])
        for repository in config["repos"]
        for hook in repository["hooks"]
    ]
    return config | {"repos": [{"repo": "local", "hooks": hooks}]}


def run_hook(branch: Path, name: str, config: Path) -> tuple[str, str]:
    """Run a hook on what a branch changes.

    Returns:
        "passed", "failed", "no files" or "cannot run", and why.
    """
    environment = source.git_environment(branch)
    environment["PRE_COMMIT_HOME"] = str(config.with_suffix(""))
    folder = str(Path(sys.executable).parent)
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "pre_commit", "run", name]
    command += ["--config", str(config), "--color=never"]
    command += ["--from-ref", queue.UPSTREAM, "--to-ref", queue.BRANCH]
    result = subprocess.run(
        command, cwd=branch, env=environment, capture_output=True, text=True
    )
    output = result.stdout + result.stderr
    log = config.with_name(f"hook-{name}.log")
    if result.returncode == 1:  # what a hook that mends files would change
        output += queue.git(branch, "diff")
        queue.git(branch, "checkout", "--quiet", ".")
    log.write_text(output)
    if result.returncode == 0:
        return ("no files" if "no files to check" in output else "passed"), ""
    if "is not on a package index" in output:
        return "cannot run", "is not on a package index"
    if result.returncode != 1:
        lines = [line for line in output.splitlines() if "rror" in line]
        return "cannot run", f"{(lines or ['no reason given'])[-1][:120]} ({log})"
    return "failed", f"see {log}"


def run(branch: Path, work: Path) -> dict[str, tuple[str, str]]:
    """Run every hook that has files on a branch; return results and reasons."""
    config = configuration(branch)
    file = work / "hooks.yaml"
    file.write_text(yaml.safe_dump(config))
    diff = queue.git(branch, "diff", "--name-only", queue.UPSTREAM, queue.BRANCH)
    results = {}
    for hook in config["repos"][0]["hooks"]:
        name = hook.get("alias", hook["id"])
        pattern = re.compile(hook.get("files", ""))
        if why := LEFT_TO_HUMAN.get(name):
            results[name] = ("cannot run", why)
        elif not any(map(pattern.search, diff.splitlines())):
            results[name] = ("no files", "")
        else:
            print(f"pr: hook {name} ...", file=sys.stderr, flush=True)
            results[name] = run_hook(branch, name, file)
    return results


def table(results: dict[str, tuple[str, str]]) -> str:
    """Return the results as a table, hook by result."""
    lines = ["| hook | result |", "| --- | --- |"]
    for name, (result, why) in results.items():
        lines.append(f"| {name} | {f'{result}: {why}' if why else result} |")
    return "\n".join(lines)
