"""A token that always came does not cease to come.

Relation: a token of which there were eight or more at each of at least four audited steps, outside of the padding, is there at
one of the two that follow, if these have half as many tokens or more. Reported as a warning: a curriculum may leave one out.
Usually caused by a second part of the data that was prepared otherwise: without end tokens, without a language, with another
tokenizer. By chance a token that comes so often is missing twice in less than one in a million trainings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenNumbers

COST = frozenset({"host"})
OBSERVERS = frozenset({"given_numbers"})
STAGE = "data"
_LOOKS, _FEWEST = 4, 8


class SeenTokens(NamedTuple):
    """looks: how many. total: the most tokens of one. least: [tokens] the fewest of each, of looks with any. absent: [tokens]
    looks in a row without it.
    """

    looks: int
    total: float
    least: npt.NDArray[np.float32]
    absent: npt.NDArray[np.int32]


def remember(evidence: Evidence) -> SeenTokens | None:
    """Return what is known of each token with this step."""
    known: SeenTokens | None = evidence.remembered("vanished_tokens", None)
    counts = evidence.of(GivenNumbers).tokens
    if not counts.sum():
        return known
    if known is None or len(known.least) != len(counts):
        return SeenTokens(1, float(counts.sum()), counts, np.zeros(len(counts), np.int32))
    if counts.sum() < known.total / 2:
        return known
    absent = np.where(counts > 0, 0, known.absent + 1)
    frequent = (known.looks >= _LOOKS) & (known.least >= _FEWEST)
    least = np.where((counts == 0) & frequent, known.least, np.minimum(known.least, counts))
    return SeenTokens(known.looks + 1, max(known.total, float(counts.sum())), least, absent)


def check(evidence: Evidence) -> list[Finding]:
    """Find tokens that no longer come."""
    seen = remember(evidence)
    if seen is None or seen.looks < _LOOKS + 2 or not evidence.of(GivenNumbers).tokens.sum():
        return []
    gone = [int(i) for i in np.flatnonzero((seen.absent >= 2) & (seen.least >= _FEWEST))]
    if not gone:
        return []
    text = (
        f"token {and_more([str(i) for i in gone])} no longer comes: it was missing at {seen.absent[gone[0]]} audited "
        f"steps in a row, and came {seen.least[gone[0]]:.0f} times or more at each before"
    )
    hint = "look at how this part of the data was prepared: another tokenizer, no end tokens, a filter"
    least = float(seen.least[gone[0]])
    return [
        evidence.found(
            text, "tokens", next=hint, measured=0.0, expected=least, kind="scalar", names=[f"token {i}" for i in gone]
        )
    ]
