"""Overfit: after 20 steps on this one batch its loss is far lower, and not with the inputs of another row."""

from __future__ import annotations

from math import isfinite

import torch

from trainprobe.preflight.properties.input import content_of
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import Subject

STEPS = 20
RATES = 0.2, 0.03  # of Adam, relative to the size of each weight; the second where the first does not do
LOW = 0.5  # share of the first loss under which what is learnt is more than how frequent each target is
FALL = 0.1  # share of the loss that it falls by at least
WORSE = 0.1  # share of that fall which is lost at least with other inputs


def examine(subject: Subject) -> Line:
    """Train on the batch with an Adam of its own, then give each row the input of its neighbour, and zeros; put all back."""
    start, weights = subject.base.loss, subject.parameters.values()
    if lack := subject.lack(3 * sum(p.numel() * p.element_size() for p in weights)):
        return not_applicable(f"gradients and the two averages of Adam {lack}")
    end = next((low for rate in RATES if start - (low := _trained(subject, rate)) >= FALL * abs(start)), None)
    if end is None:
        return broken(f"{STEPS} steps on this batch alone leave its loss at {start:.4g}: it learns nothing", loss=start)
    told = f"{STEPS} steps on this batch change its loss from {start:.4g} to {end:.4g}"
    batch, others = subject.batch, dict[str, float]()
    labels, content = batch.of("labels"), content_of(batch)
    alike = labels is None or batch.rows < 2 or not content or bool((labels == labels[:1]).all())
    if alike or end > LOW * start:
        return holds(
            f"{told}; the use of inputs was not seen{' (no labels of rows that differ)' if alike else ''}", start=start, end=end
        )
    for what, change in (("of another row", lambda x: x.roll(1, 0)), ("of zeros", torch.zeros_like)):
        other = batch.with_leaves({i: change(batch.leaves[i]) for i in content})
        others[what] = subject.run(other, rewind=None, backward=False).loss
    told = f"{told}; with inputs {', '.join(f'{what} it is {loss:.4g}' for what, loss in others.items())}"
    figures = {"start": start, "end": end, "other_row": others["of another row"], "zeros": others["of zeros"]}
    unused = [what for what, loss in others.items() if isfinite(loss) and loss - end < WORSE * (start - end)]
    return broken(f"what is learnt does not use the inputs: {told}", **figures) if unused else holds(told, **figures)


def _trained(subject: Subject, rate: float) -> float:
    """Return the loss after the steps, whose weights stay."""
    subject.guard.rewind()
    parameters = subject.parameters
    sizes = {name: float(p.detach().double().pow(2).mean().sqrt()) or 0.02 for name, p in parameters.items()}
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate * sizes[name]} for name, p in parameters.items()], foreach=False)
    for _ in range(STEPS):
        for name, gradient in subject.run(rewind=None, kept=dict).gradients.items():
            parameters[name].grad = gradient
        optimizer.step()
    return subject.run(rewind=None, backward=False).loss
