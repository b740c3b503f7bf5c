"""What a comparison of two dumps comes to: whether they agree, and the first place where they do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainprobe.comparison.verdict import Verdict
from trainprobe.dump_compare.arguments import given_alone
from trainprobe.dump_compare.between_steps import NO_WEIGHTS, Left, Weights, changed, left_by, optimizer_parts, who_changed
from trainprobe.dump_compare.causes import causes, without_gradient
from trainprobe.dump_compare.distances import SLACK, Distance
from trainprobe.dump_compare.factors import times
from trainprobe.dump_compare.intervals import ANOTHER_ORDER, OTHER_ORDER, TRANSPOSED, Interval
from trainprobe.dump_compare.judge import Judged, Outcome, enclosing
from trainprobe.dump_compare.one_sided import cut_short, given_alone_around, lone_module_before, side_alone, tensor_of_one
from trainprobe.dump_compare.pairing import RankPair
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name

_ROUNDING = "what both dumps hold agrees within rounding"
_RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential")


@dataclass(frozen=True, slots=True)
class Compared:
    """One rank of one step. framework, framework_b: of A and of B, as entries are named.

    unread: why stored values could not be read. notes: what a third run lacks, or what was left out. made: what else was asked
    for of it, by name (see compare_rank). agreeing: how many calls agree and are not among `calls` (see spread).
    by_structure: module of A that was not paired by name → what it was paired by (see renamed).
    world: how many ranks A's run had. by_statistics: how many values are equal in all statistics that both dumps hold, where
    nothing else tells of them.
    recorded: "optimizer" where A holds operators of the optimizer, "states" where it holds gradients as that sees them.
    cut: whether the dumps of A and of B say that the step did not end.
    weights: of two frameworks, the weights as the step begins and as its optimizer leaves them (see between_steps).
    joined: whether these are calls of all ranks of two layouts, joined; `at` then names A's lowest rank and the steps' folders.
    """

    at: RankPair
    calls: Sequence[Judged]
    framework: str = "pytorch"
    framework_b: str = "pytorch"
    unread: Sequence[str] = ()
    notes: Sequence[str] = ()
    made: dict[str, Any] = field(default_factory=dict[str, Any])
    joined: bool = False
    agreeing: Mapping[Outcome, int] = field(default_factory=dict[Outcome, int])
    by_structure: Mapping[str, str] = field(default_factory=dict[str, str])
    recorded: frozenset[str] = frozenset()
    by_statistics: int = 0
    world: int = 1
    cut: tuple[bool, bool] = False, False
    weights: Weights = NO_WEIGHTS


@dataclass(frozen=True, slots=True)
class DumpsVerdict(Verdict):
    """What a comparison of two dumps comes to. first: the first place where they differ. counts: of calls, by outcome."""

    first: tuple[Compared, Judged] | None = None
    counts: Mapping[Outcome, int] = field(default_factory=dict[Outcome, int])


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
    details = [*missing, *_about_missing(alone), *_about_formats(ranks), *_about_unread(ranks)]
    details += _about_ranks(ranks)
    details += [*dict.fromkeys(note for rank in ranks for note in rank.notes), *_about_rounding(ranks), *_about_counts(counts)]
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
        details = [*between[1:], *_hints(rank, judged), *details]
        told = causes(rank.calls, judged.pair.place)
        because = [f"; before it, {cause}" for cause in told if not cause.startswith(f"{judged.call.name} has no gradient")]
        what = "".join(
            [_what(judged, changed(judged, _left_before(ranks, rank))), *between[:1], *_scaled(rank, judged), *because]
        )
        return DumpsVerdict(2, f"{surely} {_where(rank, judged)}: {what}", details, first, counts)
    if whole == counts["missing"]:
        said = "no call of one has a partner in the other" if whole else "neither dump holds a call"
        return DumpsVerdict(3, f"nothing was compared: {said}", details, None, counts)
    arguments = _about_arguments(ranks)
    if counts["unknown"]:
        said = (
            f"{counts['unknown']} of {whole} calls cannot be compared: both dumps need statistics, or fingerprints of one kind"
        )
        return DumpsVerdict(3, "; ".join([said, *arguments]), details, None, counts)
    details = [*arguments, *details]
    because = list(dict.fromkeys(cause for rank in ranks for cause in causes(rank.calls)))
    unread = any(rank.unread for rank in ranks)
    if missing or alone or unread:
        agrees = _ROUNDING if counts["rounding"] + counts["carried"] else "all that both dumps hold agrees"
        lacking = "stored values cannot be read" if unread else "parts of one have no partner in the other"
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
    """Let what is suspicious between frameworks be carried, where the weights are apart and results before it as far.

    Behind a step of an optimizer, which makes much of a small gradient, statistics tell too little of what a call is given.
    """
    apart: set[int] = set()
    for rank in sorted(ranks, key=lambda rank: rank.at.step):
        noise = 0.0
        for judged in rank.calls if rank.framework != rank.framework_b else ():
            far = max((value.low for value in judged.values if value.result), default=0.0)
            if judged.outcome == "suspicious" and rank.at.rank in apart and far <= SLACK * noise:
                judged.outcome = "carried"
            noise = max(noise, far if far < math.inf and judged.call.kind != "state" else 0.0)
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


def first_of(
    calls: Sequence[Judged],
    explained: bool = False,
    later: bool = False,
    left: Left | None = None,
    joined: bool = False,
) -> Judged | None:
    """Return the first call that is given something else than on the other side, or gives it; the innermost of nested ones.

    explained: the weights may be apart for what was in the steps before; the batch may not. later: whether there are steps
    before, in which an optimizer may have rounded. What is suspicious counts where nothing else does. left: how far apart the
    step before has left weights and states; what begins further apart was changed in between. joined: whether ranks were
    joined, between whose operators collectives run.
    """
    start = _first_result(calls)  # what is given behind it may come from there
    arrives = [
        judged
        for judged in calls
        if judged.pair.place <= start and given_another(judged, _is_of_the_batch if explained else None) is not None
    ]
    arrives += [] if explained or later else _other_weights(calls, start)
    arrives += [judged for judged in calls if changed(judged, left)] if left else []
    arrives += _other_losses(calls)
    arrives += _other_operands(calls) if joined and not (explained or later) else []
    for outcome in ("bug", "suspicious"):
        wrong = [judged for judged in calls if judged.outcome == outcome]
        outer = {id(call) for judged in (*wrong, *arrives) for call in enclosing(judged.pair.a)}
        inner = [judged for judged in wrong if id(judged.pair.a) not in outer]
        found = min([*arrives, *inner], key=_place, default=None)
        if found is not None:
            return _comes_from(calls, found)
    return None


def _comes_from(calls: Sequence[Judged], found: Judged) -> Judged:
    """Return what one side alone has that a call which is given something else follows from, or else that call."""
    given = given_another(found)
    if given is None or given.slot.startswith("parameters") or found.outcome in ("bug", "suspicious"):
        return found
    return given_alone_around(calls, found) or lone_module_before(calls, found) or found


def _also_alone(rank: Compared, judged: Judged) -> list[str]:
    """Return what else around a call one side alone gives its tensor, and what it changes first within the call."""
    said = tensor_of_one(judged)
    around = {id(call) for call in enclosing(judged.pair.a)} if said else set[int]()
    also = next((one for one in rank.calls if id(one.pair.a) in around and tensor_of_one(one) == said), None)
    told = "" if also is None else f"; {entry_name(also.call, rank.framework)}, which it runs within, is given it there too"
    within = (one for one in rank.calls if said and any(call is judged.pair.a for call in enclosing(one.pair.a)))
    inner = next(((one, given) for one in within if (given := given_another(one)) is not None), None)
    return [told, *([f"the first that changes within it is {_far(inner[1])} of {_where(rank, inner[0])}"] if inner else [])]


def _between_steps(ranks: Sequence[Compared], rank: Compared, judged: Judged) -> list[str]:
    """Return where weights parted that are others at the beginning of a step, and what to record; nothing for anything else.

    The step that was compared before agrees in all that the dumps hold of it, or its place would have been named.
    """
    before = [other for other in ranks if other.at.step < rank.at.step and other.at.rank == rank.at.rank]
    if not before or judged.outcome in ("bug", "suspicious"):
        return []
    if given_another(judged, _is_a_weight) is None and changed(judged, _left_before(ranks, rank)) is None:
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


def _other_weights(calls: Sequence[Judged], start: float) -> list[Judged]:
    """Return first forwards of modules behind `start` whose weights are others: no call before can be what they come from."""
    first = (one for one in calls if one.pair.place > start and one.call.call == 0 and one.call.phase == "forward")
    return [one for one in first if one.call.kind == "module" and given_another(one, _is_a_weight) is not None]


def _is_a_weight(call: Call, value: Distance) -> bool:
    return value.slot.startswith("parameters") and (value.interval.low > 0 or value.interval == OTHER_ORDER)


def _other_losses(calls: Sequence[Judged]) -> list[Judged]:
    """Return backwards of modules that are given a gradient far from anything before: the loss, or its gradient, is another.

    Those that run within a module whose backward gives something are left out, as that tells whether the gradient is right.
    """
    modules = [one for one in calls if one.call.kind == "module" and one.call.phase == "backward"]
    giving = {one.call.name for one in modules if any(value.result for value in one.values)}
    backwards = {id(one) for one in modules if giving.isdisjoint(around.name for around in enclosing(one.call))}
    noise, found = 0.0, list[Judged]()
    for judged in calls:
        if id(judged) in backwards:
            far = max((value.low for value in judged.values if not value.result), default=0.0)
            found += [judged] if far > SLACK * SLACK * max(noise, judged.own) else []
        noise = max([noise, *(value.low for value in judged.values if value.result and value.low < math.inf)])
    return found


def _other_operands(calls: Sequence[Judged]) -> list[Judged]:
    """Return forwards of operators that are given something far from all results before: a weight, or what ranks sent."""
    noise, found = 0.0, list[Judged]()
    end = next((i for i, one in enumerate(calls) if one.call.phase == "backward"), len(calls))  # then gradients and optimizers
    for judged in (one for one in calls[:end] if one.call.kind == "op" and one.call.phase == "forward"):
        far = max((value.low for value in judged.values if not value.result and value.low < math.inf), default=0.0)
        found += [judged] if far > SLACK * SLACK * max(noise, judged.own) else []
        noise = max([noise, *(value.low for value in judged.values if value.result and value.low < math.inf)])
    return found


def _place(judged: Judged) -> int:
    return judged.pair.place


def _first_result(calls: Sequence[Judged]) -> float:
    """Return the place of the first call whose results are apart, of nested ones the innermost; of none, that of the end."""
    differ = (judged for judged in calls if judged.outcome != "identical")
    apart = [judged for judged in differ if any(value.result and _is_apart(value.interval) for value in judged.values)]
    outer = {id(call) for judged in apart for call in enclosing(judged.pair.a)}
    return min((judged.pair.place for judged in apart if id(judged.pair.a) not in outer), default=math.inf)


def _is_apart(far: Interval) -> bool:
    return far.high > 0 and far.evidence != "absent"


def given_another(judged: Judged, counts: Callable[[Call, Distance], bool] | None = None) -> Distance | None:
    """Return the first value that a call is given and that is not the same stored numbers on both sides.

    counts: which values to look at, all of them where it is None.
    """
    if judged.given == 0:
        return None
    given = (value for value in judged.values if not value.result and value.another and value.slot not in judged.excused)
    return next((value for value in given if counts is None or counts(judged.call, value)), None)


def _is_of_the_batch(call: Call, value: Distance) -> bool:
    """Return whether training does not change a value: whole numbers, and what the model is called with."""
    root = call.kind == "module" and call.name == ROOT and call.phase == "forward"
    return value.epsilon == 0 or (root and not value.slot.startswith("parameters"))


def _where(rank: Compared, judged: Judged) -> str:
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


def _what(judged: Judged, since: tuple[Distance, float] | None = None) -> str:
    if side_alone(judged):
        return f"only {side_alone(judged)} runs this module"
    value = since[0] if since is not None else given_another(judged, _is_a_weight) or given_another(judged)
    if judged.outcome not in ("bug", "suspicious") and value is not None:
        source = "the weights differ" if value.slot.startswith("parameters") else "it is given something else"
        return f"{source}, {_far(value)}"
    worst = judged.worst
    beyond = max(judged.values, key=lambda value: value.beyond, default=None)
    if beyond is not None and beyond.beyond.times > 1:
        far = f"{beyond.slot} is {times(beyond)}" if beyond.factor else _moved(beyond)
    else:
        far = "" if worst is None else f"{_far(worst)} ({_rounding(judged, worst)})"
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


def _far(value: Distance) -> str:
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


def _hints(rank: Compared, judged: Judged) -> list[str]:
    """Return what helps to find the reason: what it runs within, random numbers, a call before that only one side has."""
    said: list[str] = []
    around = next(enclosing(judged.call), None)
    if around is not None:
        said.append(f"it runs within {entry_name(around, rank.framework)}")
    if any(word in f"{judged.call.name} {judged.call.cls}".lower() for word in _RANDOM):
        said.append("it draws random numbers: compare runs with equal generators, or with dropout off")
    if judged.call.kind == "state" and judged.call.phase == "step" and any(value.result for value in judged.values):
        said.append("this is what the optimizer makes of the parameter")
    said += _about_factor(rank, judged)
    worst = judged.worst
    if worst is not None and worst.from_truth is not None:
        far = worst.from_truth
        nearer = "both are as far" if far[0] == far[1] else f"{'A' if far[0] > far[1] else 'B'} is further from it"
        said.append(f"from the run in high precision A is {far[0]:.1e} apart and B {far[1]:.1e}: {nearer}")
    place = judged.pair.place
    settings = [other for other in rank.calls if other.argument and other.pair.place < place and other is not judged]
    if settings:
        said.append(f"before it, {settings[-1].argument} of {entry_name(settings[-1].call, rank.framework)}")
    alone = [other for other in rank.calls if other.pair.a is None or other.pair.b is None]
    before = [other for other in alone if other.pair.place < place]
    if before:
        said.append(f"before it, only {side_alone(before[-1])} runs {entry_name(before[-1].call, rank.framework)}")
    return said


def _scaled(rank: Compared, judged: Judged) -> list[str]:
    """Return that gradients are scaled between the backward and the optimizer, where those of the backward agree."""
    factor = next((value.factor for value in judged.values if value.factor), 0.0)
    if not factor or judged.call.kind != "state" or judged.call.phase != "backward":
        return []
    backward = [one.outcome for one in rank.calls if one.call.kind == "parameter" and one.pair.a and one.pair.b]
    if not backward or not {"bug", "suspicious", "unknown"}.isdisjoint(backward):
        return []
    return ["; gradients of the backward agree: they are clipped or scaled in between, on one side or by another number"]


def _about_factor(rank: Compared, judged: Judged) -> list[str]:
    """Return of how many gradients of parameters one side has those of the other times the number of the first place."""
    first = next((value for value in judged.values if value.factor), None)
    kinds = {one.call.kind for one in rank.calls if one.call.phase == "backward"}
    kind = "state" if "state" in kinds else "parameter"  # as the optimizer sees them, or as they reached the modules
    gradients = [
        value
        for one in rank.calls
        if one.call.kind == kind and one.call.phase == "backward"
        for value in one.values
        if value.result and value.interval.evidence != "absent"
    ]
    same = [value for value in gradients if first is not None and abs(value.factor / first.factor - 1) < 0.02]
    whole = "all" if len(same) == len(gradients) else f"{len(same)} of"
    return [f"{whole} {len(gradients)} gradients of parameters are {times(same[0])}"] if same else []


def _about_missing(missing: Sequence[tuple[Compared, Judged]]) -> list[str]:
    said: list[str] = []
    alone = [found for found in missing if found[1].pair.a is None or found[1].pair.b is None]
    if alone:
        count = "1 call has" if len(alone) == 1 else f"{len(alone)} calls have"
        side = side_alone(alone[0][1])
        said = [f"{count} no partner; the first is {_where(*alone[0])}, which is in {side} alone"]
    results = [(at, value) for at in missing for value in at[1].values if value.interval.evidence == "absent"]
    if results:
        at, value = results[0]
        said.append(
            f"{len(results)} results have no partner; the first is {value.slot} of {_where(*at)}, {value.interval.note}"
        )
    return said


def _about_arguments(ranks: Sequence[Compared]) -> list[str]:
    """Return which plain arguments differ of calls whose results are not known to."""
    other = [(rank, one) for rank in ranks for one in rank.calls if one.argument and one.outcome not in ("bug", "suspicious")]
    if not other:
        return []
    what = "1 call has another plain argument" if len(other) == 1 else f"{len(other)} calls have another plain argument, first"
    return [f"{what}: {other[0][1].argument} of {_where(*other[0])}"]


def _about_ranks(ranks: Sequence[Compared]) -> list[str]:
    """Return of how many ranks of a run the dumps are, where it had more."""
    found, world = {rank.at.rank for rank in ranks}, max((rank.world for rank in ranks), default=1)
    whole = any(rank.joined for rank in ranks) or len(found) >= world
    return [] if whole else [f"{len(found)} of the {world} ranks of A's run were compared, as the dumps hold no others"]


def _about_formats(ranks: Sequence[Compared]) -> list[str]:
    other = [(rank, judged, value) for rank in ranks for judged in rank.calls for value in judged.values if value.formats]
    if not other:
        return []
    rank, judged, value = other[0]
    return [
        f"{len(other)} values have another number format; the first is {value.slot} of {_where(rank, judged)}: {value.formats}"
    ]


def _about_unread(ranks: Sequence[Compared]) -> list[str]:
    unread = [text for rank in ranks for text in rank.unread]
    return [f"{len(unread)} stored values cannot be read and are told by their statistics: {unread[0]}"] if unread else []


def _about_rounding(ranks: Sequence[Compared]) -> list[str]:
    """Return who says what rounding explains: a third run, or a model of it."""
    differ = [judged for rank in ranks for judged in rank.calls if judged.outcome != "identical"]
    apart = [value for judged in differ for value in judged.values if value.result and _is_apart(value.interval)]
    measured = sum(value.floor > 0 for value in apart)
    if not apart:
        return []
    if not measured:
        return ["what rounding explains is worked out by a model; `--floor` measures it (`trainprobe floor` makes such a run)"]
    rest = f"; a model speaks for the other {len(apart) - measured}" if measured < len(apart) else ""
    return [f"what rounding explains was measured for {measured} of {len(apart)} results that are apart{rest}"]


def _about_counts(counts: Mapping[Outcome, int]) -> list[str]:
    said = [f"{number} {outcome}" for outcome, number in counts.items() if number]
    return [f"calls: {', '.join(said)}"] if said else []
