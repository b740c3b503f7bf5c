"""Compare two checkpoints tensor by tensor, whatever their formats and layouts, and say what it means.

Nothing is assembled: each logical tensor is a set of rectangles on both sides, and what is measured is their intersections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from trainprobe.ckpt_compare.adapters import drawn_alike, is_projection
from trainprobe.ckpt_compare.cause import Mismatch
from trainprobe.ckpt_compare.causes import find_causes
from trainprobe.ckpt_compare.coverage import Coverage, HeldBox, coverage_of, overlaps
from trainprobe.ckpt_compare.pairing import Move, align, explain_moves, find_copies
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, What
from trainprobe.ckpt_compare.quantised_layouts import decoded, hide_codes
from trainprobe.ckpt_compare.renames import follow_renames, under_names_of_a
from trainprobe.ckpt_compare.results import CheckpointComparison, CheckpointFault, RowVerdict, TensorRow
from trainprobe.ckpt_compare.state import EXTRA, compare_state
from trainprobe.ckpt_compare.tasks import Advance, MeasureTask, Runner, TaskOutcome, run, tasks_of
from trainprobe.ckpt_compare.tensor_pairs import TensorPair, pair_of, shared_values
from trainprobe.ckpt_compare.transforms import QKV_ROWS
from trainprobe.engine.compare.difference import Difference
from trainprobe.engine.compare.rounding import agreement_of
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.engine.core.words import counted
from trainprobe.engine.geometry.rectangles import Rectangle

_Q = ".attention.q.weight"
AT_ONCE = 1 << 12  # pairs of tensors that are measured together: a pair at work weighs more than its result


@uncollected()
def compare(
    a: Checkpoint,
    b: Checkpoint,
    what: Sequence[What] = ("weights", "optimizer"),
    *,
    threads: int | None = None,
    copies: bool = True,
    advance: Advance | None = None,
    runner: Runner = run,
) -> CheckpointComparison:
    """Compare two checkpoints that already carry logical names (see `names.to_logical`).

    what: kinds of content that count for the verdict. copies: also compare the copies of a tensor that one checkpoint holds.
    advance: told the number of bytes measured since its last call, from any thread. runner: who measures (see work.run, world).
    """
    a, b, notes = align(a, b)
    kinds, slots = _common_content(a, b, what, notes)
    left, right = _chosen(a, kinds, slots), _chosen(b, kinds, slots)
    left, right = _without_drawn(left, right, (a.config, b.config), notes)
    left, right = hide_codes(left, right, a.config), hide_codes(right, left, b.config)
    names = follow_renames(left, right)
    right = under_names_of_a(right, names)
    rows: list[TensorRow] = []
    measured: list[TensorRow] = []
    faults: list[CheckpointFault] = []
    shared = shared_values(left, right, (a.config, b.config))
    keys = chain(left, (key for key in right if key not in left))
    while some := list(islice(keys, AT_ONCE)):
        paired = [pair_of(key, left, right, (a.config, b.config), shared) for key in some]
        rows += [p for p in paired if isinstance(p, TensorRow)]
        pairs = {key: p for key, p in zip(some, paired, strict=True) if isinstance(p, TensorPair)}
        notes += [f"{key}: {p.note}" for key, p in pairs.items() if p.a.shape != p.b.shape and not p.rest]
        found, disagree = _measured(pairs, copies, lambda tasks: runner(tasks, threads, advance))
        measured += found
        faults += disagree
    rows += measured
    faults += [CheckpointFault(side, p.where, p.message) for side, c in (("A", a), ("B", b)) for p in c.problems]
    moves = explain_moves({r.key for r in rows if r.verdict not in ("identical", "rounding")}, left, right)
    rows, renamed, moves = _paired_by_content(rows, moves)
    if names:
        rows, followed = _noted(rows, {a_key: b_key for b_key, a_key in names.items()})
        renamed = (*renamed, *followed)
    state = compare_state(a.state, b.state)
    compared: tuple[What, ...] = tuple(dict.fromkeys([*kinds, *(r.what for r in state if r.a is not None and r.b is not None)]))
    one_sided = _one_sided(a, b, what, notes)
    mismatches = [Mismatch(r.key, r.a, r.b, r.difference) for r in rows if r.verdict == "differ" and r.a and r.b]
    moved = {m.b_key for m in moves if m.a_key in right}  # what B lacks under its own name is told as a copy
    apart = {o.key: o.difference for o in mismatches if o.key not in moved}
    every = [r.key for r in rows] if mismatches else ()
    causes = find_causes(mismatches, moves, find_copies(apart, left, right), (left, right), every)
    return CheckpointComparison(
        a, b, tuple(rows), tuple(faults), state, moves, compared, tuple(what), tuple(notes), one_sided, renamed, causes
    )


def _measured(
    pairs: Mapping[str, TensorPair], copies: bool, measure: Callable[[Sequence[MeasureTask]], Sequence[TaskOutcome]]
) -> tuple[list[TensorRow], list[CheckpointFault]]:
    """Return a row for each pair, and the copies inside one checkpoint that disagree."""
    coverages = {key: (coverage_of(p.a), coverage_of(p.b)) for key, p in pairs.items()}
    jobs, tasks = _tasks(pairs, coverages, copies)
    results, faults = _collected(jobs, measure(tasks))
    return [_row(key, pairs[key], coverages[key], results[key]) for key in pairs], faults


def _one_sided(a: Checkpoint, b: Checkpoint, what: Sequence[What], notes: list[str]) -> tuple[str, ...]:
    """Say which content that was asked for, and is no tensor, only one side holds; note what a format may not write."""
    asked = [kind for kind in what if kind not in ("weights", "optimizer")]
    lacking = [
        f"{kind}: only in {'A' if a.state.get(kind) else 'B'}"
        for kind in asked
        if bool(a.state.get(kind)) != bool(b.state.get(kind))
    ]
    held = [c.state.get("weights", {}) for c in (a, b)] if "weights" in what else [{}, {}]
    for side, mine, other in (("A", *held), ("B", *reversed(held))):
        if names := sorted((name for name in mine if name not in other), key=lambda name: name.endswith(EXTRA)):
            more = f" and {counted(len(names) - 1, 'more value')} are" if len(names) > 1 else " is"
            every = a.format == b.format and not names[0].endswith(EXTRA)  # other formats hold tensors alone
            (lacking if every else notes).append(f"{names[0]} ({repr(mine[names[0]])[:40]}){more} in {side} alone")
    return tuple(lacking)


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
    one_sided = sorted((slots[0] ^ slots[1]) - {""}) if "optimizer" in kinds else []
    notes += [f"optimizer {slot}: only in {'A' if slot in slots[0] else 'B'}, not compared" for slot in one_sided]
    return kinds, slots[0] & slots[1]


def _chosen(c: Checkpoint, kinds: Sequence[What], slots: set[str]) -> Mapping[str, LogicalTensor]:
    if all(t.what in kinds and t.slot in slots for t in c.tensors.values()):
        return c.tensors
    return {k: t for k, t in c.tensors.items() if t.what in kinds and t.slot in slots}


def _without_drawn(
    left: Mapping[str, LogicalTensor],
    right: Mapping[str, LogicalTensor],
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    notes: list[str],
) -> tuple[Mapping[str, LogicalTensor], Mapping[str, LogicalTensor]]:
    """Leave out matrices that an adapter's loader draws anew, where one side stores them and both draw them from the same."""
    one_sided = {k for k in left.keys() ^ right.keys() if is_projection(k)} if drawn_alike(configs) else set[str]()
    if not one_sided:
        return left, right
    notes.append(
        f"{len(one_sided)} tensors that one side alone stores are left out, such as {min(one_sided)}: "
        f"both adapters draw them when they are loaded, from {configs[0]['drawn_from']}"
    )
    return {k: t for k, t in left.items() if k not in one_sided}, {k: t for k, t in right.items() if k not in one_sided}


