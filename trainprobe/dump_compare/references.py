"""A third dump beside the two: a run that measures what rounding does (a floor), or one in higher precision (the truth).

The floor run is one side again, repeated, on another number of threads, or with weights perturbed in their last bit. Which side
it repeats follows from the numbers: it is the one that it is nearer to in more results. Its distance from that side is what
rounding does to a result, measured, and takes the place of the model there. Where it has the same bits as that side it has
measured nothing, and the model speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.intervals import Interval, interval
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.pairing import pair_calls
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name, slots
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded
from trainprobe.errors import FormatError

Sides = tuple[Side, Side]


def measure_floor(judged: Sequence[Judged], sides: Sides, run: Side) -> None:
    """Give each result that is apart its measured rounding: `Distance.floor`, relative l2, 0 where `run` has no other bits."""
    found = list(_distances(judged, sides, run))
    nearer = [far_a.high <= far_b.high for _, _, far_a, far_b in found if far_a.high != far_b.high]
    of_a = sum(nearer) * 2 >= len(nearer)
    for one, i, far_a, far_b in found:
        one.values[i] = one.values[i]._replace(floor=(far_a if of_a else far_b).high)


def measure_condition(judged: Sequence[Judged], sides: Sides, path: Path, at: tuple[int, int]) -> None:
    """Give each result that is apart the response of its operator to a perturbation, from a file of `op-check --condition`.

    The response is a floor, and what arrives at a call counts as often as its condition says. at: (step, rank). Raises
    FormatError where the file cannot be read.
    """
    known = _conditions(path, at)
    for one in judged:
        call = one.pair.a
        found = known.get(entry_name(call, sides[0].step_data.framework)) if call is not None else None
        if found is None:
            continue
        results = [i for i, value in enumerate(one.values) if value.result]
        responses = [x for x in found.get("response", ()) if isinstance(x, float)]
        for place, i in enumerate(results):
            if responses and one.values[i].interval.high:
                own = responses[place] if len(responses) == len(results) else max(responses)
                one.values[i] = one.values[i]._replace(floor=own)
        one.given *= max(1.0, found.get("condition") or 1.0)


def _conditions(path: Path, at: tuple[int, int]) -> dict[str, Any]:
    try:
        document = orjson.loads(read_bounded(path, LARGEST_STATE, follow=True))
        if document["format"] != "trainprobe-condition" or document["version"] != 1:
            raise FormatError(f"{path} is no file of `trainprobe op-check --condition` that this version reads")
        return {call["entry"]: call for call in document["calls"] if (call["step"], call["rank"]) == at}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} cannot be read as a file of `trainprobe op-check --condition`: {error!r}") from None


def measure_truth(judged: Sequence[Judged], sides: Sides, run: Side) -> None:
    """Give each result that is apart its distances from a run in higher precision: `Distance.from_truth`, of A and of B."""
    for one, i, far_a, far_b in list(_distances(judged, sides, run)):
        one.values[i] = one.values[i]._replace(from_truth=(far_a.low, far_b.low))


def _distances(judged: Sequence[Judged], sides: Sides, run: Side) -> Iterator[tuple[Judged, int, Interval, Interval]]:
    """Yield a call, the place of a result that is apart in it, and the distances of both sides from the third run."""
    partners = [_partners(side, run) for side in sides]
    for one in judged:
        mine, theirs = one.pair.a, one.pair.b
        if mine is None or theirs is None or not any(value.result and value.interval.high for value in one.values):
            continue
        partner = partners[0].get(id(mine)) or partners[1].get(id(theirs))
        if partner is None:
            continue
        left, right, third = dict(slots(mine)), dict(slots(theirs)), dict(slots(partner))
        for i, value in enumerate(one.values):
            if value.result and value.interval.high and all(value.slot in each for each in (left, right, third)):
                c = third[value.slot]
                far = interval(sides[0], left[value.slot], run, c), interval(sides[1], right[value.slot], run, c)
                if not any(each.evidence in ("nothing", "shape") for each in far):
                    yield one, i, *far


def _partners(side: Side, run: Side) -> Mapping[int, Call]:
    pairs = pair_calls(side.step_data.calls, run.step_data.calls)
    return {id(pair.a): pair.b for pair in pairs if pair.a is not None and pair.b is not None}
