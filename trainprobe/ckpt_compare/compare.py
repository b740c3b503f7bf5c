"""Compare two checkpoints tensor by tensor, whatever their formats and layouts, and say what it means.

Nothing is assembled: each logical tensor is a set of rectangles on both sides, and what is measured is their intersections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainprobe.ckpt_compare.causes import Cause, Odd, find_causes
from trainprobe.ckpt_compare.cover import Cover, Part, cover, overlaps
from trainprobe.ckpt_compare.pairing import Move, align, explain_moves
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Rectangle, What
from trainprobe.ckpt_compare.state import StateRow, compare_state
from trainprobe.ckpt_compare.vocabulary import padding_reason
from trainprobe.ckpt_compare.work import Advance, Outcome, Runner, Task, run, tasks_of
from trainprobe.engine.diff.difference import Difference
from trainprobe.engine.diff.verdict import judge, noise_floor

RowVerdict = Literal["identical", "rounding", "differ", "only in A", "only in B", "shape", "incomplete"]
INCOMPLETE: tuple[RowVerdict, ...] = ("only in A", "only in B", "shape", "incomplete")


@dataclass(frozen=True, slots=True)
class Row:
    """What was found out about one logical tensor."""

    key: str
    verdict: RowVerdict
    what: What
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    dtype_a: str = ""
    dtype_b: str = ""
    native_a: str = ""
    native_b: str = ""
    difference: Difference = field(default_factory=Difference)
    floor: float = 0.0
    note: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong inside one checkpoint, or missing from the comparison: which side ("A", "B"), where, and what."""

    side: str
    where: str
    message: str
    grave: bool = True  # False: copies of one tensor disagree, yet everything could be compared


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was found. `compared`: which kinds of content both sides hold and that were looked at.

    `lone`: kinds beside tensors that count and that only one side holds.
    """

    a: Checkpoint
    b: Checkpoint
    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]
    state: tuple[StateRow, ...]
    moves: tuple[Move, ...]
    compared: tuple[What, ...]
    counted: tuple[What, ...]
    notes: tuple[str, ...] = ()
    lone: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two tensors to compare, and the part of both that is compared. rest: why that is not all, where it should be."""

    a: LogicalTensor
    b: LogicalTensor
    box: Rectangle
    note: str = ""
    rest: str = ""


def compare(
    a: Checkpoint,
    b: Checkpoint,
    what: Sequence[What] = ("weights", "optimizer"),
    *,
    threads: int | None = None,
    copies: bool = True,
    advance: Advance | None = None,
    runner: Runner = run,
) -> Comparison:
    """Compare two checkpoints that already carry logical names (see `names.to_logical`).

    what: kinds of content that count for the verdict. copies: also compare the copies of a tensor that one checkpoint holds.
    advance: told the number of bytes measured since its last call, from any thread. runner: who measures (see work.run, world).
    """
    a, b, aligned = align(a, b)
    notes = [aligned] if aligned else []
    kinds, slots = _common_content(a, b, what, notes)
    left, right = _chosen(a, kinds, slots), _chosen(b, kinds, slots)
    pairs, rows = _pair(left, right, notes, (a.config, b.config))
    covers = {key: (cover(p.a), cover(p.b)) for key, p in pairs.items()}
    jobs, tasks = _tasks(pairs, covers, copies)
    results, faults = _collected(jobs, runner(tasks, threads, advance))
    rows += [_row(pairs[key], covers[key], results[key]) for key in pairs]
    faults += [Fault(side, p.where, p.message) for side, c in (("A", a), ("B", b)) for p in c.problems]
    moves = explain_moves({r.key for r in rows if r.verdict not in ("identical", "rounding")}, left, right)
    rows, moves = _paired_by_content(rows, moves)
    state = compare_state(a.state, b.state)
    compared: tuple[What, ...] = tuple(dict.fromkeys([*kinds, *(r.what for r in state if r.a is not None and r.b is not None)]))
    lone = _lone(a, b, what)
    odd = [Odd(r.key, pairs[r.key].a, pairs[r.key].b, r.difference) for r in rows if r.verdict == "differ" and r.key in pairs]
    causes = find_causes(odd, moves)
    return Comparison(a, b, tuple(rows), tuple(faults), state, moves, compared, tuple(what), tuple(notes), lone, causes)


