"""Files with names that others can predict: they are written whole or not at all, and never through a link."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from trainprobe.errors import FormatError

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # opening fails where the name is a link
SMALL = 64 << 10  # bytes of a file that people write by hand
LARGEST_STATE = 1 << 30  # bytes of a file that remembers a run


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is the old one or the new one at any time. Its folder must exist. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_bounded(path: Path, most: int) -> bytes:
    """Return what a regular file holds. Raises OSError; FormatError for what is no such file or has more than `most` bytes."""
    handle = os.open(path, os.O_RDONLY | NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode):
            raise FormatError(f"{path} is no regular file")
        if seen.st_size > most:
            raise FormatError(f"{path} has {seen.st_size} bytes, and more than {most} are not read")
        return file.read(most)


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used to `NAME.damaged`, or a name with a number behind it; return the new name."""
    target, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.damaged{number}")
    return path.rename(target)
