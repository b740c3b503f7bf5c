"""Arrays that lie in a file as plain bytes, mapped into memory when they are asked for."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainprobe.ckpt_compare.pieces import Point
from trainprobe.engine.diff.number_formats import NumberFormat
from trainprobe.errors import FormatError

OPEN_FILES = 256  # mapped at the same time; the least recently used one is let go


@lru_cache(maxsize=OPEN_FILES)
def mapping(path: str) -> mmap.mmap:
    """Map a whole file for reading."""
    try:
        with Path(path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read: {error}. Check that the file is whole and that you may read it") from error


def forget_pages(path: str, start: int, stop: int) -> None:
    """Tell the kernel that these bytes are not needed again, so that mapped files do not add up to resident memory."""
    held = mapping(path)
    first, stop = start - start % mmap.PAGESIZE, min(stop, len(held))
    if hasattr(held, "madvise") and stop > first:
        held.madvise(mmap.MADV_DONTNEED, first, stop - first)


@runtime_checkable
class Mapped(Protocol):
    """A source whose pages can be let go."""

    def release(self) -> None:
        """Let go of the resident pages."""
        ...


@dataclass(frozen=True, slots=True)
class MappedArray:
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

    def load(self) -> npt.NDArray[Any]:
        """Return the bits as an array that points into the mapped file."""
        if not self.span:
            return np.empty(self.shape, self.format.storage)
        held = mapping(self.path)
        if self.start + self.span > len(held):
            raise FormatError(
                f"{self.path} ends at byte {len(held)}, but an array of shape {list(self.shape)} {self.format.name} reaches to "
                f"byte {self.start + self.span}: the file is truncated, copy it again"
            )
        flat = np.frombuffer(held, np.uint8, self.span, self.start).view(self.format.storage)
        if self.strides is None:
            return flat.reshape(self.shape)
        steps = tuple(s * self.format.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)

    def release(self) -> None:
        """Let go of the resident pages of this array."""
        if self.span:
            forget_pages(self.path, self.start, self.start + self.span)


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
