"""Tensor values of one rank and step on their way to disk: one safetensors file, or one `.pt` or `.npy` file a tensor.

A small step is written at once. The file of a large one is streamed, past the page cache where that can be done: room for the
header is reserved, values are appended as they come, and the header is written last, with blanks behind it (the format allows
them), so memory stays bounded.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import orjson

from trainprobe.engine.storage.dumps.direct_file import BLOCK, DirectFile
from trainprobe.engine.storage.dumps.layout import partial_name
from trainprobe.engine.storage.safe_files import open_private
from trainprobe.errors import MissingExtra

SAFETENSORS_FILE = "tensors.safetensors"
DATA_FOLDER = "dump_tensor_data"
PADDING = "_padding."  # keys of the bytes that keep the values behind them on a multiple of eight
_ALIGN = 8
_RESERVE = (1 << 18) - 8
_COPY = 1 << 22
_HELD = 16 << 20
_PLAIN_NAME = re.compile(r"[\w.+\-]{1,200}", re.ASCII)

# dtype text → name in a safetensors header
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip

SAFETENSORS_NAMES = {f"torch.{name}": short for name, short in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor value on the host.

    key: unique in its step; `Value.tensor` names it. dtype: as in `Value.dtype`. data: its bytes, row-major and contiguous
    (bytes, or any buffer that no longer changes).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return memoryview(self.data).nbytes

    @classmethod
    def of(cls, key: str, data: Any, dtype: str | None = None) -> SavedTensor:
        """Wrap a NumPy array, a torch tensor on the host, or an object with `dtype` (text), `shape` and `data` (bytes).

        dtype: how it is called where NumPy has no such type (bfloat16 as uint16 bits).
        """
        if isinstance(data, SavedTensor):
            return data if data.key == key else cls(key, data.dtype, data.shape, data.data)
        if isinstance(data, np.ndarray):
            whole = np.ascontiguousarray(data)
            return cls(key, dtype or f"torch.{whole.dtype.name}", tuple(data.shape), whole.reshape(-1).view(np.uint8))
        if hasattr(data, "untyped_storage"):
            torch = load_torch("storing a tensor")
            flat = data.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return cls(key, dtype or str(data.dtype), tuple(data.shape), flat.view(torch.uint8).numpy())
        return cls(key, dtype or str(data.dtype), tuple(data.shape), data.data)

    @classmethod
    def all_of(cls, chunk: Any) -> Iterator[SavedTensor]:
        """Yield the values of a chunk that the compiled tape gathered."""
        data = chunk.data
        for key, dtype, shape, offset, size in chunk.items():
            yield cls(key, dtype, tuple(shape), data[offset : offset + size])


@lru_cache(256)
def plain_dtype(dtype: str) -> str:
    """Return `float32` for `torch.float32`, `mindspore.float32` and `Float32`."""
    name = dtype.rpartition(".")[2]
    return name.lower()


class TensorFiles(Protocol):
    """Where the values of one step go. Ends with `finish` or `discard`."""

    def add(self, saved: SavedTensor) -> int:
        """Store one value; return how many bytes it took."""
        ...

    def finish(self) -> int:
        """Make what was stored readable; nothing is stored after it. Return the `reserve` that suits another step like it."""
        ...

    def discard(self) -> None:
        """Close what is open; the folder is going to be removed."""
        ...


class SafetensorsFile:
    """Streams values into one safetensors file (see the module text). A key is stored once.

    What fits into `held` bytes waits in memory and is written at once, behind its header. In a streamed file the values, and
    from then on each piece of them, begin at a multiple of `BLOCK`. reserve: bytes for the header at least.
    """

    def __init__(self, path: Path, reserve: int = _RESERVE, held: int = _HELD) -> None:
        self._path = path
        self._entries: list[bytes] = []  # as text: thousands of small containers would keep the garbage collector busy
        self._keys: set[str] = set()
        self._metadata = {"format": "pt"}
        self._start = _whole_blocks(8 + reserve)
        self._end = 0
        self._held = held
        self._waiting: list[Any] = []
        self._file: DirectFile | None = None
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, saved: SavedTensor) -> int:
        """Append one value; return how many bytes the file grew."""
        if saved.key in self._keys:
            return 0
        before = self._end
        self._align()
        name = SAFETENSORS_DTYPES.get(plain_dtype(saved.dtype))
        if name is None:  # a dtype that the format has no name for is stored as its bytes
            self._metadata[f"dtype {saved.key}"] = orjson.dumps([saved.dtype, list(saved.shape)]).decode()
            self._append(saved.key, "U8", [saved.nbytes], saved.data)
        else:
            self._append(saved.key, name, list(saved.shape), saved.data)
        return self._end - before

    def add_chunk(self, chunk: Any) -> int:
        """Append all values of a chunk (see `SavedTensor.all_of`); return how many bytes the file grew."""
        keys = chunk.keys()
        if not self._keys.isdisjoint(keys) or len(set(keys)) < len(keys):
            return sum(map(self.add, SavedTensor.all_of(chunk)))
        before = self._end
        self._align(_ALIGN if self._file is None else BLOCK)
        self._keys.update(keys)
        items = chunk.items()
        for (key, dtype, shape, offset, size), following in zip(
            items, [*(item[3] for item in items[1:]), chunk.nbytes], strict=True
        ):
            begin, end = self._end + offset, self._end + offset + size
            self._entries.append(_entry(key, SAFETENSORS_NAMES[dtype], shape, begin, end))
            if offset + size < following:
                self._entries.append(_entry(f"{PADDING}{end}", "U8", [following - offset - size], end, self._end + following))
        self._write(chunk.data)
        self._end += chunk.nbytes
        return self._end - before

    def _align(self, to: int = _ALIGN) -> None:
        if self._end % to:
            more = to - self._end % to
            self._append(f"{PADDING}{self._end}", "U8", [more], bytes(more))

    def _append(self, key: str, dtype: str, shape: list[int], data: Any) -> None:
        size = memoryview(data).nbytes
        if size:
            self._write(data)
        self._keys.add(key)
        self._entries.append(_entry(key, dtype, shape, self._end, self._end + size))
        self._end += size

    def _write(self, data: Any) -> None:
        if self._file is not None:
            self._file.append(data)
            return
        self._waiting.append(data)
        if self._end + memoryview(data).nbytes > self._held:
            self._file = DirectFile(partial_name(self._path), self._start)
            for waiting in self._waiting:
                self._file.append(waiting)
            self._waiting.clear()

    def finish(self) -> int:
        """Write the header in front of the values; return its bytes, and some more, for numbers in it may get longer."""
        if self._closed:
            return 0
        self._closed = True
        header = b"{" + b",".join([b'"__metadata__":' + orjson.dumps(self._metadata), *self._entries]) + b"}"
        partial = partial_name(self._path)
        if self._file is None:
            with open_private(partial, "wb", buffering=1 << 16) as file:
                file.write(_framed(header, 8 + -(-len(header) // _ALIGN) * _ALIGN))
                file.writelines(self._waiting)
            self._waiting.clear()
        else:
            self._file.finish()
            start = max(self._start, _whole_blocks(8 + len(header)))
            with partial.open("r+b") as file:
                if start > self._start:
                    self._shift(file, start)
                file.seek(0)
                file.write(_framed(header, start))
        partial.rename(self._path)
        return len(header) * 9 // 8

    def discard(self) -> None:
        """Let go of the file without making it readable."""
        self._closed = True
        self._waiting.clear()
        if self._file is not None:
            self._file.discard()

    def _shift(self, file: BinaryIO, start: int) -> None:
        """Move all values towards the end, last part first, to make room for a header that outgrew what was reserved."""
        left = self._end
        while left > 0:
            size = min(_COPY, left)
            left -= size
            file.seek(self._start + left)
            part = file.read(size)
            file.seek(start + left)
            file.write(part)


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _framed(header: bytes, start: int) -> bytes:
    """Return what lies before byte `start` of a file, where its values begin."""
    return (start - 8).to_bytes(8, "little") + header.ljust(start - 8)


def _entry(key: str, dtype: str, shape: list[int] | tuple[int, ...], begin: int, end: int) -> bytes:
    return b'%b:{"dtype":"%b","shape":%b,"data_offsets":[%d,%d]}' % (
        *(orjson.dumps(key), dtype.encode(), str(list(shape)).encode()),
        *(begin, end),
    )


class SeparateFiles:
    """Stores each value as a file of its own under `dump_tensor_data/`, for tools that expect that."""

    def __init__(self, folder: Path, suffix: str, save: Callable[[Path, SavedTensor], None]) -> None:
        self._folder = folder / DATA_FOLDER
        self._suffix = suffix
        self._save = save
        self._written: set[str] = set()  # file names
        self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, saved: SavedTensor) -> int:
        """Write one file; return its size in bytes."""
        path = self._folder / file_name(saved.key, self._suffix)
        self._save(partial_name(path), saved)
        partial_name(path).rename(path)
        self._written.add(path.name)
        return path.stat().st_size

    def finish(self) -> int:
        """Do nothing: each file is whole."""
        return 0

    def place(self, links: Mapping[str, str]) -> None:
        """Give each value a file for each place it is at: file name → key. They are links to one file where that works.

        Values that are at no place, as their calls were not selected once the step had ended, are removed.
        """
        for name, key in links.items():
            source, target = self._folder / file_name(key, self._suffix), self._folder / name
            if source == target:
                continue
            try:
                os.link(source, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, target)
        for name in self._written - links.keys():
            (self._folder / name).unlink()

    def discard(self) -> None:
        """Do nothing: no file is open."""


def open_tensor_files(folder: Path, tensor_format: str, reserve: int = 0) -> TensorFiles:
    """Return where the values of a step go.

    tensor_format: safetensors, pt or npy. reserve: what `finish` of a step like it returned.
    """
    if tensor_format == "safetensors":
        return SafetensorsFile(folder / SAFETENSORS_FILE, max(reserve, _RESERVE))
    return SeparateFiles(folder, tensor_format, save_pt if tensor_format == "pt" else save_npy)


def file_name(key: str, suffix: str) -> str:
    """Return the file name of a key: the key itself where every file system takes it, otherwise made safe and distinct."""
    if _PLAIN_NAME.fullmatch(key) and not key.startswith("."):
        return f"{key}.{suffix}"
    safe = re.sub(r"[^\w.+\-]", "_", key, flags=re.ASCII)[:180].lstrip(".") or "_"
    return f"{safe}.{zlib.crc32(key.encode()):08x}.{suffix}"


def save_npy(path: Path, saved: SavedTensor) -> None:
    """Write `.npy`; bfloat16 is widened to float32 exactly, and a dtype that NumPy lacks is stored as its bytes."""
    raw = np.frombuffer(saved.data, np.uint8)
    name = plain_dtype(saved.dtype)
    if name == "bfloat16":
        array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(saved.shape)
    elif hasattr(np, name) or name == "bool":
        array = raw.view(name).reshape(saved.shape)
    else:
        array = raw
    with open_private(path, "wb") as file:
        np.save(file, array, allow_pickle=False)


def save_pt(path: Path, saved: SavedTensor) -> None:
    """Write `.pt`: a bare tensor, as `torch.save` does. Raises MissingExtra without torch."""
    torch = load_torch("writing tensors as .pt")
    tensor = torch.empty(saved.shape, dtype=getattr(torch, plain_dtype(saved.dtype)))
    if saved.nbytes:
        tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(saved.data, np.uint8)
    torch.save(tensor, path)


def load_torch(purpose: str) -> Any:
    """Return torch, which only `.pt` files need. Raises MissingExtra when it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise MissingExtra("torch", "torch", purpose) from None
