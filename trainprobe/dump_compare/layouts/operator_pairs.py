"""Pairs the operators of two layouts by the module call that they run in and their place there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainprobe.dump_compare.call_slots import fill, is_result
from trainprobe.dump_compare.layouts.arguments import add_arguments
from trainprobe.dump_compare.layouts.collectives import Collectives
from trainprobe.dump_compare.layouts.grouping import CallTable, Group, Here, Key, Owner, Piece, in_expert, order_of, parts_of
from trainprobe.dump_compare.layouts.joined import JoinedSide, RankPart
from trainprobe.dump_compare.layouts.known_values import KnownValues
from trainprobe.dump_compare.layouts.operators import Joined, backward_joins, forward_joins
from trainprobe.dump_compare.layouts.topology import expert_position_of, position_of
from trainprobe.dump_compare.pairing import aligned, operator
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name, slots

Lanes = list[list[Here]]  # what each rank ran, in order; the stages of a pipeline one behind the other
Grouped = Callable[[Key, Mapping[Piece, list[Here]], Mapping[Piece, list[Here]]], Sequence[Group]]
Parents = Sequence[Mapping[tuple[str, str, int, int], Call]]
_Heres = tuple[list[Here], list[Here]]  # what the ranks of either side ran, of one operator
_OPTIMIZER = ("optimizer", "clip_grad")


@dataclass(frozen=True, slots=True)
class OperatorPair:
    """An operator of both sides: what the ranks ran, and the calls of the whole."""

    micro: int
    heres: tuple[Sequence[Here], Sequence[Here]]
    calls: tuple[Call, Call]


@dataclass(frozen=True, slots=True)
class _Site:
    """Where operators stand: what they run in, the micro-batch, and the calls of modules that were made, side by side.

    weights: shapes of weights of which a module's forward is given all, whatever its rank holds.
    """

    owner: Owner
    micro: int
    parents: Parents
    weights: set[tuple[int, ...]]

    def parent(self, side: int, like: Call, phase: str) -> Call | str | None:
        """Return what a call runs in."""
        if isinstance(like.parent, str):
            return like.parent
        name, number = self.owner
        made = self.parents[side]
        return made.get((name, phase, number, self.micro)) or made.get((name, "forward", number, self.micro))


class OperatorPairs:
    """Makes the operators of the whole model from those of the ranks, and counts what is left out and why.

    known: of which numbers it is known how they lie over the ranks.
    """

    def __init__(
        self,
        tables: tuple[CallTable, CallTable],
        sides: tuple[JoinedSide, JoinedSide],
        collectives: tuple[Collectives, Collectives],
    ) -> None:
        self._tables, self._sides, self._collectives = tables, sides, collectives
        self._base = 0 if tables[0].layout.sizes.get("pp", 1) <= tables[1].layout.sizes.get("pp", 1) else 1
        self._numbers: Counter[str] = Counter()
        self._other_samples = len({(table.micros, table.layout.averaged) for table in tables}) > 1
        self._alone = not any(key[0] == "module" for table in tables for key in table.calls)  # no modules were recorded
        self.known = KnownValues(recognises=self._alone)
        self._outside: Counter[str] = Counter()  # operators outside modules that may count micro-batches and ranks
        self._others: Counter[str] = Counter()  # modules that run other operators on the two sides → how many calls
        self._unknown: Counter[str] = Counter()  # operators that have no known split → how many calls
        self._gradients: Counter[str] = Counter()  # backwards, of which gradients were left out → how many

    def pairs(self, grouped: Grouped, parents: Parents) -> Iterator[OperatorPair]:
        """Yield what can be compared. grouped: returns which pieces belong together. parents: see _Site."""
        found: list[tuple[tuple[int, ...], _Site, tuple[list[Here], list[Here]], bool]] = []
        a, b = (table.operators for table in self._tables)
        for owner in dict.fromkeys([*a, *b]):
            mine, theirs = a.get(owner, {}), b.get(owner, {})
            key = "op", owner[0], "forward", owner[1]
            for micro, *pieces in grouped(key, mine, theirs) if mine and theirs else [(0, [*mine], [*theirs])]:
                lanes = _lanes(mine, pieces[0]), _lanes(theirs, pieces[1])
                outside = owner[0] == "" and self._other_samples and not self._alone
                together, sure = ([], True) if outside or not all(lanes) else _side_by_side(lanes, owner, self._alone)
                self._leave_out(self._outside if outside else self._others, owner, lanes, together)
                site = _Site(owner, micro, parents, self._weights(owner) if together else set())
                found += [
                    (order_of(heres[self._base], micro, self._tables[self._base]), site, heres, sure) for heres in together
                ]
        for _, site, heres, sure in sorted(
            found, key=lambda each: each[0]
        ):  # what is known of a value follows from those before
            yield from self._at(site, heres, sure)

    def follow(self, a: Sequence[RankPart], b: Sequence[RankPart]) -> None:
        """Take in what ranks get of a collective that they hand a value to which the other side holds whole."""
        for i, (parts, whole) in enumerate(((a, b), (b, a))):
            if len(whole) == 1 and len(parts) > 1:
                for got, cut in self._collectives[i].passed_on(parts, whole[0]):
                    self.known.add(whole, got, cut=cut)

    def _leave_out(self, counts: Counter[str], owner: Owner, lanes: tuple[Lanes, Lanes], together: Sequence[_Heres]) -> None:
        """Count what has no partner, with its backwards."""
        kept = {id(here) for heres in together for of_side in heres for here in of_side}
        alone = [[here for lane in side for here in lane if id(here) not in kept] for side in lanes]
        if alone[0] or alone[1]:
            counts[owner[0] or "the script itself"] += sum(map(len, [*alone, *self._backwards((alone[0], alone[1]))]))

    def _weights(self, owner: Owner) -> set[tuple[int, ...]]:
        """Return the shapes of the weights of a module whose shards are gathered for its forward."""
        heres = [
            here
            for table in self._tables
            for of in table.calls.get(("module", owner[0], "forward", owner[1]), {}).values()
            for here in of
        ]
        values = [(slot, value) for here in heres for slot, value in slots(here.call)]
        return {
            tuple(value.shape)
            for slot, value in values
            if slot.startswith("parameters") and "placements" in (value.extra or {})
        }

    def _at(self, site: _Site, heres: _Heres, sure: bool) -> Iterator[OperatorPair]:
        """Yield an operator and its backward, where they can be compared."""
        backs = self._backwards(heres)
        values = [_values(of, site.owner, "forward", table) for of, table in zip(heres, self._tables, strict=True)]
        calls = [[here.call for here in of] for of in heres]
        trusted = site.owner[0] in _OPTIMIZER
        found = forward_joins(calls, values[0], values[1], self.known, site.weights, trusted=trusted, sure=sure)
        if not found:
            self._unknown[entry_name(calls[self._base][0])] += sum(map(len, (*heres, *backs)))
            return
        for slot in (slot for slot in found if is_result(slot)):
            self.follow(values[0][slot], values[1][slot])
        number = self._number(heres)
        yield OperatorPair(site.micro, heres, self._calls(site, number, heres, found))
        if backs[0] or backs[1]:
            yield from self._backward(site, number, (heres, backs), found)

    def _backward(
        self,
        site: _Site,
        number: int,
        ran: tuple[_Heres, _Heres],
        forward: Mapping[str, Joined],
    ) -> Iterator[OperatorPair]:
        heres, backs = ran
        values = [_values(of, site.owner, "backward", table) for of, table in zip(backs, self._tables, strict=True)]
        whole = [len(one) == len(other) for one, other in zip(heres, backs, strict=True)]
        found = backward_joins(forward, values[0], values[1]) if all(whole) else None
        name = entry_name((backs[0] or backs[1])[0].call)
        if not found:
            self._unknown[name] += sum(map(len, backs))
            return
        self._gradients[name] += len(values[0].keys() & values[1].keys()) - len(found)
        yield OperatorPair(site.micro, backs, self._calls(site, number, backs, found))

    def _backwards(self, heres: _Heres) -> _Heres:
        """Return the backwards of some forwards, of those that have one."""
        found = [
            [back for here in of if (back := table.backwards.get((here.rank, here.call.name, here.call.call))) is not None]
            for of, table in zip(heres, self._tables, strict=True)
        ]
        return found[0], found[1]

    def _number(self, heres: _Heres) -> int:
        """Return the number of an operator of the whole: as the side has it that no pipeline cuts, or a new one."""
        call = heres[self._base][0].call
        self._numbers[call.name] += 1
        return call.call if self._tables[self._base].layout.sizes.get("pp", 1) == 1 else self._numbers[call.name] - 1

    def _calls(self, site: _Site, number: int, heres: _Heres, found: Mapping[str, Joined]) -> tuple[Call, Call]:
        made: list[Call] = []
        for i, (side, of) in enumerate(zip(self._sides, heres, strict=True)):
            like = of[0].call
            micro = None if isinstance(like.parent, str) else site.micro
            call = Call("op", like.name, number, like.phase, micro=micro, parent=site.parent(i, like, str(like.phase)))
            fill(call, {slot: side.add(joined[:2][i]) for slot, joined in found.items()})
            made.append(call)
        if made[0].phase != "backward":
            ran = [[(here.rank, here.call) for here in of] for of in heres]
            add_arguments((made[0], made[1]), (ran[0], ran[1]))
        return made[0], made[1]

    def notes(self) -> list[str]:
        """Return how many operators were left out, and why."""
        reasons = (
            (self._outside, "calls of operators outside modules are not compared, as they may count ranks or micro-batches"),
            (
                self._others,
                "calls of operators are not compared, as what they run in runs others on the two sides: {first} first",
            ),
            (self._unknown, "calls of operators have no known split and were not compared; the first is {first}"),
            (+self._gradients, "gradients are sums over samples, or stand within an operator: not compared, {first} first"),
        )
        return [f"{counts.total()} {said.format(first=next(iter(counts)))}" for counts, said in reasons if counts]


def _lanes(of: Mapping[Piece, list[Here]], pieces: Sequence[Piece]) -> Lanes:
    """Return what was run in some pieces, piece by piece and tensor-parallel rank by rank."""
    found: dict[tuple[Piece, int], list[Here]] = defaultdict(list)
    for piece in pieces:
        for here in of.get(piece, ()):
            found[piece, here.tensor].append(here)
    return [sorted(lane, key=lambda here: (here.stage, here.place)) for lane in found.values()]


def _side_by_side(lanes: tuple[Lanes, Lanes], owner: Owner, alone: bool) -> tuple[list[_Heres], bool]:
    """Return the operators that belong together, and whether that is sure by their places alone.

    It is where all ranks run the same operators, or end with them. Where one side runs some that the other does not, within a
    module and on one stage, the names are aligned; that they are the same operators is then to be shown by what they are given.
    alone: whether no modules were recorded, so that all that the script runs is aligned.
    """
    shared = _shared_end([*lanes[0], *lanes[1]], owner)
    if shared:
        ends = [[lane[-shared:] for lane in side] for side in lanes]
        return [([lane[i] for lane in ends[0]], [lane[i] for lane in ends[1]]) for i in range(shared)], True
    names = [[[operator(here.call.name) for here in lane] for lane in side] for side in lanes]
    alike = all(each == of_side[0] for of_side in names for each in of_side)
    staged = any(len({here.stage for here in lane}) > 1 for side in lanes for lane in side)
    if not alike or staged or owner[0] in _OPTIMIZER or (owner[0] == "" and not alone):
        return [], True
    return [
        ([lane[i] for lane in lanes[0]], [lane[j] for lane in lanes[1]]) for i, j in aligned(names[0][0], names[1][0])
    ], False


def _shared_end(lanes: Sequence[Sequence[Here]], owner: Owner) -> int:
    """Return how many operators all ranks run alike, where the shortest is all that the others end with, else 0.

    A wrapper gathers weights before a module runs, and runs operators for that which are not the model's. Of several stages,
    and outside modules, only all operators together are known to be alike; an optimizer on stages has its weights in an order
    of its own.
    """
    names = [[operator(here.call.name) for here in lane] for lane in lanes]
    least, most = min(map(len, names)), max(map(len, names))
    staged = any(len({here.stage for here in lane}) > 1 for lane in lanes)
    outside = owner[0] in ("", *_OPTIMIZER)
    if (staged and outside) or ((staged or outside) and least < most):
        return 0
    return least if least and all(each[-least:] == names[0][-least:] for each in names) else 0


def _values(heres: Sequence[Here], owner: Owner, phase: str, table: CallTable) -> dict[str, list[RankPart]]:
    """Return slot → what the ranks hold there."""
    of: dict[Piece, list[Here]] = defaultdict(list)
    for here in heres:
        position = (
            expert_position_of(here.side.step_data.place) if in_expert(owner[0]) else position_of(here.side.step_data.place)
        )
        of[(here.call.micro or 0, *position.data)].append(here)
    return parts_of(of, [*of], ("op", owner[0], phase, owner[1]), table)
