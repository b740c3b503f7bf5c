"""Rectangles of a tensor: their intersections and differences, and those that a range of elements is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """An axis-aligned box in a tensor: where it begins and how far it reaches, one number an axis."""

    offset: Point
    shape: Point

    @property
    def end(self) -> Point:
        """First index past the box on each axis."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def count(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """Return the common part, or None when there is no element in both."""
        if self.offset == other.offset and self.shape == other.shape:
            return self if 0 not in self.shape else None
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(e - s for s, e in zip(start, map(min, self.end, other.end), strict=True))
        return Rectangle(start, shape) if all(n > 0 for n in shape) else None

    def minus(self, other: Rectangle) -> list[Rectangle]:
        """Return what is left when `other` is cut out, as at most two boxes an axis that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self]
        left: list[Rectangle] = []
        offset, end = list(self.offset), list(self.end)
        for axis in range(len(offset)):
            for lo, hi in ((offset[axis], common.offset[axis]), (common.end[axis], end[axis])):
                if lo < hi:
                    start = (*offset[:axis], lo, *offset[axis + 1 :])
                    stop = (*end[:axis], hi, *end[axis + 1 :])
                    left.append(Rectangle(start, tuple(e - s for s, e in zip(start, stop, strict=True))))
            offset[axis], end[axis] = common.offset[axis], common.end[axis]
        return left

    def holds(self, at: Sequence[int]) -> bool:
        """Return whether the element at these indices is inside."""
        return all(0 <= i - o < n for i, o, n in zip(at, self.offset, self.shape, strict=True))

    def moved(self, by: Point) -> Rectangle:
        """Return the box moved by some elements on each axis."""
        return Rectangle(tuple(o + n for o, n in zip(self.offset, by, strict=True)), self.shape)

    def within(self, outer: Point) -> tuple[slice, ...]:
        """Return the slices that pick this box out of an array that begins at `outer`."""
        if self.offset == outer:
            return tuple([slice(0, n) for n in self.shape])
        return tuple(slice(o - b, o - b + n) for o, b, n in zip(self.offset, outer, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offset, self.end, strict=True)) + "]"


def flat_rectangles(shape: Point, start: int, stop: int) -> Iterator[tuple[int, Rectangle]]:
    """Cut the elements start … stop−1 of a tensor in row-major order into rectangles; yield (first element, rectangle).

    ZeRO and the distributed optimizers share a tensor out as such ranges. At most 2·ndim − 1 rectangles.
    """
    if start >= stop:
        return
    if not shape:
        yield start, Rectangle((), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that the range holds whole: first … last−1
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        yield first * inner, Rectangle((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Point, row: int, start: int, stop: int) -> Iterator[tuple[int, Rectangle]]:
    """Yield the rectangles of a range of elements that lies in one row of the first axis."""
    begin = row * math.prod(shape[1:])
    for at, box in flat_rectangles(shape[1:], start - begin, stop - begin):
        yield begin + at, Rectangle((row, *box.offset), (1, *box.shape))
