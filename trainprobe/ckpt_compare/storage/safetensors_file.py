"""Safetensors files: eight bytes of header length, a JSON header, then the numbers as they are.

The header is read here rather than by the library because a checkpoint may use number formats that NumPy does not have.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.storage.mapped import MappedArray
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
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and struct.unpack("<Q", head[:8])[0] < _LARGEST_HEADER


def read_safetensors(path: Path) -> tuple[dict[str, MappedArray], dict[str, str]]:
    """Return the arrays by name and the file's own metadata; raise FormatError when header and size do not agree."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length + 8 > size:
            raise FormatError(f"{path} is truncated or no safetensors file: {size} bytes, a header of {length} is announced")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise FormatError(f"{path} has a damaged safetensors header: {error}") from error
    metadata = header.pop("__metadata__", None) or {}
    arrays: dict[str, MappedArray] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise FormatError(f"{path}: {name} has number format {entry['dtype']}, which is not known here")
        start, stop = entry["data_offsets"]
        array = MappedArray(str(path), 8 + length + start, tuple(entry["shape"]), number_format(_DTYPES[entry["dtype"]]))
        if array.span != stop - start:
            raise FormatError(
                f"{path}: {name} of shape {entry['shape']} {entry['dtype']} takes {array.span} bytes, not {stop - start}"
            )
        arrays[name] = array
    return arrays, metadata
