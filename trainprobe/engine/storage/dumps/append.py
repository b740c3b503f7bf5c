"""Files that only grow, piece by piece: a piece is on disk whole, or a killed run tears only the last one."""

from __future__ import annotations

import os
from pathlib import Path

from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE
from trainprobe.errors import OutputError

_AT_ONCE = hasattr(os, "writev")  # spares a copy


class AppendedFile:
    """Appends pieces that end in a newline. What a killed run left behind its last newline is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = self._open()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK, PRIVATE)
        self.size = _cut_torn_end(file)
        return file

    def write(self, *pieces: bytes) -> None:
        """Append pieces as one; where only a part of it fits on the disk, that part is taken back and OSError raised.

        A file that somebody has removed is begun anew, for the next pieces.
        """
        file = self._file
        if file is None:
            raise OutputError("a file that is closed cannot be written")
        if os.fstat(file).st_nlink == 0:
            self._file = self._open()
            os.close(file)
            raise OutputError(f"{self._path} was removed, and what it held is lost")
        size = sum(map(len, pieces))
        try:
            done = os.writev(file, pieces) if _AT_ONCE else 0
            rest = memoryview(b"".join(pieces) if done < size else b"")[done:]
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, self.size)
            raise
        self.size += size

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file is not None:
            os.close(self._file)
        self._file = None


def _cut_torn_end(file: int) -> int:
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - (1 << 16))
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    os.ftruncate(file, end)
    return end


def make_room(paths: list[Path], on_existing: str) -> None:
    """Prepare for files that a run appends to: remove older ones on "replace", keep them on "continue".

    Raises OutputError when one exists and the plan refuses that.
    """
    for path in paths:
        if on_existing == "continue" or not path.exists():
            continue
        if on_existing != "replace":
            raise OutputError(
                f"{path} exists already, and nothing is overwritten: choose another folder, "
                "or set on_existing to continue or replace"
            )
        path.unlink()
