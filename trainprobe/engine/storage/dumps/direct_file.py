"""A new file that grows at its end, written past the page cache where that can be done.

For each page that passes through its cache the kernel finds a page, fills it and later takes it back: 1 to 3 s of CPU a GB. A
disk that reads the program's own memory costs 0.1 s. Linux does that (`O_DIRECT`) for whole blocks: the place in the file,
the address in memory and the size are multiples of a block. What comes otherwise is gathered in memory where they are.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainprobe.engine.storage.safe_files import NO_LINK, PRIVATE, open_private

BLOCK = 4096  # bytes; the blocks of almost all disks and file systems divide it
SLOWEST = 256e6  # bytes/s; a slower disk makes the training wait sooner than the page cache does, which takes much at once
PATIENCE = 0.25  # s that writing may lag behind that
_LARGE = 1 << 20  # bytes that are worth a system call of their own
_GATHERED = 4 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP}


class DirectFile:
    """Appends to a new file from byte `start` on; the bytes before are a hole until somebody writes them after `finish`.

    slowest, patience: a disk that takes fewer bytes a second, and lags behind by so many seconds, is written to through the
    page cache from then on. So is one whose file system refuses, and every disk where there is no `O_DIRECT` (macOS,
    Windows). The bytes are the same either way. Errors of the disk are raised as they are (OSError).
    """

    def __init__(self, path: Path, start: int = 0, slowest: float = SLOWEST, patience: float = PATIENCE) -> None:
        self._path = path
        self._slowest, self._patience = slowest, patience
        self._file, self._block = _open(path)
        self._file.seek(start)
        self._gathered = _at_a_block(_GATHERED)
        self._filled = 0
        self._late = 0.0

    @property
    def direct(self) -> bool:
        """Whether what comes next passes by the page cache."""
        return self._block > 1

    def append(self, data: Any) -> None:
        """Write the bytes of a buffer behind what is there; they may wait until `finish`, in a copy."""
        part = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.empty(0, np.uint8)
        if len(part) >= _LARGE and not self._filled % self._block and not part.ctypes.data % self._block:
            self._write_gathered()
            whole = len(part) - len(part) % self._block
            self._write(part[:whole])
            part = part[whole:]
        while len(part):
            taken = part[: _GATHERED - self._filled]
            self._gathered[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            part = part[len(taken) :]
            if self._filled == _GATHERED:
                self._write_gathered()

    def finish(self) -> None:
        """Write what waits, and close."""
        if self._filled % self._block:
            self._through_the_cache()
        self._write_gathered()
        self._file.close()

    def discard(self) -> None:
        """Close, with what waits unwritten."""
        self._file.close()

    def _write_gathered(self) -> None:
        self._write(self._gathered[: self._filled])
        self._filled = 0

    def _write(self, part: npt.NDArray[np.uint8]) -> None:
        while len(part):
            begun = time.perf_counter()
            try:
                done = self._file.write(part.data)
            except OSError as error:
                if not self.direct or error.errno not in _REFUSALS:
                    raise
                self._through_the_cache()
                continue
            part = part[done:]
            self._judge(done, time.perf_counter() - begun)

    def _judge(self, done: int, seconds: float) -> None:
        self._late = max(0.0, self._late + seconds - done / self._slowest)
        if self.direct and (done % self._block or self._late > self._patience):
            self._through_the_cache()

    def _through_the_cache(self) -> None:
        place = self._file.tell()
        self._file.close()
        self._file, self._block = self._path.open("r+b", buffering=0), 1
        self._file.seek(place)


def _open(path: Path) -> tuple[BinaryIO, int]:
    """Return the new file, and of what its writes must be multiples."""
    if hasattr(os, "O_DIRECT"):
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | NO_LINK, PRIVATE)
            return os.fdopen(file, "wb", buffering=0), BLOCK
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
    return open_private(path, "wb", buffering=0), 1


def _at_a_block(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + BLOCK, np.uint8)
    skipped = -memory.ctypes.data % BLOCK
    return memory[skipped : skipped + size]
