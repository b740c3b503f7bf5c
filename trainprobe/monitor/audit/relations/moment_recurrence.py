"""Moments after an update are those that the optimizer's rule gives for this gradient and the moments before.

Relation, summed over the elements of a parameter (all sums are taken in float64): Σv' = β₂Σv + (1 - β₂)Σg² and
Σm' = β₁Σm + (1 - β₁)Σg, for torch's Adam and AdamW with float32 moments. Floor: 1e-4 of Σv' for the first; for the second
16 ε √n (β₁‖m‖ + ‖g‖). Source: Kingma and Ba (2015), algorithm 1. Of every other optimizer: state of float32 that followed
s' = a s + b g, or b g², at two audited steps or more (see `recurrences`) goes on so, with whatever a and b, within 1000 times
the noise of its sums.
Usually caused by moments that belong to another parameter or shard, by a gradient that changed after it was looked at, or by
a kernel that skipped a part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.updates import UpdateCounts, UsedGroups
from trainprobe.monitor.audit.recurrences import BROKEN, Key, Recurrence, equations_of, learned

COST = frozenset({"fingerprints"})
OBSERVERS = frozenset({"parameter_groups", "updates"})
STAGE = "moments"
STEADY = 2
_FLOOR = 1e-4
_EPSILON = 2.0**-23


def check(evidence: Evidence) -> list[Finding]:
    """Find the first parameter whose moments are not what the rule gives."""
    if not evidence.of(UpdateCounts).once:
        return []
    for name, betas, sign in _judged(evidence):
        found = _second(evidence, name, betas[1]) or _first(evidence, name, betas[0], sign)
        if found is not None:
            return [found]
    return _no_longer_followed(evidence)


def remember(evidence: Evidence) -> dict[Key, Recurrence]:
    """Return the recurrences that the state of each parameter group follows."""
    return learned(evidence, _known(evidence))


def _known(evidence: Evidence) -> dict[Key, Recurrence]:
    return evidence.remembered("moment_recurrence", {})


def _no_longer_followed(evidence: Evidence) -> list[Finding]:
    """Find state that left the recurrence it followed, whatever the optimizer; new factors alone are a schedule's."""
    followed = _known(evidence)
    for key, equations in equations_of(evidence).items():
        known = followed.get(key)
        if known is None or known.steps < STEADY or len(known.factors) != equations.terms(known.squared).shape[1]:
            continue
        off, refit = (equations.off(known.squared, f) for f in (known.factors, equations.solved(known.squared)))
        if off.max() <= BROKEN or refit.max() <= BROKEN:
            continue
        names = [equations.names[i] for i in np.argsort(-off) if off[i] > BROKEN]
        rule = f"{known.factors[0]:.4g} times itself and {known.factors[1]:.4g} times the gradient{'²' * known.squared}"
        text = (
            f"{key[1]} of {and_more(names, len(equations.names))} is no longer {rule}, as at each audited step before. It is "
            f"off by {off.max():.3g} times its noise floor"
        )
        hint = "look for what else writes to the optimizer's state, such as an in-place operation on a view of it"
        return [evidence.found(text, names, key[1], next=hint, floor=BROKEN, severity="error")]
    return []


def _judged(evidence: Evidence) -> Iterator[tuple[str, tuple[float, float], float]]:
    seen = evidence.tensors
    groups = {name: group for group in evidence.of(UsedGroups).groups for name in group.names}
    for name in seen.with_slot("exp_avg_sq_after"):
        group = groups.get(name)
        betas = group.options.get("betas") if group is not None else None
        if group is None or group.kind not in ("Adam", "AdamW") or not isinstance(betas, tuple) or len(betas) != 2:
            continue
        coupled = (
            group.kind == "Adam" and bool(group.options.get("weight_decay")) and not group.options.get("decoupled_weight_decay")
        )
        plain = seen.dtypes.get((name, "exp_avg_sq_after")) == "float32" == seen.dtypes.get((name, "grad"))
        if plain and not coupled and seen.number(name, "grad", "norm") > 0:
            yield name, (float(betas[0]), float(betas[1])), -1.0 if group.options.get("maximize") else 1.0


def _second(evidence: Evidence, name: str, beta: float) -> Finding | None:
    seen = evidence.tensors
    was = seen.number(name, "exp_avg_sq", "sum") if (name, "exp_avg_sq") in seen else 0.0
    expected = beta * was + (1 - beta) * seen.number(name, "grad", "norm") ** 2
    return _judge(evidence, name, "exp_avg_sq_after", expected, _FLOOR * abs(expected) + 1e-30)


def _first(evidence: Evidence, name: str, beta: float, sign: float) -> Finding | None:
    seen = evidence.tensors
    there = (name, "exp_avg") in seen
    was, norm = (seen.number(name, "exp_avg", s) if there else 0.0 for s in ("sum", "norm"))
    gradient, size = seen.number(name, "grad", "norm"), seen.number(name, "grad", "count") ** 0.5
    expected = beta * was + (1 - beta) * sign * seen.number(name, "grad", "sum")
    return _judge(evidence, name, "exp_avg_after", expected, 16 * _EPSILON * size * (beta * norm + gradient) + 1e-30)


def _judge(evidence: Evidence, name: str, slot: str, expected: float, floor: float) -> Finding | None:
    measured = evidence.tensors.number(name, slot, "sum")
    if not abs(measured - expected) > floor:
        return None
    text = (
        f"{slot.removesuffix('_after')} of {name} is not what Adam's rule gives: its sum is "
        f"{measured:.9g}, expected {expected:.9g}"
    )
    return evidence.found(
        text, name, slot.removesuffix("_after"), measured=measured, expected=expected, floor=floor, severity="error"
    )
