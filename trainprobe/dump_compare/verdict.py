"""What a comparison of two dumps comes to: whether they agree, and the first place where they do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trainprobe.dump_compare.arguments import rate_of_update
from trainprobe.dump_compare.between_steps import Left, changed, left_by, optimizer_parts, who_changed
from trainprobe.dump_compare.causes import causes
from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.first_difference import first_of, given_another, is_a_weight
from trainprobe.dump_compare.judge import Judged, Outcome, enclosing
from trainprobe.dump_compare.one_sided import cut_short, tensor_of_one
from trainprobe.dump_compare.remarks import (
    about_arguments,
    about_counts,
    about_formats,
    about_missing,
    about_random_numbers,
    about_ranks,
    about_rounding,
    about_scale,
    about_unread,
    hints,
    scaled_gradients,
)
from trainprobe.dump_compare.results import Compared, DumpsVerdict
from trainprobe.dump_compare.sentences import difference_in_words, distance_in_words, place_of_call
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.core.words import counted

_SIXTEEN_BITS = 2.0**-11  # the gap of formats of 16 bits is larger
_BEHIND = 2  # times what results before it are apart: a call in float32 behind them may be so
_CANCELS = 2  # times: a sum that cancels more is apart by more than what it is given
_ROUNDING = "what both dumps hold agrees within rounding"


def judge_runs(ranks: Sequence[Compared], missing: Sequence[str]) -> DumpsVerdict:
    """Return what to say of all ranks and steps. missing: steps and ranks that only one side has."""
    found = _judge_runs(ranks, missing)
    short = [text for rank in ranks if (text := _cut_short(rank))]
    if not short:
        return found
    more = f", and {len(short) - 1} more steps or ranks end early" if len(short) > 1 else ""
    return replace(found, code=max(found.code, 3) if found.code != 2 else 2, sentence=f"{short[0]}{more}: {found.sentence}")


def _cut_short(rank: Compared) -> str:
    where = f"step {rank.at.step}, rank {rank.at.rank}"
    return "" if rank.joined else cut_short(rank.calls, sum(rank.agreeing.values()), rank.cut, where)


def _judge_runs(ranks: Sequence[Compared], missing: Sequence[str]) -> DumpsVerdict:
    _carry_over(ranks)
    counts: Counter[Outcome] = Counter(judged.outcome for rank in ranks for judged in rank.calls)
    for rank in ranks:
        counts.update(rank.agreeing)
    whole = sum(counts.values())
    alone = [(rank, judged) for rank in ranks for judged in rank.calls if judged.outcome == "missing"]
    details = [*missing, *about_missing(alone), *about_formats(ranks), *about_unread(ranks)]
    details += about_ranks(ranks)
    details += [
        *dict.fromkeys(note for rank in ranks for note in rank.notes),
        *about_rounding(ranks),
        *about_counts(counts, ranks),
    ]
    first = _first(ranks)
    optimizer = _in_the_optimizer(ranks, math.inf if first is None else first[0].at.step)
    structured = len({name for rank in ranks for name in rank.by_structure})
    of_them = f", {structured} modules of A paired by structure" if structured else ""
    if optimizer is not None:
        return DumpsVerdict(
            2, optimizer, ["config-check compares rates, weight decay and the formula of the update", *details], None, counts
        )
    if first is not None:
        rank, judged = first
        surely = "the first difference is at" if judged.outcome != "suspicious" else "the first suspicious difference is at"
        between = _between_steps(ranks, rank, judged) or _between_modules(rank, judged) or _also_alone(rank, judged)
        details = [*between[1:], *hints(rank, judged), *details]
        told = causes(rank.calls, judged.pair.place)
        because = [f"; before it, {cause}" for cause in told if not cause.startswith(f"{judged.call.name} has no gradient")]
        what = "".join(
            [
                _about_rate(rank, judged),
                difference_in_words(judged, changed(judged, _left_before(ranks, rank))),
                about_random_numbers(rank, judged),
                *between[:1],
                *scaled_gradients(rank, judged),
                *because,
            ]
        )
        return DumpsVerdict(2, f"{surely} {place_of_call(rank, judged)}: {what}", details, first, counts)
    if whole == counts["missing"]:
        said = "no call of one has a partner in the other" if whole else "neither dump holds a call"
        return DumpsVerdict(3, f"nothing was compared: {said}", details, None, counts)
    if not any(rank.values for rank in ranks):
        said = f"nothing was compared: {counted(whole, 'call')} without a value"
        return DumpsVerdict(3, said, details, None, counts)
    arguments = about_arguments(ranks)
    if counts["unknown"]:
        said = (
            f"{counts['unknown']} of {whole} calls cannot be compared: both dumps need statistics, or fingerprints of one kind"
        )
        return DumpsVerdict(3, "; ".join([said, *arguments]), details, None, counts)
    details = [*arguments, *details]
    because = [*dict.fromkeys(cause for rank in ranks for cause in causes(rank.calls)), *about_scale(ranks)]
    unread = any(rank.unread for rank in ranks)
    if missing or alone or unread:
        agrees = _ROUNDING if counts["rounding"] + counts["carried"] else "all that both dumps hold agrees"
        lacking = "parts of the dumps could not be read" if unread else "parts of one have no partner in the other"
        return DumpsVerdict(3, "; ".join([f"{agrees}, but {lacking}", *because]), details, None, counts)
    if counts["rounding"] or counts["carried"]:
        return DumpsVerdict(1, "; ".join([f"{_ROUNDING}: {whole} calls{of_them}", *because]), details, None, counts)
    alike = sum(rank.by_statistics for rank in ranks)
    if alike:
        details = [f"{alike} values are told by statistics alone, which the same numbers in another order have too", *details]
    whom = "their tensors" if arguments else "them"
    return DumpsVerdict(0, f"all {whole} calls agree in all that the dumps hold of {whom}{of_them}", details, None, counts)


def _first(ranks: Sequence[Compared]) -> tuple[Compared, Judged] | None:
    """Return the first place of the earliest step where something is wrong; of several ranks, that of the earliest call."""
    apart: set[int] = set()  # ranks whose numbers were apart in a step before, which explains what they begin with
    steps = sorted({rank.at.step for rank in ranks})
    for step in steps:
        here = [rank for rank in ranks if rank.at.step == step]
        firsts = [
            (rank, first_of(rank.calls, rank.at.rank in apart, step != steps[0], _left_before(ranks, rank), rank.joined))
            for rank in here
        ]
        found = [(rank, judged) for rank, judged in firsts if judged is not None]
        if found:
            return min(found, key=lambda pair: (pair[1].outcome == "suspicious", pair[1].pair.place, pair[0].at.rank))
        apart |= {rank.at.rank for rank in here if any(judged.outcome in ("rounding", "carried") for judged in rank.calls)}
    return None


def _carry_over(ranks: Sequence[Compared]) -> None:
    """Let what is suspicious be carried, where the weights are apart and results before it as far: statistics tell too little.

    Between frameworks that is so behind a step of an optimizer, which makes much of a small gradient. In one framework it is so
    of float32 behind results of 16 bits: what such a call is given may be apart by their rounding and leave statistics alone.
    """
    apart: set[int] = set()
    for rank in sorted(ranks, key=lambda rank: rank.at.step):
        two, noise, coarse = rank.framework != rank.framework_b, 0.0, False
        for judged in rank.calls if rank.at.rank in apart else ():
            results = [value for value in judged.values if value.result]
            far = max((value.low if two or value.cancelled <= _CANCELS else 0.0 for value in results), default=0.0)
            fine = max((value.epsilon for value in results), default=0.0) < _SIXTEEN_BITS
            alone = two or (coarse and fine and all(value.interval.evidence == "statistics" for value in judged.values))
            if judged.outcome == "suspicious" and alone and far <= (SLACK if two else _BEHIND) * noise:
                judged.outcome = "carried"
            noise = max(noise, far if far < math.inf and judged.call.kind != "state" else 0.0)
            coarse |= not fine
        if any(judged.outcome in ("rounding", "carried") for judged in rank.calls):
            apart.add(rank.at.rank)


def _in_the_optimizer(ranks: Sequence[Compared], before: float) -> str | None:
    """Return what is to be said where the optimizer of a step before `before` moves the weights of two frameworks otherwise."""
    for rank in sorted(ranks, key=lambda rank: (rank.at.step, rank.at.rank)):
        if rank.at.step >= before:
            return None
        behind = next((other for other in ranks if other.at.rank == rank.at.rank and other.at.step > rank.at.step), None)
        steps = rank.at.step + 1 if rank.weights.leaves or behind is None else behind.at.step
        after = rank.weights.leaves or (behind.weights.begins if behind is not None else {})
        if said := optimizer_parts(rank.weights, after, steps):
            where = f"step {rank.at.step}, rank {rank.at.rank}"
            return f"the first difference is in the optimizer's step ({where}): what it is given agrees, and {said}"
    return None


def _left_before(ranks: Sequence[Compared], rank: Compared) -> Left:
    """Return how far apart the step before has left weights and states, nothing where that was not compared."""
    before = (other for other in ranks if other.at.step == rank.at.step - 1 and other.at.rank == rank.at.rank)
    return next((left_by(other.calls) for other in before), {})


def _about_rate(rank: Compared, judged: Judged) -> str:
    """Return which learning rate is another, where the first difference is what an optimizer makes, as text or ""."""
    call = judged.call
    if judged.outcome not in ("bug", "suspicious") or not (
        call.parent == "optimizer" or (call.kind, call.phase) == ("state", "step")
    ):
        return ""
    told = [] if judged.argument.startswith("lr is") else rank.rates
    said = next(iter(told), "") or _rate_of_updates(rank.calls)
    return f"{said}; " if said else ""


def _rate_of_updates(calls: Sequence[Judged]) -> str:
    """Return what operators of the optimizer tell of the rate; nothing behind another argument than that of weight decay."""
    for one in calls:
        a, b = one.pair.a, one.pair.b
        if one.call.parent != "optimizer" or a is None or b is None:
            continue
        said = rate_of_update(a, b)
        if said or (one.argument and not one.call.name.endswith("mul_")):
            return said
    return ""


def _also_alone(rank: Compared, judged: Judged) -> list[str]:
    """Return what else around a call one side alone gives its tensor, and what it changes first within the call."""
    said = tensor_of_one(judged)
    around = {id(call) for call in enclosing(judged.pair.a)} if said else set[int]()
    also = next((one for one in rank.calls if id(one.pair.a) in around and tensor_of_one(one) == said), None)
    told = "" if also is None else f"; {entry_name(also.call, rank.framework)}, which it runs within, is given it there too"
    within = (one for one in rank.calls if said and any(call is judged.pair.a for call in enclosing(one.pair.a)))
    inner = next(((one, given) for one in within if (given := given_another(one)) is not None), None)
    return [
        told,
        *(
            [f"the first that changes within it is at {place_of_call(rank, inner[0])}: {distance_in_words(inner[1])}"]
            if inner
            else []
        ),
    ]


def _between_steps(ranks: Sequence[Compared], rank: Compared, judged: Judged) -> list[str]:
    """Return where weights parted that are others at the beginning of a step, and what to record; nothing for anything else.

    The step that was compared before agrees in all that the dumps hold of it, or its place would have been named.
    """
    before = [other for other in ranks if other.at.step < rank.at.step and other.at.rank == rank.at.rank]
    if not before or judged.outcome in ("bug", "suspicious"):
        return []
    if given_another(judged, is_a_weight) is None and changed(judged, _left_before(ranks, rank)) is None:
        return []
    last = max(before, key=lambda other: other.at.step)
    found = changed(judged, _left_before(ranks, rank))
    if found is not None:
        who = (who_changed(judged, found[0], last.at, rank.at) if rank.joined else "") or "one side"
        return [f"; step {last.at.step} has left it {found[1]:.1e} apart at most: {who} changed it in between"]
    behind = (
        f"; step {last.at.step}, the last that was compared before, agrees in what both dumps hold: the difference begins in "
        "the optimizer's step, or in what else changes weights, which was not recorded"
    )
    more = ["`monitor: {parameters: true, gradients: true}`"] if "states" not in last.recorded else []
    more += ["`level: mix`"] if "optimizer" not in last.recorded else []
    if rank.joined or not more:
        return [behind]
    steps = "" if rank.at.step - last.at.step == 1 else f", in every step from {last.at.step} to {rank.at.step}"
    return [behind, f"to see which parameter, and whether its gradient is another, record {' or '.join(more)}{steps}"]


def _between_modules(rank: Compared, judged: Judged) -> list[str]:
    """Return in which module a difference arises that one within it is the first to be given; nothing for anything else."""
    around = next(enclosing(judged.pair.a), None)
    outer = next((one for one in rank.calls if one.pair.a is around), None) if around is not None else None
    given = given_another(judged)
    if outer is None or given is None or given.slot.startswith("parameters") or judged.outcome in ("bug", "suspicious"):
        return []
    if (
        outer.call.kind != "module"
        or not outer.values
        or tensor_of_one(outer)
        or given_another(outer, _is_no_weight) is not None
    ):
        return []
    return [
        f"; {entry_name(outer.call, rank.framework)}, which it runs within, is given the same: it arises there, between modules"
    ]


def _is_no_weight(call: Call, value: Distance) -> bool:
    return not value.slot.startswith("parameters")
