"""The vocabulary of checkpoint comparison: a checkpoint is logical tensors, and a logical tensor is made of pieces.

A piece is a rectangle of the whole tensor whose numbers lie in some file. Two checkpoints are compared by intersecting their
rectangles, whatever layout they were written in: nothing is ever put together. A piece does not hold its numbers; `Source.load`
maps them from the file when they are wanted and slicing the result costs nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compare.number_formats import NumberFormat
from trainprobe.engine.geometry.rectangles import Point, Rectangle, flat_rectangles
from trainprobe.errors import FormatError

Array = npt.NDArray[Any]
What = Literal["weights", "optimizer", "rng", "scheduler", "iteration", "args"]
KINDS: tuple[What, ...] = ("weights", "optimizer", "rng", "scheduler", "iteration", "args")


class Source(Protocol):
    """Numbers that lie in a file and are mapped when asked for."""

    @property
    def shape(self) -> Point:
        """Shape of what `load` returns."""
        ...

    @property
    def format(self) -> NumberFormat:
        """What the bits mean."""
        ...

    def load(self) -> Array:
        """Return the bits, dtype `format.storage`, of `shape`; raise FormatError when the file does not hold them."""
        ...


class FileSource(Source, Protocol):
    """Numbers of which the file is known."""

    @property
    def path(self) -> str:
        """The file."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of a logical tensor, and where its numbers lie.

    file: where, for messages. replica: which copy this is ("tp 1"), empty when it is the only one. stored: the name in the
    file, where `file` does not say it already (a million pieces share their names with the tensors).
    """

    offset: Point
    source: Source
    file: str
    replica: str = ""
    stored: str = ""

    @property
    def where(self) -> str:
        """File and name in the file, for messages."""
        return f"{self.file}: {self.stored}" if self.stored else self.file

    @property
    def shape(self) -> Point:
        """Extent on each axis."""
        return self.source.shape

    @property
    def rectangle(self) -> Rectangle:
        """Place in the logical tensor."""
        return Rectangle(self.offset, self.source.shape)


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor of the model as a whole, free of any parallel layout.

    name: the one name it has in every format; native: the name in the checkpoint. held: its pieces, or the source alone
    where that is the whole tensor and lies in its file under the native name (a piece weighs as much as all the rest). slot:
    empty for a weight, else which value of the optimizer belongs to it (`exp_avg`, `master`, …). vocabulary: the first axis
    may end in padding rows.
    """

    name: str
    shape: Point
    held: tuple[Piece, ...] | FileSource
    slot: str = ""
    native: str = ""
    vocabulary: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces in the order in which they were found; none where no file holds any of the tensor."""
        if isinstance(self.held, tuple):
            return self.held
        return (Piece(origin(len(self.shape)), self.held, file_name(self.held.path), "", self.native or self.name),)

    @property
    def stored(self) -> bool:
        """Whether some file holds some of it."""
        return self.held != ()

    @property
    def key(self) -> str:
        """Name and slot, the key in reports: `layers.0.mlp.fc2.weight` or `layers.0.mlp.fc2.weight#exp_avg`."""
        return f"{self.name}#{self.slot}" if self.slot else self.name

    @property
    def what(self) -> What:
        """Whether this belongs to the weights or to the optimizer."""
        return "optimizer" if self.slot else "weights"

    @property
    def format(self) -> NumberFormat:
        """Number format of the stored elements (of the first piece)."""
        return self.held[0].source.format if isinstance(self.held, tuple) else self.held.format

    @property
    def count(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def renamed(self, name: str) -> LogicalTensor:
        """Return the same tensor under another name; its old one stays on as the native name."""
        return LogicalTensor(sys.intern(name), self.shape, self.held, self.slot, self.native or self.name, self.vocabulary)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a checkpoint that could not be read or does not fit, and where."""

    where: str
    message: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint as logical tensors and plain values.

    family: whose names the tensors carry ("megatron", "huggingface", … or "" when unknown). layout: (axis → size) it was
    written in. config: what the names need to know (heads, groups, …). state: section → (path → plain value) for all that is
    not a tensor. warnings: what a user must know about the files before anything else.
    """

    path: str
    format: str
    tensors: Mapping[str, LogicalTensor]
    family: str = ""
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a source, picked by slices."""

    source: Source
    cut: tuple[slice, ...]

    @property
    def shape(self) -> Point:
        """Extent of the slices."""
        return tuple(s.stop - s.start for s in self.cut)

    @property
    def format(self) -> NumberFormat:
        """Number format of the whole."""
        return self.source.format

    def load(self) -> Array:
        """Map the whole and slice it."""
        return part_of(self.source, self.cut)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """A source seen in another shape with the same elements in row-major order."""

    source: Source
    shape: Point

    @property
    def format(self) -> NumberFormat:
        """Number format of the whole."""
        return self.source.format

    def load(self) -> Array:
        """Map the whole and reshape it."""
        return self.source.load().reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Turned:
    """A source with its axes in another order, as numpy.transpose."""

    source: Source
    axes: Point

    @property
    def shape(self) -> Point:
        """Shape after turning."""
        return tuple(self.source.shape[a] for a in self.axes)

    @property
    def format(self) -> NumberFormat:
        """Number format of the whole."""
        return self.source.format

    def load(self) -> Array:
        """Map the whole and turn it."""
        return np.transpose(self.source.load(), self.axes)


