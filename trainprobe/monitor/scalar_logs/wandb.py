"""What a run of W&B wrote offline, `run-….wandb`: the framing is read here, the records by the client's own classes.

The file is a log as LevelDB writes it: a header of seven bytes, then blocks of 32 KiB of chunks. Each chunk has a CRC-32, a
length and a type: whole record, or its first, middle or last part. Source: `core/pkg/leveldb/record.go` of wandb/wandb.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainprobe.engine.storage.left_out import DAMAGED, leave_out, tell
from trainprobe.engine.storage.safe_files import LARGEST_TEXT, open_to_read
from trainprobe.errors import FormatError, MissingExtra
from trainprobe.monitor.scalar_logs.rows import MOST, scalars_of

WHAT = "files run-….wandb"
_HEADER = struct.Struct("<4sHB")  # ":W&B", a number of the format, its version
_CHUNK = struct.Struct("<IHB")  # CRC-32 of type and data, length, type
_BLOCK = 32 << 10  # bytes
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_OWN = "_"  # the client's own columns begin with it: _step, _timestamp, _runtime


def find(path: Path) -> list[list[Path]]:
    """Return each such file under a folder, or the one that is named."""
    if path.is_file():
        return [[path]] if path.suffix == ".wandb" else []
    return [[file] for file in sorted({file.resolve() for file in path.rglob("run-*.wandb") if file.is_file()})]


def read(files: list[Path]) -> Iterator[tuple[int, str, float]]:
    """Yield (step, name, number) of what was logged. Raises MissingExtra without the client."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise MissingExtra("wandb", "wandb", f"reading {files[0]}") from error
    step = -1
    with open_to_read(files[0]) as file:
        for data in _records(file, files[0]):
            try:
                record = Record.FromString(data)
            except DAMAGED as error:
                leave_out(f"{files[0]}: a record is left out ({error!s:.200})")
                continue
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): _value(item.value_json) for item in record.history.item}
                step = _step(record.history, row, step)
                for name, number in scalars_of(row):
                    if not name.startswith(_OWN):
                        yield step, name, number


def _step(history: Any, row: dict[str, Any], last: int) -> int:
    if history.HasField("step"):
        return history.step.num
    told = row.get("_step")
    return told if isinstance(told, int) and 0 <= told < MOST else last + 1


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _NOT_FINITE.get(value) if isinstance(value, str) else value


def _records(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the records of a file; what its writer was killed in, and behind a damage, is left out and told."""
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] != b":W&B":
        raise FormatError(f"{path} does not begin as a file of W&B does")
    at, parts = _HEADER.size, list[bytes]()
    while True:
        if _BLOCK - at % _BLOCK < _CHUNK.size:  # the rest of a block that holds no chunk
            at += len(file.read(_BLOCK - at % _BLOCK))
        chunk = file.read(_CHUNK.size)
        if len(chunk) < _CHUNK.size:
            if chunk or parts:
                tell(f"{path} ends within a record: the run was killed or goes on")
            return
        checksum, length, kind = _CHUNK.unpack(chunk)
        data = file.read(length)
        at += len(chunk) + len(data)
        if len(data) < length:
            tell(f"{path} ends within a record: the run was killed or goes on")
            return
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            leave_out(f"{path} is damaged at byte {at - length}: what is behind it is left out")
            return
        parts = [data] if kind in (_WHOLE, _FIRST) else [*parts, data]
        if sum(map(len, parts)) > LARGEST_TEXT:
            raise FormatError(f"{path} holds a record of more than {LARGEST_TEXT} bytes")
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []
