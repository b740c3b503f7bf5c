"""Writes dump files as a device does, from the public description of the format alone: no protobuf library is used here."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

NUMBERS = {"float32": 1, "float16": 2, "int8": 3, "uint8": 4, "int32": 7, "int64": 8, "bool": 11, "float64": 12}
BF16, HIFLOAT8 = 27, 33
FORMATS = {"NCHW": 0, "ND": 2, "NC1HWC0": 3, "FRACTAL_NZ": 29}


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def whole(field: int, number: int) -> bytes:
    return varint(field << 3) + varint(number)


def chunk(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def shape(dims, packed=True) -> bytes:
    return chunk(1, b"".join(map(varint, dims))) if packed else b"".join(whole(1, n) for n in dims)


def tensor(array, io, *, dtype=None, form="ND", original=None, inline=False, padding=0, op=""):
    """Return (message, bytes) of a tensor. The two sides number their fields differently."""
    raw = np.ascontiguousarray(array).tobytes() + b"\0" * padding
    number = dtype or NUMBERS[array.dtype.name]
    data, size, first = (5, 6, 7) if io == "output" else (4, 5, 6)
    message = whole(1, number) + whole(2, FORMATS[form]) + chunk(3, shape(array.shape, packed=form != "NCHW"))
    message += chunk(4, chunk(1, op.encode())) if op and io == "output" else b""
    message += chunk(data, raw) if inline else b""
    message += whole(size, len(raw)) + (chunk(first, shape(original)) if original else b"")
    return message, b"" if inline else raw


def raw_dump(inputs=(), outputs=(), op_name="", inline=False) -> bytes:
    """Return a dump file. inputs, outputs: (message, bytes) of `tensor`; the bytes of the inputs come first."""
    message = chunk(1, b"2.0") + whole(2, 1589195081588018)
    message += b"".join(chunk(3, told) for told, _ in outputs) + b"".join(chunk(4, told) for told, _ in inputs)
    message += chunk(5, whole(1, 0) + whole(3, 0)) + chunk(6, op_name.encode()) + chunk(7, whole(1, 5))  # 7: a later release's
    return message if inline else struct.pack("<Q", len(message)) + message + b"".join(raw for _, raw in (*inputs, *outputs))


def write_kernel(folder: Path, name: str, inputs, outputs, *, task=1, stream=0, time=1589195081588018, op_name="", **more):
    """Write one kernel's file and return its path. inputs, outputs: arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{task}.{stream}.{time}"
    sides = [tensor(a, "input", **more) for a in inputs], [tensor(a, "output", **more) for a in outputs]
    path.write_bytes(raw_dump(*sides, op_name))
    return path


def overflow_old(unit: str, stream: int, task: int, status: int) -> bytes:
    """Return the 2048 bytes of the first layout."""
    at, state = {"DHA Atomic Add": (0, 512), "L2 Atomic Add": (128, 768), "AI Core": (256, 1040)}[unit]
    out = bytearray(2048)
    struct.pack_into("<6Q", out, at, 3, stream, task, 0, 0x1000, 0x2000)
    struct.pack_into("<Q", out, state, status)
    return bytes(out)


def overflow_new(unit: int, stream: int, task: int, status: int, version: int = 0) -> bytes:
    """Return the second layout, of the AI Core (0) or of the vector unit (1)."""
    words = [3, stream, task, 0, 0, 0, 0x1000, 0x2000, 5, 6, *([0, 0, status, 0] if version else [status])]
    return struct.pack(f"<6I{len(words)}Q", 0x5A5A5A5A, version, 1, unit, 0, 8 * len(words), *words)


def write_overflow(folder: Path, report: bytes) -> Path:
    """Write the report of an overflow, as the device does: in the output of a raw dump file."""
    path = folder / "Opdebug.Node_OpDebug.59.0.1589195081588099"
    path.write_bytes(raw_dump((), [tensor(np.frombuffer(report, np.uint8), "output")]))
    return path
