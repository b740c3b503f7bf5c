"""The raw dump files of CANN: `DumpData`, a protobuf message in front of the bytes of the tensors.

Bytes 0 to 7 are the length of the message (little endian), the message follows, then the bytes of all inputs and of all
outputs in the order of the message. Files of older releases are the message alone, with the bytes inside it. The message is
described here from public descriptions of the format; nothing of CANN is needed, `protobuf` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.storage.safe_files import open_to_read, read_bounded, regular
from trainprobe.errors import FormatError, MissingExtra

LARGEST_HEADER = 64 << 20
_LARGEST_INLINE = 512 << 20  # bytes of a file that is one message
_MOST_TENSORS = 4096
_MOST_AXES = 64
# number → (name, NumPy dtype of the stored bytes); what stands under no name here cannot be read as elements
DTYPES: dict[int, tuple[str, str]] = {
    **{1: ("float32", "<f4"), 2: ("float16", "<f2"), 3: ("int8", "i1"), 4: ("uint8", "u1"), 5: ("int16", "<i2")},
    **{6: ("uint16", "<u2"), 7: ("int32", "<i4"), 8: ("int64", "<i8"), 9: ("uint32", "<u4"), 10: ("uint64", "<u8")},
    **{11: ("bool", "?"), 12: ("float64", "<f8"), 16: ("complex64", "<c8"), 17: ("complex128", "<c16")},
    **{18: ("qint8", "i1"), 19: ("qint16", "<i2"), 20: ("qint32", "<i4"), 21: ("quint8", "u1"), 22: ("quint16", "<u2")},
    **{27: ("bfloat16", "<u2"), 34: ("float8_e5m2", "u1"), 35: ("float8_e4m3fn", "u1"), 36: ("float8_e8m0fnu", "u1")},
}
_OTHER_DTYPES = {
    **{0: "undefined", 13: "string", 14: "dual_sub_int8", 15: "dual_sub_uint8", 23: "resource", 24: "string_ref", 25: "dual"},
    **{26: "variant", 28: "int4", 29: "uint1", 30: "int2", 31: "uint2", 32: "complex32", 33: "hifloat8"},
    **{37: "float6_e3m2", 38: "float6_e2m3", 39: "float4_e2m1", 40: "float4_e1m2"},
}
FORMATS = {
    **{0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 5: "NC1C0HWPAD", 6: "NHWC1C0", 7: "FSR_NCHW"},
    **{14: "CHWN", 16: "HWCN", 26: "MD", 27: "NDHWC", 28: "FRACTAL_ZZ", 29: "FRACTAL_NZ", 30: "NCDHW", 31: "DHWCN"},
    **{32: "NDC1HWC0", 33: "FRACTAL_Z_3D", 34: "CN", 35: "NC"},
}
# message → (number, name, type, repeated); a type is a scalar of protobuf or another of these messages
_MESSAGES: dict[str, tuple[tuple[int, str, str, bool], ...]] = {
    "Shape": ((1, "dim", "uint64", True),),
    "OriginalOp": ((1, "name", "bytes", False), (2, "output_index", "uint32", False)),
    "OpOutput": (
        *((1, "data_type", "int32", False), (2, "format", "int32", False), (3, "shape", "Shape", False)),
        *((4, "original_op", "OriginalOp", False), (5, "data", "bytes", False), (6, "size", "uint64", False)),
        *((7, "original_shape", "Shape", False), (8, "sub_format", "int32", False)),
    ),
    "OpInput": (
        *((1, "data_type", "int32", False), (2, "format", "int32", False), (3, "shape", "Shape", False)),
        *((4, "data", "bytes", False), (5, "size", "uint64", False), (6, "original_shape", "Shape", False)),
        (7, "sub_format", "int32", False),
    ),
    "OpBuffer": ((1, "buffer_type", "int32", False), (2, "data", "bytes", False), (3, "size", "uint64", False)),
    "DumpData": (
        *((1, "version", "bytes", False), (2, "dump_time", "uint64", False), (3, "output", "OpOutput", True)),
        *((4, "input", "OpInput", True), (5, "buffer", "OpBuffer", True), (6, "op_name", "bytes", False)),
    ),
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of a raw dump file.

    io: "input" or "output". shape: as the device holds it, in its `format`; original_shape: as the program has it, or ().
    dtype: plain name. start, size: where its bytes lie in the file. inline: its bytes, of files that are one message.
    original_op: the operator that this output belonged to before operators were fused, or "".
    """

    io: str
    slot: int
    dtype: str
    format: str
    shape: tuple[int, ...]
    original_shape: tuple[int, ...]
    start: int
    size: int
    stored: str  # NumPy dtype of the bytes, "" where NumPy has none
    original_op: str = ""
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class RawDump:
    """A raw dump file. op_name: the whole name of the operator, with its scope, or "". version: of the format."""

    path: Path
    version: str
    op_name: str
    tensors: tuple[RawTensor, ...]


