"""The answer in one sentence and one exit code.

0 identical · 1 equal within the rounding of the stored number formats · 2 differ · 3 not comparable or incomplete.
A proven difference outweighs what could not be looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainprobe.ckpt_compare.adapters import method_of, written
from trainprobe.ckpt_compare.cause import beyond_rounding
from trainprobe.ckpt_compare.causes import headline
from trainprobe.ckpt_compare.pairing import Move, layer_sentences
from trainprobe.ckpt_compare.pieces import KINDS
from trainprobe.ckpt_compare.quantised import UNDECODED
from trainprobe.ckpt_compare.results import INCOMPLETE, CheckpointComparison, CheckpointFault, TensorRow
from trainprobe.ckpt_compare.state import StateRow
from trainprobe.comparison.verdict import Verdict

IDENTICAL, ROUNDING, DIFFER, INCOMPLETE_CODE = 0, 1, 2, 3
TOLERATED = "within --atol"  # how the note of a row begins whose difference a user allows
SAID = 6  # named examples in a list


def verdict_of(c: CheckpointComparison) -> Verdict:
    """Judge a whole comparison. What the sentence says is not said again in the details."""
    code, sentence, details = _judged(c)
    return Verdict(code, sentence, tuple(text for text in details if text not in sentence))


def _judged(c: CheckpointComparison) -> tuple[int, str, list[str]]:
    differ = [r for r in c.rows if r.verdict == "differ"]
    lost = [r for r in c.rows if r.verdict in INCOMPLETE]
    rounding = [r for r in c.rows if r.verdict == "rounding"]
    state = [s for s in c.state if s.what in c.counted and not s.equal]
    state.sort(key=lambda s: s.path.startswith("initial_"))  # what an optimizer began with follows from what it has
    severe = [f for f in c.faults if f.severe]
    copies = [f for f in c.faults if not f.severe]
    details = _details(c, lost)
    if differ or copies or state:
        return (DIFFER, _differ_sentence(c, differ, len(copies), state), details)
    frameworks = {"mindspore" if side.format == "mindspore" else "torch" for side in (c.a, c.b)}
    alike = c.a.family == c.b.family and len(frameworks) == 1  # `gamma` of MindSpore is `weight` of torch
    renamed = c.renamed if alike and 2 * len(c.renamed) <= len(c.rows) else ()
    if renamed and not (lost or severe or c.one_sided):
        return (INCOMPLETE_CODE, _renamed_sentence(c, renamed), details)
    if lost or severe or c.one_sided or not any(r.verdict in ("identical", "rounding") for r in c.rows):
        return (INCOMPLETE_CODE, _incomplete_sentence(c, lost, severe), details)
    if rounding:
        return (ROUNDING, _rounding_sentence(c, rounding), details)
    if not any(r.difference.count for r in c.rows):
        return (INCOMPLETE_CODE, f"not comparable: {_census(c.rows)}, nothing was compared", details)
    names = f", {len(c.renamed)} of them under other names" if c.renamed else ""
    return (IDENTICAL, f"identical: {_census(c.rows)} hold the same values in both{names}", details)


def relative(row: TensorRow) -> float:
    """What rows are sorted by: relative l2, infinite where something is NaN or missing on one side only."""
    return float("inf") if row.difference.misplaced else row.difference.relative_l2


def by_error(rows: Sequence[TensorRow]) -> list[TensorRow]:
    """Return rows with the largest relative error first."""
    return sorted(rows, key=lambda r: (-relative(r), r.key))


def _census(rows: Sequence[TensorRow]) -> str:
    counts = Counter(r.what for r in rows)
    total = sum(r.difference.count for r in rows)
    parts = [f"{n} {what}" for what, n in counts.items()]
    return f"{' and '.join(parts)} tensors ({total:,} elements)"


def _differ_sentence(c: CheckpointComparison, differ: Sequence[TensorRow], copies: int, state: Sequence[StateRow]) -> str:
    if differ:
        worst = by_error(differ)[0]
        d = worst.difference
        place = f" at {list(d.at)}" if d.at is not None else ""
        where = f" ({worst.where})" if worst.where else ""
        what = f"{d.misplaced:,} misplaced NaN or infinity" if d.misplaced else f"relative error {d.relative_l2:.3g}"
        share = _share(worst)
        cause = headline(c.causes, {r.key: r for r in differ})
        first = f"{cause}. {len(differ)}" if cause else len(differ)
        lacking = _lost([r for r in c.rows if r.verdict in INCOMPLETE])
        besides = "".join(f"; also, {said}" for said in [*lacking, *map(_unequal, state[:1])])
        return (
            f"differ: {first} of {len(c.rows)} tensors; worst is {worst.key}: {what}, {share}, largest{place}{where}{besides}"
        )
    if copies:
        return f"differ: {copies} tensor{'s' if copies > 1 else ''} whose copies inside one checkpoint disagree"
    return f"differ: all compared tensors agree, but {_unequal(state[0])}"


def _unequal(row: StateRow) -> str:
    return f"{row.what} {row.path} is {row.a!r} in A and {row.b!r} in B"


def _share(row: TensorRow) -> str:
    """Say how many elements differ; of two number formats, how many differ by more than the rounding to the coarser one."""
    d = row.difference
    formats_differ = row.dtype_a != row.dtype_b and row.shape_a == row.shape_b
    apart = beyond_rounding(row.a, row.b) if formats_differ and row.a and row.b else None
    if apart is None:
        return f"{d.changed:,} of {d.count:,} elements"
    return f"{apart:,} of {d.count:,} elements beyond rounding"


def _incomplete_sentence(c: CheckpointComparison, lost: Sequence[TensorRow], severe: Sequence[CheckpointFault]) -> str:
    if not c.rows:
        return "not comparable: the two checkpoints have no kind of content in common"
    if not lost and not severe and c.one_sided:
        return f"incomplete: all compared tensors agree, but {', '.join(c.one_sided)}"
    cause = headline(c.causes, {r.key: r for r in lost})
    missing = ", ".join([*([cause] if cause else []), *_lost(lost)])
    example = f", such as {lost[0].key}" if lost and not cause else ""
    agree = sum(r.verdict in ("identical", "rounding") for r in c.rows)
    word = "incomplete" if agree else "not comparable"
    said = [*_adapters(c), *([_fault(severe)] if severe else []), *([missing + example] if missing else [])]
    return f"{word}: {'; '.join(said)}; {agree} of {len(c.rows)} tensors agree"


def _adapters(c: CheckpointComparison) -> list[str]:
    """Say that one side holds nothing but an adapter, and the other a model."""
    methods = method_of(c.a), method_of(c.b)
    if bool(methods[0]) == bool(methods[1]):
        return []
    side, other, method = ("A", "B", methods[0]) if methods[0] else ("B", "A", methods[1])
    held = any(f".{method}_" in k for k in (c.b if methods[0] else c.a).tensors)
    alone = (
        f"--only '*.{method}_*' compares the adapters" if held else "compare the model that it was trained on, or a merged one"
    )
    return [
        f"{side} is an adapter ({written(method)}) alone and {other} {'also holds its' if held else 'is a'} model ({alone})"
    ]


def _fault(severe: Sequence[CheckpointFault]) -> str:
    """Return the first file or part that cannot be read, in words, and how many others there are."""
    first = severe[0]
    name = Path(first.where).name or first.where
    first_said = first.message if name in first.message else f"{name} {first.message}"
    others = f" (and {len(severe) - 1} more files or parts that cannot be read)" if len(severe) > 1 else ""
    return f"in {first.side} {first_said}{others}"


def _lost(rows: Sequence[TensorRow]) -> Iterator[str]:
    """Say how many tensors are missing or not whole, and in which way."""
    for (verdict, reason), n in Counter((r.verdict, r.reason) for r in rows).items():
        words = {"shape": ("has another shape", "have different shapes"), "incomplete": ("could not be read whole",) * 2}
        one, many = (reason, reason) if reason else words.get(verdict, (f"is {verdict}", f"are {verdict}"))
        yield f"1 tensor {one}" if n == 1 else f"{n} tensors {many}"


def _renamed_sentence(c: CheckpointComparison, renamed: Sequence[Move]) -> str:
    first = renamed[0]
    have = "have" if len(renamed) > 1 else "has"
    return (
        f"incomplete: {len(renamed)} of {len(c.rows)} tensors {have} another name in B with the same values: "
        f"{first.a_key} is called {first.b_key}{', transposed' if first.turned else ''}; all others agree"
    )


def _rounding_sentence(c: CheckpointComparison, rounding: Sequence[TensorRow]) -> str:
    allowed = [r for r in rounding if r.note.startswith(TOLERATED)]
    if allowed:
        worst = max(allowed, key=lambda r: r.difference.max_abs)
        return (
            f"equal within the tolerance that was given: {len(allowed)} of {len(c.rows)} tensors differ by at most "
            f"{worst.difference.max_abs:.3g} ({worst.key}), relative error {worst.difference.relative_l2:.3g}"
        )
    pairs = Counter(f"{r.dtype_a}/{r.dtype_b}" if r.dtype_a != r.dtype_b else r.dtype_a for r in rounding)
    most = max(r.difference.max_ulp for r in rounding)
    if len(pairs) == 1 and all(r.dtype_a == r.dtype_b for r in rounding):
        changed, total = (sum(getattr(r.difference, name) for r in rounding) for name in ("changed", "count"))
        return (
            f"equal within rounding: {len(rounding)} of {len(c.rows)} tensors differ in the last bit of {next(iter(pairs))} "
            f"({changed:,} of their {total:,} elements, by one unit), the others are identical"
        )
    return (
        f"equal within rounding: {len(rounding)} of {len(c.rows)} tensors differ by at most {most:.3g} units in the last place "
        f"({', '.join(pairs)}), the others are identical"
    )


def _details(c: CheckpointComparison, lost: Sequence[TensorRow]) -> list[str]:
    """Say what moved, what is broken, and what else is not the same."""
    said = [f"{side}: warning: {text}" for side, one in (("A", c.a), ("B", c.b)) for text in one.warnings]
    said += [cause.sentence for cause in c.causes]
    said += layer_sentences(m for m in c.moves if not (m.turned and m.a_key == m.b_key))  # which are a cause
    said += [
        f"{f.side}: {f.where} {f.message}" if f.message.startswith("is ") else f"{f.side}: {f.message} ({f.where})"
        for f in c.faults
    ]
    lost = sorted(lost, key=lambda r: not r.note)  # what is known to be broken before what is merely absent
    said += [f"{r.key}: {r.verdict}{f', {r.note}' if r.note else ''}" for r in lost[:SAID]]
    if len(lost) > SAID:
        said.append(f"… and {len(lost) - SAID} more tensors that are missing or incomplete")
    if any(r.note.startswith(UNDECODED) for r in lost):
        said.append(
            "weights in a format that is not decoded: dequantise them with the library that wrote them, and compare that"
        )
    said += _renamed(c.renamed)
    said += _state_sentences(c)
    said += [*c.one_sided, *c.notes]
    for side, checkpoint in (("A", c.a), ("B", c.b)):
        said += [f"{side}: {note}" for note in checkpoint.notes]
    return said


def _renamed(moves: Sequence[Move]) -> list[str]:
    said = [f"{m.a_key} of A is {m.b_key} in B{', transposed' if m.turned else ''}: the same values" for m in moves[:SAID]]
    return [*said, f"… and {len(moves) - SAID} more under other names"] if len(moves) > SAID else said


def _state_sentences(c: CheckpointComparison) -> list[str]:
    said: list[str] = []
    for what in KINDS:
        unequal = [s for s in c.state if s.what == what and not s.equal]
        total = sum(1 for s in c.state if s.what == what)
        moved = [f"rng: {note}" for note in dict.fromkeys(s.note for s in unequal if s.note)]
        said += moved
        if what in ("iteration", "optimizer") or what in c.counted:
            said += [f"{what}: {s.path} is {s.a!r} in A, {s.b!r} in B" for s in unequal[:SAID]]
            if len(unequal) > SAID:
                said.append(f"{what}: … and {len(unequal) - SAID} more of {total} values")
        elif unequal and not moved:
            said.append(f"{what}: {len(unequal)} of {total} values are not the same (--what {what} counts and lists them)")
    return said
