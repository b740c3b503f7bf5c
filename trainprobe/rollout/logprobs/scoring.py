"""Causes that lie in how logits become log-probabilities or weights: temperature, truncation, sums, and low precision."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trainprobe.rollout.logprobs.cause import GapCause, all_of, correlation
from trainprobe.rollout.logprobs.tokens import F64, ROUNDING, SUMS, NoiseFloor, ScoredTokens

_STEADY, _ALIKE = 0.6, 0.8  # share of the gap's variance that the log-probability explains; correlation of both sides
_STEADY_ENOUGH, _VERY_ALIKE = 0.4, 0.95  # the same: noise of this correlation explains a fortieth of the variance
_LEAST_MASS = 0.3  # that top-p and top-k leave
_RATIO = 0.02  # relative error of log weights that are the same


def temperature(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap is proportional to the log-probability, or to its distance from the entropy where that is known.

    At inverse temperature β the log-probability is β·l − log Σ p^β, and its derivative at β = 1 is l + entropy.
    """
    gap, level = scored.gap, scored.trainer[scored.counted]
    if len(gap) < 30 or float(np.mean(np.abs(gap))) <= floor.typical / 2:
        return None
    known = scored.entropy is not None
    if scored.entropy is not None:
        level = level + scored.of(scored.entropy)
    core = np.abs(gap) <= 20 * max(float(np.median(scored.size)), 1e-300)  # single far tokens are no slope
    x, y = level[core], gap[core]
    mean_x, mean_y = (0.0, 0.0) if known else (float(x.mean()), float(y.mean()))
    square = float((x - mean_x) @ (x - mean_x))
    slope = float((x - mean_x) @ (y - mean_y)) / square if square > 0 else 0.0
    rest = gap - mean_y - slope * (level - mean_x)
    steady = 1 - float(rest @ rest) / float(((gap - mean_y) @ (gap - mean_y)) or 1.0)
    both = correlation(scored.trainer[scored.counted], scored.engine[scored.counted])
    telling = steady >= _STEADY_ENOUGH and both >= _VERY_ALIKE
    if not (telling or (steady >= _STEADY and both >= _ALIKE)) or not -0.9 < slope < 10 or abs(slope) < 0.005:
        return None
    return GapCause(
        "temperature",
        f"The temperature is not undone on one side: the gap is {slope:.2g} times the log-probability"
        f"{' less its mean (the entropy)' if known else ''}, as at a temperature of about {1 / (1 + slope):.2g} beside 1",
        min(1.0, steady),
        all_of(scored),
        "Score both sides at one temperature: logits divided by it before the softmax in both, or in neither.",
        {"slope": slope, "share of the variance": steady, "correlation of the sides": both},
        telling,
    )


