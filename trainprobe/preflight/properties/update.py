"""Update: one step of the optimizer moves every weight that it should, downhill, and the loss of the same batch falls."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from inspect import signature

import torch
from torch import Tensor
from torch.optim import LBFGS, SparseAdam

from trainprobe.engine.capture.step_gradients import dot, relative, sampled
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.words import and_more
from trainprobe.preflight import first_steps
from trainprobe.preflight.report import BROKEN, Line, broken, holds, not_applicable
from trainprobe.preflight.subject import LOSS, Subject

FORMULA = 1e-3  # of the largest step of a tensor that one may be off
LOST = 0.01  # share of the weights from which it is told


def examine(subject: Subject) -> Line:
    """Let the optimizers step once on the gradients of the batch, look at what moved, and run the batch again."""
    if not subject.optimizers:
        return not_applicable("no optimizer was given")
    base = subject.base
    if any(isinstance(optimizer, LBFGS) for optimizer in subject.optimizers):
        return not_applicable("LBFGS runs the loss itself, as often as it likes")
    subject.guard.rewind()
    sparse = {
        id(p) for o in subject.optimizers if isinstance(o, SparseAdam) for group in o.param_groups for p in group["params"]
    }
    for name, p in subject.parameters.items():
        gradient = base.gradients.get(name)
        p.grad = None if gradient is None else gradient.to_sparse(1) if id(p) in sparse else gradient.clone()
    groups = [group for optimizer in subject.optimizers for group in optimizer.param_groups]
    rates = {id(p): float(group.get("lr", 1.0)) for group in groups for p in group["params"]}
    wanted = attempt(lambda: _moves(subject), otherwise=lambda _: {})
    try:
        for optimizer in subject.optimizers:
            optimizer.step()
        line = _judged(subject, rates, wanted)
        return replace(line, text="; ".join([line.text, *first_steps.remarks(subject)])) if line.status != BROKEN else line
    finally:
        subject.guard.put_back()
        subject.guard.clear_gradients()


def _moves(subject: Subject) -> dict[str, Tensor]:
    """Return parameter → some elements of what its one optimizer, of torch.optim, adds to it in float64: see `sampled`."""
    held = Counter(number for ids in subject.held for number in ids)
    names, found = {id(p): name for name, p in subject.parameters.items() if held[id(p)] == 1}, dict[str, Tensor]()
    for optimizer in subject.optimizers:
        kind = type(optimizer)
        taken = signature(kind).parameters.keys() - {"params", "foreach", "fused", "capturable"}
        for group in optimizer.param_groups if kind.__module__.startswith("torch.optim") else ():
            for p in (p for p in group["params"] if id(p) in names and p.grad is not None and p.grad.layout is torch.strided):
                wide = p.detach().double().requires_grad_()
                wide.grad = p.grad.double()
                own = kind([wide], **{key: value for key, value in group.items() if key in taken})
                own.state[wide] = {key: deepcopy(x).to(torch.float64) if isinstance(x, Tensor) else x
                                   for key, x in optimizer.state.get(p, {}).items()}  # fmt: skip
                own.step()
                found |= sampled({names[id(p)]: wide.detach() - p.detach().double()})
    return found


def _off(subject: Subject, wanted: dict[str, Tensor]) -> tuple[list[str], float]:
    """Return the parameters whose step is not that of the formula, and the share of elements that are rounded back."""
    before, off, kept, count = subject.guard.copies(), list[str](), 0, 0
    for name, move in wanted.items():
        p = subject.parameters[name]
        old, new = (sampled({name: x.detach().double()})[name] for x in (before[id(p)].to(p.device), p))
        fine = torch.finfo(p.dtype).eps * torch.maximum(old.abs(), new.abs()) + FORMULA * move.abs().max()
        off += [name] if bool(((new - old - move).abs() > fine).any()) else []
        kept, count = kept + int(((new == old) & (move != 0)).sum()), count + int((move != 0).sum())
    return off, kept / max(count, 1)


def _judged(subject: Subject, rates: dict[int, float], wanted: dict[str, Tensor]) -> Line:
    base, before, still, predicted = subject.base, subject.guard.copies(), list[str](), 0.0
    least = subject.eps * dot(base.gradients, base.gradients) ** 0.5  # of a gradient that is not rounding alone
    for name, p in subject.parameters.items():
        move, gradient = p.detach() - before[id(p)].to(p.device), base.gradients.get(name)
        if gradient is not None:
            predicted += float((gradient.double() * move.double()).sum())
            still += [name] if float(gradient.norm()) > least and not bool(move.any()) else []
    held = [n for n in still if id(subject.parameters[n]) in rates]
    if all(rate == 0 for rate in rates.values()):
        return not_applicable("the learning rate of this step is 0, as at the start of a warm-up")
    if len(still) == len(subject.parameters) or [n for n in held if rates[id(subject.parameters[n])] != 0]:
        return broken(f"the optimizer does not move {and_more(held)}, which has a gradient", count=len(held))
    if held:
        return broken(f"the learning rate of {and_more(held)} is 0, and that of others is not", count=len(held))
    off, kept = _off(subject, wanted)
    if off:
        return broken(
            f"the step of {and_more(off)} is not what its optimizer does in float64: a hook, or what wraps it, changes it",
            count=len(off),
        )
    after = subject.run(rewind=None, backward=False)
    if predicted > 0:
        return broken(f"the optimizer goes uphill: by {predicted:.3g} of the loss to first order", predicted=predicted)
    figures = {"change": after.loss - base.loss, "predicted": predicted}
    if not figures["change"] <= 0 and subject.beyond(relative(after.loss, base.loss), LOSS):
        text = f"the loss of this batch rises from {base.loss:.4g} to {after.loss:.4g} in one step"
        return broken(f"{text}, {predicted:.3g} was expected: the learning rate is too large", **figures)
    lost = f"; {kept:.0%} of the weights do not move, as their dtype rounds it away" if kept > LOST else ""
    text = "one step changes the loss by {change:.3g}, to first order by {predicted:.3g}".format(**figures)
    return holds(f"{text}{lost}", **figures)
