"""Frames: what travels between a training and the machine that judges its operators.

All numbers are big-endian. A frame is

    offset  bytes  what
    0       4      the letters TPOC
    4       1      version, 1
    5       1      kind, see `Kind`
    6       2      zero
    8       4      length of the header, at most 1 MiB
    12      8      length of the payload, at most what the receiver allows; 0 but in a CALL
    20      4      CRC-32 of bytes 0 to 19 and the header
    24      4      CRC-32 of the payload
    28             header: one JSON object in UTF-8
                   payload: a safetensors file

Both lengths are checked before anything of that size is held. Nothing here knows sockets or files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import orjson

from trainprobe.errors import FormatError

MAGIC = b"TPOC"
VERSION = 1
LONGEST_HEADER = 1 << 20
_PREFIX = struct.Struct(">4sBBHIQ")
_CHECKS = struct.Struct(">II")
PREFIX_BYTES = _PREFIX.size + _CHECKS.size


class FrameError(FormatError):
    """Bytes that are no frame of this protocol, or a frame that says what it must not."""


class Kind(IntEnum):
    """What a frame is. HELLO, CALL and PING come from the training, the others from the server; BYE from both."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    CALL = 4
    VERDICT = 5
    PING = 6
    PONG = 7
    BYE = 8


@dataclass(frozen=True, slots=True)
class WireFrame:
    """One frame. header: its JSON object. payload: a safetensors file, empty but in a CALL."""

    kind: Kind
    header: Mapping[str, Any]
    payload: bytes = b""


def encode(frame: WireFrame) -> bytes:
    """Return a frame as bytes, without its payload, which follows. Raises FrameError for a header that is too long."""
    try:
        header = orjson.dumps(frame.header)
    except TypeError as error:
        raise FrameError(f"a {frame.kind.name} frame cannot be written as JSON: {error}") from None
    if len(header) > LONGEST_HEADER:
        raise FrameError(
            f"the header of a {frame.kind.name} frame has {len(header)} bytes, at most {LONGEST_HEADER} are allowed"
        )
    start = _PREFIX.pack(MAGIC, VERSION, frame.kind, 0, len(header), len(frame.payload))
    return start + _CHECKS.pack(zlib.crc32(header, zlib.crc32(start)), zlib.crc32(frame.payload)) + header


class Decoder:
    """Finds the frames in bytes that come in pieces. most: bytes of the largest payload that is accepted.

    It holds one frame that is not complete yet, and no more than has arrived of it.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[WireFrame]:
        """Yield the frames that are complete now. Raises FrameError; nothing can be fed after that."""
        self._bytes += data
        while (frame := self._next()) is not None:
            yield frame

    @property
    def between_frames(self) -> bool:
        """Return whether no part of a frame is waiting for the rest."""
        return not self._bytes

    def _next(self) -> WireFrame | None:
        held = self._bytes
        known = min(len(held), len(MAGIC))
        if bytes(held[:known]) != MAGIC[:known]:
            raise FrameError(f"no frame of this protocol begins with {bytes(held[:8])!r}")
        if len(held) < PREFIX_BYTES:
            return None
        kind, header_length, payload_length = self._lengths()
        end = PREFIX_BYTES + header_length + payload_length
        if len(held) < end:
            return None
        with memoryview(held) as view:
            header = bytes(view[PREFIX_BYTES : PREFIX_BYTES + header_length])
            payload = bytes(view[PREFIX_BYTES + header_length : end])
            checks = _CHECKS.unpack_from(view, _PREFIX.size)
            found = zlib.crc32(header, zlib.crc32(view[: _PREFIX.size])), zlib.crc32(payload)
        if checks != found:
            raise FrameError(f"a {kind.name} frame does not have the checksum that it names")
        del held[:end]
        return WireFrame(kind, _object(kind, header), payload)

    def _lengths(self) -> tuple[Kind, int, int]:
        _, version, kind, zero, header, payload = _PREFIX.unpack_from(self._bytes)
        if version != VERSION:
            raise FrameError(f"the other side writes version {version} of this protocol, here it is {VERSION}: use one release")
        if zero or kind not in Kind.__members__.values():
            raise FrameError(f"there is no frame of kind {kind}")
        if header > LONGEST_HEADER:
            raise FrameError(f"a header of {header} bytes is announced, at most {LONGEST_HEADER} are read")
        most = self.most if kind == Kind.CALL else 0
        if payload > most:
            raise FrameError(f"a {Kind(kind).name} frame announces a payload of {payload} bytes, at most {most} are read")
        return Kind(kind), header, payload


def _object(kind: Kind, text: bytes) -> dict[str, Any]:
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise FrameError(f"the header of a {kind.name} frame is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise FrameError(f"the header of a {kind.name} frame is no JSON object")
    return header
