"""Padding: what the mask hides and how much padding there is changes neither loss nor gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from trainprobe.engine.capture.step_gradients import relative
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import LOSS, Seen, Subject

COLUMNS = 3


def examine(subject: Subject) -> Line:
    """Change tokens and labels under the mask and add padding, all at once and then each alone; take a row's targets away."""
    batch = subject.batch
    tokens, mask, labels = batch.of("tokens"), batch.of("mask"), batch.text_labels
    if tokens is None or mask is None or mask.shape != tokens.shape:
        return not_applicable("the batch has no mask beside its tokens")
    hidden = mask == 0
    changes, every = _changes(subject, hidden)
    seen = attempt(subject.run, every, otherwise=lambda _: None)
    skipped = ""
    if seen is None or subject.differs(seen):
        for what, other in changes.items():
            alone = attempt(subject.run, other, otherwise=fault_text)
            if isinstance(alone, str):
                skipped = f"; not tested: {what} ({alone})"
            elif subject.differs(alone):
                return broken(_sentence(subject, what, other, alone, hidden), loss=alone.loss)
    elif not subject.draws:
        subject.order_is_free = True
    if subject.draws:
        return not_applicable(f"the step draws random numbers ({subject.draws}), other ones with more padding")
    tested = [what for what in changes if f"{what} (" not in skipped]
    found = attempt(lambda: subject.other_row, otherwise=lambda _: None) if labels is not None and batch.rows > 1 else None
    if found is not None and not found[1].finite:
        alone = attempt(lambda: subject.run(batch.with_other_last(hidden=False)).finite, otherwise=lambda _: False)
        row = "of padding alone" if alone else "whose labels are all ignored"
        return broken(f"a row {row} makes the loss {found[1].loss} or its gradient not finite")
    tested += ["a row of padding without targets"] if found is not None else []
    return holds(f"{', '.join(tested)}{skipped}") if tested else not_applicable(skipped.removeprefix("; "))


def _changes(subject: Subject, hidden: Tensor) -> tuple[dict[str, Batch], Batch]:
    """Return the batch with each change that must not matter, and with all of them. hidden: what the mask hides."""
    batch, labels = subject.batch, subject.batch.text_labels
    changes, every = dict[str, Batch](), batch
    if bool(hidden.any()):
        changes["tokens under the mask"] = every = batch.with_role("tokens", batch.other_tokens(hidden))
        if labels is not None and bool((labels[hidden] != batch.ignored).any()):
            other = torch.where(hidden, batch.other_tokens(hidden), labels)
            changes["labels under the mask"], every = batch.with_role("labels", other), every.with_role("labels", other)
    if not subject.draws:
        left = bool(hidden[:, 0].any())
        changes["more padding"], every = batch.padded(COLUMNS, left), every.padded(COLUMNS, left).reversed()
    return changes, every


def _sentence(subject: Subject, what: str, other: Batch, seen: Seen, hidden: Tensor) -> str:
    change, left = _change(subject, seen), bool(hidden[:, 0].any())
    if what == "labels under the mask":
        return f"padding counts: other labels where the mask is 0 change {change}"
    place = _place(subject, other, ~hidden, left)
    if what == "more padding":
        return f"{COLUMNS} more columns on the {'left' if left else 'right'} change {change}{place}"
    if not place and _predicted_from_padding(subject.batch, hidden):
        place = ": the first target behind the padding is predicted from padding, whose label should be ignored"
    return f"other tokens where the mask is 0 change {change}{place}"


def _predicted_from_padding(batch: Batch, hidden: Tensor) -> bool:
    labels = batch.text_labels
    return labels is not None and bool((hidden[:, :-1] & ~hidden[:, 1:] & (labels[:, 1:] != batch.ignored)).any())


def _change(subject: Subject, seen: Seen) -> str:
    if not seen.finite:
        return f"the loss to {seen.loss}"
    before = subject.base.loss
    if subject.beyond(relative(before, seen.loss), LOSS):
        factor = seen.loss / before if before else float("inf")
        by = f"the factor {factor:.4g}" if abs(factor - 1) > 1e-3 else f"{factor - 1:.1e} of its value"
        return f"the loss by {by} ({before:.7g} to {seen.loss:.7g})"
    return f"the gradient by {seen.gap:.2g} of its norm"


def _place(subject: Subject, other: Batch, mask: Tensor, left: bool) -> str:
    """Return the first module whose output changes where the mask lets it through, as text; other: may have more columns."""

    def same(x: Tensor) -> Tensor | None:
        more = x.shape[1] - mask.shape[1] if x.dim() > 2 and len(x) == len(mask) else -1
        if more not in (0, COLUMNS):
            return None
        return (x[:, more:] if left else x[:, : mask.shape[1]])[mask.to(x.device)]

    found = subject.first_difference(subject.batch, other, same)
    return f"; first in {found}" if found else ""
