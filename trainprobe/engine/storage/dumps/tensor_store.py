"""Stored tensor values, read one at a time: a safetensors file is mapped into memory, `.npy` and large `.pt` files too.

A `.pt` file is loaded without code.

`data_name` comes from a file that anybody may have written: a name that is not a plain file name is refused.
"""

from __future__ import annotations

import math
import mmap
import pickle
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.engine.storage.dumps.tensor_files import (
    DATA_FOLDER,
    PADDING,
    SAFETENSORS_DTYPES,
    SAFETENSORS_FILE,
    SavedTensor,
    load_torch,
    plain_dtype,
)
from trainprobe.engine.storage.kernel_dumps.file_names import holds_kernels
from trainprobe.engine.storage.npy_files import map_npy
from trainprobe.engine.storage.safe_files import open_to_read, regular
from trainprobe.engine.storage.widening import widen
from trainprobe.errors import FormatError, UnsafeFile

_LARGEST_HEADER = 100_000_000
_LARGE_PT = 1 << 20  # bytes: smaller files are copied faster than mapped
_NAMES = {short: f"torch.{name}" for name, short in SAFETENSORS_DTYPES.items()}
_BITS = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8}


class TensorStore:
    """The stored values of one rank and step. folder: the rank's folder."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        path = self._folder / SAFETENSORS_FILE
        self._whole = SafetensorsReader(path) if path.is_file() else None

    def names(self) -> Iterator[str]:
        """Yield the name of each stored value, as `Value.tensor` has it."""
        if self._whole is not None:
            yield from self._whole.entries
        data = self._folder / DATA_FOLDER
        if data.is_dir():
            yield from sorted(path.name for path in data.iterdir() if path.suffix in {".pt", ".npy"})

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a value as a NumPy array; bfloat16 and float8 are widened to float32, which is exact.

        Raises UnsafeFile for a name that leads out of the folder, FormatError for what is missing or cannot be read.
        """
        if self._whole is not None and name in self._whole.entries:
            return self._whole.array(name)
        path = self._path(name)
        try:
            return map_npy(path) if path.suffix == ".npy" else _load_pt(path)
        except FormatError:
            raise
        except (OSError, ValueError, EOFError, RuntimeError) as error:
            raise FormatError(f"{path} cannot be read as a tensor: {error}") from None

    def _path(self, name: str) -> Path:
        if "/" in name or "\\" in name or "\0" in name or name.startswith("."):
            raise UnsafeFile(f"the tensor name {name!r} in {self._folder} leads out of its folder, so it is not opened")
        path = self._folder / DATA_FOLDER / name
        if not path.is_file() or path.suffix not in {".npy", ".pt"}:
            raise FormatError(f"{self._folder} has no tensor {name!r}, neither in {SAFETENSORS_FILE} nor under {DATA_FOLDER}")
        if path.resolve().parent != (self._folder / DATA_FOLDER).resolve():
            raise UnsafeFile(f"{path} is a link that leads out of its folder, so it is not opened")
        return path


