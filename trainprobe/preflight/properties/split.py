"""Split: the gradient of a batch is that of its micro-batches, accumulated as this trainer does it."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from trainprobe.engine.capture.step_gradients import Gradients, apart, dot, relative, sampled
from trainprobe.engine.core.words import counted
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.report import Line, broken, by_design, holds, not_applicable
from trainprobe.preflight.subject import LOSS, Seen, Step, Subject

CLOSE = 1e-3  # relative, of weights that are read off gradients


def examine(subject: Subject) -> Line:
    """Compare the gradient of the batch with that of 2 micro-batches, or of as many as the trainer accumulates."""
    count = max(subject.micro_batches, 2)
    if subject.batch.rows < count:
        return not_applicable(f"a batch of {counted(subject.batch.rows, 'row')} has no {count} micro-batches")
    if subject.batch.grouped:
        return not_applicable(subject.batch.grouped)
    micros = subject.batch.split(count)
    if subject.draws:
        other = not_applicable(f"the step draws random numbers ({subject.draws}), other ones for each micro-batch")
        return other if subject.step is None else _with_draws(subject, subject.step, micros) or other
    parts, whole = list[Seen](), subject.base.gradients
    if subject.step is None:
        parts, whole = [subject.run(micro, kept=sampled) for micro in micros], sampled(whole)
        reported, gradients = sum(part.loss for part in parts) / count, _sum(parts, [1 / count] * count)
    else:
        reported, gradients = subject.accumulate(subject.step, micros)
    if not subject.beyond(gap := apart(whole, gradients)):
        return _reported(subject, micros, reported, gap)
    if not parts:
        whole, gradients = sampled(whole), sampled(gradients)
        parts = [subject.run(micro, kept=sampled) for micro in micros]
    right, left_over = _weights(whole, parts)
    actual, _ = _weights(gradients, parts)
    factors = [a / r if r else float("inf") for a, r in zip(actual, right, strict=True)]
    if subject.beyond(left_over, times=10) or all(relative(factor, 1.0) < CLOSE for factor in factors):
        mixed = "the loss mixes its rows, as batch statistics and balance losses do"
        return by_design(f"no weights of {count} micro-batches give the gradient of the batch: {mixed}")
    figures = _figures(factors)
    if subject.micro_batches == 1:
        text = f"of {count} micro-batches or ranks, each would have to count by its {_named(right, micros)}"
        text = f"{text}, equal weights are wrong by a factor of {_extreme(factors):.3g}"
        text = _sentence(factors, actual, right, micros) if subject.step else text
        return holds(f"for one micro-batch a step; {text}", gap=gap, **figures)
    total = sum(a * part.loss for a, part in zip(actual, parts, strict=True))
    also = "" if reported is None else _fault_of_loss(reported, total, subject.base.loss)
    return broken(f"{_sentence(factors, actual, right, micros)}{also}", gap=gap, **figures)


def _with_draws(subject: Subject, step: Step, micros: list[Batch]) -> Line | None:
    """Compare the step with its micro-batches, one behind the other, which draw the same numbers; None if they count unlike.

    What the whole batch has is unknown then, but of micro-batches of one size each counts as their mean has it.
    """
    if any(share != 1 / len(micros) for shares in _shares(micros).values() for share in shares):
        return None
    gradients = sampled(subject.accumulate(step, micros)[1])
    parts = [subject.run(micro, rewind=None if i else True, kept=sampled) for i, micro in enumerate(micros)]
    actual, left_over = _weights(gradients, parts)
    factors = [weight * len(micros) for weight in actual]
    if subject.beyond(left_over, times=10):
        return None
    if all(relative(factor, 1.0) < CLOSE for factor in factors):
        return holds(f"{len(micros)} micro-batches of one size, which draw other random numbers, count alike")
    return broken(_sentence(factors, actual, [1 / len(micros)] * len(micros), micros), **_figures(factors))


def _figures(factors: list[float]) -> dict[str, float]:
    return {f"factor_{i}": factor for i, factor in enumerate(factors)}


def _sum(parts: list[Seen], weights: list[float]) -> Gradients:
    """Return the gradients of parts, each times a weight, in float64."""
    found = dict[str, Tensor]()
    for part, weight in zip(parts, weights, strict=True):
        found |= {name: found.get(name, 0) + g.double() * weight for name, g in part.gradients.items()}
    return found


def _reported(subject: Subject, micros: list[Batch], reported: float | None, gap: float) -> Line:
    if reported is None or not subject.beyond(relative(reported, subject.base.loss), LOSS, times=100):
        return holds(f"{len(micros)} micro-batches give the gradient of the batch", gap=gap)
    losses = [subject.run(micro, backward=False).loss for micro in micros]
    share = reported / subject.base.loss
    text = f"the gradient holds, but the reported loss is {share:.3g} times that of the batch"
    last = any(relative(reported, losses[-1] * shares[-1]) < CLOSE for shares in _shares(micros).values())
    return broken(f"{text}{': that of the last micro-batch alone' if last else ''}", factor=share)


def _fault_of_loss(reported: float, total: float, right: float) -> str:
    if relative(reported, right) < CLOSE:
        return "; the reported loss is right"
    same = relative(reported, total) < CLOSE
    return f"; the reported loss has {'the same fault' if same else 'another fault'} ({reported:.4g} for {right:.4g})"


def _weights(gradients: Gradients, parts: list[Seen]) -> tuple[list[float], float]:
    """Return the weights of the parts' gradients whose sum is nearest to a gradient, and what is left, relative."""
    products = torch.tensor([[dot(a.gradients, b.gradients) for b in parts] for a in parts], dtype=torch.float64)
    wanted = torch.tensor([dot(a.gradients, gradients) for a in parts], dtype=torch.float64)
    weights = torch.linalg.lstsq(products, wanted.unsqueeze(1)).solution.flatten().tolist()
    return weights, apart(gradients, _sum(parts, weights)) if dot(gradients, gradients) else 0.0


