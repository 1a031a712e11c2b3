# SPDX-License-Identifier: Apache-2.0
"""Pinned files arrive by name and hash, through what pip is configured with."""

import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu_wheel.errors import BuildError
from cpu_wheel.fetch import fetch
from cpu_wheel.pins import Archive

CONTENT = os.urandom(3 << 20)
ARCHIVE = Archive(
    project="demo-project",
    file="demo_project-1.0.tar.gz",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    setting="CPU_WHEEL_SDIST",
)
NOWHERE = "http://127.0.0.1:9/simple"  # the discard port: nobody listens


class Index(http.server.BaseHTTPRequestHandler):
    """An index with one file; it keeps a list of what was asked for."""

    asked: list[str]
    content = CONTENT
    lost = 0  # bytes that are promised and never sent
    password = ""

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        if self.password and "Basic" not in self.headers.get("Authorization", ""):
            self.send_error(401)
        elif self.path == "/simple/demo-project/":
            page = f'<a href="/files/{ARCHIVE.file}">{ARCHIVE.file}</a>'.encode()
            self.reply(page, "text/html")
        elif self.path == f"/files/{ARCHIVE.file}":
            self.reply(self.content, "application/gzip")
        else:
            self.send_error(404)

    def reply(self, content: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        lost = self.lost if content_type != "text/html" else 0
        self.wfile.write(content[: len(content) - lost])

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets, nothing of the machine's."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)


@pytest.fixture
def index() -> Iterator[type[Index]]:
    handler = type("Handler", (Index,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}/simple"  # type: ignore
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param("PIP_INDEX_URL", "{url}", id="index-url"),
        pytest.param("PIP_EXTRA_INDEX_URL", "{url}", id="first-index-unreachable"),
        pytest.param(
            "PIP_EXTRA_INDEX_URL", "{url}/empty {url}", id="second-index-lacks-it"
        ),
    ],
)
def test_download_from_an_index(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    index: type[Index],
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value.format(url=index.url))  # type: ignore

    path = fetch(ARCHIVE, tmp_path)

    assert path.read_bytes() == CONTENT
    assert left_in(tmp_path) == [ARCHIVE.file]
    assert "3 of 3 MiB" in capfd.readouterr().err

    index.asked.clear()
    assert fetch(ARCHIVE, tmp_path) == path
    assert index.asked == []


def test_index_of_pips_configuration_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    configuration = tmp_path / "pip.conf"
    configuration.write_text(f"[global]\nindex-url = {index.url}\n")  # type: ignore
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))

    assert fetch(ARCHIVE, tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize("form", ["path", "uri"])
def test_find_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / ARCHIVE.file).write_bytes(CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv(
        "PIP_FIND_LINKS", str(links) if form == "path" else links.as_uri()
    )

    assert fetch(ARCHIVE, tmp_path / "cache").read_bytes() == CONTENT


def test_wrong_hash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore
    index.content = CONTENT[:-1] + b"x"

    with pytest.raises(BuildError) as error:
        fetch(ARCHIVE, tmp_path)

    assert ARCHIVE.sha256 in str(error.value)
    assert hashlib.sha256(index.content).hexdigest() in str(error.value)
    assert ARCHIVE.file in str(error.value)
    assert left_in(tmp_path) == []


def test_connection_that_ends_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore
    index.lost = 1 << 20

    with pytest.raises(BuildError, match=ARCHIVE.file):
        fetch(ARCHIVE, tmp_path)

    assert index.asked.count(f"/files/{ARCHIVE.file}") == 3
    assert left_in(tmp_path) == []

    index.lost = 0
    assert fetch(ARCHIVE, tmp_path).read_bytes() == CONTENT


def test_no_network_and_nothing_cached(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as error:
        fetch(ARCHIVE, tmp_path)

    assert "\n" not in str(error.value)
    assert "CPU_WHEEL_SDIST" in str(error.value)
    assert left_in(tmp_path) == []


def test_password_is_used_and_never_shown(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    index: type[Index],
) -> None:
    url = index.url.replace("//", "//user:hush@")  # type: ignore
    index.password = "hush"
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", NOWHERE.replace("//", "//user:hush@"))

    assert fetch(ARCHIVE, tmp_path / "good").read_bytes() == CONTENT

    index.content = b"tampered with"
    with pytest.raises(BuildError) as error:
        fetch(ARCHIVE, tmp_path / "bad")
    assert "hush" not in str(error.value) + "".join(capfd.readouterr())


def test_damaged_cache_is_downloaded_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore
    (tmp_path / ARCHIVE.file).write_bytes(CONTENT[:1000])

    assert fetch(ARCHIVE, tmp_path).read_bytes() == CONTENT


def test_given_file_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    given = tmp_path / "renamed.tar.gz"
    given.write_bytes(CONTENT)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore

    assert fetch(ARCHIVE, tmp_path / "cache", given) == given
    assert index.asked == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["truncated", "missing", "folder"])
def test_given_file_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index], damage: str
) -> None:
    given = tmp_path / "given.tar.gz"
    if damage == "truncated":
        given.write_bytes(CONTENT[:1000])
    elif damage == "folder":
        given.mkdir()
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore

    with pytest.raises(BuildError, match=str(given)):
        fetch(ARCHIVE, tmp_path / "cache", given)

    assert given.exists() == (damage != "missing")
    assert index.asked == []


def test_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: type[Index]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)  # type: ignore
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("a file")

    with pytest.raises(BuildError, match=r"cache: cannot store .* CPU_WHEEL_CACHE"):
        fetch(ARCHIVE, in_the_way)
