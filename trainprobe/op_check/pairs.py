"""Two dumps of the same steps: where an operator was given the same inputs, which of the two results is nearer the truth."""

from __future__ import annotations

from trainprobe.op_check.check import Checked
from trainprobe.op_check.conclusion import Conclusion, conclude, said
from trainprobe.op_check.dump import DumpChecked

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
        text = nearer(row.checked, other.checked)
        if text:
            details.append(f"{row.entry}{f' in {row.module}' if row.module else ''}: {text}")
    details.insert(2, f"{same} of {len(a.rows)} calls of A were given the same inputs in B")
    worse = max((0, 1), key=lambda i: (_order(conclusions[i].code), i == 0))
    worst = conclusions[worse].worst
    at = "AB"[worse]
    text = f"{at}, {said(worst)}" if worst is not None and conclusions[worse].code in (1, 2) else conclusions[worse].sentence
    return Conclusion(conclusions[worse].code, text, details, worst)


def _order(code: int) -> int:
    return {0: 0, 1: 1, 3: 2, 2: 3}[code]


def nearer(a: Checked, b: Checked, names: tuple[str, str] = ("A", "B")) -> str:
    """Return which of two results of the same inputs is nearer the truth, an empty string where neither clearly is."""
    far = [max((j.worst for j in checked.judgements), default=0.0) for checked in (a, b)]
    if max(far) <= 1.0 or max(far) < _APART * min(far):
        return ""
    best = 0 if far[0] < far[1] else 1
    return f"{names[best]} is nearer the truth ({min(far):.3g} bounds away, {names[1 - best]} {max(far):.3g})"
