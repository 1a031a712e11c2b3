# SPDX-License-Identifier: Apache-2.0
"""How long the wheel takes, beside compressing the same files into a zip.

Each round measures three things in turn, as whole processes: the zip, with the
compressor and level that the wheel uses; the wheel with the patched tree there; and
the wheel from nothing but downloads. A ratio compares times of one round.

Nothing is deleted before the end: ext4 searches past every inode freed within the
last minutes, which makes thousands of new files take up to four times as long.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from checks.report import table
from cpu_wheel.paths import BUILD, ROOT
from cpu_wheel.pins import load_release
from cpu_wheel.settings import Settings
from cpu_wheel.steps import make_wheel

ZIP = """
import sys, zipfile
from pathlib import Path
source = Path(sys.argv[1])
with zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_DEFLATED) as archive:
    for path in sorted(source.rglob("*")):
        archive.write(path, path.relative_to(source))
"""


def timed(*command: str | Path) -> tuple[float, str]:
    """Run a command; return its seconds and what it said on standard error."""
    start = time.monotonic()
    result = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.monotonic() - start, result.stderr


def wheel_seconds(folder: Path, keep_tree: bool) -> dict[str, float]:
    """Return the seconds of `cpu_wheel wheel`, whole and by step.

    Args:
        folder: A new folder, for the wheel and for a tree that is in the way.
        keep_tree: Whether the patched tree stays, or is made again.
    """
    release = load_release(Settings.from_environment().release)
    dist = folder / "dist"
    dist.mkdir(parents=True)
    if not keep_tree:
        for tree in BUILD.glob(f"vllm-{release.version}-*"):
            tree.rename(folder / tree.name)
    whole, said = timed(sys.executable, "-m", "cpu_wheel", "wheel", "--dist-dir", dist)
    steps = {"whole": whole}
    for line in said.splitlines():
        what, _, seconds = line.removesuffix(" s").rpartition(": ")
        if not line.endswith("..."):
            step = "build" if "setup.py" in what else "unpack and patch"
            steps[step] = float(seconds)
    return steps


def measure_round(folder: Path, files: Path) -> dict[str, float]:
    """Return the seconds of one round."""
    folder.mkdir()
    compress, _ = timed(sys.executable, "-c", ZIP, files, folder / "files.zip")
    with_tree = wheel_seconds(folder / "tree there", keep_tree=True)
    nothing = wheel_seconds(folder / "nothing", keep_tree=False)
    return {
        "zip": compress,
        "wheel, tree there": with_tree["whole"],
        "wheel, from nothing": nothing["whole"],
        "of that: unpack and patch": nothing["unpack and patch"],
        "of that: upstream's setup.py": nothing["build"],
        "of that: start, hashes, checks": nothing["whole"]
        - nothing["unpack and patch"]
        - nothing["build"],
        "ratio, tree there": with_tree["whole"] / compress,
        "ratio, from nothing": nothing["whole"] / compress,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.build_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        folder = Path(name)
        wheel = make_wheel(Settings.from_environment(), ROOT / "dist")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "files")
        rounds = []
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            rounds.append(measure_round(folder / str(number), folder / "files"))
    measured = {key: [times[key] for times in rounds] for key in rounds[0]}
    figures = (statistics.median, min, max)
    rows = (
        (key, *(f"{figure(values):.2f}" for figure in figures))
        for key, values in measured.items()
    )
    print(table(("seconds, or ratio to the zip", "median", "min", "max"), rows))


if __name__ == "__main__":
    main()
