"""Why a quantised weight differs: its scales or zero points were left out, or its codes were taken in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from trainprobe.ckpt_compare.cause import Cause, Mismatch, Values, count, dense
from trainprobe.ckpt_compare.pieces import LogicalTensor, bottom
from trainprobe.ckpt_compare.quantised import Quantised, scheme_of, seen_as

WORD = 8  # codes of 4 bits in 32
ORDER = "quantised codes in another order inside their words"


def quantised(mismatches: Sequence[Mismatch]) -> Iterator[Cause]:
    """Find what was done wrong with the parts of quantised weights."""
    found: dict[str, set[str]] = {}
    for o in mismatches:
        sentence = next((said for said in (_missing(o), _treated(o)) if said), "")
        if sentence:
            found.setdefault(sentence, set()).add(o.key)
    for sentence, keys in found.items():
        yield Cause(f"{count(keys)} {sentence}", frozenset(keys))


def _missing(o: Mismatch) -> str:
    for side, tensor in (("A", o.a), ("B", o.b)):
        source = bottom(tensor.pieces[0].source)
        if isinstance(source, Quantised) and source.lacks:
            return f"stored without scales in {side}: {source.lacks.rpartition('.')[2]} is missing"
    return ""


def _treated(o: Mismatch) -> str:
    """Say what makes the values of one side those of the other; nothing where it is not found."""
    for side, mine, other in (("B", o.a, o.b), ("A", o.b, o.a)):
        if scheme_of(mine):
            units, scales, zeros = (dense(seen_as(mine, view)) for view in ("units", "scales", "zeros"))
            values = dense(other)
            if units is None or scales is None or zeros is None or values is None:
                continue
            rough = max(2.0**-12, other.format.epsilon)
            for said, made in _ways(units, scales, zeros):
                if _equal(made, values, rough):
                    return said.format(scale=_scales_of(mine), side=side)
            with np.errstate(all="ignore"):
                found = values / scales
            levels, rough = units + zeros, rough * (1 + float(np.max(np.abs(zeros), initial=0)))
            if any(_shuffled(x, y, rough) for x, y in ((levels, found + zeros), (levels.T, (found + zeros).T))):
                return ORDER
    return ""


def _ways(units: Values, scales: Values, zeros: Values) -> Iterator[tuple[str, Values]]:
    yield "the codes alone in {side}: their scales ({scale}) were left out", units
    with np.errstate(all="ignore"):
        yield "divided by their scales ({scale}) in {side}, and not multiplied", units / scales
    if np.any(zeros):
        yield "without their zero points in {side}", (units + zeros) * scales
    for step in (1, -1):
        word = "less" if step > 0 else "more"
        yield f"as if zero points were one {word} in {{side}}", (units + step) * scales


def _scales_of(tensor: LogicalTensor) -> str:
    source = bottom(tensor.pieces[0].source)
    return source.scales_name if isinstance(source, Quantised) else ""


def _equal(x: Values, y: Values, rough: float) -> bool:
    return x.shape == y.shape and bool(np.all(np.abs(x - y) <= rough * np.maximum(np.abs(x), np.abs(y))))


def _shuffled(x: Values, y: Values, rough: float) -> bool:
    if x.ndim != 2 or x.shape != y.shape or x.shape[1] % WORD or not np.isfinite(y).all():
        return False
    left, right = (np.sort(v.reshape(-1, WORD), axis=1) for v in (x, y))
    return bool(np.all(np.abs(left - right) <= max(rough, 1e-3) * np.maximum(np.abs(left), 1)))
