# SPDX-License-Identifier: Apache-2.0
"""Get a pinned file: from the user, from the cache, or from a package index."""

import errno
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from cpu_wheel.pins import Archive, BuildError


def sha256(path: Path) -> str:
    """Return the hash of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, archive: Archive) -> None:
    """Check a file against its pin.

    Raises:
        BuildError: The file is missing or has another hash.
    """
    try:
        actual = sha256(path)
    except (FileNotFoundError, IsADirectoryError):
        raise BuildError(f"{path}: no such file (expected {archive.file})") from None
    if actual != archive.sha256:
        raise BuildError(
            f"{path}: sha256 is {actual}, expected {archive.sha256} "
            f"({archive.file} as pinned in upstream.toml)"
        )


def fetch(archive: Archive, cache: Path) -> Path:
    """Return a verified local copy of a pinned file.

    A file named by the archive's setting is used where it lies and no network is
    touched. Otherwise the cache has it, or it is downloaded into the cache.

    Args:
        archive: The pin.
        cache: The folder of downloads.

    Raises:
        BuildError: There is no such file, or none with the pinned hash.
    """
    if given := os.environ.get(archive.setting):
        path = Path(given).absolute()
        verify(path, archive)
        return path
    path = cache / archive.file
    if path.exists():
        try:
            verify(path, archive)
            return path
        except BuildError as error:
            print(f"cpu_wheel: {error}; downloading it again", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
            from cpu_wheel.download import download

            partial = Path(folder) / archive.file
            download(archive, partial)
            partial.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise BuildError(
            f"{cache}: cannot store {archive.file} ({error.strerror}); name a writable "
            f"folder with CPU_WHEEL_CACHE or the file itself with {archive.setting}"
        ) from None
    return path
