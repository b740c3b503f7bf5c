"""Safetensors files: eight bytes of header length, a JSON header, then the numbers as they are.

The header is read here rather than by the library because a checkpoint may use number formats that NumPy does not have.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from trainprobe.ckpt_compare.storage import remarks
from trainprobe.ckpt_compare.storage.mapped import DIMENSIONS, LARGEST, MappedArray, extent, same_tuple
from trainprobe.engine.compare.number_formats import number_format
from trainprobe.engine.storage.safe_files import open_to_read
from trainprobe.errors import FormatError

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I64": "int64",
    "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "C64": "complex64",
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # as the reference implementation


def is_safetensors(path: Path) -> bool:
    """Whether the file begins as safetensors files do."""
    if not path.is_file():
        return False
    with open_to_read(path) as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] < _LARGEST_HEADER


def read_safetensors(path: Path) -> tuple[dict[str, MappedArray], dict[str, str]]:
    """Return the arrays by name and the file's own metadata; raise FormatError when header and size do not agree.

    As the format demands, the arrays must fill the file without a gap and without sharing a byte.
    """
    header, size = _header(path)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise FormatError(f"{path} has a damaged safetensors header: its metadata is no object")
    arrays = {sys.intern(name): _array(path, name, entry) for name, entry in header.items()}
    end = _end(path, arrays)
    if end < size:  # the arrays that a file which is too short cuts off are reported when they are read
        remarks.fault(str(path), f"holds {size - end} bytes behind the last array that its header knows")
    return arrays, metadata  # pyright: ignore[reportUnknownVariableType]


def _end(path: Path, arrays: Mapping[str, MappedArray]) -> int:
    """Return the byte behind the last array; raise FormatError where there is a gap or an overlap."""
    first = _first_byte(path)
    at, behind = first, 0
    for name in arrays:  # in the order of the header, which is that of the file in nearly all files
        behind, at = at, arrays[name].start + arrays[name].span
        if arrays[name].start != behind:
            break
    else:
        return at
    at = first
    for name in sorted(arrays, key=lambda n: (arrays[n].start, arrays[n].span)):
        if arrays[name].start != at:
            begin = arrays[name].start - first
            raise FormatError(
                f"{path}: {name} begins at byte {begin} of the data, and the arrays before it end at {at - first}"
            )
        at += arrays[name].span
    return at


def _first_byte(path: Path) -> int:
    with open_to_read(path) as file:
        return 8 + struct.unpack("<Q", file.read(8))[0]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the size of the file.

    Entries that describe an array have become one while the header was read: of a million the texts and lists between would
    weigh more than the arrays.
    """
    size = path.stat().st_size
    with open_to_read(path) as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length + 8 > size or length > _LARGEST_HEADER:
            raise FormatError(f"{path} is truncated or no safetensors file: {size} bytes, a header of {length} is announced")
        try:
            header = json.loads(file.read(length), object_hook=partial(_described, str(path), 8 + length))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged safetensors header: it is no object")
    return header, size  # pyright: ignore[reportUnknownVariableType]


def _described(path: str, first: int, entry: dict[str, Any]) -> Any:
    """Return the array that an object of the header describes; the object itself where it describes none."""
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets)):
        return entry
    if dtype not in _DTYPES or len(offsets) != 2:
        return entry
    fmt = number_format(_DTYPES[dtype])
    if math.prod(shape) * fmt.itemsize != offsets[1] - offsets[0]:
        return entry
    if len(shape) > DIMENSIONS or math.prod(n for n in shape if n) > LARGEST:
        return entry
    return MappedArray(path, first + offsets[0], same_tuple(tuple(shape)), fmt)


def _array(path: Path, name: str, entry: Any) -> MappedArray:
    """Return an entry of the header that is an array; raise FormatError that says what is wrong with any other."""
    if isinstance(entry, MappedArray):
        return entry
    held: dict[str, Any] = entry if isinstance(entry, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    dtype, shape, offsets = held.get("dtype"), held.get("shape"), held.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise FormatError(f"{path}: {name} needs `dtype`, `shape` and `data_offsets`, and has {str(entry)[:200]}")
    if dtype not in _DTYPES:
        raise FormatError(f"{path}: {name} has number format {dtype}, which is not known here")
    try:
        extent(shape)
    except FormatError as error:
        raise FormatError(f"{path}: {name}: {error}") from None
    taken = math.prod(shape) * number_format(_DTYPES[dtype]).itemsize
    raise FormatError(f"{path}: {name} of shape {shape} {dtype} takes {taken} bytes, not {offsets[1] - offsets[0]}")


def _are_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)  # pyright: ignore
