"""Operators of two layouts, where it is proven how each of their values lies over the ranks: whole, copies, or parts.

An operator is known by the module call that it runs in and its place there; both sides must run the same operators there. Its
numbers are compared where one of these holds, and left out and counted otherwise:

    whole     one rank ran it for these samples on either side, as under pipeline parallelism
    boxes     DTensors say themselves which part each rank holds
    copies    all ranks hold the same numbers, or must, as the operator is a function of nothing but copies
    parts     all that it is given is known, its parts lie side by side, and it mixes nothing along a dimension that is split
    terms     a product of parts along what is summed over: each rank holds a term
    mean      a loss of known parts, averaged over equally many samples

What is known begins with the values of modules and with weights. Sums that were not yet reduced are never known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

from trainprobe.dump_compare.arguments import plain_arguments
from trainprobe.dump_compare.call_slots import is_result
from trainprobe.dump_compare.layouts.cuts import (
    ELEMENTWISE,
    Cut,
    Lay,
    boxes_of,
    drops_nothing,
    lays_of_results,
    shape_of_part,
    unused,
)
from trainprobe.dump_compare.layouts.joined import Join, RankPart, agree
from trainprobe.dump_compare.layouts.known_values import KnownValues, Values, has_boxes
from trainprobe.dump_compare.layouts.splits import by_boxes, whole_shape
from trainprobe.engine.core.records import Call

Way = Literal["whole", "boxes", "copies", "parts", "mean", "terms"]
Joined = tuple[Join, Join, Way]

_MOVES = ("view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim", "swapaxes", "t")
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "baddbmm", "embedding")
_OVER_LAST = ("softmax", "log_softmax", "layer_norm", "rms_norm")
_ATTENTION = ("scaled_dot_product_attention",)
_MEANS = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_SIZED = ("view", "reshape", "flatten", "unflatten")
_OF_TORCH = ("Functional", "Tensor", "Torch")
_NOT_PURE = ("dropout", "rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "empty", "new_empty", "rrelu")
_NO_OPERATORS = ("view_as",)  # what DTensors put around local tensors


def is_plumbing(call: Call) -> bool:
    """Return whether a call passes tensors on between ranks or wrappers and is not the model's."""
    return not call.name.startswith(_OF_TORCH) or call.name.rpartition(".")[2] in _NO_OPERATORS


_BY_RANKS: tuple[Way, ...] = ("whole", "copies", "boxes", "parts")


def forward_joins(
    calls: Sequence[Sequence[Call]],
    a: Values,
    b: Values,
    known: KnownValues,
    weights: Set[tuple[int, ...]] = frozenset(),
    *,
    trusted: bool = False,
    sure: bool = True,
) -> dict[str, Joined] | None:
    """Return how the values of an operator make one whole on each side; None where that is not known of one of them.

    calls: of the ranks of either side. known: takes in what the operator gives. weights: shapes of gathered weights. trusted:
    whether what is the same on all ranks is a copy, as in an optimizer, and not a number that each rank found of its samples.
    sure: whether the calls are known to be the same operator; they must be given the same values if not.
    """
    given = [slot for slot in a if slot in b and not is_result(slot)]
    _recognise(a, b, given, known)
    if not sure and not all(known.are_one(a[slot], b[slot]) or not any(part.size for part in a[slot]) for slot in given):
        return None
    found: dict[str, Joined] | None
    if len(calls[0]) == len(calls[1]) == 1:
        found = {slot: (_single(parts), _single(b[slot]), "whole") for slot, parts in a.items() if slot in b}
    elif a.keys() != b.keys():
        return None
    else:
        in_cuts = _joins_of_cuts(calls, (a, b), known)
        if in_cuts is not None:
            return in_cuts
        sound = {
            slot: trusted or all(known.all_of(side[slot]) or _is_gathered(side[slot], weights) for side in (a, b))
            for slot in given
        }
        found = _joins_of_ranks(calls, a, b, sound)
    for slot in filter(is_result, found or ()):
        known.add(a[slot], b[slot])
    return found


