"""What an NPU writes about an overflow: which unit, in which task of which stream, with which status.

Two layouts are known. In both, all numbers are little endian.
* 2048 bytes: DHA atomic add at 0, L2 atomic add at 128, AI Core at 256, each with model, stream, task, task type, start of the
  program and of its parameters as uint64; the status of the first two at 512 and 768; kernel code, block and status of the AI
  Core at 1024.
* magic 0x5a5a5a5a, version, valid, unit, reserved, length as uint32; then uint64 fields that depend on the unit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.storage.kernel_dumps.acl_message import payload, read_raw
from trainprobe.engine.storage.kernel_dumps.file_names import KernelFile
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

_MAGIC, _OLD_SIZE, _LARGEST = 0x5A5A5A5A, 2048, 1 << 20
_UNITS = ("AI Core", "AI Vector", "AI CPU", "SDMA")  # as the second layout numbers them
_SHORT = {"AIC": "AI Core", "AIV": "AI Vector", "AICPU": "AI CPU"}
_CORE = (
    "model_id",
    "stream_id",
    "task_id",
    "task_type",
    "context_id",
    "thread_id",
    "pc_start",
    "para_base",
    "core_id",
    "block_id",
)
_COPY = ("model_id", "stream_id", "task_id", "task_type", "context_id", "thread_id", "src_addr", "dst_addr", "channel_id")
_CPU = ("model_id", "stream_id", "task_id", "task_type", "context_id", "cpu_id", "thread_id")
_FIELDS = {"AI Core": _CORE, "AI Vector": _CORE, "SDMA": _COPY, "AI CPU": _CPU}
_OLD = (("DHA Atomic Add", 0, 512), ("L2 Atomic Add", 128, 768), ("AI Core", 256, 1040))


@dataclass(frozen=True, slots=True)
class Overflow:
    """One overflow. unit: "AI Core", "L2 Atomic Add", … status: of the unit's register, not 0."""

    path: Path
    unit: str
    stream: int
    task: int
    status: int

    def __str__(self) -> str:
        return f"{self.unit}, stream {self.stream}, task {self.task}, status {self.status:#x}"


def read_overflows(file: KernelFile) -> list[Overflow]:
    """Return the overflows that a file reports. Raises FormatError where it is in neither layout."""
    if file.path.name.endswith(".json"):
        return list(_of_json(file.path))
    raw = read_raw(file.path)
    found: list[Overflow] = []
    for tensor in raw.tensors:
        if tensor.io == "output":
            found += _of_bytes(file.path, payload(file.path, tensor, _LARGEST))
    return found


def _of_bytes(path: Path, data: bytes) -> Iterator[Overflow]:
    if len(data) >= 24 and struct.unpack_from("<I", data)[0] == _MAGIC:
        version, valid, unit, _, _ = struct.unpack_from("<5I", data, 4)
        if unit >= len(_UNITS):
            raise FormatError(f"{path} tells of an overflow in unit {unit}, which is not known")
        name = _UNITS[unit]
        fields = _FIELDS[name]
        states = 4 if version == 1 and fields is _CORE else 1
        if len(data) < 24 + 8 * (len(fields) + states):
            raise FormatError(f"{path} ends within the report of an overflow")
        numbers = struct.unpack_from(f"<{len(fields) + states}Q", data, 24)
        status = 0
        for word in numbers[len(fields) :]:
            status |= word
        if valid == 1 and status:
            yield Overflow(path, name, numbers[1], numbers[2], status)
    elif len(data) == _OLD_SIZE:
        for name, at, state in _OLD:
            (status,) = struct.unpack_from("<Q", data, state)
            if status:
                yield Overflow(path, name, *struct.unpack_from("<2Q", data, at + 8), status)
    else:
        raise FormatError(f"{path} has {len(data)} bytes of an overflow report, in no layout that is known")


def _of_json(path: Path) -> Iterator[Overflow]:
    try:
        content = orjson.loads(read_bounded(path, _LARGEST))
    except (orjson.JSONDecodeError, OSError) as error:
        raise FormatError(f"{path} cannot be read as the report of an overflow: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} is no report of an overflow: it holds no object")
    accelerator: Any = content.get("acc_list")
    if isinstance(accelerator, dict):
        unit = str(accelerator.get("acc_type"))
        units: Mapping[str, Any] = {_SHORT.get(unit, unit): accelerator.get("data")}
    else:
        units = content
    for unit, about in units.items():
        if isinstance(about, dict):
            status = _number(path, about.get("status", 0))
            if status:
                yield Overflow(
                    path, unit, _number(path, about.get("stream_id", 0)), _number(path, about.get("task_id", 0)), status
                )


def _number(path: Path, value: Any) -> int:
    if isinstance(value, list):  # the status of several registers
        return max((_number(path, item) for item in value if not isinstance(item, list)), default=0)
    try:
        return int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"{path} has {str(value)[:50]!r} where a number should be") from None
