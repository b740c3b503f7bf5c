"""Rows: their order does not matter, and one changes nothing in another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainprobe.engine.capture.step_gradients import distance
from trainprobe.preflight.report import Line, broken, by_design, holds, not_applicable
from trainprobe.preflight.subject import LOGITS, Seen, Subject

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
        if why := batch.grouped or batch.several:
            return not_applicable(why)
        half = batch.rows // 2
        pairs = [*range(half - 1, -1, -1), *range(batch.rows - 1, half - 1, -1)]
        if batch.rows % 2 == 0 < half - 1 and not subject.differs(subject.run(batch.take(pairs))):
            return by_design(f"rows 0 and {half}, and so on, belong together, as chosen and rejected texts do")
        factor = turned.loss / subject.base.loss if subject.base.loss else float("nan")
        text = f"the order of the rows matters: reversed, the loss is {factor:.4g} times as large"
        return broken(f"{text} and the gradient is off by {turned.gap:.2g} of its norm", factor=factor)
    last, (other, seen) = batch.rows - 1, subject.other_row
    if not seen.finite:
        other = batch.take([*range(last), 0])
        seen = subject.run(other)
    before, after = _orders(subject.base.logits, batch.rows), _orders(seen.logits, batch.rows)
    if not before or [x.shape for x in before] != [x.shape for x in after]:
        return holds("their order does not matter; no output has rows, so what one does to another was not seen")
    gaps = [distance(a[:last], b[:last]) for a, b in zip(before, after, strict=True)]
    order = gaps.index(min(gaps))
    if subject.beyond(gaps[order], LOGITS):
        return _coupled(subject, other, gaps[order], order)
    if _compared(subject, seen, order):
        return (
            not_applicable(batch.grouped)
            if batch.grouped
            else by_design("the loss compares rows with each other; outputs of rows are independent")
        )
    return holds("their order does not matter, and one changes nothing in another")


def _orders(x: Tensor | None, rows: int) -> list[Tensor]:
    """Return an output as [rows, …], in two orders: of several results a row, those together, and those a batch apart.

    The second is of a model that is given several texts a row, one batch behind the other.
    """
    if x is None or x.shape[0] % rows:
        return []
    return [x.reshape(rows, -1), x.reshape(-1, rows, x[0].numel()).transpose(0, 1).reshape(rows, -1)]


def _coupled(subject: Subject, other: Any, gap: float, order: int) -> Line:
    rows = subject.batch.rows

    def same(x: Tensor) -> Tensor | None:
        return next((by_row[: rows - 1] for by_row in _orders(x, rows)[order:]), None)

    place = subject.first_difference(subject.batch, other, same)
    modules, parts = dict(subject.model.named_modules()), place.split(".")
    around = [type(modules.get(".".join(parts[: i + 1]))) for i in range(len(parts))]
    kinds = " ".join(kind.__name__.lower() for module in around for kind in module.__mro__)
    for words, what in ((_SHARED, "batch norm"), (_CAPACITY, "experts with a capacity")):
        if any(word in kinds for word in words):
            return by_design(f"{what} ({place}): rows change each other in training", gap=gap)
    if place in ("", "the model") and subject.base.logits is not None and tuple(subject.base.logits.shape) == (rows, rows):
        return by_design("the outputs compare rows with each other: one for each pair of them", gap=gap)
    where = f", first in {place}" if place else ""
    return broken(f"changing row {rows - 1} changes the outputs of other rows{where}", gap=gap)


def _compared(subject: Subject, seen: Seen, order: int) -> bool:
    """Tell whether the slopes of the unchanged rows changed by more than one common factor."""
    slopes = [_orders(x.slope, subject.batch.rows) for x in (subject.base, seen)]
    if not all(slopes) or slopes[0][order].shape != slopes[1][order].shape:
        return False
    a, b = (x[order][:-1].double() for x in slopes)
    size = float((a * a).sum())
    if not size:
        return False
    factor = float((a * b).sum()) / size
    return subject.beyond(distance(a * factor, b), LOGITS, times=100)
