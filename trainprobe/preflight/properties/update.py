"""Update: one step of the optimizer moves every weight that it should, downhill, and the loss of the same batch falls."""

from __future__ import annotations

from torch.optim import LBFGS, SparseAdam

from trainprobe.engine.core.words import and_more
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import LOSS, Subject, dot, relative


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
    try:
        for optimizer in subject.optimizers:
            optimizer.step()
        return _judged(subject, rates)
    finally:
        subject.guard.put_back()
        subject.guard.clear_gradients()


def _judged(subject: Subject, rates: dict[int, float]) -> Line:
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
    after = subject.run(rewind=None, backward=False)
    if predicted > 0:
        return broken(f"the optimizer goes uphill: by {predicted:.3g} of the loss to first order", predicted=predicted)
    figures = {"change": after.loss - base.loss, "predicted": predicted}
    if not figures["change"] <= 0 and subject.beyond(relative(after.loss, base.loss), LOSS):
        text = f"the loss of this batch rises from {base.loss:.4g} to {after.loss:.4g} in one step"
        return broken(f"{text}, {predicted:.3g} was expected: the learning rate is too large", **figures)
    return holds("one step changes the loss by {change:.3g}, to first order by {predicted:.3g}".format(**figures), **figures)
