"""Rows: their order does not matter, and one changes nothing in another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainprobe.preflight.report import Line, broken, by_design, holds, not_applicable
from trainprobe.preflight.subject import LOGITS, Seen, Subject, apart, distance

_SHARED = ("batchnorm", "batch_norm")
_CAPACITY = ("moe", "router", "expert", "gate", "switch")


def examine(subject: Subject) -> Line:
    """Run the rows in reverse order, then put the first row in the place of the last."""
    batch = subject.batch
    if batch.rows < 2:
        return not_applicable("the batch has one row")
    if subject.draws:
        return not_applicable(f"the step draws random numbers ({subject.draws}), other ones for each row")
    if not subject.order_is_free and subject.differs(turned := subject.run(subject.batch.reversed())):
        factor = turned.loss / subject.base.loss if subject.base.loss else float("nan")
        text = f"the order of the rows matters: reversed, the loss is {factor:.4g} times as large"
        return broken(f"{text} and the gradient is off by {apart(subject.base, turned):.2g} of its norm", factor=factor)
    last, (other, seen, finite) = batch.rows - 1, subject.other_row
    if not finite:
        other = batch.take([*range(last), 0])
        seen = subject.run(other)
    before, after = _by_row(subject.base.logits, batch.rows), _by_row(seen.logits, batch.rows)
    if before is None or after is None or before.shape != after.shape:
        return holds("their order does not matter; no output has rows, so what one does to another was not seen")
    gap = distance(before[:last], after[:last])
    if subject.beyond(gap, LOGITS):
        return _coupled(subject, other, gap)
    if _compared(subject, seen):
        return by_design("the loss compares rows with each other; outputs of rows are independent")
    return holds("their order does not matter, and one changes nothing in another")


def _by_row(x: Tensor | None, rows: int) -> Tensor | None:
    return None if x is None or x.shape[0] % rows else x.reshape(rows, -1)


def _coupled(subject: Subject, other: Any, gap: float) -> Line:
    rows = subject.batch.rows

    def same(x: Tensor) -> Tensor | None:
        by_row = _by_row(x, rows)
        return None if by_row is None else by_row[: rows - 1]

    place = subject.first_difference(subject.batch, other, same)
    modules, parts = dict(subject.model.named_modules()), place.split(".")
    around = [type(modules.get(".".join(parts[: i + 1]))) for i in range(len(parts))]
    kinds = " ".join(kind.__name__.lower() for module in around for kind in module.__mro__)
    for words, what in ((_SHARED, "batch norm"), (_CAPACITY, "experts with a capacity")):
        if any(word in kinds for word in words):
            return by_design(f"{what} ({place}): rows change each other in training", gap=gap)
    where = f", first in {place}" if place else ""
    return broken(f"changing row {rows - 1} changes the outputs of other rows{where}", gap=gap)


def _compared(subject: Subject, seen: Seen) -> bool:
    """Tell whether the slopes of the unchanged rows changed by more than one common factor."""
    a, b = (_by_row(x.slope, subject.batch.rows) for x in (subject.base, seen))
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = a[:-1].double(), b[:-1].double()
    size = float((a * a).sum())
    if not size:
        return False
    factor = float((a * b).sum()) / size
    return subject.beyond(distance(a * factor, b), LOGITS, times=100)
