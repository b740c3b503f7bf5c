"""Padding: what the mask hides and how much padding there is changes neither loss nor gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.preflight.batches import IGNORED, Batch
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import Seen, Subject, apart

COLUMNS = 3


def examine(subject: Subject) -> Line:
    """Change tokens and labels under the mask, add padding where the batch has it, take the targets of one row away."""
    batch = subject.batch
    tokens, mask, labels = batch.of("tokens"), batch.of("mask"), batch.text_labels
    if tokens is None or mask is None or mask.shape != tokens.shape:
        return not_applicable("the batch has no mask beside its tokens")
    hidden, tested, skipped = mask == 0, list[str](), list[str]()
    if bool(hidden.any()):
        tested.append("tokens under the mask")
        if (bad := _under_the_mask(subject, hidden)) is not None:
            return bad
        if labels is not None and bool((labels[hidden] != IGNORED).any()):
            tested.append("labels under the mask")
            other = torch.where(hidden, batch.other_tokens(hidden), labels)
            seen = subject.run(batch.with_role("labels", other))
            if subject.differs(seen):
                return broken(
                    f"padding counts: other labels where the mask is 0 change {_change(subject, seen)}", loss=seen.loss
                )
    if subject.draws:
        return not_applicable(f"the step draws random numbers ({subject.draws}), other ones with more padding")
    left = bool(hidden[:, 0].any())
    more = batch.padded(COLUMNS, left)
    seen = attempt(subject.run, more, otherwise=fault_text)
    if isinstance(seen, str):
        skipped.append(f"more padding ({seen})")
    else:
        tested.append("more padding")
        if subject.differs(seen):
            side = "left" if left else "right"
            return broken(
                f"{COLUMNS} more columns on the {side} change {_change(subject, seen)}{_place(subject, more, left)}",
                loss=seen.loss,
            )
    if labels is not None and batch.rows > 1:
        tested.append("a row without targets")
        empty = labels.clone()
        empty[0] = IGNORED
        seen = attempt(subject.run, batch.with_role("labels", empty), otherwise=lambda _: None)
        if seen is not None and not seen.finite:
            return broken(f"a row whose labels are all ignored makes the loss {seen.loss} or its gradient not finite")
    return holds("; not tested: ".join([", ".join(tested), *skipped]))


def _under_the_mask(subject: Subject, hidden: Tensor) -> Line | None:
    batch = subject.batch
    other = batch.with_role("tokens", batch.other_tokens(hidden))
    seen = subject.run(other)
    if not subject.differs(seen):
        return None
    place = subject.first_difference(batch, other, lambda x, _: _shown(x, ~hidden))
    found = f"; first in {place}" if place else ""
    if not place and _predicted_from_padding(batch, hidden):
        found = ": the first target behind the padding is predicted from padding, whose label should be ignored"
    return broken(f"other tokens where the mask is 0 change {_change(subject, seen)}{found}", loss=seen.loss)


def _predicted_from_padding(batch: Batch, hidden: Tensor) -> bool:
    labels = batch.text_labels
    return labels is not None and bool((hidden[:, :-1] & ~hidden[:, 1:] & (labels[:, 1:] != IGNORED)).any())


def _shown(x: Tensor, mask: Tensor) -> Tensor | None:
    """Return the places of an output [rows, time, …] that the mask lets through."""
    return x[mask.to(x.device)] if x.dim() > 2 and x.shape[:2] == mask.shape else None


def _change(subject: Subject, seen: Seen) -> str:
    if not seen.finite:
        return f"the loss to {seen.loss}"
    before = subject.base.loss
    if abs(before - seen.loss) > subject.tolerance(subject.loss_floor) * abs(before):
        factor = seen.loss / before if before else float("inf")
        by = f"the factor {factor:.4g}" if abs(factor - 1) > 1e-3 else f"{factor - 1:.1e} of its value"
        return f"the loss by {by} ({before:.7g} to {seen.loss:.7g})"
    return f"the gradient by {apart(subject.base, seen):.2g} of its norm"


def _place(subject: Subject, more: Batch, left: bool) -> str:
    tokens, mask = subject.batch.of("tokens"), subject.batch.of("mask")
    assert tokens is not None and mask is not None
    time = tokens.shape[1]

    def same(x: Tensor, side: int) -> Tensor | None:
        if x.dim() < 3 or x.shape[1] != time + COLUMNS * side:
            return None
        return _shown(x[:, COLUMNS:] if side and left else x[:, :time], mask.bool())

    found = subject.first_difference(subject.batch, more, same)
    return f"; first in {found}" if found else ""
