"""A file of a fixed size that holds the last pieces written to it, readable at any moment, also after the writer was killed.

    header     MAGIC, number of slots, bytes of a slot, bytes of the journal
    position   where the process is in its training (engine.core.position)
    journal    what the step in progress has brought so far (engine.storage.step_journal), a quarter of the file
    slot       sequence number from 1 (0: empty), length (top bit: not compressed), CRC-32, then the piece, compressed by zlib
               where it would not fit otherwise

The file is mapped into memory: what was stored belongs to the operating system at once. A slot is made empty before it is
written and numbered last, so that a torn one is known by its number or its CRC. The file's room is taken when it is made: a
full disk is an error then, and no fatal signal later.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path

from trainprobe.engine.core.position import BYTES, Where, read_position
from trainprobe.engine.storage.safe_files import open_private, open_to_read
from trainprobe.errors import FormatError, OutputError

MAGIC = b"TPBOX\0\0\4"
_HEADER = struct.Struct("<8sQQQ")  # MAGIC, slots, bytes of a slot, bytes of the journal
_JOURNAL = _HEADER.size + BYTES  # where the journal begins
_SHARE = 4  # of the file, for the journal
_SLOT = struct.Struct("<QQQ")
_PLAIN = 1 << 63


class Ring:
    """A ring that is being written."""

    def __init__(self, path: Path, slots: int, max_bytes: int) -> None:
        """Make the file anew. max_bytes: its size. Raises OutputError when the disk has no room for it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.slots = slots
        journal = max_bytes // _SHARE & ~7
        self._first = _JOURNAL + journal
        self.slot_bytes = (max_bytes - self._first) // slots
        size = self._first + self.slot_bytes * slots
        path.unlink(missing_ok=True)
        draft = path.with_name(f".{path.name}.partial")  # a reader finds a ring there, or nothing
        with open_private(draft, "w+b") as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
            except OSError as error:
                draft.unlink(missing_ok=True)
                raise OutputError(
                    f"the black box {path} needs {size} bytes: {error}; make room, or lower `max_bytes` of `black_box`"
                ) from error
            self._map = mmap.mmap(file.fileno(), size)
        self._map[: _HEADER.size] = _HEADER.pack(MAGIC, slots, self.slot_bytes, journal)
        draft.replace(path)
        self._sequence = 0

    def put(self, piece: bytes) -> bool:
        """Store a piece in the place of the oldest; return False, and store nothing, when it does not fit a slot."""
        plain = _SLOT.size + len(piece) <= self.slot_bytes
        packed = piece if plain else zlib.compress(piece, 1)
        if _SLOT.size + len(packed) > self.slot_bytes:
            return False
        at = self._first + self.slot_bytes * (self._sequence % self.slots)
        self._map[at : at + _SLOT.size] = _SLOT.pack(0, 0, 0)
        self._map[at + _SLOT.size : at + _SLOT.size + len(packed)] = packed
        self._sequence += 1
        self._map[at : at + _SLOT.size] = _SLOT.pack(self._sequence, len(packed) | plain * _PLAIN, zlib.crc32(packed))
        return True

    def room_for_position(self) -> memoryview:
        """Return the part of the file that is for the position, uint8 [BYTES]; to be let go of before `close`."""
        return memoryview(self._map)[_HEADER.size : _JOURNAL]

    def room_for_journal(self) -> memoryview:
        """Return the part of the file that is for the journal of a step, uint8 [n]; to be let go of before `close`."""
        return memoryview(self._map)[_JOURNAL : self._first]

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._map.close()


def read_ring(path: Path) -> list[bytes]:
    """Return the pieces of a ring, oldest first, torn ones left out. Raises FormatError for a file that is no ring."""
    data = _whole(path)
    _, slots, size, journal = _HEADER.unpack_from(data)
    found: list[tuple[int, bytes]] = []
    for i in range(slots):
        at = _JOURNAL + journal + i * size
        sequence, length, crc = _SLOT.unpack_from(data, at)
        plain, length = bool(length & _PLAIN), length & ~_PLAIN
        packed = data[at + _SLOT.size : at + _SLOT.size + length]
        if sequence and length <= size - _SLOT.size and zlib.crc32(packed) == crc:
            found.append((sequence, packed if plain else zlib.decompress(packed)))
    return [piece for _, piece in sorted(found)]


def read_where(path: Path) -> Where:
    """Return where the process was when it wrote to a ring last. Raises FormatError for a file that is no ring."""
    return read_position(_whole(path)[_HEADER.size : _JOURNAL])


def read_journal_bytes(path: Path) -> memoryview:
    """Return the journal of a ring for `step_journal.read_journal`. Raises FormatError for a file that is no ring."""
    data = _whole(path)
    return memoryview(data)[_JOURNAL : _JOURNAL + _HEADER.unpack_from(data)[3]]


def _whole(path: Path) -> mmap.mmap | bytes:
    with open_to_read(path) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    if len(data) < _JOURNAL or data[:8] != MAGIC:
        raise FormatError(f"{path} is not a black box of this format (its first bytes are {data[:8]!r})")
    _, slots, size, journal = _HEADER.unpack_from(data)
    if len(data) != _JOURNAL + journal + slots * size:
        raise FormatError(
            f"{path} has {len(data)} bytes where its header says {_JOURNAL + journal + slots * size}: it was cut off"
        )
    return data
