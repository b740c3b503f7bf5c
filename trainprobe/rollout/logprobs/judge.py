"""The verdict of a file of log-probabilities: identical, rounding, or which cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.words import counted
from trainprobe.errors import UsageError, did_you_mean
from trainprobe.rollout.logprobs import alignment, context, scoring
from trainprobe.rollout.logprobs.cause import GapCause, correlation, grouped
from trainprobe.rollout.logprobs.tokens import CATASTROPHIC, FAR, ROUNDING, NoiseFloor, ScoredTokens, floor_of

# the more a signature excludes, the earlier it is asked; the first that explains enough is named first
SIGNATURES: tuple[Callable[[ScoredTokens, NoiseFloor], GapCause | None], ...] = (
    *(scoring.sum_for_mean, alignment.padding, alignment.shift, alignment.shifted_mask, scoring.truncation),
    *(scoring.temperature, context.stale, context.packing, context.drift, context.router_flips, scoring.precision),
    context.context,
)
PROFILES = ("position", "length", "entropy", "rank", "version", "micro_batch")
DTYPE, LAYERS = "bfloat16", 32  # where nobody says


@dataclass(frozen=True)
class LogprobComparison:
    """What was found of one file."""

    scored: ScoredTokens
    floor: NoiseFloor
    statistics: dict[str, float]
    causes: list[GapCause]
    verdict: Verdict


def judge(scored: ScoredTokens, dtype: str | None = None, layers: int | None = None) -> LogprobComparison:
    """Judge the log-probabilities of the same tokens. dtype, layers: what both engines compute in, and their depth.

    Raises UsageError for a dtype that is not known, or no layer.
    """
    if dtype is not None and dtype not in ROUNDING:
        raise UsageError(
            f"--dtype {dtype!r} is not known{did_you_mean(dtype, list(ROUNDING))}; known are {', '.join(ROUNDING)}"
        )
    if layers is not None and layers < 1:
        raise UsageError(f"--layers {layers}: give 1 or more")
    floor = floor_of(scored, dtype or DTYPE, layers or LAYERS, assumed=dtype is None)
    broken = _not_comparable(scored)
    if broken is not None:
        return LogprobComparison(scored, floor, {}, [], broken)
    statistics = statistics_of(scored)
    found = [cause for ask in SIGNATURES if (cause := ask(scored, floor)) is not None] if scored.size.any() else []
    causes = sorted(found, key=lambda cause: cause.sure == "perhaps")
    return LogprobComparison(scored, floor, statistics, causes, _verdict(scored, floor, statistics, causes))


def _not_comparable(scored: ScoredTokens) -> Verdict | None:
    """Return the verdict of a file in which the rows are not the same tokens, or nothing is there to judge."""
    own, other = scored.tokens, scored.trainer_tokens
    if own is not None and other is not None:
        unlike = np.flatnonzero(scored.mask & (own != other))
        if len(unlike):
            first = int(unlike[0])
            row = int(scored.row[first])
            rows = len(set(scored.row[unlike].tolist()))
            return Verdict(
                2,
                f"These are not the same tokens: {counted(len(unlike), 'token')} of {counted(rows, 'sequence')} differ, first "
                f"in sequence {row} at place {first - int(scored.starts[row])}: {own[first]} of the engine, {other[first]} of "
                "the trainer. Hand the engine's token ids to the trainer instead of its text.",
            )
    if not len(scored.counted):
        return Verdict(3, "No token is counted: the mask is 0 everywhere, or no log-probability is finite.")
    return None


def statistics_of(scored: ScoredTokens) -> dict[str, float]:
    """Return the statistics of the gap: nats, and ratios π_trainer / π_engine."""
    gap, size = scored.gap, scored.size
    log_ratio = -gap
    ratio = np.exp(np.clip(log_ratio, -50, 50))
    lost = int(scored.mask.sum()) - len(gap)
    return {
        "tokens": len(gap),
        "sequences": int((scored.lengths > 0).sum()),
        "mean gap": float(gap.mean()),
        "mean absolute gap": float(size.mean()),
        "median absolute gap": float(np.median(size)),
        "99th percentile": float(np.quantile(size, 0.99)),
        "largest": float(size.max()),
        "k1": float(gap.mean()),
        "k2": float((log_ratio**2).mean() / 2),
        "k3": float((ratio - 1 - log_ratio).mean()),
        "Pearson": correlation(scored.trainer[scored.counted], scored.engine[scored.counted]),
        "effective sample size": float(ratio.sum() ** 2 / (ratio @ ratio) / len(ratio)),
        "share clipped at 0.2": float((np.abs(ratio - 1) > 0.2).mean()),
        "catastrophic tokens": int((size > CATASTROPHIC).sum()),
        "not finite": lost,
    }


def _verdict(scored: ScoredTokens, floor: NoiseFloor, statistics: dict[str, float], causes: list[GapCause]) -> Verdict:
    size, lost = statistics["mean absolute gap"], int(statistics["not finite"])
    shown = f"mean |gap| {size:.2g} nats, largest {statistics['largest']:.2g}, floor {floor.allowed:.2g} ({floor.why})"
    further = [
        c for c in causes[1:] if c.name not in ("context", "precision")
    ]  # these two are what is left, where nothing fits
    details = [shown, *(f"also {c.name}: {c.sentence} (explains {c.explains:.0%})" for c in further)]
    if not scored.masked:
        details.append("the file has no mask: every place was counted")
    if lost:
        where = np.flatnonzero(scored.mask & ~scored.finite)
        row = int(scored.row[where[0]])
        details.insert(0, f"NaN or infinity first in sequence {row} at place {int(where[0] - scored.starts[row])}")
    far = int((scored.size > FAR * floor.allowed).sum())
    if far:
        details.append(f"{counted(far, 'token')} more than {FAR:g} times above the floor")
    if lost:
        return Verdict(
            2, f"{counted(lost, 'token')} inside the mask have a log-probability that is NaN or infinite; {shown}.", details
        )
    if causes:
        first = causes[0]
        how = f"{first.sure}; it explains {first.explains:.0%} of the gap, of {first.tokens}"
        return Verdict(2, f"{first.sentence} ({how}). {first.advice}", details)
    if not scored.size.any():
        return Verdict(0, f"The log-probabilities of all {len(scored.size):,} tokens are identical.", details[1:])
    if size <= floor.allowed:
        return Verdict(1, f"The log-probabilities differ by rounding alone: {shown}, {len(scored.size):,} tokens.", details[1:])
    return Verdict(
        2,
        f"The log-probabilities differ by more than rounding, and no known cause fits: {shown}. Give the version of the "
        "weights and the micro-batch of each sequence, or a repeated scoring.",
        details,
    )


def profile(scored: ScoredTokens, kind: str) -> list[dict[str, Any]]:
    """Return the mean and largest gap by position, length, entropy, rank, version or micro_batch; empty where not known."""
    if not len(scored.counted):
        return []
    if kind == "position":
        group = np.floor(np.log2(scored.at + 1))
    elif kind == "length":
        group = np.floor(np.log2(scored.lengths[scored.row[scored.counted]]))
    elif kind == "entropy" and scored.entropy is not None:
        group = np.floor(np.nan_to_num(scored.of(scored.entropy)) * 2) / 2
    elif kind in ("rank", "version", "micro_batch") and getattr(scored, kind) is not None:
        group = scored.of(getattr(scored, kind))
    else:
        return []
    names, means, counts = grouped(scored.size, group)
    order = np.argsort(means)[::-1][:50] if len(names) > 50 else np.arange(len(names))
    text = _SPANS.get(kind, "{:g}".format)
    return [{"of": text(float(names[i])), "mean": float(means[i]), "tokens": int(counts[i])} for i in order]


def _powers(begin: int) -> Callable[[float], str]:
    def span(name: float) -> str:
        low, high = int(2**name) - 1 + begin, int(2 ** (name + 1)) - 2 + begin
        return str(low) if low == high else f"{low}–{high}"

    return span


_SPANS: dict[str, Callable[[float], str]] = {"position": _powers(0), "length": _powers(1)}


def worst_tokens(scored: ScoredTokens, most: int = 50) -> list[dict[str, Any]]:
    """Return the tokens with the largest gaps, the worst first, with their text where the file has it."""
    size = scored.size
    chosen = np.argpartition(size, -most)[-most:] if len(size) > most else np.arange(len(size))
    chosen = chosen[np.argsort(size[chosen])[::-1]]
    found: list[dict[str, Any]] = []
    for i in chosen:
        place = int(scored.counted[i])
        row = int(scored.row[place])
        told: dict[str, Any] = {"sequence": row, "place": place - int(scored.starts[row])}
        told |= {"trainer": float(scored.trainer[place]), "engine": float(scored.engine[place]), "gap": float(scored.gap[i])}
        if scored.tokens is not None:
            told["token"] = int(scored.tokens[place])
        if scored.text is not None:
            near = slice(max(int(scored.starts[row]), place - 4), min(int(scored.starts[row + 1]), place + 3))
            told["text"] = str(scored.text[place])
            told["around"] = "".join(map(str, scored.text[near]))
        found.append(told)
    return found


def as_json(found: LogprobComparison) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {
        "code": found.verdict.code,
        "sentence": found.verdict.sentence,
        "details": list(found.verdict.details),
        "floor": {"allowed mean gap": found.floor.allowed, "why": found.floor.why, "measured": found.floor.measured},
        "statistics": found.statistics,
        "causes": [{**asdict(cause), "sure": cause.sure} for cause in found.causes],
        "by": {kind: rows for kind in PROFILES if (rows := profile(found.scored, kind))},
        "worst tokens": worst_tokens(found.scored),
    }
