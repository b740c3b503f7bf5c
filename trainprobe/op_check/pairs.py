"""Two dumps of the same steps: where an operator was given the same inputs, which of the two results is nearer the truth."""

from __future__ import annotations

from trainprobe.op_check.conclusion import Conclusion, conclude, said
from trainprobe.op_check.dump import DumpChecked, Row

_APART = 4.0  # times further away, before one is said to be nearer


def three_way(a: DumpChecked, b: DumpChecked) -> Conclusion:
    """Return the conclusion of both: each judged by itself, and A against B where the inputs are the same bits."""
    conclusions = conclude(a), conclude(b)
    theirs = {(row.step, row.rank, row.entry): row for row in b.rows}
    details = [f"A: {conclusions[0].sentence}", f"B: {conclusions[1].sentence}"]
    same = 0
    for row in a.rows:
        other = theirs.get((row.step, row.rank, row.entry))
        if other is None or other.key != row.key:
            continue
        same += 1
        nearer = _nearer(row, other)
        if nearer:
            details.append(f"{row.entry}{f' in {row.module}' if row.module else ''}: {nearer}")
    details.insert(2, f"{same} of {len(a.rows)} calls of A were given the same inputs in B")
    worse = max((0, 1), key=lambda i: (_order(conclusions[i].code), i == 0))
    worst = conclusions[worse].worst
    at = "AB"[worse]
    text = f"{at}, {said(worst)}" if worst is not None and conclusions[worse].code in (1, 2) else conclusions[worse].sentence
    return Conclusion(text, conclusions[worse].code, worst, details)


def _order(code: int) -> int:
    return {0: 0, 1: 1, 3: 2, 2: 3}[code]


def _nearer(a: Row, b: Row) -> str:
    far = [max((j.worst for j in row.checked.judgements), default=0.0) for row in (a, b)]
    if max(far) <= 1.0 or max(far) < _APART * min(far):
        return ""
    name, other = ("B", "A") if far[0] > far[1] else ("A", "B")
    return f"{name} is nearer the truth ({min(far):.3g} bounds away, {other} {max(far):.3g})"
