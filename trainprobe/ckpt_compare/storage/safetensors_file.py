"""Safetensors files: eight bytes of header length, a JSON header, then the numbers as they are.

The header is read here rather than by the library because a checkpoint may use number formats that NumPy does not have.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any, TypeGuard

from trainprobe.ckpt_compare.storage import remarks
from trainprobe.ckpt_compare.storage.mapped import LARGEST, MappedArray, same_tuple
from trainprobe.engine.diff.number_formats import number_format
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
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] < _LARGEST_HEADER


def read_safetensors(path: Path) -> tuple[dict[str, MappedArray], dict[str, str]]:
    """Return the arrays by name and the file's own metadata; raise FormatError when header and size do not agree.

    As the format demands, the arrays must fill the file without a gap and without sharing a byte.
    """
    header, first, size = _header(path)
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise FormatError(f"{path} has a damaged safetensors header: its metadata is no object")
    file = str(path)
    arrays = {sys.intern(name): _array(file, name, entry, first) for name, entry in header.items()}
    at = first
    for name, array in sorted(arrays.items(), key=lambda held: (held[1].start, held[1].span)):
        if array.start != at:
            where = f"{name} begins at byte {array.start - first} of the data, and the arrays before it end at {at - first}"
            raise FormatError(f"{path}: {where}")
        at += array.span
    if at < size:  # of one that is too short the arrays that are cut off are told when they are read
        remarks.fault(file, f"holds {size - at} bytes behind the last array that its header knows")
    return arrays, metadata  # pyright: ignore[reportUnknownVariableType]


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, the first byte of the data, and the size of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length + 8 > size or length > _LARGEST_HEADER:
            raise FormatError(f"{path} is truncated or no safetensors file: {size} bytes, a header of {length} is announced")
        try:
            header = json.loads(file.read(length), object_hook=_lean)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged safetensors header: it is no object")
    return header, 8 + length, size  # pyright: ignore[reportUnknownVariableType]


def _lean(entry: dict[str, Any]) -> Any:
    """Turn an object that describes an array into a tuple while the header is read: a million of them weigh a fifth."""
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2:
        return sys.intern(dtype), same_tuple(tuple(shape)), *offsets
    return entry


def _array(path: str, name: str, entry: Any, first: int) -> MappedArray:
    if not isinstance(entry, tuple):
        raise FormatError(f"{path}: {name} needs `dtype`, `shape` and `data_offsets`, and has {str(entry)[:200]}")
    dtype, shape, start, stop = entry  # pyright: ignore[reportUnknownVariableType]
    if dtype not in _DTYPES:
        raise FormatError(f"{path}: {name} has number format {dtype}, which is not known here")
    fmt = number_format(_DTYPES[dtype])
    if math.prod(shape) * fmt.itemsize != stop - start or math.prod(n for n in shape if n) > LARGEST:
        taken = math.prod(shape) * fmt.itemsize
        raise FormatError(f"{path}: {name} of shape {list(shape)} {dtype} takes {taken} bytes, not {stop - start}")
    return MappedArray(path, first + start, shape, fmt)


def _are_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)  # pyright: ignore
