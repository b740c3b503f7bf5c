"""A difference as the part of a sentence: where it is, what differs, and by how much."""

from __future__ import annotations

import math

from trainprobe.dump_compare.arguments import given_alone
from trainprobe.dump_compare.causes import without_gradient
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.first_difference import given_another, is_a_weight
from trainprobe.dump_compare.intervals import ANOTHER_ORDER, TRANSPOSED
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.one_sided import side_alone
from trainprobe.dump_compare.results import Compared
from trainprobe.dump_compare.scale_factors import times
from trainprobe.engine.core.step_data import entry_name


def place_of_call(rank: Compared, judged: Judged) -> str:
    """Return where a call is: its entry, its name in B where that is another, step, micro-batch and rank."""
    call = judged.call
    micro = f", micro-batch {call.micro}" if call.micro is not None else ""
    of_rank = "" if rank.joined else f", rank {rank.at.rank}"
    return f"{entry_name(call, rank.framework)}{_also_called(rank, judged)} (step {rank.at.step}{micro}{of_rank})"


def _also_called(rank: Compared, judged: Judged) -> str:
    """Return what B calls a call that has another name there, as text or ""."""
    a, b = judged.pair.a, judged.pair.b
    if a is None or b is None or a.kind == "op" or a.name == b.name:
        return ""
    return f", {entry_name(b, rank.framework_b)} in B,"


def difference_in_words(judged: Judged, since: tuple[Distance, float] | None = None) -> str:
    """Return how a call differs. since: the value that changed between two steps, and how far its step before left it."""
    if side_alone(judged):
        return f"only {side_alone(judged)} runs this module"
    value = since[0] if since is not None else given_another(judged, is_a_weight) or given_another(judged)
    if judged.outcome not in ("bug", "suspicious") and value is not None:
        source = "the weights differ" if value.slot.startswith("parameters") else "it is given something else"
        return f"{source}, {distance_in_words(value)}"
    worst = judged.worst
    beyond = max(judged.values, key=lambda value: value.beyond, default=None)
    if beyond is not None and beyond.beyond.times > 1:
        far = f"{beyond.slot} is {times(beyond)}" if beyond.factor else _moved(beyond)
    else:
        far = (
            ""
            if worst is None or not (worst.interval.low or worst.interval.note)
            else f"{distance_in_words(worst)} ({_rounding(judged, worst)})"
        )
    if judged.argument:
        return f"{judged.argument}; {far}" if far else judged.argument
    alone = given_alone(judged.pair.a, judged.pair.b) if judged.pair.a is not None and judged.pair.b is not None else ""
    given = (
        alone
        or next(iter(without_gradient([judged])), "")
        or ("all that it is given agrees" if judged.given == 0 else f"what it is given is {judged.given:.1e} apart")
    )
    return f"{given}, {far}"


_MOVED = {"max": "its largest number", "min": "its smallest number", "mean": "its mean", "norm": "its norm"}


def _moved(value: Distance) -> str:
    """Return which number of a result is further apart than the rounding of this result explains."""
    found, far = value.beyond, value.interval
    exact = "" if far.evidence == "values" else "at least "
    at = f" (most at {far.note})" if far.evidence == "values" and far.note else ""
    at = f" ({far.note})" if far.note.startswith((TRANSPOSED, ANOTHER_ORDER)) else at
    often = f"{found.times:.2g}" if found.times < 1000 else "over 1000"
    name = _MOVED.get(found.what, found.what)
    moved = f"{name} moved by {found.changed:.1e}, {often} times what rounding explains"
    return f"{value.slot} is {exact}{far.low:.1e} apart{at}: {moved}"


def _rounding(judged: Judged, value: Distance) -> str:
    return f"{'measured' if value.floor else 'own'} rounding {judged.rounding(value):.1e}"


def distance_in_words(value: Distance) -> str:
    """Return how far a value is apart."""
    far = value.interval
    if far.evidence == "replicas":
        return f"{value.slot}: {far.note}, at least {far.low:.1e} apart"
    exact = "" if far.evidence == "values" else "at least "
    if not 0 < far.low < math.inf:
        return f"{value.slot}: {far.note}"
    if value.factor:
        return f"{value.slot} is {times(value)}"
    of_terms = f", {value.low:.1e} of what was summed to get it" if value.cancelled > 2 else ""
    at = f", {far.note}" if far.evidence == "values" and far.note else ""
    return f"{value.slot} is {exact}{far.low:.1e} apart{of_terms}{at}"
