"""The zip archives that torch.save writes, read where they lie in a mapped file.

`zipfile` keeps half a kilobyte for each member, and a checkpoint of a million tensors has a million members: here a member
costs the eight bytes of its place. Only stored (uncompressed) members are read, and pickles are held against their checksum.
Format: PKWARE's APPNOTE, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainprobe.ckpt_compare.storage.mapped import forget_pages, mapping
from trainprobe.errors import FormatError

_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_ENTRY_FIELDS = struct.Struct("<4x4xHH4xLLLHHH8xL")  # flags, compression, crc, sizes, lengths of name, extra, comment, header
_LONGEST_COMMENT = 1 << 16
_AT_ONCE = 1 << 15  # local headers that are looked at before their pages are let go


@dataclass(frozen=True, slots=True)
class Member:
    """One member as the directory describes it.

    header: first byte of its local header, counted from the archive's. entry: first byte of its directory entry in the file.
    """

    name: str
    compressed: bool
    checksum: int
    size: int
    header: int
    entry: int


class Places:
    """Where storages lie: key → (first byte in the file, bytes). Keys that count 0, 1, 2, … take sixteen bytes each."""

    __slots__ = ("_counted", "_named", "_sizes", "_starts")

    def __init__(self) -> None:
        self._starts, self._sizes = array("Q"), array("Q")
        self._named: dict[str, int] = {}
        self._counted = 0  # keys "0" … of which the number is the place in the arrays

    def add(self, key: str, start: int, size: int) -> None:
        """Note a storage. Raises FormatError for a key that is there already."""
        if self.get(key) is not None:
            raise FormatError(f"storage {key} is there twice")
        if self._counted == len(self._starts) and key == str(self._counted):
            self._counted += 1
        else:
            self._named[key] = len(self._starts)
        self._starts.append(start)
        self._sizes.append(size)

    def get(self, key: str) -> tuple[int, int] | None:
        """Return first byte and number of bytes; None for a key that is not there."""
        number = self._named.get(key)
        if number is None:
            number = int(key) if key.isdecimal() and key.isascii() and len(key) < 19 else -1
            if not 0 <= number < self._counted or key != str(number):
                return None
        return self._starts[number], self._sizes[number]

    def shift_behind_headers(self, path: str) -> None:
        """Turn the places of local headers into those of the data behind them: the name and its padding vary in length."""
        held = mapping(path)
        headers = np.frombuffer(self._starts, np.uint64).astype(np.int64)
        if headers.size and not 0 <= int(headers.min()) <= int(headers.max()) <= len(held) - 30:
            raise FormatError("a local header lies outside of the file")
        raw = np.frombuffer(held, np.uint8)
        for first in range(0, headers.size, _AT_ONCE):
            some = headers[first : first + _AT_ONCE]
            lengths = [raw[some + at].astype(np.int64) + (raw[some + at + 1].astype(np.int64) << 8) for at in (26, 28)]
            headers[first : first + _AT_ONCE] += 30 + lengths[0] + lengths[1]
            forget_pages(path, int(some.min()), int(some.max()))
        self._starts = array("Q", headers.astype(np.uint64).tobytes())


class TorchZip:
    """An archive in bytes start … start+length of a file. Raises FormatError where there is none, or a damaged one."""

    def __init__(self, path: str, start: int, length: int) -> None:
        self._held, self._path, self._start, self._stop = mapping(path), path, start, start + length
        self._first, self._behind = self._directory()
        found = [m for m in self.members() if m.name == "data.pkl" or m.name.endswith("/data.pkl")]
        if len(found) != 1:
            raise FormatError(f"it is a zip file with {len(found) or 'no'} data.pkl: not written by torch.save")
        self.pickled = found[0]
        self._root = self.pickled.name[: -len("data.pkl")]

    def _directory(self) -> tuple[int, int]:
        """Return first byte of the central directory, and the byte behind it."""
        held, stop = self._held, self._stop
        end = held.rfind(_END, max(self._start, stop - _LONGEST_COMMENT - 22), stop)
        if end < 0 or end + 22 > stop:
            raise FormatError("it has no end of a zip archive")
        size, offset = struct.unpack_from("<LL", held, end + 12)
        behind = end
        if end - 20 >= self._start and held[end - 20 : end - 16] == _LOCATOR64:
            behind = self._start + struct.unpack_from("<Q", held, end - 12)[0]
            if behind + 56 > stop or held[behind : behind + 4] != _END64:
                behind = end - 20 - 56  # as archives with something before them have it
            if behind < self._start or held[behind : behind + 4] != _END64:
                raise FormatError("its zip64 directory is not where it should be")
            size, offset = struct.unpack_from("<QQ", held, behind + 40)
        if size > behind - self._start or offset + size != behind - self._start:
            raise FormatError("its zip directory is not where it should be")
        return behind - size, behind

    def members(self) -> Iterator[Member]:
        """Yield the members in the order of the directory."""
        held, at = self._held, self._first
        while at < self._behind:
            if at + 46 > self._behind or held[at : at + 4] != _ENTRY:
                raise FormatError("its zip directory is damaged")
            flags, method, crc, packed, size, name_length, extra, comment, header = _ENTRY_FIELDS.unpack_from(held, at)
            name = held[at + 46 : at + 46 + name_length]
            tail = at + 46 + name_length
            if 0xFFFFFFFF in (packed, size, header):
                packed, size, header = _long_numbers(held[tail : tail + extra], packed, size, header)
            if flags & 1:
                raise FormatError("it is an encrypted zip archive, which torch.save never writes")
            text = name.decode("utf-8" if flags & 0x800 else "cp437")
            yield Member(text, method != 0 or packed != size, crc, size, header, at)
            at = tail + extra + comment
        if at != self._behind:
            raise FormatError("its zip directory is damaged")

    def places(self) -> Places:
        """Return where the storages lie; raise FormatError for compressed ones and for big-endian archives."""
        found, data = Places(), f"{self._root}data/"
        for member in self.members():
            if member.name.startswith(data):
                if member.compressed:
                    raise FormatError("it is a compressed zip archive: torch.save never writes one, save it again")
                found.add(member.name.removeprefix(data), self._start + member.header, member.size)
            elif member.name == f"{self._root}byteorder" and self.read(member) != b"little":
                raise FormatError("it holds big-endian numbers: save it again on a little-endian machine")
        forget_pages(self._path, self._first, self._behind)
        found.shift_behind_headers(self._path)
        return found

    def read(self, member: Member) -> bytes:
        """Return the bytes of a member, held against their checksum; raise FormatError where they are not as written."""
        start, stop = self._extent(member)
        data = self._held[start:stop]
        forget_pages(self._path, start, stop)
        if zlib.crc32(data) != member.checksum:
            raise FormatError(f"{member.name} is not as it was written: its checksum is another one")
        return data

    def holds(self, member: Member, word: bytes) -> bool:
        """Whether a member holds these bytes; nothing is copied."""
        start, stop = self._extent(member)
        found = self._held.find(word, start, stop) >= 0
        forget_pages(self._path, start, stop)
        return found

    def looked_at(self) -> list[tuple[int, int]]:
        """Return the spans of the file, (first byte, byte behind), that decide how the archive is read.

        They are the directory without the checksums of members that are not read, the local headers, pickle and byte order.
        """
        spans: list[tuple[int, int]] = []
        at = self._first
        for member in self.members():
            header = self._start + member.header
            if member.name in (self.pickled.name, f"{self._root}byteorder"):
                spans += [(header, header + 30), self._extent(member)]
                continue
            spans.append((at, member.entry + 16))  # the checksum is bytes 16 to 19 of an entry
            at = member.entry + 20
            if member.name.startswith(f"{self._root}data/"):
                spans.append((header + 26, header + 30))  # lengths of the name and of the padding
        return [*spans, (at, self._stop)]

    def _extent(self, member: Member) -> tuple[int, int]:
        if member.compressed:
            raise FormatError("it is a compressed zip archive: torch.save never writes one, save it again")
        header = self._start + member.header
        if header + 30 > self._stop or self._held[header : header + 4] != _LOCAL:
            raise FormatError(f"{member.name} is not where the zip directory says")
        name, extra = struct.unpack_from("<HH", self._held, header + 26)
        start = header + 30 + name + extra
        if start + member.size > self._stop:
            raise FormatError(f"{member.name} is cut off")
        return start, start + member.size


def _long_numbers(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """Return packed size, size and header place of a member where they do not fit into 32 bits."""
    at, found = 0, {"size": size, "packed": packed, "header": header}
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        numbers: list[Any] = (
            list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4)) if at + 4 + length <= len(extra) else []
        )
        if kind == 1:
            wanted = [key for key, value in found.items() if value == 0xFFFFFFFF]
            if len(numbers) < len(wanted):
                raise FormatError("its zip directory is damaged")
            found.update(zip(wanted, numbers, strict=False))
            break
        at += 4 + length
    return found["packed"], found["size"], found["header"]
