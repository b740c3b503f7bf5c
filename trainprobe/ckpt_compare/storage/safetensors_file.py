"""Safetensors files: eight bytes of header length, a JSON header, then the numbers as they are.

The header is read here rather than by the library because a checkpoint may use number formats that NumPy does not have.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, TypeGuard

from trainprobe.ckpt_compare.storage import remarks
from trainprobe.ckpt_compare.storage.mapped import LARGEST, MappedArray
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
    arrays: dict[str, MappedArray] = {}
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        arrays[name], start, stop = _array(path, name, entry, first)
        ends.append((start, stop, name))
    at = 0
    for start, stop, name in sorted(ends):
        if start != at:
            raise FormatError(f"{path}: {name} begins at byte {start} of the data, and the arrays before it end at {at}")
        at = stop
    if first + at < size:  # of one that is too short the arrays that are cut off are told when they are read
        remarks.fault(str(path), f"holds {size - first - at} bytes behind the last array that its header knows")
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
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} has a damaged safetensors header: it is no object")
    return header, 8 + length, size  # pyright: ignore[reportUnknownVariableType]


def _array(path: Path, name: str, entry: Any, first: int) -> tuple[MappedArray, int, int]:
    """Return one array, and where it begins and ends in the data."""
    held: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = held.get("dtype"), held.get("shape"), held.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise FormatError(f"{path}: {name} needs `dtype`, `shape` and `data_offsets`, and has {str(entry)[:200]}")
    if dtype not in _DTYPES:
        raise FormatError(f"{path}: {name} has number format {dtype}, which is not known here")
    fmt = number_format(_DTYPES[dtype])
    start, stop = offsets
    if math.prod(shape) * fmt.itemsize != stop - start or math.prod(n for n in shape if n) > LARGEST:
        taken = math.prod(shape) * fmt.itemsize
        raise FormatError(f"{path}: {name} of shape {shape} {dtype} takes {taken} bytes, not {stop - start}")
    return MappedArray(str(path), first + start, tuple(shape), fmt), start, stop


def _are_counts(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)  # pyright: ignore
