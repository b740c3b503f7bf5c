"""Causes that lie in what a token was scored with: weights, neighbours in a batch, experts, the cache, the context."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainprobe.rollout.logprobs.cause import GapCause, above, all_of, correlation, grouped, ranks, share
from trainprobe.rollout.logprobs.tokens import Mask, NoiseFloor, ScoredTokens

_MOST_BUCKETS = 8


def stale(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap grows with the age of the weights that wrote a sequence."""
    if scored.version is None or len(scored.counted) < 30:
        return None
    version = scored.of(scored.version)
    names, means, _ = grouped(scored.size, version)
    if len(names) < 2:
        return None
    by_row = scored.by_row(scored.size)
    age = names.max() - scored.by_row(version)
    seen = np.isfinite(by_row)
    grows = correlation(ranks(age[seen]), ranks(by_row[seen]))
    young, old, whole = float(means[-1]), float(means[0]), float(scored.size.mean())
    if grows < 0.5 or old < 3 * young or seen.sum() < 8 or old <= floor.typical:
        return None
    older = version < names.max()
    return GapCause(
        "stale",
        f"The engine's weights are stale: the mean gap is {young:.2g} at version {names[-1]:g} and {old:.2g} at version "
        f"{names[0]:g}",
        1 - young / whole,
        f"{int(older.sum()):,} tokens of older versions",
        "Push the weights before each rollout, bound the age of what is trained on, or correct by the importance weight.",
        {"rank correlation with age": grows, "mean gap of the newest": young, "mean gap of the oldest": old},
    )


