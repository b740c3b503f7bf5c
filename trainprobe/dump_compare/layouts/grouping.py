"""The calls of all ranks by their logical names, and which samples of one side are those of the other.

A call is known by kind, name in the whole model, phase, and its number within its micro-batch. What a rank computed in one
micro-batch is a *piece*: (micro-batch, index on dp, cp and sp). The pieces of two layouts are matched by what the model was
called with; without such numbers they are taken in the order in which samplers hand them out, micro-batch by micro-batch.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from trainprobe.dump_compare.dump_side import STATISTICS, Side
from trainprobe.dump_compare.layouts.joined import RankPart
from trainprobe.dump_compare.layouts.operators import is_plumbing
from trainprobe.dump_compare.layouts.rank_boxes import box_of
from trainprobe.dump_compare.layouts.topology import ParallelLayout, RankPosition, expert_position_of, layout_of, position_of
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import parameter_name, slots

Piece = tuple[int, ...]  # micro-batch, then the index on each data axis
Key = tuple[str, str, str, int]  # kind, name, phase, number within the micro-batch
Owner = tuple[str, int]  # what operators run in: a module's name, or "" or "optimizer" outside; number within the micro-batch
_EXPERTS = ("experts", "local_experts")
_SUMMED = 1e-9  # relative: by how much sums over samples may be off
_ALIKE = 1e-3  # relative: by how much norms of one gradient may differ to be taken for the same
_CHUNK = re.compile(r"(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Here:
    """A call of one rank. stage: of the pipeline, virtual stages counted. place: order of execution on the rank."""

    side: Side
    call: Call
    rank: int
    stage: int
    tensor: int
    place: int


@dataclass(slots=True)
class CallTable:
    """The calls of one side. calls: key → piece → those of the ranks; keys stand in the order of execution, rank by rank.

    operators: what they run in → piece → forwards of the ranks, in order. backwards: rank, name and number → the backward.
    """

    layout: ParallelLayout
    calls: dict[Key, dict[Piece, list[Here]]] = field(default_factory=dict[Key, dict[Piece, list[Here]]])
    pieces: list[Piece] = field(default_factory=list[Piece])
    operators: dict[Owner, dict[Piece, list[Here]]] = field(default_factory=dict[Owner, dict[Piece, list[Here]]])
    backwards: dict[tuple[int, str, int], Here] = field(default_factory=dict[tuple[int, str, int], Here])
    left_out: int = 0  # collectives and what is recomputed: other layouts run others
    averaged: int = 1  # how many times larger gradients are, before they are reduced, than their share of the whole
    turns: bool = False  # each second virtual stage runs from the last rank back to the first
    divided: int = 1  # by how many micro-batches the sum of all their gradients is divided

    def rename(self, renamed: Callable[[str], str]) -> None:
        """Give the calls other names."""
        self.calls = {(key[0], renamed(key[1]), key[2], key[3]): pieces for key, pieces in self.calls.items()}
        self.operators = {(renamed(name), number): pieces for (name, number), pieces in self.operators.items()}

    @property
    def micros(self) -> int:
        """Return the number of micro-batches."""
        return len({piece[0] for piece in self.pieces})


def table_of(sides: Sequence[Side]) -> CallTable:
    """Return the calls of all ranks of one side."""
    places = [side.step_data.place for side in sides]
    layout = layout_of(places[0])
    table = CallTable(layout, turns=_turns_back(sides, layout))
    seen: dict[Piece, None] = {}
    for side, place in zip(sides, places, strict=True):
        position, of_expert = position_of(place), expert_position_of(place)
        numbers: Counter[Hashable] = Counter()
        owners: dict[int, Owner] = {}
        tied = _tied(side)
        for i, call in enumerate(side.step_data.calls):
            if call.kind == "op" and call.phase != "recompute":
                _add_operator(table, side, call, owners, i)
                continue
            if call.kind not in ("module", "parameter", "saved") or call.phase == "recompute":
                table.left_out += 1
                continue
            name, stage = _whole_name(call.name, position, table)
            name = tied.get(name, name) if call.kind == "parameter" else name
            expert = in_expert(name)
            at_rank = of_expert if expert else position
            piece = (call.micro or 0, *at_rank.data)
            if call.kind == "module" and not expert:
                seen.setdefault(piece)
            at = (call.kind, name, call.phase, stage, call.micro)
            key = (call.kind, name, str(call.phase), numbers[at])
            if call.kind == "module" and call.phase == "forward":
                owners[id(call)] = name, numbers[at]
            numbers[at] += 1
            here = Here(side, call, place.rank, stage, at_rank.tensor, i)
            table.calls.setdefault(key, {}).setdefault(piece, []).append(here)
    of_operators = () if seen else {piece for of in table.operators.values() for piece in of}  # of a dump without modules
    table.pieces = sorted(seen or of_operators)
    table.averaged = layout.averaged
    return table


def _add_operator(table: CallTable, side: Side, call: Call, owners: Mapping[int, Owner], place: int) -> None:
    """Put an operator where it runs. owners: calls of modules of this rank → what they are called in the table."""
    at, parent = side.step_data.place, call.parent
    owner = owners.get(id(parent)) if isinstance(parent, Call) else (parent or "", 0)
    if is_plumbing(call) or (owner is None and call.phase != "backward"):
        table.left_out += 1
        return
    position = expert_position_of(at) if owner is not None and in_expert(owner[0]) else position_of(at)
    around = _whole_name(parent.name, position, table)[1] if isinstance(parent, Call) else position.stage
    here = Here(side, call, at.rank, around, position.tensor, place)
    if call.phase == "backward":
        table.backwards[at.rank, call.name, call.call] = here
    elif owner is not None:
        table.operators.setdefault(owner, {}).setdefault((call.micro or 0, *position.data), []).append(here)


def settle_averaging(a: CallTable, b: CallTable) -> str:
    """Find out whether one side adds up the gradients of its ranks instead of averaging them; return a sentence if it does.

    It then divides the loss beforehand, or the sum behind (as Megatron does for a loss per token), so that gradients before the
    reduction are that many times smaller. Or it divides by the micro-batches behind all of them, as torch's pipelines do, so
    that gradients before are that many times larger. Those behind it tell whether the whole is right.
    """
    norms = [_norm_of_loss_gradients(table) for table in (a, b)]
    if not all(norms):
        return ""
    ratio = norms[0] / a.averaged / (norms[1] / b.averaged)
    for name, table, other in (("A", a, ratio * a.averaged), ("B", b, ratio / b.averaged)):
        if table.averaged > 1 and abs(ratio - 1) > _ALIKE and abs(other - 1) < _ALIKE:
            said = (
                f"gradients of {name} before the reduction are compared as a sum over its {table.averaged} ranks, not as a mean"
            )
            table.averaged = 1
            return said
        if table.micros > 1 and abs((1 / ratio if name == "B" else ratio) / table.micros - 1) < _ALIKE:
            table.averaged *= table.micros
            table.divided = table.micros
            return (
                f"gradients of {name} before the end of the step are divided by its {table.micros} micro-batches, "
                "as its schedule divides their sum"
            )
    return ""


def _norm_of_loss_gradients(table: CallTable) -> float:
    """Return the norm of all gradients that reach the model's outputs, NaN or 0 where the dump does not say it.

    Those at outputs are of other samples each; those at a loss are terms of one, however many micro-batches there are.
    """
    found: list[tuple[float, bool]] = []
    for heres in table.calls.get(("module", ROOT, "backward", 0), {}).values():
        last = max(heres, key=lambda here: (here.stage, -here.tensor))
        given = [value for at, value in slots(last.call) if at.startswith("grad_output")]
        found += [(last.side.norm(value), math.prod(value.shape) == 1) for value in given]
    norm = sum(each for each, _ in found) if all(single for _, single in found) else math.hypot(*(each for each, _ in found))
    return norm if math.isfinite(norm) else 0.0


def _tied(side: Side) -> dict[str, str]:
    """Return module → module whose weight it shares in the whole model, where that one is on another rank.

    Known where the rank's source says that it holds a weight of a module that does not run here, and a module that runs here
    has gradients of a weight that the source does not name.
    """
    if not side.step_data.states:
        return {}
    held = {call.name for call in side.step_data.states}
    calls = [call for call in side.step_data.calls if call.phase != "recompute"]
    runs = {call.name for call in calls if call.kind == "module"}
    elsewhere = [name for name in held if owner_of(name) not in runs]
    unnamed = {
        parameter_name(call, short): call.name for call in calls if call.kind == "parameter" for short in call.params or {}
    }
    strange = [name for name in unnamed if name not in held]
    return {unnamed[strange[0]]: owner_of(elsewhere[0])} if len(elsewhere) == len(strange) == 1 else {}


def in_expert(name: str) -> bool:
    """Return whether a module is an expert, or holds the experts: it is given tokens of all samples, wherever it is."""
    return any(part in _EXPERTS for part in name.split("."))


def owner_of(parameter: str) -> str:
    """Return the module that holds a parameter."""
    return parameter.rpartition(".")[0] or ROOT


def _whole_name(name: str, position: RankPosition, table: CallTable) -> tuple[str, int]:
    """Return the name without the number of a virtual stage, and which stage of the whole pipeline it is of."""
    sizes = table.layout.sizes
    chunk = _CHUNK.match(name) if sizes.get("vpp", 1) > 1 else None
    if chunk is None:
        return name, position.stage
    turn, ranks = int(chunk[1]), sizes.get("pp", 1)
    back = table.turns and turn % 2 == 1
    return name[chunk.end() :] or ROOT, turn * ranks + (ranks - 1 - position.stage if back else position.stage)


def _turns_back(sides: Sequence[Side], layout: ParallelLayout) -> bool:
    """Return whether the last rank of a pipeline hands what its first virtual stage gives to its own second one, as in ZBV."""
    last = layout.sizes.get("pp", 1) - 1
    for side in sides if layout.sizes.get("vpp", 1) > 1 and last else ():
        if position_of(side.step_data.place).stage == last:
            calls = [call for call in side.step_data.calls if call.kind == "module" and call.phase == "forward"]
            given, made = (
                [side.numbers(value) for call in calls if call.name == name for at, value in slots(call) if at.startswith(slot)]
                for name, slot in (("1", "input"), ("0", "output"))
            )
            return any(numbers and numbers in made for numbers in given)
    return False


Group = tuple[int, Sequence[Piece], Sequence[Piece]]  # number of a micro-batch, pieces of A, pieces of B


def match_pieces(a: CallTable, b: CallTable) -> list[Group]:
    """Return which pieces are compared: one with one, micro-batch with micro-batch, or all with all.

    Pieces that are matched by their numbers alone and hold other samples are compared all together, where those are the same.
    """
    groups = _by_number(a, b)
    whole = 0, a.pieces, b.pieces
    told = [_are_given_the_same(a, b, group) for group in groups] if len(groups) > 1 else []
    return [whole] if False in told and _are_given_the_same(a, b, whole) else groups


def _are_given_the_same(a: CallTable, b: CallTable, group: Group) -> bool | None:
    """Return whether the model is called with the same in the pieces of a group, as far as statistics tell; None if not."""
    mine, theirs = (_of_all(table, pieces) for table, pieces in zip((a, b), group[1:], strict=True))
    if not mine or mine.keys() != theirs.keys():
        return None
    near = [
        math.isclose(x, y, rel_tol=_SUMMED, abs_tol=_SUMMED) for at in mine for x, y in zip(mine[at], theirs[at], strict=True)
    ]
    return all(near)


def _of_all(table: CallTable, pieces: Sequence[Piece]) -> dict[str, tuple[float, ...]]:
    """Return slot → elements, largest, smallest, sum and sum of squares of all that the model is called with in some pieces."""
    found: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for piece, heres in table.calls.get(("module", ROOT, "forward", 0), {}).items():
        first = min(heres, key=lambda here: (here.stage, here.tensor))
        for at, value in slots(first.call) if piece in pieces else ():
            numbers = first.side.numbers(value)
            if at.startswith(("input", "kwargs")) and all(name in numbers for name in STATISTICS):
                n = math.prod(value.shape)
                found[at].append((n, numbers["max"], numbers["min"], numbers["mean"] * n, numbers["norm"] ** 2))
    columns = {at: [*zip(*each, strict=True)] for at, each in found.items() if len(each) == len(pieces)}
    return {
        at: (sum(n), max(high), min(low), sum(added), sum(squares)) for at, (n, high, low, added, squares) in columns.items()
    }


def other_micro_batches(a: Side, b: Side) -> bool:
    """Return whether one rank of either side had as many samples in a step, in another number of micro-batches."""
    micros = [len({call.micro or 0 for call in side.step_data.calls if call.kind == "module"}) for side in (a, b)]
    if micros[0] == micros[1]:  # as of nearly all dumps, of which the tables would take a fifth of the time
        return False
    tables = [table_of([side]) for side in (a, b)]
    given = [_of_all(table, table.pieces) for table in tables]
    sizes = [{at: numbers[0] for at, numbers in each.items()} for each in given]
    return tables[0].micros != tables[1].micros and bool(sizes[0]) and sizes[0] == sizes[1]


def _by_number(a: CallTable, b: CallTable) -> list[Group]:
    """Return the groups that the number of pieces and micro-batches of both sides make."""
    if len(a.pieces) == len(b.pieces):
        mine, theirs = (_fingerprints(table) for table in (a, b))
        by_input = {fingerprint: piece for piece, fingerprint in theirs.items()}
        if len(by_input) == len(b.pieces) and set(mine.values()) == set(by_input):
            return [(i, [piece], [by_input[mine[piece]]]) for i, piece in enumerate(a.pieces)]
        return [(i, [one], [other]) for i, (one, other) in enumerate(zip(a.pieces, b.pieces, strict=True))]
    return by_micro_batch(a, b)


def by_micro_batch(a: CallTable, b: CallTable) -> list[Group]:
    """Return the pieces of each micro-batch, or all together where the sides have other numbers of micro-batches."""
    if a.micros == b.micros:
        return [(m, _of_micro(a, m), _of_micro(b, m)) for m in sorted({piece[0] for piece in a.pieces})]
    return [(0, a.pieces, b.pieces)]


def _of_micro(table: CallTable, micro: int) -> list[Piece]:
    return [piece for piece in table.pieces if piece[0] == micro]


def _fingerprints(table: CallTable) -> dict[Piece, Hashable]:
    """Return what tells the samples of a piece: the statistics or bits of all that the model is called with."""
    found: dict[Piece, Hashable] = {}
    for piece, heres in table.calls.get(("module", ROOT, "forward", 0), {}).items():
        first = min(heres, key=lambda here: (here.stage, here.tensor))
        given = [(at, value) for at, value in slots(first.call) if at.startswith(("input", "kwargs"))]
        numbers = [(at, tuple(sorted((first.side.bits(value) or first.side.numbers(value)).items()))) for at, value in given]
        found[piece] = tuple(sorted(numbers))
    return found


def values_of(heres: Sequence[Here]) -> dict[str, list[tuple[Here, Value]]]:
    """Return slot → the values that the ranks of one stage have there.

    A module that spans stages is given its inputs in the first and gives its outputs in the last; what others have is handed
    from stage to stage. Gradients of a weight that stages share are those of all stages.
    """
    if heres and heres[0].call.kind == "parameter":
        shared: dict[str, list[tuple[Here, Value]]] = defaultdict(list)
        for here in heres:
            for slot, value in slots(here.call):
                shared[slot].append((here, value))
        return shared
    found: dict[str, dict[int, list[tuple[Here, Value]]]] = defaultdict(lambda: defaultdict(list))
    for here in heres:
        for slot, value in slots(here.call):
            found[slot][here.stage].append((here, value))
    stages = [here.stage for here in heres]

    def shown(slot: str) -> int:
        if slot.startswith("parameters"):
            return min(found[slot])
        return max(stages) if slot.startswith(("output", "grad_output")) else min(stages)

    return {slot: of[shown(slot)] for slot, of in found.items() if shown(slot) in of}


def order_of(heres: Sequence[Here], micro: int, table: CallTable) -> tuple[int, ...]:
    """Return a sort key of a call in the order of execution: under a pipeline, stage after stage and back."""
    first = min(heres, key=lambda here: here.place)
    if table.layout.sizes.get("pp", 1) == 1:
        return (first.place,)
    back = first.call.phase == "backward" or first.call.kind == "parameter"
    micro = table.micros if isinstance(first.call.parent, str) else micro  # the optimizer steps behind all
    return micro, back, -first.stage if back else first.stage, first.place


def parts_of(of: Mapping[Piece, list[Here]], pieces: Sequence[Piece], key: Key, table: CallTable) -> dict[str, list[RankPart]]:
    """Return slot → what the ranks hold of it, piece by piece."""
    backward = key[2] == "backward" or key[0] == "parameter"
    # a gradient of which no accumulator saw the parts, as in a zero-bubble schedule
    at_end = key[0] == "parameter" and len({micro for micro, *_ in of}) == 1
    weight, ranks = (table.divided if at_end else 1) / table.averaged if backward else 1.0, table.layout.ranks
    found: dict[str, list[RankPart]] = {}
    for piece in pieces:
        for slot, values in values_of(of.get(piece, ())).items():
            found.setdefault(slot, []).extend(
                RankPart(
                    here.side, value, here.rank, _sample(key, piece, here), here.tensor, weight, box_of(value, here.rank, ranks)
                )
                for here, value in values
            )
    return found


def _sample(key: Key, piece: Piece, here: Here) -> Piece:
    """Return what tells the terms of a sum apart: the samples, and for a weight that stages share the stage."""
    return (*piece, here.stage) if key[0] == "parameter" else piece


def first_of(of: Mapping[Piece, list[Here]], pieces: Sequence[Piece]) -> Call:
    """Return the first call of these pieces."""
    return next(here.call for piece in pieces for here in of.get(piece, ()))
