# SPDX-License-Identifier: Apache-2.0
"""The mechanical part of taking on a release: fetch, hash, try the series, report."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

import httpx2
from packaging.version import Version

from cpu_wheel import download, source
from cpu_wheel.errors import BuildError
from cpu_wheel.files import making, sha256
from cpu_wheel.paths import PATCHES, ROOT
from cpu_wheel.pins import Archive, read_pins, read_series


def add(version: str, cache: Path, pins_file: Path = ROOT / "upstream.toml") -> str:
    """Pin a release in upstream.toml, with the series that fits it best.

    Args:
        version: The release, which is not pinned yet.
        cache: The folder of downloads; a file that lies there is taken as it is.
        pins_file: The file that gets the entry.

    Returns:
        A report: what was pinned, and which patches do not apply.

    Raises:
        BuildError: It is there already, or its sdist cannot be had.
    """
    pins = read_pins()
    if version in pins["release"]:
        raise BuildError(f"release {version} is in upstream.toml already")
    pinned = pins["release"][pins["pinned"]]
    sdist = obtain(pinned["sdist"], pins["pinned"], version, cache)
    entry = {"sdist": sdist}
    with contextlib.suppress(BuildError):  # it comes later than the sources
        native = obtain(pinned["native-wheel"], pins["pinned"], version, cache)
        entry["native-wheel"] = native
    with tempfile.TemporaryDirectory(prefix=".release-", dir=cache) as folder:
        tried = {}
        for series in dict.fromkeys(pin["series"] for pin in pins["release"].values()):
            tree = Path(folder) / series
            source.unpack(cache / sdist["file"], tree)
            tried[series] = misfits(tree, read_series(PATCHES / series))
        requirements = (tree / "requirements/cpu.txt").read_text()
    torch = re.search(r"^torch==([\d.]+)", requirements, re.MULTILINE)
    best = min(tried, key=lambda series: len(tried[series]))
    lines = [f'[release."{version}"]', f'torch = "{torch[1] if torch else ""}"']
    lines.append(f'series = "{best}"')
    for name, archive in entry.items():
        lines += ["", f'[release."{version}".{name}]']
        lines += [f'{key} = "{value}"' for key, value in archive.items()]
    older = (v for v in pins["release"] if Version(v) < Version(version))
    text, before = pins_file.read_text(), next(older, None)
    at = text.index(f'[release."{before}"]') if before else len(text)
    parts = [text[:at].rstrip("\n"), "\n".join(lines), text[at:]]
    pins_file.write_text("\n\n".join(filter(None, parts)).rstrip("\n") + "\n")
    report = [f"pinned {', '.join(archive['file'] for archive in entry.values())}"]
    report.append(f"{best} fits best; {len(tried[best])} patches do not apply")
    return "\n".join(report + tried[best])


def obtain(like: dict[str, str], old: str, new: str, cache: Path) -> dict[str, str]:
    """Download the file of a release that another release's file is like; hash it.

    Raises:
        BuildError: No index has it.
    """
    name = like["file"].replace(f"-{old}", f"-{new}", 1)
    archive = Archive(like["project"], name, sha256="", setting="")
    for _, finder in download.finders() if not (cache / name).exists() else ():
        with contextlib.suppress(httpx2.HTTPError, EOFError):
            if link := download.find(finder, archive):
                with making(cache / name) as partial:
                    download.stream(finder, link, partial)
                break
    if not (cache / name).exists():
        raise BuildError(f"no configured index has {name}")
    found = sha256(cache / name)
    return {"project": archive.project, "file": name, "sha256": found}


def misfits(tree: Path, series: tuple[Path, ...]) -> list[str]:
    """Apply what applies of a series, and return why the rest does not."""
    problems = []
    for patch in series:
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                source.apply_patches(tree, [patch], allow_offset=True)
            except BuildError as error:
                problems.append(str(error))
    return problems
