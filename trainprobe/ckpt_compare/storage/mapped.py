"""Arrays that lie in a file as plain bytes, mapped into memory when they are asked for."""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.pieces import Point
from trainprobe.engine.compare.number_formats import NumberFormat
from trainprobe.engine.storage import safe_files
from trainprobe.errors import FormatError, UnsafeFile

LARGEST_TEXT = 1 << 28  # bytes
LARGEST = 1 << 60  # elements of an array, dimensions of 0 left out: beyond it NumPy's own arithmetic overflows
DIMENSIONS = 64  # NumPy has no more
_BEHIND = 1 << 20  # bytes: what is read in order lets go of itself more often than that
OPEN_FILES = 256  # mapped at the same time; the least recently used one is let go


def mapping(path: str) -> mmap.mmap:
    """Map a whole file for reading; raise FormatError for what is no regular file, or empty, or may not be read."""
    known = getattr(_once, "files", None)
    if known is not None and (held := known.get(path)) is not None:
        return held
    try:
        found = os.stat(path)  # noqa: PTH116  (called for every tensor: a Path costs more than the call)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, a device may have no end
            raise FormatError(f"{path} is no regular file: name a checkpoint's file or folder")
        held = _mapping(path, found.st_ino, found.st_size, found.st_mtime_ns)
    except FormatError:
        raise
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}. Check that the file is whole and that you may read it") from error
    if known is not None:
        if len(known) >= OPEN_FILES:
            known.clear()
        known[path] = held
    return held


_once = threading.local()


@contextmanager
def each_file_once() -> Generator[None]:
    """In here this thread asks once whether a file is still the same: a million arrays may lie in one."""
    _once.files = {}
    try:
        yield
    finally:
        del _once.files


@lru_cache(maxsize=OPEN_FILES)
def _mapping(path: str, *_version: int) -> mmap.mmap:
    """Map this version of a file: one that was written anew must not be read through the old mapping."""
    with safe_files.open_to_read(Path(path)) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def extent(numbers: Iterable[Any]) -> Point:
    """Return a shape or strides; raise FormatError for one that no array has."""
    found, elements = tuple(numbers), 1
    if len(found) > DIMENSIONS:
        raise FormatError(f"a tensor has {len(found)} dimensions, and at most {DIMENSIONS} can be read: save it flattened")
    for n in found:
        if type(n) is not int or n < 0:
            elements = LARGEST + 1
            break
        elements *= n or 1
    if elements > LARGEST:
        raise FormatError(f"{str(found)[:80]} is the shape of no array")
    return same_tuple(found)


@lru_cache(maxsize=1024)
def same_tuple(shape: Point) -> Point:
    """Return the same tuple for equal shapes: a million tensors have a few of them."""
    return shape


def forget_pages(path: str, start: int, stop: int) -> None:
    """Tell the kernel that these bytes are not needed again, so that mapped files do not add up to resident memory."""
    held = mapping(path)
    first, stop = start - start % mmap.PAGESIZE, min(stop, len(held))
    if hasattr(held, "madvise") and stop > first:
        held.madvise(mmap.MADV_DONTNEED, first, stop - first)


def forget_behind(data: Any, at: int) -> None:
    """Let go of the pages of a mapped file before a byte up to which it was read in order; bytes in memory stay."""
    forget_between(data, at - _BEHIND, at)


def forget_between(data: Any, start: int, stop: int) -> None:
    """Let go of the pages of a mapped file from the page of one byte up to that of another; bytes in memory stay."""
    if isinstance(data, mmap.mmap) and hasattr(data, "madvise"):
        first, stop = max(0, start) & -mmap.PAGESIZE, stop & -mmap.PAGESIZE
        if stop > first:
            data.madvise(mmap.MADV_DONTNEED, first, stop - first)


def read_text(path: Path) -> str:
    """Return a small text file (a pointer, a configuration, an index); raise FormatError for what is none."""
    try:
        return safe_files.read_text(path, LARGEST_TEXT)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> Any:
    """Return what a small JSON file holds; raise FormatError for what is none."""
    try:
        return json.loads(read_text(path))
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no valid JSON: {error}") from error


def inside(folder: Path, name: Any) -> Path:
    """Return the file of this name in a folder; raise UnsafeFile for a name that leads out of it (links are followed)."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UnsafeFile(f"{folder} names the file {str(name)[:200]!r}, which leads out of the folder: it is not opened")
    return folder / name


class Mapped:
    """A source that lies in a mapped file, whose pages can be let go."""

    __slots__ = ()

    def lies(self) -> tuple[str, int, int]:
        """Return the file, the first byte in it and the byte behind the last one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MappedArray(Mapped):
    """An array in a file, in row-major order unless `strides` (in elements) say otherwise."""

    path: str
    start: int
    shape: Point
    format: NumberFormat
    strides: Point | None = None

    @property
    def span(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.shape:
            return 0
        if self.strides is None:
            return math.prod(self.shape) * self.format.itemsize
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * self.format.itemsize

    def lies(self) -> tuple[str, int, int]:
        """Return the file, the first byte in it and the byte behind the last one."""
        return self.path, self.start, self.start + self.span

    def load(self) -> npt.NDArray[Any]:
        """Return the bits as an array that points into the mapped file."""
        span = self.span
        if not span:
            return np.empty(self.shape, self.format.storage)
        held = mapping(self.path)
        if self.start + span > len(held):
            raise FormatError(
                f"{self.path} ends at byte {len(held)}, but an array of shape {list(self.shape)} {self.format.name} reaches to "
                f"byte {self.start + span}: the file is truncated, copy it again"
            )
        flat = np.frombuffer(held, np.uint8, span, self.start).view(self.format.storage)
        if self.strides is None:
            return flat.reshape(self.shape)
        steps = tuple(s * self.format.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """A small array that was decoded while a file was opened and is kept in memory."""

    bits: npt.NDArray[Any]
    format: NumberFormat

    @property
    def shape(self) -> Point:
        """Shape of the array."""
        return self.bits.shape

    def load(self) -> npt.NDArray[Any]:
        """Return the bits."""
        return self.bits
