"""Where the first NaN or infinity of a step arose on each rank, and which rank made what the others were handed.

Each rank is traced by itself, as the rule `nonfinite` does it. A rank whose first bad value is the result of a collective, or
what its model was given, did not make it where another rank did. Where all ranks were recorded and none made it, the collective
did: a sum that overflows. What stands in constants and masks alone does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainprobe.engine.core.addresses import Address
from trainprobe.monitor.frames import Bools, Health
from trainprobe.monitor.nan_trace.steps import RankStep
from trainprobe.monitor.nonfinite_values import is_given, that_matter
from trainprobe.monitor.rules.nonfinite import find_origin

Kind = Literal["made", "handed", "given"]
FOLLOWED = 3  # recorded steps behind the first that are looked at for the ranks that it reached later


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The first value of a rank's step that is not finite.

    kind: a call of this rank made it, a collective handed it over, or it was there before any call (the batch, a weight).
    how: that in words. what: "NaN" or "infinity". place: of the value in the order of the step.
    """

    at: RankStep
    address: Address
    kind: Kind
    how: str
    what: str
    place: int


@dataclass(frozen=True, slots=True)
class RunTrace:
    """The first step with such values. first: what the others follow from. later: of ranks that a later step reached."""

    step: int
    first: RankTrace
    ranks: Sequence[RankTrace]
    later: Sequence[RankTrace] = ()


def trace_run(steps: Iterable[list[RankStep]]) -> tuple[RunTrace | None, int]:
    """Return what is traced of a run, None where everything that matters is finite, and how many steps were looked at."""
    found: RunTrace | None = None
    later: dict[int, RankTrace] = {}
    before: list[RankStep] = []
    looked, behind = 0, 0
    for ranks in steps:
        traces = [trace for here in ranks if (trace := trace_rank(here)) is not None]
        looked += found is None
        if found is None and traces:
            found = _of_step(_made_by_collectives(traces, ranks), before)
        elif found is not None:
            reached = {trace.at.rank for trace in found.ranks}
            later |= {trace.at.rank: trace for trace in traces if trace.at.rank not in reached | later.keys()}
            behind += 1
        before = ranks
        if found is not None and (behind == FOLLOWED or len(found.ranks) + len(later) >= len(ranks)):
            break
    return (None if found is None else RunTrace(found.step, found.first, found.ranks, [*later.values()])), looked


def _made_by_collectives(traces: Sequence[RankTrace], ranks: Sequence[RankStep]) -> Sequence[RankTrace]:
    """Return the traces, with what collectives handed over as made by these, where no rank of the whole run had it before."""
    missing = ranks[0].frame.place.world_size - len({here.rank for here in ranks})
    if missing > 0 or any(trace.kind != "handed" for trace in traces):
        return traces
    return [replace(trace, kind="made", how="what all ranks gave was finite, the collective made it") for trace in traces]


def _of_step(traces: Sequence[RankTrace], before: Sequence[RankStep]) -> RunTrace:
    """Return what is traced of the first bad step. before: the step in front of it, whose update may have spoilt a weight."""
    first = _first(traces)
    if first.kind == "given" and first.address.kind == "parameter":
        step = first.at.frame.step - 1
        updates = [_trace(here, here.frame.health >= Health.INFINITE) for here in before if here.frame.step == step]
        made = [trace for trace in updates if trace is not None and trace.kind == "made"]
        if made:
            first = _first(made)
    return RunTrace(first.at.frame.step, first, traces if first in traces else [first, *traces])


def trace_rank(here: RankStep) -> RankTrace | None:
    """Return the first bad value of one rank and step; None where all that matters is finite.

    In a dump of kernels every NaN and infinity matters: it may hold a few kernels of the step alone, so that what became of a
    value cannot be followed.
    """
    return _trace(here, here.frame.health >= Health.INFINITE if here.kernels else that_matter(here.frame))


def _trace(here: RankStep, matters: Bools) -> RankTrace | None:
    if not matters.any():
        return None
    address, how = find_origin(here.frame, matters)
    number = here.frame.table.address(address)
    places = np.flatnonzero(here.frame.addresses == number)
    worst = here.frame.health[places].max(initial=Health.INFINITE)
    kind: Kind = "handed" if address.kind == "collective" else "given" if is_given(address) else "made"
    return RankTrace(
        here, address, kind, how, "NaN" if worst == Health.NAN else "infinity", int(places[0]) if places.size else 0
    )


def _first(traces: Sequence[RankTrace]) -> RankTrace:
    """Return what the others follow from: what a call made, then what came in, then what was handed over."""
    order = ("made", "given", "handed")
    return min(traces, key=lambda trace: (order.index(trace.kind), trace.place, trace.at.rank))


def reached(trace: RankTrace) -> list[Address]:
    """Return which later results of the same step are bad, in order: of modules (or ops), loss, gradients, weights."""
    frame = trace.at.frame
    bad = frame.health >= Health.INFINITE
    addresses = [frame.table.addresses[number] for number in frame.addresses[bad].tolist()]
    behind = addresses[addresses.index(trace.address) + 1 :] if trace.address in addresses else addresses
    modules = any(address.kind == "module" for address in behind)
    return [address for address in behind if not is_given(address) and (address.kind != "op" or not modules)]
