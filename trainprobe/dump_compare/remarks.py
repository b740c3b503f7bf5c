"""Remarks beside the verdict: what helps to find the cause, and what could not be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainprobe.dump_compare.arguments import plain_arguments
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.first_difference import is_apart
from trainprobe.dump_compare.judge import Judged, Outcome, enclosing
from trainprobe.dump_compare.one_sided import side_alone
from trainprobe.dump_compare.results import Compared
from trainprobe.dump_compare.scale_factors import times
from trainprobe.dump_compare.sentences import place_of_call
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.core.words import counted

_RANDOM = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential")


def hints(rank: Compared, judged: Judged) -> list[str]:
    """Return what helps to find the reason: what it runs within, a factor, a call before that only one side has."""
    said: list[str] = []
    around = next(enclosing(judged.call), None)
    if around is not None:
        said.append(f"it runs within {entry_name(around, rank.framework)}")
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


def about_random_numbers(rank: Compared, judged: Judged) -> str:
    """Return that a call, or what runs within it, draws random numbers, as text or ""."""
    own = judged.pair.a
    within = (one.call for one in rank.calls if own is not None and any(call is own for call in enclosing(one.pair.a)))
    draws = judged.outcome in ("bug", "suspicious") and any(map(_draws, (judged.call, *within)))
    return "; it draws random numbers: compare runs with equal generators, or with dropout off" if draws else ""


def _draws(call: Call) -> bool:
    if any(word in f"{call.name} {call.cls}".lower() for word in _RANDOM):
        return True
    given = plain_arguments(call) if "attention" in call.name.lower() and call.kind == "op" else {}
    rates = (x for at, x in given.items() if at == "dropout_p" or at.startswith("argument"))
    return given.get("training") is not False and any(isinstance(x, float) and 0 < x < 1 for x in rates)


def scaled_gradients(rank: Compared, judged: Judged) -> list[str]:
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
    if first is None:
        return []
    optimizers = _gradients(rank, "state")
    for gradients in (optimizers, _gradients(rank, "parameter")):
        same = [value for value in gradients if abs(value.factor / first.factor - 1) < 0.02]
        if same:
            whole = "all" if len(same) == len(gradients) else f"{len(same)} of"
            unscaled = "; where the optimizer takes them, none is" if optimizers and gradients is not optimizers else ""
            return [f"{whole} {len(gradients)} gradients of parameters are {times(same[0], gradients=True)}{unscaled}"]
    return []


def about_scale(ranks: Sequence[Compared]) -> list[str]:
    """Return by what number all gradients of one side are larger, of a rank where they share one."""
    for rank in ranks:
        gradients = _gradients(rank, "parameter")
        if gradients and (factor := gradients[0].factor) and all(abs(value.factor / factor - 1) < 0.02 for value in gradients):
            return [
                f"all {len(gradients)} gradients of parameters are {times(gradients[0], gradients=True)} (step {rank.at.step})"
            ]
    return []


def _gradients(rank: Compared, kind: str) -> list[Distance]:
    """Return gradients of parameters: as the optimizer sees them (`state`), or as they reached the modules (`parameter`)."""
    calls = (one for one in rank.calls if one.call.kind == kind and one.call.phase == "backward")
    return [value for one in calls for value in one.values if value.result and value.interval.evidence != "absent"]


def about_missing(missing: Sequence[tuple[Compared, Judged]]) -> list[str]:
    """Return how many calls and results have no partner, and the first of each."""
    said: list[str] = []
    alone = [found for found in missing if found[1].pair.a is None or found[1].pair.b is None]
    if alone:
        count = "1 call has" if len(alone) == 1 else f"{len(alone)} calls have"
        side = side_alone(alone[0][1])
        said = [f"{count} no partner; the first is {place_of_call(*alone[0])}, which is in {side} alone"]
    results = [(at, value) for at in missing for value in at[1].values if value.interval.evidence == "absent"]
    if results:
        at, value = results[0]
        said.append(
            f"{len(results)} results have no partner; the first is {value.slot} of {place_of_call(*at)}, {value.interval.note}"
        )
    return said


def about_arguments(ranks: Sequence[Compared]) -> list[str]:
    """Return which plain arguments differ of calls whose results are not known to."""
    other = [(rank, one) for rank in ranks for one in rank.calls if one.argument and one.outcome not in ("bug", "suspicious")]
    if not other:
        return []
    what = "1 call has another plain argument" if len(other) == 1 else f"{len(other)} calls have another plain argument, first"
    return [f"{what}: {other[0][1].argument} of {place_of_call(*other[0])}"]


def about_ranks(ranks: Sequence[Compared]) -> list[str]:
    """Return of how many ranks of a run the dumps are, where it had more."""
    found, world = {rank.at.rank for rank in ranks}, max((rank.world for rank in ranks), default=1)
    whole = any(rank.joined for rank in ranks) or len(found) >= world
    return [] if whole else [f"{len(found)} of the {world} ranks of A's run were compared, as the dumps hold no others"]


def about_formats(ranks: Sequence[Compared]) -> list[str]:
    """Return how many values have different number formats, and the first."""
    other = [(rank, judged, value) for rank in ranks for judged in rank.calls for value in judged.values if value.formats]
    if not other:
        return []
    rank, judged, value = other[0]
    first = f"{value.slot} of {place_of_call(rank, judged)}: {value.formats}"
    return [f"{len(other)} values have another number format; the first is {first}"]


def about_unread(ranks: Sequence[Compared]) -> list[str]:
    """Return how many parts of the dumps cannot be read, and why the first cannot."""
    unread = [text for rank in ranks for text in rank.unread]
    return [f"{counted(len(unread), 'part')} of the dumps could not be read, such as: {unread[0]}"] if unread else []


def about_rounding(ranks: Sequence[Compared]) -> list[str]:
    """Return who says what rounding explains: a third run, or a model of it."""
    differ = [judged for rank in ranks for judged in rank.calls if judged.outcome != "identical"]
    apart = [value for judged in differ for value in judged.values if value.result and is_apart(value.interval)]
    measured = sum(value.floor > 0 for value in apart)
    if not apart:
        return []
    if not measured:
        return ["what rounding explains is worked out by a model; `--floor` measures it (`trainprobe floor` makes such a run)"]
    rest = f"; a model speaks for the other {len(apart) - measured}" if measured < len(apart) else ""
    return [f"what rounding explains was measured for {measured} of {len(apart)} results that are apart{rest}"]


def about_counts(counts: Mapping[Outcome, int], ranks: Sequence[Compared]) -> list[str]:
    """Return how many calls have each outcome."""
    said = [f"{number} {outcome}" for outcome, number in counts.items() if number]
    what = "calls, by what could be read of them" if any(rank.unread for rank in ranks) else "calls"
    return [f"{what}: {', '.join(said)}"] if said else []
