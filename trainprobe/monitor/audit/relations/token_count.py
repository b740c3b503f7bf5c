"""The reported number of tokens is that of the model's inputs.

Relation, for a scalar that is called tokens, num_tokens, input_tokens …: let n be the number of integers in the first integer
tensor of each training call of the model. The scalar is at most Σn over the micro-batches of this step and over all ranks with
data of their own (dp, cp, ep). Padding and ignored targets may reduce it. It is not the count of the first of several
micro-batches alone, unless the others count nothing. For tokens_seen, consumed_tokens or total_tokens, the same holds for the
increase since the step before. Tolerance zero.
Usually caused by a count in the wrong group or a sum over replicas, by a count that omits gradient accumulation, or by one that
is added once a rank. Throughput, schedules over tokens and losses that are divided by it are then wrong by a factor.
"""

from __future__ import annotations

import re

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence, along
from trainprobe.monitor.audit.facts.calls import TrainingCalls

COST = frozenset({"host", "ranks"})
OBSERVERS = frozenset({"model_calls", "updates"})
STAGE = "data"
_OWN_DATA = frozenset({"dp", "cp", "ep"})
_GROWS = re.compile(r"tokens?[ _./-]?(seen|consumed|total)|(seen|consumed|total|cumulative)[ _./-]?(\w+[ _./-])?tokens?")
_OF_A_STEP = re.compile(r"(^|[ _./-])tokens?($|[ _./])")
_RATES = re.compile(r"per|/s|tps|rate|throughput|share|length")


def check(evidence: Evidence) -> list[Finding]:
    """Find counts that are not those of the data."""
    own = evidence.of(TrainingCalls).tokens
    if not sum(own):
        return []
    group = along(evidence, _OWN_DATA)
    everywhere = sum(peer.numbers["tokens"] for peer in group) if group else float(sum(own))
    if not group and evidence.place.world_size > 1:
        return []
    for name, reported in evidence.scalars.items():
        lower = name.lower()
        if _RATES.search(lower):
            continue
        if _GROWS.search(lower):
            before = evidence.before.scalars.get(name) if evidence.before is not None and evidence.follows else None
            found = [] if before is None else _judge(evidence, name, reported - before, own, everywhere, " grew by")
        else:
            found = _judge(evidence, name, reported, own, everywhere, " is") if _OF_A_STEP.search(lower) else []
        if found:
            return found
    return []


def _judge(evidence: Evidence, name: str, reported: float, own: tuple[int, ...], everywhere: float, verb: str) -> list[Finding]:
    first, several = float(own[0]), len(own) > 1 and sum(own) > own[0]
    if not reported > everywhere and not (several and reported == first):
        return []
    why = "a micro-batch alone was counted" if several and reported == first else f"{reported / everywhere:.4g} times as many"
    text = (
        f"the reported number of tokens {name}{verb} {reported:.12g}: {why}. The model was called with {everywhere:.12g} in "
        f"this step ({sum(own)} on this rank in {len(own)} calls)"
    )
    hint = "count over all micro-batches, and over the ranks that have data of their own, each once"
    return [
        evidence.found(
            text, name, next=hint, measured=reported, expected=everywhere, floor=0.0, kind="scalar", severity="error"
        )
    ]