NOTHING = Difference()


@dataclass(slots=True)
class _Result:
    difference: Difference = NOTHING
    failures: list[str] = field(default_factory=list[str])


def _tasks(
    pairs: Mapping[str, TensorPair], coverages: Mapping[str, tuple[Coverage, Coverage]], copies: bool
) -> tuple[list[tuple[str, str, str]], list[MeasureTask]]:
    """Return what is to be measured: every pair, and the copies inside each side, cut into tasks."""
    jobs: list[tuple[str, str, str]] = []  # key, side ("": the comparison itself), which copies
    tasks: list[MeasureTask] = []
    for key, pair in pairs.items():
        ca, cb = coverages[key]
        jobs.append((key, "", ""))
        for overlap in overlaps(_clipped(ca.parts, pair.box), _clipped(cb.parts, pair.box)):
            tasks += tasks_of(len(jobs) - 1, overlap)
        for side, held in (("A", ca), ("B", cb)) if copies else ():
            for copy in held.copies:
                jobs.append((key, side, f"{copy.a.piece.where} and {copy.b.piece.where}"))
                tasks += tasks_of(len(jobs) - 1, copy)
    return jobs, tasks


def _collected(
    jobs: Sequence[tuple[str, str, str]], outcomes: Iterable[TaskOutcome]
) -> tuple[dict[str, _Result], list[CheckpointFault]]:
    merged = [_Result() for _ in jobs]
    for outcome in outcomes:
        into = merged[outcome.row]
        into.difference = into.difference.merge(outcome.difference) if into.difference is not NOTHING else outcome.difference
        if outcome.failure:
            into.failures.append(outcome.failure)
    faults: list[CheckpointFault] = []
    results: dict[str, _Result] = {}
    for (key, side, which), result in zip(jobs, merged, strict=True):
        if not side:
            results[key] = result
        elif result.difference.changed:
            d = result.difference
            faults.append(
                CheckpointFault(
                    side, which,
                    f"{key}: copies disagree in {d.changed} of {d.count} elements, by up to {d.max_abs:.3g} "
                    f"at {list(d.at or ())}",
                    severe=False,
                )
            )  # fmt: skip
    return results, faults