def _recognise(a: Values, b: Values, given: Sequence[str], known: KnownValues) -> None:
    """Learn which values of both sides are one, by what an operator is given."""
    for slot in given:
        if not (known.all_of(a[slot]) and known.all_of(b[slot])) and _are_the_same_bits((*a[slot], *b[slot])):
            known.add(a[slot], b[slot])
        if known.recognises:
            known.recognise(a[slot], b[slot])
    if known.recognises:
        known.take_weights(a, b)


def _joins_of_ranks(
    calls: Sequence[Sequence[Call]], a: Values, b: Values, sound: Mapping[str, bool]
) -> dict[str, Joined] | None:
    """Return how the values of several ranks make wholes. sound: of what is given, whether it may be joined."""
    found: dict[str, Joined] = {}
    for slot in sorted(a, key=is_result):  # what is given first
        if is_result(slot):
            made = _of_result(calls, found, a[slot], b[slot])
        else:
            made = _joined(a[slot], b[slot]) if sound[slot] else None
        if made is None:
            return None
        found[slot] = made
    return found


def _joins_of_cuts(
    calls: Sequence[Sequence[Call]], sides: tuple[Values, Values], known: KnownValues
) -> dict[str, Joined] | None:
    """Return how values make wholes where one rank of one side holds all, and those of the other known parts."""
    one = 0 if len(calls[0]) == 1 else 1
    if len(calls[one]) != 1 or len({part.data for parts in sides[1 - one].values() for part in parts}) > 1:
        return None
    call, ranks = calls[one][0], len(calls[1 - one])
    last = call.name.rpartition(".")[2].strip("_")
    wholes = {slot: parts[0] for slot, parts in sides[one].items() if slot != unused(last, call)}
    if any(len(sides[1 - one][slot]) != ranks for slot in wholes) or not _say_the_same(calls):
        return None
    lays: dict[str, Lay] = {}
    for slot in (slot for slot in wholes if not is_result(slot)):
        lay = _lay_of(wholes[slot], sides[1 - one][slot], known)
        if lay is None:
            return None
        lays[slot] = lay
    if not any(isinstance(lay, Cut) for lay in lays.values()):
        return None
    results = {slot: whole.shape for slot, whole in wholes.items() if is_result(slot) and whole.size}
    made = lays_of_results(last, call, {slot: (wholes[slot].shape, lay) for slot, lay in lays.items()}, results)
    if made is None or not all(_fits(wholes[slot].shape, sides[1 - one][slot], lay) for slot, lay in made.items()):
        return None
    found: dict[str, Joined] = {}
    every: dict[str, Lay] = {**lays, **made}
    for slot, lay in every.items():
        parts, whole = sides[1 - one][slot], wholes[slot]
        if slot in made and lay != "sum":
            known.add([whole], parts, cut=lay if isinstance(lay, Cut) else None)
        if whole.value.row >= 0 and all(part.value.row >= 0 for part in parts):
            mine, theirs = _single([whole]), _of_lay(parts, lay, whole.shape)
            way: Way = "copies" if lay == "copy" else "terms" if lay == "sum" else "parts"
            found[slot] = (mine, theirs, way) if one == 0 else (theirs, mine, way)
    return found or None


def _say_the_same(calls: Sequence[Sequence[Call]]) -> bool:
    """Return whether calls are given the same dimensions; sizes differ with the parts, and other numbers change no split."""
    last = calls[0][0].name.rpartition(".")[2].strip("_")
    if last in _SIZED or last in ELEMENTWISE or last in _PRODUCTS:
        return True
    arguments = [plain_arguments(call) for of_side in calls for call in of_side]
    return all(each == arguments[0] for each in arguments)


def _lay_of(whole: RankPart, parts: Sequence[RankPart], known: KnownValues) -> Lay | None:
    """Return how the ranks hold what an operator is given, None where it is not known."""
    if whole.size == 0 and all(part.size == 0 for part in parts):
        return "copy"
    if not known.are_one([whole], parts):
        return None
    if all(part.shape == whole.shape for part in parts) and agree(parts):
        return "copy"
    cut = known.cut_of(parts)
    return cut if cut is not None and _fits(whole.shape, parts, cut) else None


