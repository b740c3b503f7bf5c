"""Causality and documents: no token sees a later one or another document, and the label of each is the next token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainprobe.engine.capture.step_gradients import distance
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import LOGITS, Seen, Subject

MOST = 0.9  # share of the targets that are a neighbouring token of the batch


def examine(subject: Subject) -> Line:
    """Read the targets off the gradient of the logits, change the later tokens of each row, then single documents."""
    if (found := _given_targets(subject)) is not None:
        return found
    batch, logits, labels = subject.batch, subject.base.logits, subject.batch.text_labels
    tokens = batch.of("tokens")
    of_each = tokens is not None and labels is not None and float((labels[:, :-1] == tokens[:, 1:]).double().mean()) > MOST
    if tokens is not None and logits is not None and logits.shape == tokens.shape and of_each:  # a loss for each token
        quiet = holds("later tokens change no loss before them; labels are the next tokens")
        return _later(subject, batch) or _documents(subject, batch) or quiet
    if tokens is None or logits is None or logits.dim() not in (2, 3):
        return not_applicable("the loss is not that of a text: no tokens [rows, time] with logits [rows, time, vocabulary]")
    readings = [batch, *(batch.reading(i) for i in reversed(batch.texts()) if i != batch.roles["tokens"])]
    shifts = [shift_of(_beside(subject.base, text), text.leaves[text.roles["tokens"]]) for text in readings]
    if 1 in shifts:
        read = readings[shifts.index(1)]
        return _later(subject, read) or _documents(subject, read) or holds("later tokens change nothing before them")
    if logits.dim() == 3 and shifts[0] is not None:
        return _shifted(shifts[0])
    for read, shift in zip(readings, shifts, strict=True):
        if shift is not None and _reads(subject, read) and _later(subject, read) is None:  # no autoencoder
            return _shifted(shift)
    if all(_beside(subject.base, text).logits is None for text in readings):
        return not_applicable(f"the logits {list(logits.shape)} do not stand beside the tokens {list(tokens.shape)}")
    return not_applicable("the targets are not the next tokens of the batch")


def _shifted(shift: int) -> Line:
    if shift == 0:
        return broken("the target of each token is the token itself: labels are not shifted", shift=0)
    what = "labels are shifted twice" if shift == 2 else "labels are shifted the wrong way"
    return broken(f"{what}: the target at t is the token at t{shift:+d}", shift=shift)


def _beside(seen: Seen, batch: Batch) -> Seen:
    """Return the logits of a run, and their slope, beside the tokens: [rows, time, …], also where the loop flattened them.

    Both are None where they do not stand beside the tokens.
    """
    rows, time = batch.leaves[batch.roles["tokens"]].shape
    flat = seen.logits is not None and seen.logits.dim() == 2 and len(seen.logits) == rows * time != rows
    x, slope = (t.reshape(rows, time, -1) if flat and t is not None else t for t in (seen.logits, seen.slope))
    beside = x is not None and x.dim() > 1 and x.shape[0] == rows and 0 <= time - x.shape[1] <= 1
    return Seen(seen.loss, logits=x if beside else None, slope=slope if beside else None)


def _reads(subject: Subject, batch: Batch) -> bool:
    """Tell whether the model is given these tokens: others change its logits."""
    every = torch.ones_like(batch.leaves[batch.roles["tokens"]], dtype=torch.bool)
    other, before = (
        subject.run(batch.with_role("tokens", batch.other_tokens(every)), backward=False).logits,
        subject.base.logits,
    )
    return other is not None and before is not None and subject.beyond(distance(before, other), LOGITS)


def _given_targets(subject: Subject) -> Line | None:
    """Change the later labels of an encoder with a decoder: the logits up to the first of them must be the same."""
    labels, logits = subject.batch.of("labels"), subject.base.logits
    decodes = getattr(getattr(subject.model, "config", None), "is_encoder_decoder", False)
    if labels is None or logits is None or logits.shape[:-1] != labels.shape or labels.dim() != 2 or not decodes:
        return None
    edge, later = labels.shape[1] // 2, labels[:, labels.shape[1] // 2 :]
    other = torch.cat([labels[:, :edge], torch.where(later >= 0, later.roll(1, 1).clamp_min(0), later)], dim=1)
    seen = subject.run(subject.batch.with_role("labels", other), backward=False)
    if seen.logits is None or seen.logits.shape != logits.shape:
        return None
    gap = distance(logits[:, : edge + 1], seen.logits[:, : edge + 1])
    if subject.beyond(gap, LOGITS):
        return broken("the decoder is given the target that it predicts: labels are not shifted to the right", gap=gap)
    return holds("no target reaches its own prediction")


SMOOTHED = 0.8  # share of what falls that is the target's, at least
_BALANCED = 0.02  # of a sum, in 16 bits


def targets_of(seen: Seen) -> tuple[Tensor, Tensor] | None:
    """Return the class that each row of logits is trained to, [...], and where it is; None where the loss is another.

    The gradient of a cross entropy with respect to logits is negative for the target, for others no more than by the share
    that smoothed labels have, and its sum is 0.
    With respect to probabilities or their logarithms it is of the target alone, as that of the value of an action is.
    """
    if seen.logits is None or seen.slope is None or seen.logits.shape[-1] < 2:
        return None
    slope = seen.slope.double()
    used = slope.abs().amax(-1) > 1e-6 * slope.abs().max()  # else ignored, or certain already
    if not bool(used.any()):
        return None
    falls = -slope[used].clamp(max=0)
    lone = (falls.amax(-1) > SMOOTHED * falls.sum(-1)).double().mean()
    balanced = float(slope[used].sum(-1).abs().mean()) < _BALANCED * float(slope[used].abs().sum(-1).mean())
    return (slope.argmin(-1), used) if lone > MOST and (balanced or _are_shares(seen.logits[used].double())) else None


def _are_shares(x: Tensor) -> bool:
    """Tell whether rows are probabilities or their logarithms."""
    totals = (x.sum(-1), x.logsumexp(-1).exp())
    return any(float((total - 1).abs().mean()) < _BALANCED for total in totals)


def shift_of(seen: Seen, tokens: Tensor) -> int | None:
    """Return by how many places the targets are ahead of the tokens, None where they are others."""
    found = targets_of(seen)
    if found is None:
        return None
    wanted, used = found
    if wanted.dim() != 2:
        return None
    time = wanted.shape[1]
    for shift in (1, 0, 2, -1):
        at = torch.arange(time, device=tokens.device) + shift
        inside = used & ((at >= 0) & (at < tokens.shape[1])).to(used.device)
        ahead = tokens[:, at.clamp(0, tokens.shape[1] - 1)].to(wanted.device)
        if int(inside.sum()) >= 0.5 * int(used.sum()) and float((wanted == ahead)[inside].double().mean()) > MOST:
            return shift
    return None


def _later(subject: Subject, batch: Batch) -> Line | None:
    tokens, mask = batch.leaves[batch.roles["tokens"]], batch.of("mask")
    place, edge = torch.arange(tokens.shape[1], device=tokens.device), tokens.shape[1] // 2
    later = (place > edge).expand(tokens.shape)
    if mask is not None and mask.shape == tokens.shape:
        later = later & mask.bool()
    what = "tokens see later ones: changing those changes outputs before them"
    return _changed(subject, batch, later, (place <= edge).expand(tokens.shape), what)


def _documents(subject: Subject, batch: Batch) -> Line | None:
    begins = begins_of(subject)
    if begins is None:
        return None
    number = begins.cumsum(1)
    first, what = (number == 0) & (number.amax(1, keepdim=True) > 0), "a document of a packed row changes another document"
    quiet = holds("later tokens change nothing before them, packed documents nothing in each other")
    return _changed(subject, batch, first, number > 0, what) or quiet


def begins_of(subject: Subject) -> Tensor | None:
    """Return where a document begins behind another one in its row, [rows, time]; None where no row holds several."""
    positions, documents = subject.batch.of("positions"), subject.batch.of("documents")
    if positions is not None and positions.dim() == 2:
        begins = (positions[:, 1:] == 0) & (positions[:, :-1] > 0)
    elif documents is not None and documents.dim() == 2:
        begins = documents[:, 1:] != documents[:, :-1]
    else:
        return None
    return pad(begins, (1, 0)) if bool(begins.any()) else None


def _changed(subject: Subject, batch: Batch, where: Tensor, looked_at: Tensor, what: str) -> Line | None:
    """Change some tokens of one row; tell, as `what`, that this is seen where it is looked at, and the first module there."""
    rows, before = (where.any(1) & looked_at.any(1)).nonzero(), _beside(subject.base, batch).logits
    if not len(rows) or before is None:
        return None
    alone = torch.zeros_like(where)
    alone[rows[0]] = True  # what other rows change is no matter of time
    other, looked_at = batch.with_role("tokens", batch.other_tokens(where & alone)), looked_at & alone
    after, at = _beside(subject.run(other, backward=False), other).logits, looked_at[:, : before.shape[1]]
    if after is None or after.shape != before.shape or not bool(at.any()):
        return None
    gap = distance(before[at], after[at])
    if not subject.beyond(gap, LOGITS):
        return None

    def same(x: Tensor) -> Tensor | None:
        if x.dim() > 2 and x.shape[:2] == where.shape:
            return x[looked_at]
        turned = x.dim() == 3 and (x.shape[0], x.shape[2]) == tuple(where.shape) != tuple(x.shape[:2])
        return x.transpose(1, 2)[looked_at] if turned else None

    return broken(f"{what}, first in {subject.first_difference(batch, other, same) or 'the logits'}", gap=gap)