def _paired_by_content(
    rows: list[TensorRow], moves: Sequence[Move]
) -> tuple[list[TensorRow], tuple[Move, ...], tuple[Move, ...]]:
    """Join two tensors that only one side each has a name for and that hold the same; return rows, joined, and other moves."""
    only_a = {r.key: r for r in rows if r.verdict == "only in A"}
    only_b = {r.key: r for r in rows if r.verdict == "only in B"}
    joined = [m for m in moves if m.a_key in only_a and m.b_key in only_b]
    gone = {m.a_key for m in joined} | {m.b_key for m in joined}
    rows = [r for r in rows if r.key not in gone]
    for m in joined:
        x, y = only_a[m.a_key], only_b[m.b_key]
        note = f"named {m.b_key} in B, found by its content{', transposed' if m.turned else ''}"
        verdict: RowVerdict = "rounding" if m.difference.changed else "identical"
        rows.append(replace(x, verdict=verdict, b=y.b, difference=m.difference, note=note))
    return rows, tuple(joined), tuple(m for m in moves if m not in joined)


def _noted(rows: Sequence[TensorRow], names: Mapping[str, str]) -> tuple[list[TensorRow], tuple[Move, ...]]:
    """Note the name in B of tensors that were compared under the name of A; return the rows, and those that agree as moves."""
    noted = [
        replace(r, note=f"named {names[r.key]} in B, found by the content of its kind") if r.key in names else r for r in rows
    ]
    agree = [r for r in rows if r.key in names and r.verdict in ("identical", "rounding")]
    return noted, tuple(Move(r.key, names[r.key], difference=r.difference) for r in agree)


def _clipped(parts: Sequence[HeldBox], box: Rectangle) -> list[HeldBox]:
    if len(parts) == 1 and parts[0].box == box and 0 not in box.shape:
        return list(parts)
    cut = [(part, part.box.intersect(box)) for part in parts]
    return [HeldBox(part.piece, common) for part, common in cut if common is not None]


def _row(key: str, pair: TensorPair, coverages: tuple[Coverage, Coverage], result: _Result) -> TensorRow:
    """Judge one pair: incomplete when not every element was held by both sides, else by its difference."""
    d = _lean(result.difference)
    row = TensorRow(key, "identical", pair.a, pair.b, d, pair.note, _located(coverages, d))
    if d.count == pair.box.count and not (d.changed or d.misplaced or result.failures or pair.rest):
        return row
    if result.failures or d.count < pair.box.count:
        return replace(
            row, verdict="incomplete", note="; ".join(dict.fromkeys([*result.failures, *_holes(coverages, pair.box, d)]))
        )
    verdict = agreement_of(d, row.floor)
    if pair.rest:
        reason = f"with {pair.rest.partition(':')[0]}"
        return replace(row, verdict="differ" if verdict == "differ" else "incomplete", note=pair.rest, reason=reason)
    return replace(row, verdict=verdict)


def _lean(d: Difference) -> Difference:
    """Return the same difference; of equal values no sums are kept: a million rows share a few objects."""
    return d if d.changed or d.misplaced else _equal(d.count, d.nan_a, d.nan_b)


@lru_cache(maxsize=1024)
def _equal(count: int, nan_a: int, nan_b: int) -> Difference:
    return Difference(count, 0, nan_a, nan_b)


def _holes(coverages: tuple[Coverage, Coverage], box: Rectangle, d: Difference) -> list[str]:
    said: list[str] = []
    for side, held in zip("AB", coverages, strict=True):
        if held.beyond:
            piece = held.beyond[0]
            said.append(
                f"{side}: {piece.where} reaches to {list(piece.rectangle.end)}, outside of the shape {list(held.shape)}"
            )
        gaps = [common for gap in (held.gaps() if held.uncovered else []) if (common := gap.intersect(box)) is not None]
        if gaps:
            said.append(f"{side}: no file holds {', '.join(map(str, gaps))}")
    return said or [f"{box.count - d.count} of {box.count} elements could not be compared"]


def _located(coverages: tuple[Coverage, Coverage], d: Difference) -> str:
    """Say in which files the largest difference stands."""
    if d.at is None:
        return ""
    point = Rectangle(d.at, (1,) * len(d.at))
    held = [next((p.piece.where for p in c.parts if p.box.intersect(point)), "") for c in coverages]
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
    a, b = decoded(a, b), decoded(b, a)
    first = to_logical(a, {**known[1], **known[0], **given}, maps)  # one after the other: of a million tensors both are large
    rows = _rows_of_attention(first)
    second = to_logical(b, {**known[0], **known[1], **rows, **given}, maps)
    if not rows and (rows := _rows_of_attention(second)):
        first = to_logical(a, {**known[1], **known[0], **rows, **given}, maps)
    return first, second


def _rows_of_attention(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return how many rows q and k have where all layers have them apart, for a side that fuses them."""
    tensors = checkpoint.tensors
    of_k = {name: tensors.get(f"{name.removesuffix('q.weight')}k.weight") for name in tensors if name.endswith(_Q)}
    rows = {(tensors[name].shape[0], k.shape[0]) for name, k in of_k.items() if k is not None and k.shape}
    return {QKV_ROWS: rows.pop()} if len(rows) == 1 else {}