def _shares(micros: list[Batch]) -> dict[str, list[float]]:
    """Return what may be counted → the share of each micro-batch in it."""
    kinds = {"targets": Batch.targets, "tokens": Batch.tokens, "rows": lambda m: m.rows}
    counts = {name: [count(m) for m in micros] for name, count in kinds.items()}
    texts = [(m.ignored, labels) for m in micros if (labels := m.text_labels) is not None]
    shifted = [int((x[:, 1:] != ignored).sum()) for ignored, x in texts]
    if len(shifted) == len(micros):
        counts = {**counts, "targets": shifted, "labels": counts["targets"]}
    counts["micro-batches"] = [1] * len(micros)
    return {name: [c / max(sum(held), 1) for c in held] for name, held in counts.items()}


def _named(weights: list[float], micros: list[Batch]) -> str:
    """Return what the weights count: targets, tokens, rows or micro-batches; by a scale or as they are."""
    total = sum(weights) or 1.0
    for name, shares in _shares(micros).items():
        if all(relative(w / total, s) < CLOSE for w, s in zip(weights, shares, strict=True)):
            return name
    return "content"


def _sentence(factors: list[float], actual: list[float], right: list[float], micros: list[Batch]) -> str:
    count, first = len(micros), factors[0]
    if all(relative(f, first) < CLOSE for f in factors):
        text = f"the gradient of {count} micro-batches is that of the batch times the factor {_number(first)}"
        return f"{text}{_why(first, micros)}"
    lost = [i for i, f in enumerate(factors) if abs(f) < CLOSE]
    if lost:
        return f"micro-batch {lost[0]} has no part in the gradient (factor 0)"
    told = ", ".join(f"{f:.3g}" for f in factors)
    scale = sum(actual)
    whole = f", and all of it times {_number(scale)}" if relative(scale, sum(right)) > CLOSE else ""
    alike = all(relative(a, actual[0]) < CLOSE for a in actual)
    count_by = "alike" if alike else f"by {_named(actual, micros)}"
    text = f"micro-batches count {count_by}, in the whole batch they count by {_named(right, micros)}"
    return f"{text}: their gradients are {told} times what they should be, a factor of up to {_extreme(factors):.3g}{whole}"


def _extreme(factors: list[float]) -> float:
    return max(factors, key=lambda f: abs(f - 1))


def _number(factor: float) -> str:
    near = Fraction(factor).limit_denominator(64)
    return str(near) if relative(float(near), factor) < CLOSE else f"{factor:.4g}"


def _why(factor: float, micros: list[Batch]) -> str:
    wholes = {"micro-batches": len(micros), "rows": sum(m.rows for m in micros), "targets": sum(m.targets() for m in micros)}
    for name, number in wholes.items():
        for text, value in ((f", the {number} {name}", number), (f", 1 / {number} {name}", 1 / number)):
            if relative(factor, value) < CLOSE:
                return text
    return ""