def _fits(shape: tuple[int, ...], parts: Sequence[RankPart], lay: Lay) -> bool:
    """Return whether what ranks hold has the shapes that a lay says."""
    part_shape = shape_of_part(shape, lay) if isinstance(lay, Cut) else shape
    cut_fits = not isinstance(lay, Cut) or lay.unit * len(parts) == lay.period
    return cut_fits and all(part.shape == part_shape for part in parts)


def _of_lay(parts: Sequence[RankPart], lay: Lay, shape: tuple[int, ...]) -> Join:
    if lay == "copy":
        return Join(parts[:1], shape=shape, replicas=[(parts[0], other) for other in parts[1:]])
    if lay == "sum":
        return Join(parts, "terms", shape, terms=len(parts))
    return Join(parts, shape=shape, boxes=boxes_of(shape, lay, len(parts)))


def _are_the_same_bits(parts: Sequence[RankPart]) -> bool:
    """Return whether all ranks of both sides are given the same bits; a function of those gives the same everywhere."""
    bits = [part.side.bits(part.value) for part in parts]
    return (
        bool(bits[0]) and all(each == bits[0] for each in bits) and len({(part.shape, part.value.dtype) for part in parts}) == 1
    )


def _is_gathered(parts: Sequence[RankPart], weights: Set[tuple[int, ...]]) -> bool:
    return parts[0].shape in weights and all(part.value.requires_grad for part in parts) and agree(parts)


def backward_joins(forward: Mapping[str, Joined], a: Values, b: Values) -> dict[str, Joined] | None:
    """Return how the gradients of an operator make wholes, as its values do; None where one that it is given has no known way.

    A gradient at something that several samples share is a sum over them, which is compared as the gradient of a weight alone:
    it is left out here, as is one within an operator.
    """
    found: dict[str, Joined] = {}
    for slot in (slot for slot in a if slot in b):
        made = _of_gradient(_way_of(slot, forward, a[slot]), a[slot], b[slot])
        if made is not None:
            found[slot] = made
        elif not is_result(slot):
            return None
    return found


def _single(parts: Sequence[RankPart]) -> Join:
    return Join(parts, shape=parts[0].shape)


def _of_result(
    calls: Sequence[Sequence[Call]], given: Mapping[str, Joined], a: Sequence[RankPart], b: Sequence[RankPart]
) -> Joined | None:
    inputs = [made for slot, made in given.items() if not is_result(slot)]
    if all(way in ("copies", "whole") for _, _, way in inputs):
        if calls[0][0].name.endswith("__getitem__"):  # a dump does not hold all of an index, which may be a rank's own
            made = _joined(a, b)
            return made if made is not None and made[2] in ("copies", "whole") else None
        return _joined(a, b, copies=True) if _is_function(calls, alone=not inputs) else None
    first = calls[0][0]
    last = first.name.rpartition(".")[2].rstrip("_")
    if last in _MEANS and plain_arguments(first).get("reduction", "mean") == "mean":
        return _mean(a, b) if all(_is_of_equal_parts(made) for made in inputs) else None
    return _joined(a, b) if _keeps_parts_apart(last, first, inputs) else None


def _is_function(calls: Sequence[Sequence[Call]], *, alone: bool) -> bool:
    """Return whether calls give the same on all ranks where they are given the same tensors, or none (`alone`)."""
    arguments = [[plain_arguments(call) for call in of_side] for of_side in calls]
    alike = all(each == of_side[0] for of_side in arguments for each in of_side)
    last = calls[0][0].name.rpartition(".")[2]
    drawn = any(word in last for word in _NOT_PURE) and not drops_nothing(calls[0][0])
    return alike and not drawn and not (alone and arguments[0][0] != arguments[1][0])


def _is_of_equal_parts(made: Joined) -> bool:
    return made[2] == "parts" and all(len({part.shape for part in join.parts}) == 1 for join in made[:2])


