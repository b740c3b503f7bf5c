"""Which piece answers for which part of a tensor: a cover without overlap, and the copies that must agree with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainprobe.ckpt_compare.pieces import Array, LogicalTensor, Piece, origin, part_of
from trainprobe.engine.geometry.rectangles import Point, Rectangle


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box inside a piece."""

    piece: Piece
    box: Rectangle

    def load(self, box: Rectangle | None = None) -> Array:
        """Map the bits of the box, or of a smaller one inside it."""
        return part_of(self.piece.source, (box or self.box).within(self.piece.offset))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box that two parts hold."""

    box: Rectangle
    a: HeldBox
    b: HeldBox


@dataclass(frozen=True, slots=True)
class Coverage:
    """parts: disjoint; copies: boxes that a second piece holds as well (a from the cover, b the copy).

    Uncovered: elements nobody holds.
    """

    shape: Point
    parts: tuple[HeldBox, ...]
    copies: tuple[Overlap, ...]
    uncovered: int
    beyond: tuple[Piece, ...]

    def gaps(self, most: int = 4) -> list[Rectangle]:
        """Return the boxes that no piece holds, at most `most` of them."""
        left = [Rectangle((0,) * len(self.shape), self.shape)]
        for part in self.parts:
            left = [box for rest in left for box in rest.minus(part.box)]
        return left[:most]


def coverage_of(tensor: LogicalTensor) -> Coverage:
    """Choose for each element of a tensor the piece that answers for it; the first one in reading order wins."""
    outer, pieces = Rectangle(origin(len(tensor.shape)), tensor.shape), tensor.pieces
    if len(pieces) == 1 and tensor.count and pieces[0].shape == tensor.shape and pieces[0].offset == outer.offset:
        return Coverage(tensor.shape, (HeldBox(pieces[0], outer),), (), 0, ())
    parts: list[HeldBox] = []
    copies: list[Overlap] = []
    active: list[HeldBox] = []
    beyond: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.offset):
        if outer.intersect(piece.rectangle) != piece.rectangle and piece.rectangle.count:
            beyond.append(piece)
            continue
        if piece.offset:
            active = [p for p in active if p.box.end[0] > piece.offset[0]]
        free = [piece.rectangle] if piece.rectangle.count else []
        for part in active:
            common = part.box.intersect(piece.rectangle)
            if common is not None:
                copies.append(Overlap(common, part, HeldBox(piece, common)))
                free = [box for rest in free for box in rest.minus(common)]
        fresh = [HeldBox(piece, box) for box in free]
        parts += fresh
        active += fresh
    missing = tensor.count - sum(p.box.count for p in parts)
    return Coverage(tensor.shape, tuple(parts), tuple(copies), missing, tuple(beyond))


def overlaps(a: Sequence[HeldBox], b: Sequence[HeldBox]) -> Iterator[Overlap]:
    """Yield the boxes that a part of a and a part of b both hold, in row-major order of their beginnings in a."""
    if len(a) == len(b) == 1:
        common = a[0].box.intersect(b[0].box)
        if common is not None:
            yield Overlap(common, a[0], b[0])
        return
    left, right = sorted(a, key=lambda p: p.box.offset), sorted(b, key=lambda p: p.box.offset)
    active: list[HeldBox] = []
    ahead = 0
    for part in left:
        if part.box.offset:
            first, last = part.box.offset[0], part.box.end[0]
            while ahead < len(right) and right[ahead].box.offset[0] < last:
                active.append(right[ahead])
                ahead += 1
            active = [p for p in active if p.box.end[0] > first]
        else:
            active = right
        for other in active:
            common = part.box.intersect(other.box)
            if common is not None:
                yield Overlap(common, part, other)