def packing(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """In each micro-batch one sequence agrees (the first, or the longest), and the others do not."""
    if scored.micro_batch is None or not len(scored.counted):
        return None
    by_row = scored.by_row(scored.size)
    micro = scored.by_row(scored.of(scored.micro_batch))
    seen = np.isfinite(by_row)
    by_row, micro = by_row[seen], micro[seen]
    names, inverse, counts = np.unique(micro, return_inverse=True, return_counts=True)
    least = np.full(len(names), np.inf)
    np.minimum.at(least, inverse, by_row)
    several = counts >= 2
    agrees = by_row <= floor.allowed
    far = by_row > 5 * floor.allowed
    if several.sum() < 3 or (least[several] <= floor.allowed).mean() < 0.8 or far.mean() < 0.3:
        return None
    first = np.concatenate([[True], micro[1:] != micro[:-1]])
    which = "first" if agrees[first].mean() > 0.9 and far[~first].mean() > 0.5 else "one"
    return GapCause(
        "packing",
        f"The score of a sequence depends on its micro-batch: the {which} sequence of each agrees"
        f"{'' if which == 'first' else ' (the longest has no padding)'}, {far.mean():.0%} of all sequences do not",
        float(1 - by_row[agrees].mean() / by_row.mean()) if agrees.any() else 0.0,
        f"{int(far.sum()):,} of {len(by_row):,} sequences",
        "Hide packed neighbours and padding by the attention mask, and let positions begin anew at each sequence.",
        {"sequences that agree": float(agrees.mean()), "sequences that do not": float(far.mean())},
    )


def router_flips(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """Few tokens hold nearly all of the gap; where the experts are known, they are those that went to other experts."""
    size = scored.size
    if len(size) < 30 or float(size.mean()) <= floor.allowed:
        return None
    excess = above(size, floor)
    if scored.flipped is not None:
        flips = scored.flipped[scored.counted]
        if not flips.any() or flips.all():
            return None
        inside, outside = float(size[flips].mean()), float(size[~flips].mean())
        if inside < 5 * outside:
            return None
        behind = scored.at >= _first_flip(scored, flips)
        held = share(behind, excess)
        return GapCause(
            "router flips",
            f"The router sends {flips.mean():.2%} of the tokens to other experts: they hold {share(flips, excess):.0%} of the "
            f"gap, and with the tokens behind them in their sequences {held:.0%}",
            held,
            f"{int(flips.sum()):,} of {len(size):,} tokens",
            "Replay the engine's choice of experts in the trainer, or compute the router in float32 on both sides.",
            {"mean gap where experts differ": inside, "mean gap elsewhere": outside, "tokens": float(flips.mean())},
        )
    few = size > np.quantile(size, 0.9)
    held, middle = share(few, excess), float(np.median(size))
    tail = float(np.quantile(size, 0.99)) / middle if middle > 0 else np.inf
    spread = len(set(scored.row[scored.counted][few].tolist())) / max(1, int((scored.lengths > 0).sum()))
    if held < 0.6 or tail < 30 or spread < 0.3:
        return None
    return GapCause(
        "router flips",
        f"Few tokens hold the gap: a tenth of them {held:.0%}, as where a router chooses other experts",
        held,
        f"{int(few.sum()):,} of {len(size):,} tokens, in {spread:.0%} of the sequences",
        "Record the experts of both sides (trainer_experts, engine_experts), and replay the engine's choice in the trainer.",
        {"share in a tenth of the tokens": held, "99th percentile over median": float(min(tail, 1e9))},
    )


def _first_flip(scored: ScoredTokens, flips: Mask) -> npt.NDArray[np.int64]:
    """Return which counted token of its sequence has other experts first, for each counted place, [k]."""
    first = np.full(scored.rows, np.iinfo(np.int64).max)
    rows = scored.row[scored.counted]
    np.minimum.at(first, rows[flips], scored.at[flips])
    return first[rows]


def drift(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The first token of a response agrees, and the gap grows with the number of steps behind it."""
    profile = _profile(scored)
    if profile is None or (whole := float(scored.size.mean())) <= floor.allowed:
        return None
    first, trend, late = profile
    if first > max(0.15 * whole, floor.typical) or trend < 0.7 or late < 2 * whole * 0.5:
        return None
    return GapCause(
        "drift",
        f"The gap grows along the response: {first:.2g} at its first token, which the prefill scores, {late:.2g} at the end",
        1 - first / whole,
        "the later tokens of each response",
        "Look at the engine's KV cache: its number format, what it evicts or overwrites, and the positions of decode steps.",
        {"mean gap at the first token": first, "at the last quarter": late, "rank correlation with position": trend},
    )


def context(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap is there from the first token of the response on, and in nearly all: another context."""
    profile = _profile(scored)
    if profile is None or (whole := float(scored.size.mean())) <= floor.allowed:
        return None
    first, trend, late = profile
    dense = float((scored.size > floor.typical).mean())
    if first < 0.25 * whole or dense < 0.5:
        return None
    other = (
        "another RoPE base or scaling"
        if trend > 0.7 and late > 1.3 * first
        else "another chat template or prompt"
        if trend < -0.7
        else "another RoPE base, chat template or prompt"
    )
    weights = "" if scored.version is not None else ", or other weights (no column has their version)"
    return GapCause(
        "context",
        f"The two sides see {other}{weights}: the gap is {first:.2g} at the first token of a response, and in {dense:.0%} "
        "of all tokens",
        dense,
        all_of(scored),
        "Print the ids of the whole prompt on both sides, then compare rope_theta, scaling and the versions of the weights.",
        {"mean gap at the first token": first, "at the last quarter": late, "rank correlation with position": trend},
    )


def _profile(scored: ScoredTokens) -> tuple[float, float, float] | None:
    """Return the mean gap at first tokens, the rank correlation of mean gap and position, and the mean gap at late tokens."""
    at, longest = scored.at, int(scored.lengths.max(initial=0))
    if longest < _MOST_BUCKETS or not (at == 0).any():
        return None
    bucket = np.minimum(at * _MOST_BUCKETS // longest, _MOST_BUCKETS - 1)
    names, means, counts = grouped(scored.size, bucket)
    usual = counts >= max(8, len(at) // 200)
    late = scored.size[at >= 0.75 * scored.lengths[scored.row[scored.counted]]]
    trend = correlation(ranks(names[usual]), ranks(means[usual])) if usual.sum() >= 3 else 0.0
    return float(scored.size[at == 0].mean()), trend, float(late.mean()) if len(late) else 0.0
