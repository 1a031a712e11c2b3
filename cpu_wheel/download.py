# SPDX-License-Identifier: Apache-2.0
"""Download pinned files through the indexes that pip is configured with."""

import ast
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from unearth import Link, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import PyPIClient

from cpu_wheel.errors import BuildError
from cpu_wheel.pins import Archive

CHUNK = 1 << 20
ATTEMPTS = 3


def download(archive: Archive, path: Path) -> None:
    """Download a pinned file through the indexes that pip is configured with.

    Raises:
        BuildError: No index has the file with the pinned hash.
    """
    problems = []
    for source, finder in finders():
        for attempt in range(1, ATTEMPTS + 1):
            try:
                link = find(finder, archive)
                if link is None:
                    problems.append(f"{source} does not have it")
                    break
                stream(finder, link, path)
                archive.verify(path)
                return
            except httpx2.HTTPStatusError as error:
                problems.append(f"{source}: HTTP {error.response.status_code}")
                break
            except BuildError as error:
                problems.append(f"{source}: {error}")
                break
            except (httpx2.TransportError, EOFError) as error:
                if attempt == ATTEMPTS:
                    problems.append(f"{source}: {error or type(error).__name__}")
    raise BuildError(
        f"{archive.file} cannot be downloaded: {'; '.join(problems) or 'no index'}. "
        "Check the network and `pip config list`, or name a local copy with "
        f"{archive.setting}"
    )


def find(finder: PackageFinder, archive: Archive) -> Link | None:
    """Return the link to a pinned file, if the finder's source has it."""
    for candidate in finder.find_all_packages(archive.project, allow_yanked=True):
        if candidate.link.filename == archive.file:
            return candidate.link
    return None


def stream(finder: PackageFinder, link: Link, path: Path) -> None:
    """Write what a link leads to into a file, showing progress.

    Raises:
        EOFError: The connection ended early.
        httpx2.HTTPError: The server refused or could not be reached.
    """
    with finder.session.get_stream(link.normalized) as response, path.open("wb") as out:
        response.raise_for_status()
        total = int(response.headers.get("Content-Length", 0))
        shown = -1
        done = 0
        for chunk in response.iter_bytes(CHUNK):
            out.write(chunk)
            done += len(chunk)
            percent = 100 * done // total if total else 0
            if percent // 10 > shown // 10 or (sys.stderr.isatty() and percent > shown):
                shown = percent
                end = "\r" if sys.stderr.isatty() and done < total else "\n"
                print(
                    f"cpu_wheel: downloading {path.name}: {done >> 20} of "
                    f"{total >> 20} MiB",
                    end=end,
                    file=sys.stderr,
                    flush=True,
                )
        if done < total:
            raise EOFError(f"the connection ended after {done} of {total} bytes")


def finders() -> Iterator[tuple[str, PackageFinder]]:
    """Yield a finder for each source that pip is configured with, and its name.

    One finder a source, so that one that cannot be reached stops no other.
    """
    settings = pip_settings()
    hosts = settings.get("trusted-host", "").split()
    index_urls = settings.get("index-url", "").split()
    has_default = not index_urls
    index_urls += settings.get("extra-index-url", "").split()
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        has_default = False
        index_urls = []
    # Typed loosely: unearth's client does not match its own protocol to mypy.
    session: Any = PyPIClient(
        trusted_hosts=hosts,
        verify=(
            ssl.create_default_context(cafile=settings["cert"])
            if "cert" in settings
            else True
        ),
        proxy=settings.get("proxy"),
        timeout=float(settings.get("timeout", settings.get("default-timeout", 15))),
        follow_redirects=True,
        auth=MultiDomainBasicAuth(prompting=False, index_urls=index_urls),
    )
    common: dict[str, Any] = {"trusted_hosts": hosts, "ignore_compatibility": True}
    with session:
        if has_default:  # unearth's, which is pip's
            yield "the Python package index", PackageFinder(session, **common)
        for url in index_urls:
            yield Link(url).redacted, PackageFinder(session, index_urls=[url], **common)
        for url in settings.get("find-links", "").split():
            if Path(url).exists():
                url = Path(url).absolute().as_uri()
            yield Link(url).redacted, PackageFinder(session, find_links=[url], **common)


def pip_settings() -> dict[str, str]:
    """Return the settings that `pip download` would use, by option name.

    Read from `pip config list`, whose values are Python literals. The section of
    the command beats the global one, and the environment beats both.
    """
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    sections: dict[str, dict[str, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        sections.setdefault(section, {})[option] = str(ast.literal_eval(value))
    merged: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        merged |= sections.get(section, {})
    return merged
