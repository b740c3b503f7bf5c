"""MindSpore `.ckpt` files, read without mindspore: a protobuf message whose tensors stay in the file.

    Checkpoint { repeated Value value = 1 }
    Value { string tag = 1; TensorProto tensor = 2; MapTensorProto maptensor = 3 }
    TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }
    MapTensorProto { repeated TensorProto tensor = 1 }

A tensor above 512 MiB is several Values with the same tag and the whole shape, cut along the first axis. A file may end in
`crc_num` and ten digits. Field numbers and rules: MindSpore's `checkpoint.proto` and `save_checkpoint`.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainprobe.ckpt_compare.storage.mapped import extent, mapping, same_tuple
from trainprobe.errors import FormatError

_TRAILER = 17  # bytes: `crc_num` and a ten-byte number
DTYPES = {
    "Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16", "Int64": "int64",
    "Int32": "int32",
    "Int16": "int16", "Int8": "int8", "UInt64": "uint64", "UInt32": "uint32", "UInt16": "uint16", "UInt8": "uint8",
    "Bool": "bool",
    "Complex64": "complex64", "Complex128": "complex128", "Float8E4M3FN": "float8_e4m3fn", "Float8E5M2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """One stored value: its tag, shape, type name, and where its bytes lie."""

    tag: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int


def _varint(held: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = held[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise FormatError("a number runs past the end of its message")


def _fields(held: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, first byte or value, byte past the end) for each field of a message."""
    at = start
    while at < end:
        key, at = _varint(held, at, end)
        number, wire = key >> 3, key & 7
        if wire == 2:
            length, at = _varint(held, at, end)
            if at + length > end:
                raise FormatError(f"a field of {length} bytes runs past the end of its message")
            yield number, wire, at, at + length
            at += length
        elif wire == 0:
            value, at = _varint(held, at, end)
            yield number, wire, value, at
        else:
            raise FormatError(f"wire type {wire} does not occur in MindSpore checkpoints")


def looks_like_mindspore(path: Path) -> bool:
    """Whether the first field is a Value with a tag and a tensor."""
    try:
        first = next(iter(read_values(path, most=1)), None)
    except FormatError:
        return False
    return first is not None and (first.dtype in DTYPES or first.dtype == "str")


def read_values(path: Path, most: int | None = None) -> list[Value]:
    """Return all stored values (or the first `most`); raise FormatError for a damaged, truncated or encrypted file."""
    held = mapping(str(path))
    end = len(held)
    if end > _TRAILER and held[end - _TRAILER : end - 10] == b"crc_num":
        end -= _TRAILER
    found: list[Value] = []
    try:
        for number, wire, start, stop in _fields(held, 0, end):
            if number != 1 or wire != 2:
                raise FormatError(f"field {number} does not belong there")
            found += _value(held, start, stop)
            if most is not None and len(found) >= most:
                break
    except (FormatError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no readable MindSpore checkpoint: {error}. It may be truncated or encrypted") from error
    return found


def _value(held: mmap.mmap, start: int, stop: int) -> list[Value]:
    tag = ""
    tensors: list[tuple[int, int]] = []
    for number, wire, at, end in _fields(held, start, stop):
        if wire != 2:
            raise FormatError(f"field {number} of a value is no bytes")
        if number == 1:
            tag = held[at:end].decode()
        elif number == 2:
            tensors.append((at, end))
        elif number == 3:
            tensors += [(a, e) for n, w, a, e in _fields(held, at, end) if n == 1 and w == 2]
    many = len(tensors) > 1
    return [_tensor(held, f"{tag}.{i}" if many else tag, *place) for i, place in enumerate(tensors)]


def _tensor(held: mmap.mmap, tag: str, start: int, stop: int) -> Value:
    dims: list[int] = []
    dtype, content = "", (start, start)
    for number, wire, at, end in _fields(held, start, stop):
        if number == 1 and wire == 0:
            dims.append(at)
        elif number == 1:  # packed
            place = at
            while place < end:
                value, place = _varint(held, place, end)
                dims.append(value)
        elif number == 2:
            dtype = held[at:end].decode()
        elif number == 3:
            content = (at, end)
    return Value(tag, same_tuple(tuple(dims)), dtype, content[0], content[1] - content[0])


def shape_of(value: Value, itemsize: int) -> tuple[int, ...]:
    """Return the true shape: scalars are written with dims [0] and one element. Raises FormatError for one of no array."""
    return () if value.shape == (0,) and value.length == itemsize else extent(value.shape)


def rows_in(value: Value, itemsize: int) -> int:
    """Return how many rows of the first axis this value holds (fewer than the shape says when a tensor was cut)."""
    row = math.prod(value.shape[1:]) * itemsize
    return value.length // row if row else 0


def checksum_fault(path: Path) -> str:
    """Say what is wrong when a file carries a CRC that does not fit, else nothing."""
    held = mapping(str(path))
    end = len(held)
    if end <= _TRAILER or held[end - _TRAILER : end - 10] != b"crc_num":
        return ""
    stored = int.from_bytes(held[end - 10 :], "big")
    found = 0
    for at in range(0, end - _TRAILER, 1 << 24):
        found = zlib.crc32(held[at : min(at + (1 << 24), end - _TRAILER)], found)
    return (
        ""
        if found == stored
        else f"its checksum is {found:#010x}, the file says {stored:#010x}: the content has changed since it was written"
    )
