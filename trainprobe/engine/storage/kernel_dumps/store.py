"""The stored values of a kernel dump, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.storage.kernel_dumps.acl_message import DTYPES, RawDump, array_of, read_raw
from trainprobe.engine.storage.kernel_dumps.file_names import KernelFile, kernel_files, parse_name
from trainprobe.engine.storage.kernel_dumps.layout import graphs_of
from trainprobe.engine.storage.npy_files import map_npy
from trainprobe.engine.storage.safe_files import regular
from trainprobe.engine.storage.widening import widen
from trainprobe.errors import FormatError, MissingExtra

_WIDENED = {"bfloat16": "BF16", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
_STORED = dict(DTYPES.values())
_CONVERTED = {"bfloat16": "float32", "int4": "int8", "uint1": "uint8"}  # as an .npy file holds them


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a dump file. key: its name among those of the dump. shape: None where only reading it tells."""

    key: str
    file: KernelFile
    io: str
    slot: int
    dtype: str
    format: str
    shape: tuple[int, ...] | None
    original_shape: tuple[int, ...] = ()
    original_op: str = ""
    op_name: str = ""


class KernelStore:
    """The tensors of all dump files of a step and rank. folder: that of the iteration, or one dump file."""

    def __init__(self, folder: Path | str) -> None:
        self._files = dict(list_files(Path(folder)))
        self.unread: list[str] = []
        self._tensors: dict[str, StoredTensor] | None = None

    @property
    def files(self) -> Mapping[str, KernelFile]:
        """Return the dump files by their name in the dump; the reports of overflows are among them."""
        return self._files

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors by name. What cannot be read is listed in `unread`. Raises MissingExtra without protobuf."""
        if self._tensors is None:
            self._tensors = {}
            for name, file in self._files.items():
                if file.kind != "overflow":
                    try:
                        self._tensors |= {tensor.key: tensor for tensor in _tensors_of(name, file)}
                    except MissingExtra:
                        raise
                    except (FormatError, OSError) as error:
                        self.unread.append(str(error))
        return self._tensors

    def names(self) -> Iterator[str]:
        """Yield the name of each tensor, as `Value.tensor` has it."""
        yield from self.tensors()

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor; bfloat16 and float8 are widened to float32, which is exact. Raises FormatError where it cannot."""
        tensor = self.tensors().get(name)
        if tensor is None:
            raise FormatError(f"the dump has no tensor {name!r}")
        stored = self.stored(tensor)
        return widen(stored, _WIDENED.get(tensor.dtype, "")) if stored.dtype.kind == "u" else stored

    def stored(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """Return the elements of a tensor as they are stored. Raises FormatError where they cannot be read."""
        file = tensor.file
        try:
            if file.kind == "npy":
                return _load_npy(file.path)
            if file.kind == "bin":
                return _load_bin(file.path, tensor.dtype)
            stored = next(each for each in _read_raw(file.path).tensors if (each.io, each.slot) == (tensor.io, tensor.slot))
            return array_of(file.path, stored)
        except (OSError, ValueError, EOFError, StopIteration, MemoryError, OverflowError) as error:
            raise error if isinstance(error, FormatError) else FormatError(f"{file.path} cannot be read: {error}") from None


def list_files(folder: Path) -> Iterator[tuple[str, KernelFile]]:
    """Yield the dump files of a folder, or of all graphs of its iteration, under names that are theirs alone."""
    if folder.is_file():
        file = parse_name(folder)
        if file is None:
            raise FormatError(f"{folder} does not have the name of a kernel's dump file: op_type.op_name.task.stream.timestamp")
        yield folder.name, file
        return
    graphs = graphs_of(folder)
    for graph in graphs:
        shared = f"{graph.parent.name}/" if len(graphs) > 1 else ""
        files = sorted(kernel_files(graph), key=lambda file: file.path.name)
        paired = {file.path.stem for file in files if file.kind == "npy"}
        for file in files:
            if not (file.kind == "bin" and file.path.stem in paired):
                yield f"{shared}{file.path.name}", file


def _tensors_of(name: str, file: KernelFile) -> Iterator[StoredTensor]:
    if file.kind in ("npy", "bin"):
        dtype = file.dtype.lower()
        array = _load_npy(file.path) if file.kind == "npy" else _load_bin(file.path, dtype)
        plain = dtype if _CONVERTED.get(dtype, dtype) == array.dtype.name or file.kind == "bin" else array.dtype.name
        yield StoredTensor(name, file, file.io, file.slot, plain, file.format, array.shape)
        return
    raw = _read_raw(file.path)
    for stored in raw.tensors:
        yield StoredTensor(
            f"{name}#{stored.io}.{stored.slot}",
            file,
            stored.io,
            stored.slot,
            stored.dtype,
            stored.format,
            stored.shape,
            stored.original_shape,
            stored.original_op,
            raw.op_name,
        )


@lru_cache(64)
def _read_raw(path: Path) -> RawDump:
    return read_raw(path)


def _load_npy(path: Path) -> npt.NDArray[Any]:
    array = map_npy(path)
    if array.dtype.kind not in "biufcV" or array.dtype.names:
        raise FormatError(f"{path} holds no plain tensor")
    return array.view(np.uint16) if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.ndim else array


def _load_bin(path: Path, dtype: str) -> npt.NDArray[Any]:
    stored = np.dtype(_STORED.get(dtype, "u1"))
    size = path.stat().st_size
    if size % stored.itemsize:
        raise FormatError(f"{path} has {size} bytes, no whole number of {dtype} elements")
    return np.memmap(regular(path), stored, "r") if size else np.zeros(0, stored)