def _lone(a: Checkpoint, b: Checkpoint, what: Sequence[What]) -> tuple[str, ...]:
    """Say which kinds of content that were asked for, and are no tensors, only one side holds."""
    asked = [kind for kind in what if kind not in ("weights", "optimizer")]
    return tuple(
        f"{kind}: only in {'A' if a.state.get(kind) else 'B'}"
        for kind in asked
        if bool(a.state.get(kind)) != bool(b.state.get(kind))
    )


def _common_content(a: Checkpoint, b: Checkpoint, what: Sequence[What], notes: list[str]) -> tuple[list[What], set[str]]:
    """Return which kinds of tensors, and which optimizer slots, both sides hold; note what only one of them has."""
    held = [{t.what for t in c.tensors.values()} for c in (a, b)]
    kinds: list[What] = []
    tensor_kinds: tuple[What, ...] = ("weights", "optimizer")
    for kind in tensor_kinds:
        if kind not in what:
            continue
        if all(kind in h for h in held):
            kinds.append(kind)
        elif any(kind in h for h in held):
            notes.append(f"{kind}: only in {'A' if kind in held[0] else 'B'}, not compared")
    slots = [{t.slot for t in c.tensors.values()} for c in (a, b)]
    lone = sorted((slots[0] ^ slots[1]) - {""}) if "optimizer" in kinds else []
    notes += [f"optimizer {slot}: only in {'A' if slot in slots[0] else 'B'}, not compared" for slot in lone]
    return kinds, slots[0] & slots[1]


def _chosen(c: Checkpoint, kinds: Sequence[What], slots: set[str]) -> dict[str, LogicalTensor]:
    return {k: t for k, t in c.tensors.items() if t.what in kinds and t.slot in slots}