def read_raw(path: Path) -> RawDump:
    """Read the header of a raw dump file. Raises MissingExtra without protobuf, FormatError where the file is no such dump."""
    size = path.stat().st_size
    with open_to_read(path) as file:
        length = int.from_bytes(file.read(8), "little")
        headed = 0 < length <= min(size - 8, LARGEST_HEADER)
        header = file.read(length) if headed else b""
    if headed:
        message = _parsed(header)
        sizes = None if message is None else [int(tensor.size) for tensor in (*message.input, *message.output)]
        if sizes and 8 + length + sum(sizes) <= size:
            return _dump(path, message, 8 + length)
    if size > _LARGEST_INLINE:
        raise FormatError(f"{path} is no dump of a kernel: its header of {length} bytes is none, and it is too large to be one")
    message = _parsed(read_bounded(path, _LARGEST_INLINE, follow=True))
    if message is None or not any(tensor.data for tensor in (*message.input, *message.output)):
        raise FormatError(
            f"{path} is no dump of a kernel: a header of {length} bytes does not fit its {size} bytes, and it is no message"
        )
    return _dump(path, message, None)


def _dump(path: Path, message: Any, start: int | None) -> RawDump:
    if len(message.input) + len(message.output) > _MOST_TENSORS:
        raise FormatError(f"{path} would hold {len(message.input) + len(message.output)} tensors: it is damaged")
    return RawDump(path, _text(message.version), _text(message.op_name), tuple(_tensors(path, message, start)))


def _tensors(path: Path, message: Any, start: int | None) -> Iterator[RawTensor]:
    at = start or 0
    for io, sizes in (("input", message.input), ("output", message.output)):
        for slot, tensor in enumerate(sizes):
            name, stored = DTYPES.get(tensor.data_type, (_OTHER_DTYPES.get(tensor.data_type, f"type{tensor.data_type}"), ""))
            form = FORMATS.get(tensor.format, f"format{tensor.format}")
            shapes = [tuple(int(n) for n in shape.dim[: _MOST_AXES + 1]) for shape in (tensor.shape, tensor.original_shape)]
            if max(map(len, shapes)) > _MOST_AXES:
                raise FormatError(f"{path}: {io}.{slot} would have more than {_MOST_AXES} axes: the file is damaged")
            size = int(tensor.size) if start is not None else len(tensor.data)
            original = _text(tensor.original_op.name) if io == "output" else ""
            inline = None if start is not None else bytes(tensor.data)
            yield RawTensor(io, slot, name, form, shapes[0], shapes[1], at, size, stored, original, inline)
            at += size


def array_of(path: Path, tensor: RawTensor) -> npt.NDArray[Any]:
    """Return the elements as they are stored, mapped from the file: bfloat16 and float8 as their bit patterns.

    Raises FormatError where NumPy has no such elements, or the shape needs more bytes than the tensor has.
    """
    if not tensor.stored:
        raise FormatError(f"{path}: {tensor.io}.{tensor.slot} is {tensor.dtype}, whose elements cannot be read")
    dtype = np.dtype(tensor.stored)
    shape = tensor.shape
    if not shape and tensor.size > dtype.itemsize:  # without a shape: everything there is
        shape = (tensor.size // dtype.itemsize,)
    count = math.prod(shape)
    if count * dtype.itemsize > tensor.size:
        raise FormatError(
            f"{path}: {tensor.io}.{tensor.slot} has {tensor.size} bytes, its shape {list(shape)} of {tensor.dtype} needs "
            f"{count * dtype.itemsize}"
        )
    if count == 0:
        return np.zeros(shape, dtype)
    if tensor.inline is not None:
        return np.frombuffer(tensor.inline, dtype, count).reshape(shape)
    return np.memmap(regular(path), dtype, "r", tensor.start, shape)


def payload(path: Path, tensor: RawTensor, most: int) -> bytes:
    """Return the first bytes of a tensor as they are, `most` at most."""
    if tensor.inline is not None:
        return tensor.inline[:most]
    with open_to_read(path) as file:
        file.seek(tensor.start)
        return file.read(min(tensor.size, most))


def _text(raw: bytes) -> str:
    return raw[:4096].decode("utf-8", "replace")


def _parsed(raw: bytes) -> Any:
    """Return the message, None where the bytes are none."""
    message, error = _message_class()
    parsed = message()
    try:
        parsed.ParseFromString(raw)
    except error:
        return None
    return parsed


@cache
def _message_class() -> tuple[Any, type[Exception]]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError:
        raise MissingExtra("protobuf", "npu", "reading the raw dump files of an NPU") from None
    file = descriptor_pb2.FileDescriptorProto(name="trainprobe/kernel_dump.proto", package="trainprobe", syntax="proto3")
    kinds: Any = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            about = described.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind in _MESSAGES:
                about.type, about.type_name = kinds.TYPE_MESSAGE, f".trainprobe.{kind}"
            else:
                about.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("trainprobe.DumpData")), message.DecodeError