def _keeps_parts_apart(last: str, call: Call, given: Sequence[Joined]) -> bool:
    """Return whether the results of an operator for parts are the parts of its result for the whole."""
    if last in ELEMENTWISE or last.strip("_") in ELEMENTWISE or last in _MOVES or last in _PRODUCTS:
        return True
    if last in _ATTENTION:
        return all(_alike_from(made, -2) for made in given)
    if last not in _OVER_LAST:
        return False
    arguments = plain_arguments(call)
    dim = arguments.get("dim", arguments.get("argument 1", -1)) if last.endswith("softmax") else -1
    return dim in (-1, len(given[0][0].parts[0].shape) - 1) and _alike_from(given[0], -1)


def _alike_from(made: Joined, dim: int) -> bool:
    """Return whether the last dimensions are whole on all ranks."""
    return len({part.shape[dim:] for join in made[:2] for part in join.parts}) == 1


def _joined(a: Sequence[RankPart], b: Sequence[RankPart], *, copies: bool = False) -> Joined | None:
    """Return the first readings of both sides that make wholes of one size. copies: whether ranks must hold copies."""
    for mine, way in _readings(a, copies):
        for theirs, other in _readings(b, copies):
            shape = whole_shape(mine, theirs)
            if shape is not None:
                least: Way = way if _BY_RANKS.index(way) > _BY_RANKS.index(other) else other
                return replace(mine, shape=shape), replace(theirs, shape=shape), least
    return None


def _readings(parts: Sequence[RankPart], copies: bool) -> Iterator[tuple[Join, Way]]:
    if any(part.value.row < 0 for part in parts):
        return
    if has_boxes(parts):
        if not any(part.box.term for part in parts if part.box is not None):
            yield by_boxes(parts), "boxes"
        return
    if len(parts) == 1:
        yield Join(parts), "whole"
        return
    if len({part.shape for part in parts}) == 1 and (copies or agree(parts)):
        yield Join(parts[:1], replicas=[(parts[0], other) for other in parts[1:]]), "copies"
    if not copies:
        yield Join(parts), "parts"
        yield from _copies_of_samples(parts)


def _copies_of_samples(parts: Sequence[RankPart]) -> Iterator[tuple[Join, Way]]:
    """Yield the parts of samples of which tensor-parallel ranks hold copies."""
    samples: dict[tuple[int, ...], list[RankPart]] = {}
    for part in parts:
        samples.setdefault(part.data, []).append(part)
    if 1 < len(samples) < len(parts) and all(agree(each) for each in samples.values()):
        first = [each[0] for each in samples.values()]
        yield Join(first, replicas=[(each[0], other) for each in samples.values() for other in each[1:]]), "parts"


def _mean(a: Sequence[RankPart], b: Sequence[RankPart]) -> Joined:
    made = [Join(parts, "terms" if len(parts) > 1 else "parts", parts[0].shape, mean=len(parts) > 1) for parts in (a, b)]
    return made[0], made[1], "mean"


def _way_of(slot: str, forward: Mapping[str, Joined], parts: Sequence[RankPart]) -> Way | None:
    """Return how the value lies that a gradient belongs to: of those that are as large on a rank, if it is the same for all."""
    if all(way == "whole" for _, _, way in forward.values()):
        return "whole"
    results = slot.startswith("grad_output")
    same: set[Way] = {
        way for at, (join, _, way) in forward.items() if is_result(at) == results and join.parts[0].size == parts[0].size
    }
    return same.pop() if len(same) == 1 else None


def _of_gradient(way: Way | None, a: Sequence[RankPart], b: Sequence[RankPart]) -> Joined | None:
    if way is None or any(part.value.row < 0 for part in (*a, *b)):
        return None
    if way == "whole":
        return _single(a), _single(b), "whole"
    if way == "mean":  # each rank's share of the gradient of the mean
        made = [Join(parts, "terms" if len(parts) > 1 else "parts", parts[0].shape) for parts in (a, b)]
        return made[0], made[1], "mean"
    shared = any(len({part.data for part in parts}) > 1 for parts in (a, b))
    if way in ("copies", "terms") and shared:
        return None
    made = _joined(a, b)
    same = "copies" if way == "terms" else way  # each term of a sum has the gradient of the sum
    return made if made is not None and (made[2] == same or way == "boxes") else None
