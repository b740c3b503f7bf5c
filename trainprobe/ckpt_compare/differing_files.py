"""Files that alone differ: a rank's file, or a shard, that is of another save or was written in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from trainprobe.ckpt_compare.cause import Cause, Mismatch, Sides
from trainprobe.ckpt_compare.coverage import HeldBox, Overlap, coverage_of, overlaps
from trainprobe.ckpt_compare.pieces import LogicalTensor, Piece, bottom, origin, window
from trainprobe.ckpt_compare.tasks import run, tasks_of
from trainprobe.engine.compare.difference import Difference

MOST = 256  # tensors of which the parts are measured again
LATE = 60.0  # seconds between the writing of files that say something
Values = Callable[[Sequence[Mismatch]], Iterable[Cause]]


def files_alone(mismatches: Sequence[Mismatch], sides: Sides, values: Values) -> Iterator[Cause]:
    """Find the one file of a side in which all tensors differ, while others of that side hold equal parts or tensors.

    values: finds what was done to the values of parts (a rounding, a factor).
    """
    some = mismatches[:MOST]
    if len(some) < 2:
        return
    parts = [(o, part, d) for o in some for part, d in _measured(o)]
    changed = [(o, part) for o, part, d in parts if d.changed]
    found: dict[str, str] = {}
    for side in ("A", "B"):
        files = {_file(_part(part, side).piece) for _, part in changed}
        if len(files) != 1:
            continue
        whole = {_file(p) for tensor in sides["AB".index(side)].values() for p in tensor.pieces}
        held = sum(_file(_part(part, side).piece) in files for _, part, _ in parts)
        if len(whole) > 1 and 2 * len(changed) > held:
            found[side] = files.pop()
    if not found:
        return
    same = len(set(found.values())) == 1 and len(found) == 2
    side, file = next(reversed(found.items()))
    text = f"only what {file} {'' if same else f'of {side} '}holds differs ({len(mismatches)} tensors)"
    text += "".join(_written(sides["AB".index(one)].values(), one, name) for one, name in found.items())
    inner = [_alone(o, part, d) for o, part, d in parts if d.changed]
    said = next((cause.sentence for cause in values(inner) if 2 * len(cause.keys) > len({o.key for o in inner})), "")
    yield Cause(f"{text}; its parts: {said}" if said else text, frozenset(o.key for o in mismatches))


def _file(piece: Piece) -> str:
    """Return the file or the rank's folder, without the name that stands in it."""
    return piece.file.partition(": ")[0]


def _part(overlap: Overlap, side: str) -> HeldBox:
    return overlap.a if side == "A" else overlap.b


def _measured(o: Mismatch) -> Iterator[tuple[Overlap, Difference]]:
    if o.a.shape != o.b.shape:
        return
    both = list(overlaps(coverage_of(o.a).parts, coverage_of(o.b).parts))
    if len(both) == 1:
        yield both[0], o.difference
        return
    merged = [Difference()] * len(both)
    for outcome in run([task for i, overlap in enumerate(both) for task in tasks_of(i, overlap)]):
        merged[outcome.row] = merged[outcome.row].merge(outcome.difference)
    yield from zip(both, merged, strict=True)


def _alone(o: Mismatch, overlap: Overlap, difference: Difference) -> Mismatch:
    """Return one part of a tensor as if it were all of it."""
    a, b = (
        replace(
            tensor,
            shape=overlap.box.shape,
            held=(
                Piece(
                    origin(len(tensor.shape)), window(part.piece.source, overlap.box.within(part.piece.offset)), part.piece.file
                ),
            ),
        )
        for tensor, part in ((o.a, overlap.a), (o.b, overlap.b))
    )
    return Mismatch(o.key, a, b, difference)


def _written(tensors: Iterable[LogicalTensor], side: str, file: str) -> str:
    """Say where a file was written long before or after the others of its side."""
    paths: dict[str, set[str]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            path = getattr(bottom(piece.source), "path", "")
            if path:
                paths.setdefault(_file(piece), set()).add(path)
    times = {name: max(Path(p).stat().st_mtime for p in held) for name, held in paths.items()}
    others = [when for name, when in times.items() if name != file]
    if file not in times or not others:
        return ""
    late = times[file] - median(others)
    if abs(late) < max(LATE, 10 * (max(others) - min(others))):
        return ""
    return f", and in {side} it was written {abs(late):,.0f} s {'after' if late > 0 else 'before'} the others"