class Tensors(Protocol):
    """The stored values of one rank and step, whatever wrote them."""

    def names(self) -> Iterator[str]:
        """Yield the name of each stored value, as `Value.tensor` has it."""
        ...

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a value as a NumPy array. Raises FormatError for what is missing or cannot be read."""
        ...


def open_tensors(folder: Path) -> Tensors:
    """Return the stored values of one rank and step: of a dump of this package, of mindstudio-probe, or of kernels."""
    from trainprobe.engine.storage.dumps.layout import holds_own_dump
    from trainprobe.engine.storage.kernel_dumps.store import KernelStore

    kernels = not holds_own_dump(folder) and (folder.is_file() or holds_kernels(folder))
    return KernelStore(folder) if kernels else TensorStore(folder)


class SafetensorsReader:
    """A safetensors file, read lazily. Raises FormatError where the file contradicts itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        with open_to_read(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise FormatError(f"{path} is no safetensors file: its header would have {length} bytes, the file has {size}")
            try:
                header: dict[str, Any] = orjson.loads(file.read(length))
                self._as: dict[str, str] = dict(header.pop("__metadata__", None) or {})
                self._start = 8 + length
                self.entries = {key: entry for key, entry in header.items() if not key.startswith(PADDING)}
                for key, entry in self.entries.items():
                    self._check(key, entry, size - self._start)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise FormatError(f"{path} has a header that cannot be read: {error}") from None

    def _check(self, key: str, entry: dict[str, Any], size: int) -> None:
        begin, end = entry["data_offsets"]
        bits = 8 * np.dtype(_numpy_dtype(entry["dtype"])).itemsize
        if (
            not (0 <= begin <= end <= size)
            or math.prod(entry["shape"]) * bits != 8 * (end - begin)
            or min([0, *entry["shape"]]) < 0
            or len(entry["shape"]) > 64  # NumPy has no more dimensions
        ):
            raise ValueError(f"{key!r} is said to lie at {begin} to {end} of {size} bytes with shape {entry['shape']}")

    @cached_property
    def _bytes(self) -> mmap.mmap:
        """The whole file, mapped once: a mapping for each value would take longer than reading most of them."""
        with open_to_read(self._path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def dtype(self, key: str) -> str:
        """Return the dtype a value was stored as, such as `torch.bfloat16`."""
        stored = self._as.get(f"dtype {key}")
        return orjson.loads(stored)[0] if stored is not None else _NAMES[self.entries[key]["dtype"]]

    def array(self, key: str) -> npt.NDArray[Any]:
        """Return a value, mapped from the file where its dtype needs no widening. What has no NumPy dtype stays bytes."""
        entry = self.entries[key]
        begin, end = entry["data_offsets"]
        dtype = np.dtype(_numpy_dtype(entry["dtype"]))
        shape = tuple(entry["shape"])
        if begin == end:
            return widen(np.zeros(shape, dtype), entry["dtype"])
        mapped = np.frombuffer(self._bytes, dtype, math.prod(shape), self._start + begin).reshape(shape)
        if f"dtype {key}" in self._as:
            return _as_described(mapped, orjson.loads(self._as[f"dtype {key}"]))
        return widen(mapped, entry["dtype"])


def array_of(saved: SavedTensor) -> npt.NDArray[Any]:
    """Return a value that is still in memory as a `TensorStore` returns it from a file."""
    short = SAFETENSORS_DTYPES.get(plain_dtype(saved.dtype), "")
    raw = np.frombuffer(saved.data, _BITS.get(short) or plain_dtype(saved.dtype)) if saved.nbytes else np.zeros(0)
    return widen(raw.reshape(saved.shape), short)


def _as_described(raw: npt.NDArray[Any], described: list[Any]) -> npt.NDArray[Any]:
    name = str(described[0]).rpartition(".")[2]
    return raw.view(name).reshape(described[1]) if name == "complex128" else raw


def _numpy_dtype(short: str) -> Any:
    if short in _BITS:
        return _BITS[short]
    if short not in _NAMES:
        raise ValueError(f"dtype {short!r} is not known")
    return _NAMES[short].removeprefix("torch.")


def _load_pt(path: Path) -> npt.NDArray[Any]:
    torch = load_torch("reading tensors stored as .pt")
    try:
        tensor = torch.load(regular(path), map_location="cpu", weights_only=True, mmap=_is_worth_mapping(path))
    except pickle.UnpicklingError:
        raise UnsafeFile(f"{path} holds more than a tensor, and loading it could run code: it is not loaded") from None
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(f"{path} holds a {type(tensor).__name__}, not a tensor")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16" or "float8" in str(tensor.dtype):
        tensor = tensor.float()
    return np.require(tensor.numpy(), requirements="A")


def _is_worth_mapping(path: Path) -> bool:
    """Return whether a `.pt` file is large, and a zip file that is not compressed, as torch maps bytes as they are."""
    if path.stat().st_size < _LARGE_PT:
        return False
    try:
        with zipfile.ZipFile(regular(path)) as file:
            return all(member.compress_type == zipfile.ZIP_STORED for member in file.infolist())
    except (zipfile.BadZipFile, NotImplementedError):
        return False  # an older format, or none