def window(source: Source, cut: tuple[slice, ...]) -> Source:
    """Return a part of a source; windows of windows become one, and a window on everything is the source itself."""
    if all(s.start == 0 and s.stop == n for s, n in zip(cut, source.shape, strict=True)):
        return source
    if isinstance(source, Window):
        cut = tuple(slice(o.start + i.start, o.start + i.stop) for o, i in zip(source.cut, cut, strict=True))
        return Window(source.source, cut)
    return Window(source, cut)


def bottom(source: Source) -> Source:
    """Return the array in a file that windows and other views look at."""
    while isinstance(source, (Window, Reshaped, Turned)):
        source = source.source
    return source


def part_of(source: Source, cut: tuple[slice, ...]) -> Array:
    """Return a part of a source; one that makes its numbers (`part`) makes no more of them than are wanted."""
    if isinstance(source, Window):
        inner = tuple(slice(o.start + i.start, o.start + i.stop) for o, i in zip(source.cut, cut, strict=True))
        return part_of(source.source, inner)
    make = getattr(bottom(source), "part", None)
    if make is not None and isinstance(source, Turned):
        return np.transpose(part_of(source.source, tuple(cut[source.axes.index(i)] for i in range(len(cut)))), source.axes)
    return make(cut) if make is not None and not isinstance(source, Reshaped) else source.load()[cut]


@lru_cache(maxsize=64)
def origin(axes: int) -> Point:
    """Return the first index of a tensor: the same tuple for all tensors with so many axes."""
    return (0,) * axes


def whole(name: str, source: Source, file: str, *, stored: str = "", slot: str = "") -> LogicalTensor:
    """Return a logical tensor that lies in one place; `stored`: its name in the file, where `file` does not say it."""
    name = sys.intern(str(name))
    if stored == name and file_name(getattr(source, "path", "")) == file:
        return LogicalTensor(name, source.shape, cast("FileSource", source), slot)
    return LogicalTensor(name, source.shape, (Piece(origin(len(source.shape)), source, file, "", stored),), slot)


@lru_cache(maxsize=64)
def file_name(path: str) -> str:
    """Return the last part of a path."""
    return Path(path).name


def flat_pieces(shape: Point, start: int, source: Source, where: str, replica: str = "") -> Iterator[Piece]:
    """Yield the pieces of a tensor of `shape` whose elements from `start` on are the elements of the 1-D `source`."""
    for at, box in flat_rectangles(shape, start, start + source.shape[0]):
        part = window(source, (slice(at - start, at - start + box.count),))
        yield Piece(box.offset, Reshaped(part, box.shape), where, replica)


def gather(tensors: Iterable[LogicalTensor]) -> dict[str, LogicalTensor]:
    """Join pieces that were found in different files under one key; raise FormatError when their whole shapes disagree."""
    joined: dict[str, LogicalTensor] = {}
    parts: dict[str, list[LogicalTensor]] = {}  # of keys that were found more than once
    for tensor in tensors:
        key = tensor.key
        first = joined.setdefault(key, tensor)
        if first is tensor:
            continue
        if tensor.shape != first.shape:
            one, two = first.pieces[0].where, tensor.pieces[0].where
            raise FormatError(
                f"{key} has shape {list(first.shape)} in {one} and {list(tensor.shape)} in {two}: they are not of one model"
            )
        parts.setdefault(key, [first]).append(tensor)
    for key, found in parts.items():
        joined[key] = replace(found[0], held=tuple(p for t in found for p in t.pieces))
    return joined
