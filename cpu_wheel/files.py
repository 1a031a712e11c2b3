# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are there only once they are whole."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the hash of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """Yield where to make a file or a folder; once done it is renamed to `path`.

    What a failure or an interruption leaves half-made is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)