def truncation(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap has one sign and a bound: the log of the probability that top-p, top-k or min-p kept."""
    gap = scored.gap
    if len(gap) < 30:
        return None
    for side, signed in (("engine", gap), ("trainer", -gap)):
        mean, most = float(signed.mean()), float(np.quantile(signed, 0.999))
        negative = -float(np.minimum(signed, 0).mean())
        usual = negative <= 0.05 * mean + floor.typical / 4 and mean >= 2 * floor.typical
        if not usual or most > -math.log(_LEAST_MASS) or float((signed > 0).mean()) < 0.7:
            continue
        spread = float((signed > 2 * floor.typical).mean())
        if spread < 0.3:
            continue
        explains = max(0.0, 1 - negative / mean)
        return GapCause(
            "truncation",
            f"The {side} renormalises over the tokens that top-p, top-k or min-p keep: its log-probabilities are never lower "
            f"than the other side's, and by {most:.3g} higher at most, which is −log of a kept mass of {math.exp(-most):.2g}",
            explains,
            f"{(signed > 2 * floor.typical).sum():,} of {len(gap):,} tokens",
            "Score without truncation on that side (raw log-probabilities), or apply the same mask of kept tokens in both.",
            {"mean gap": mean, "mean of the other sign": negative, "largest": most, "least kept mass": math.exp(-most)},
        )
    return None


def sum_for_mean(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The weight of a sequence is exp of the sum of its log-ratios, and not of their mean."""
    if scored.sequence_weights is None or not len(scored.counted):
        return None
    weights = scored.by_row(scored.of(scored.sequence_weights))
    total: F64 = np.bincount(scored.row[scored.counted], -scored.gap, minlength=scored.rows).astype(np.float64)
    usable = (scored.lengths >= 4) & np.isfinite(weights) & (weights > 0) & (np.abs(total) > 1e-4)
    if usable.sum() < 4:
        return None
    logs, sums, means = np.log(weights[usable]), total[usable], total[usable] / scored.lengths[usable]

    def fits(of: F64) -> float:
        return max(float((np.abs(logs - sign * of) <= _RATIO * np.abs(of) + 1e-4).mean()) for sign in (1, -1))

    if fits(sums) < 0.9 or fits(means) >= 0.5:
        return None
    largest = float(np.exp(np.abs(logs).max()))
    return GapCause(
        "sum for mean",
        f"The sequence weights are exp of a sum of log-ratios, not of their mean: they reach a factor of {largest:.3g}, and "
        "grow with the length of a response",
        fits(sums),
        f"{int(usable.sum()):,} sequences",
        "Divide the sum of log-ratios by the number of tokens before exp (GSPO's ratio), or weight each token by itself.",
        {"sequences that fit the sum": fits(sums), "sequences that fit the mean": fits(means), "largest factor": largest},
    )


def precision(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """Nothing but rounding, of a coarser format than the file says: one side lies on its grid, or the gap has its size."""
    if len(scored.counted) < 30 or float(scored.size.mean()) <= floor.allowed:
        return None
    sides = {name: scored.__getattribute__(name)[scored.counted] for name in ("engine", "trainer")}
    for dtype in ("bfloat16", "float16"):
        on = {name: _on_grid(values, dtype) for name, values in sides.items()}
        worse = max(on, key=lambda name: on[name])
        relative = float(np.median(scored.size / np.maximum(np.abs(sides[worse]), 1e-12)))
        if on[worse] > 0.99 and min(on.values()) < 0.5 and relative <= ROUNDING[dtype] * 2:
            return GapCause(
                "precision",
                f"Only the precision differs: the {worse}'s log-probabilities are rounded to {dtype}",
                on[worse],
                all_of(scored),
                "Take the log-softmax of float32 logits, and keep log-probabilities in float32.",
                {"share on the grid": on[worse], "median relative gap": relative},
            )
    mean, size = float(scored.gap.mean()), float(scored.size.mean())
    even = abs(mean) <= 0.25 * size
    core = float(np.median(scored.size)) >= 0.2 * size
    unit = _unit(floor)
    coarser = {name: floor.allowed * u / unit for name, u in ROUNDING.items() if u > unit}
    name = next((name for name, most in sorted(coarser.items(), key=lambda item: item[1]) if size <= most), None)
    if not even or not core or name is None or name == "float8" or floor.measured:
        return None
    return GapCause(
        "precision",
        f"Only the precision differs: the gap has both signs, no pattern, and the size that {name} gives",
        1.0 - abs(mean) / size if size else 0.0,
        all_of(scored),
        f"Compute both sides in one format, or give --dtype {name} if that is what they compute in.",
        {"mean gap": mean, "mean absolute gap": size, "allowed": floor.allowed},
    )


def _unit(floor: NoiseFloor) -> float:
    """Return the noise of one rounding that a floor was made from; that of float32 where it was measured."""
    name = next((name for name in ROUNDING if f" {name} " in floor.why), "float32")
    return ROUNDING[name] * SUMS.get(name, 1.0)


def _on_grid(values: F64, dtype: str) -> float:
    """Return the share of values [k] that a format of 16 bits holds exactly."""
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        bits: npt.NDArray[np.uint32] = single.view(np.uint32)
        return float(((bits & 0xFFFF) == 0).mean())
    with np.errstate(over="ignore"):
        return float((single.astype(np.float16).astype(np.float32) == single).mean())