def _pair(
    left: Mapping[str, LogicalTensor],
    right: Mapping[str, LogicalTensor],
    notes: list[str],
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> tuple[dict[str, _Pair], list[Row]]:
    """Pair tensors by key; a head that is tied to the embedding on one side is held against the embedding."""
    pairs: dict[str, _Pair] = {}
    rows: list[Row] = []
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        note = ""
        if x is None or y is None:
            tied = _tied(key, right if y is None else left)
            side = "B" if y is None else "A"
            lost = tied is not None and configs["AB".index(side)].get("tied") is False
            if tied is None or lost:
                note = f"lost in {side}, whose configuration says that it is not tied to the embedding" if lost else ""
                rows.append(replace(_one_sided(key, x, y), note=note))
                continue
            note = f"tied in {side}: held against its embedding"
            x, y = x or tied, y or tied
        box = _common_box(x, y)
        if box is None:
            rows.append(replace(_both(key, "shape", x, y), note=f"shapes {list(x.shape)} and {list(y.shape)} are not the same"))
            continue
        if x.shape == y.shape:
            pairs[key] = _Pair(x, y, box, note)
            continue
        pairs[key] = _padded(_Pair(x, y, box), configs)
        if not pairs[key].rest:
            notes.append(f"{key}: {pairs[key].note}")
    return pairs, rows


def _padded(pair: _Pair, configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> _Pair:
    """Say of the rows that only one side has whether they are padding; if nothing says so, they are missing."""
    sides = sorted(zip((pair.a.shape[0], pair.b.shape[0]), configs, "AB", strict=True), key=lambda side: side[0])
    (fewer, config_fewer, _), (more, config_more, side) = sides
    reason = padding_reason(fewer, more, config_fewer, config_more)
    if reason is not None:
        return replace(pair, note=f"rows {fewer} to {more - 1} are vocabulary padding in {side} ({reason})")
    rest = f"rows {fewer} to {more - 1} are only in {side}, and no metadata says that they are padding (--vocab N says so)"
    return replace(pair, rest=rest)


def _tied(key: str, others: Mapping[str, LogicalTensor]) -> LogicalTensor | None:
    name, _, slot = key.partition("#")
    if name != "output.weight":
        return None
    return others.get("embedding.word.weight" + (f"#{slot}" if slot else ""))


def _common_box(x: LogicalTensor, y: LogicalTensor) -> Rectangle | None:
    zero = (0,) * len(x.shape)
    if x.shape == y.shape:
        return Rectangle(zero, x.shape)
    if not (x.vocabulary and y.vocabulary and x.shape[1:] == y.shape[1:] and len(x.shape) == len(y.shape)):
        return None
    return Rectangle(zero, (min(x.shape[0], y.shape[0]), *x.shape[1:]))


def _both(key: str, verdict: RowVerdict, x: LogicalTensor, y: LogicalTensor) -> Row:
    where = x.pieces[0].where if x.pieces else ""
    return Row(
        key, verdict, x.what, x.shape, y.shape, _dtype(x), _dtype(y), x.native or x.name, y.native or y.name, where=where
    )


def _dtype(t: LogicalTensor) -> str:
    return t.format.name if t.pieces else ""


def _one_sided(key: str, x: LogicalTensor | None, y: LogicalTensor | None) -> Row:
    if x is not None:
        return Row(
            key,
            "only in A",
            x.what,
            x.shape,
            None,
            _dtype(x),
            "",
            x.native or x.name,
            where=x.pieces[0].where if x.pieces else "",
        )
    assert y is not None
    return Row(
        key,
        "only in B",
        y.what,
        None,
        y.shape,
        "",
        _dtype(y),
        "",
        y.native or y.name,
        where=y.pieces[0].where if y.pieces else "",
    )


@dataclass(slots=True)
class _Result:
    difference: Difference = field(default_factory=Difference)
    failures: list[str] = field(default_factory=list[str])


def _tasks(
    pairs: Mapping[str, _Pair], covers: Mapping[str, tuple[Cover, Cover]], copies: bool
) -> tuple[list[tuple[str, str, str]], list[Task]]:
    """Return what is to be measured: every pair, and the copies inside each side, cut into tasks."""
    jobs: list[tuple[str, str, str]] = []  # key, side ("": the comparison itself), which copies
    tasks: list[Task] = []
    for key, pair in pairs.items():
        ca, cb = covers[key]
        jobs.append((key, "", ""))
        for overlap in overlaps(_clipped(ca.parts, pair.box), _clipped(cb.parts, pair.box)):
            tasks += tasks_of(len(jobs) - 1, overlap)
        for side, held in (("A", ca), ("B", cb)) if copies else ():
            for copy in held.copies:
                jobs.append((key, side, f"{copy.a.piece.where} and {copy.b.piece.where}"))
                tasks += tasks_of(len(jobs) - 1, copy)
    return jobs, tasks


def _collected(jobs: Sequence[tuple[str, str, str]], outcomes: Iterable[Outcome]) -> tuple[dict[str, _Result], list[Fault]]:
    merged = [_Result() for _ in jobs]
    for outcome in outcomes:
        into = merged[outcome.row]
        into.difference = into.difference.merge(outcome.difference)
        if outcome.failure:
            into.failures.append(outcome.failure)
    faults: list[Fault] = []
    results: dict[str, _Result] = {}
    for (key, side, which), result in zip(jobs, merged, strict=True):
        if not side:
            results[key] = result
        elif result.difference.changed:
            d = result.difference
            faults.append(
                Fault(
                    side, which,
                    f"{key}: copies disagree in {d.changed} of {d.count} elements, by up to {d.max_abs:.3g} "
                    f"at {list(d.at or ())}",
                    grave=False,
                )
            )  # fmt: skip
    return results, faults


def _paired_by_content(rows: list[Row], moves: Sequence[Move]) -> tuple[list[Row], tuple[Move, ...]]:
    """Join two tensors that only one side each has a name for and that hold the same.

    What is left are moves between known names.
    """
    only_a = {r.key: r for r in rows if r.verdict == "only in A"}
    only_b = {r.key: r for r in rows if r.verdict == "only in B"}
    joined = [m for m in moves if m.a_key in only_a and m.b_key in only_b]
    gone = {m.a_key for m in joined} | {m.b_key for m in joined}
    rows = [r for r in rows if r.key not in gone]
    for m in joined:
        x, y = only_a[m.a_key], only_b[m.b_key]
        note = f"named {m.b_key} in B, found by its content{', transposed' if m.turned else ''}"
        verdict: RowVerdict = "rounding" if m.difference.changed else "identical"
        sides = {"shape_b": y.shape_b, "dtype_b": y.dtype_b, "native_b": y.native_b}
        rows.append(replace(x, verdict=verdict, difference=m.difference, note=note, **sides))
    return rows, tuple(m for m in moves if m not in joined)


def _clipped(parts: Sequence[Part], box: Rectangle) -> list[Part]:
    cut = [(part, part.box.intersect(box)) for part in parts]
    return [Part(part.piece, common) for part, common in cut if common is not None]


def _row(pair: _Pair, covers: tuple[Cover, Cover], result: _Result) -> Row:
    """Judge one pair: incomplete when not every element was held by both sides, else by its difference."""
    key = pair.a.key if pair.a.name != "embedding.word.weight" else pair.b.key
    row = _both(key, "identical", pair.a, pair.b)
    d = result.difference
    floor = noise_floor(pair.a.format, pair.b.format) if pair.a.pieces and pair.b.pieces else 0.0
    row = replace(row, difference=d, floor=floor, note=pair.note, where=_located(covers, d))
    if result.failures or d.count < pair.box.count:
        return replace(
            row, verdict="incomplete", note="; ".join(dict.fromkeys([*result.failures, *_holes(covers, pair.box, d)]))
        )
    verdict = judge(d, floor, stored=True)
    if pair.rest:
        return replace(row, verdict="differ" if verdict in ("bug", "suspicious") else "incomplete", note=pair.rest)
    return replace(row, verdict="differ" if verdict in ("bug", "suspicious") else verdict)


def _holes(covers: tuple[Cover, Cover], box: Rectangle, d: Difference) -> list[str]:
    said: list[str] = []
    for side, held in zip("AB", covers, strict=True):
        if held.beyond:
            piece = held.beyond[0]
            said.append(
                f"{side}: {piece.where} reaches to {list(piece.rectangle.end)}, outside of the shape {list(held.shape)}"
            )
        gaps = [common for gap in (held.gaps() if held.uncovered else []) if (common := gap.intersect(box)) is not None]
        if gaps:
            said.append(f"{side}: no file holds {', '.join(map(str, gaps))}")
    return said or [f"{box.count - d.count} of {box.count} elements could not be compared"]


def _located(covers: tuple[Cover, Cover], d: Difference) -> str:
    """Say in which files the largest difference stands."""
    if d.at is None:
        return ""
    point = Rectangle(d.at, (1,) * len(d.at))
    held = [next((p.piece.where for p in c.parts if p.box.intersect(point)), "") for c in covers]
    return " / ".join(dict.fromkeys(held))


def logical(
    a: Checkpoint, b: Checkpoint, config: Mapping[str, Any] | None = None, maps: Sequence[str] = ()
) -> tuple[Checkpoint, Checkpoint]:
    """Give both checkpoints logical names; what one does not know of the model (heads, groups) is taken from the other."""
    from trainprobe.ckpt_compare.names import to_logical

    given = dict(config or {})
    known = [{k: v for k, v in c.config.items() if v is not None} for c in (a, b)]
    if given.get("vocab"):
        a, b = (replace(c, config={**c.config, "vocab": given["vocab"]}) for c in (a, b))
    return (
        to_logical(a, {**known[1], **known[0], **given}, maps),
        to_logical(b, {**known[0], **known[1], **given}, maps),
    )
