"""Causes that make the two sides speak of different tokens: a shift, a mask at the wrong place, padding that counts."""

from __future__ import annotations

import numpy as np

from trainprobe.rollout.logprobs.cause import GapCause, above, share
from trainprobe.rollout.logprobs.tokens import Mask, NoiseFloor, ScoredTokens

LAGS = (-3, -2, -1, 1, 2, 3)
_TELLS = 0.8  # of the excess, that an edge or padding must hold


def shift(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The scores of one side agree with those of the other some places on."""
    if len(scored.counted) < 8 or (here := float(np.median(scored.size))) <= floor.typical / 10:
        return None
    best, lag = min((_lagged(scored, lag), lag) for lag in LAGS)
    if best > 0.3 * here or here <= floor.allowed:
        return None
    places = f"{abs(lag)} place{'s' if abs(lag) > 1 else ''}"
    side = "later" if lag < 0 else "earlier"
    return GapCause(
        "shift",
        f"The two sides are {places} apart: the engine's log-probability of a token stands {places} {side} than the trainer's",
        1 - best / here,
        f"all {len(scored.counted):,} tokens",
        "Let both arrays begin at the same token: logits at place t score the token at t + 1.",
        {"lag": lag, "median gap at this lag": best, "median gap at lag 0": here},
    )


def _lagged(scored: ScoredTokens, lag: int) -> float:
    """Return the median |engine[i + lag] − trainer[i]| over places of one sequence that are both counted."""
    good = scored.mask & scored.finite
    here, there = (slice(None, -lag), slice(lag, None)) if lag > 0 else (slice(-lag, None), slice(None, lag))
    both = good[here] & good[there] & (scored.row[here] == scored.row[there])
    return float(np.median(np.abs(scored.engine[there][both] - scored.trainer[here][both]))) if both.sum() > 8 else np.inf


def shifted_mask(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap is in the first or last counted token of most sequences, and nowhere else."""
    excess, lengths = above(scored.size, floor), scored.lengths
    last = scored.at == lengths[scored.row[scored.counted]] - 1
    for edge, part in (("first", scored.at == 0), ("last", last)):
        held = share(part, excess)
        far = excess[part] > 0
        long = float(np.median(lengths[lengths > 0])) if (lengths > 0).any() else 0.0
        if held < _TELLS or far.mean() < 0.5 or long < 4:
            continue
        zero = float((scored.engine[scored.counted][part] == 0).mean())
        where = " (the engine has no score there, but 0)" if zero > 0.5 else ""
        return GapCause(
            "shift",
            f"The mask is shifted: the gap is in the {edge} counted token of {far.mean():.0%} of the sequences{where}",
            held,
            f"the {edge} token of each sequence",
            "Let the mask count the tokens of the response alone, each at the place of its own log-probability.",
            {"share of the excess at the edge": held, "sequences with a gap there": float(far.mean()), "engine is 0": zero},
        )
    return None


def padding(scored: ScoredTokens, floor: NoiseFloor) -> GapCause | None:
    """The gap is in the tail of sequences, where one side has no score or one token id repeats to the end."""
    tail = _dead_tail(scored)[scored.counted]
    held = share(tail, above(scored.size, floor))
    if held < _TELLS or tail.all() or not tail.any():
        return None
    return GapCause(
        "padding",
        f"Padding is counted: {held:.0%} of the gap is in {int(tail.sum()):,} tokens behind the ends of the responses",
        held,
        f"{int(tail.sum()):,} of {len(tail):,} tokens, at the ends of {len(set(scored.row[scored.counted][tail].tolist())):,} "
        "sequences",
        "Let the mask end with the last token that was sampled, and divide by its sum.",
        {"share of the excess": held, "share of the tokens": float(tail.mean())},
    )


def _dead_tail(scored: ScoredTokens) -> Mask:
    """Return the places from which on, to the end of the sequence, one side is exactly 0, or one token id repeats."""
    n, rows = len(scored.row), scored.rows
    dead = np.zeros(n, np.bool_)
    starts, stops = scored.starts[:-1], scored.starts[1:]
    kinds = [((scored.engine == 0) & (scored.trainer != 0), 1), ((scored.trainer == 0) & (scored.engine != 0), 1)]
    if scored.tokens is not None and n:
        ends = scored.tokens[np.maximum(stops - 1, 0)]
        kinds.append(((scored.tokens == ends[scored.row]) & ~((scored.engine == 0) & (scored.trainer == 0)), 2))
    places = np.arange(n)
    for alike, least in kinds:
        last_other = np.full(rows, -1, np.int64)
        np.maximum.at(last_other, scored.row[~alike], places[~alike])
        begin = np.maximum(last_other + 1, starts)
        tails = (places >= begin[scored.row]) & ((stops - begin) >= least)[scored.row]
        dead |= tails & ((stops - starts) > 2)[scored.row]
    return dead
