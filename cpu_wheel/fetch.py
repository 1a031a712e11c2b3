# SPDX-License-Identifier: Apache-2.0
"""Get a pinned file: from the user, from the cache, or from a package index."""

import errno
import sys
import tempfile
from pathlib import Path

from cpu_wheel.errors import BuildError
from cpu_wheel.pins import Archive


def fetch(archive: Archive, cache: Path, given: Path | None = None) -> Path:
    """Return a verified local copy of a pinned file.

    A file that the user names is used where it lies and no network is touched.
    Otherwise the cache has it, or it is downloaded into the cache.

    Args:
        archive: The pin.
        cache: The folder of downloads.
        given: The user's file.

    Raises:
        BuildError: There is no such file, or none with the pinned hash.
    """
    if given:
        archive.verify(given)
        return given
    path = cache / archive.file
    if path.exists():
        try:
            archive.verify(path)
            return path
        except BuildError as error:
            print(f"cpu_wheel: {error}; downloading it again", file=sys.stderr)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # A server's part of a file must not lie there under any name.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
            # Its libraries are not needed where the files are there.
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
