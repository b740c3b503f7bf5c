"""The calls of the whole model, made from those of the ranks: each value joined from the ranks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainprobe.dump_compare.call_slots import fill
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.layouts.collectives import TERMS_OF_ROWS, Collectives
from trainprobe.dump_compare.layouts.cuts import Cut, cut_of_boxes
from trainprobe.dump_compare.layouts.fused import Beside, FusedRows, beside, matrix
from trainprobe.dump_compare.layouts.grouping import (
    CallTable,
    Group,
    Here,
    Key,
    Piece,
    by_micro_batch,
    first_of,
    in_expert,
    match_pieces,
    order_of,
    owner_of,
    parts_of,
)
from trainprobe.dump_compare.layouts.joined import Join, JoinedSide, RankPart, agree, array_of
from trainprobe.dump_compare.layouts.operator_pairs import OperatorPairs
from trainprobe.dump_compare.layouts.split_table import SplitRule, Splits
from trainprobe.dump_compare.layouts.splits import Role, joins
from trainprobe.dump_compare.layouts.states import cuts_of_weights, held_gradients
from trainprobe.dump_compare.pairing import CallPair
from trainprobe.dump_compare.parameter_states import renamed_parameter
from trainprobe.dump_compare.renamed.by_structure import Structure
from trainprobe.dump_compare.renamed.fused import Fused, about_rows
from trainprobe.dump_compare.renamed.fused_rows import Laid, RowOrder, find_rows
from trainprobe.engine.core.records import Call, Value


class JoinedCalls:
    """Makes the calls of the whole model from those of the ranks."""

    def __init__(
        self,
        tables: tuple[CallTable, CallTable],
        sides: tuple[JoinedSide, JoinedSide],
        known: Splits,
        rename: Callable[[str], str],
        structure: Structure,
    ) -> None:
        self._tables, self._sides, self._known, self._rename = tables, sides, known, rename
        self._in_a = {other: name for name, (other, _) in structure.pairs.items()}  # module of B → its other name in A
        self._looked_through, self._fused = structure.looked_through, structure.fused
        self._rows: list[RowOrder | None] = []  # of each of the fused: how its rows lie in the one
        self._unjoined: dict[str, None] = {}
        self._blind: dict[str, None] = {}  # values of which a dump holds nothing, and why
        self._together = False  # whether micro-batches hold other samples, and all of a step are compared together
        self._alone: list[dict[str, Key]] = [{}, {}]
        self._values_alone: list[dict[str, None]] = [{}, {}]  # of calls that both sides have
        self._parents: list[dict[tuple[str, str, int, int], Call]] = [{}, {}]
        self._collectives = Collectives(sides[0].ranks), Collectives(sides[1].ranks)
        self._operators = OperatorPairs(tables, sides, self._collectives)
        self._cuts = cuts_of_weights(sides, lambda name: renamed_parameter(name, rename))

    def pairs(self) -> list[CallPair]:
        """Return the calls that both sides have, in the order of execution."""
        a, b = self._tables
        groups = match_pieces(a, b)
        self._together = len(groups) == 1 and min(a.micros, b.micros) > 1
        base = 0 if a.layout.sizes.get("pp", 1) <= b.layout.sizes.get("pp", 1) else 1
        found: list[tuple[tuple[int, ...], Call, Call]] = []
        for key, mine in a.calls.items():
            theirs = b.calls.get(key)
            if theirs is None:
                self._alone[0].setdefault(_text(key), key)
                continue
            for micro, pieces_a, pieces_b in self._groups(key, mine, theirs, groups):
                heres = [of[piece] for of, pieces in ((mine, pieces_a), (theirs, pieces_b)) for piece in pieces if piece in of]
                if not heres:
                    continue
                both = self._pair(key, micro, (mine, pieces_a), (theirs, pieces_b))
                if both is not None:
                    of_base = [here for piece in (pieces_a, pieces_b)[base] for here in (mine, theirs)[base].get(piece, ())]
                    found.append((order_of(of_base, micro, self._tables[base]), *both))
        self._alone[1] = {_text(key): key for key in b.calls if key not in a.calls}
        found += self._of_fused(groups, base)
        operators = self._operators.pairs(lambda key, mine, theirs: self._groups(key, mine, theirs, groups), self._parents)
        found += [(order_of(each.heres[base], each.micro, self._tables[base]), *each.calls) for each in operators]
        found.sort(key=lambda each: each[0])
        return [CallPair(i, x, y) for i, (_, x, y) in enumerate(found)]

    def fused(self) -> list[FusedRows]:
        """Return the modules that are one on one side and several on the other, and how rows lie, once the pairs are made."""
        return [FusedRows(*each) for each in zip(self._fused, self._rows, strict=True)]

    def _of_fused(self, groups: Sequence[Group], base: int) -> Iterator[tuple[tuple[int, ...], Call, Call]]:
        """Yield the calls of modules that are one on one side and several on the other, each with its sort key."""
        for each in self._fused:
            split, single = self._tables[each.split], self._tables[1 - each.split]
            names = [self._rename(part.name) if each.split == 0 else part.name for part in each.parts]
            of_whole = each.whole.name if each.split == 0 else self._rename(each.whole.name)
            of_one = {key: [(key[0], name, *key[2:]) for name in names] for key in single.calls if key[1] == of_whole}
            of_one = {key: keys for key, keys in of_one.items() if all(part in split.calls for part in keys)}
            self._rows.append(self._rows_of(each, of_one))
            for key, keys in of_one.items():
                for i, alone in enumerate(self._alone):
                    for gone in keys if i == each.split else [key]:
                        alone.pop(_text(gone), None)
                yield from self._calls_of_fused(each, key, keys, groups, base, self._rows[-1])

    def _rows_of(self, fused: Fused, of_one: Mapping[Key, Sequence[Key]]) -> RowOrder | None:
        """Return how the rows of several modules lie in the one, None where neither a map nor stored weights tell."""
        split, single = self._tables[fused.split], self._tables[1 - fused.split]
        matrices = (
            matrix(self._beside(key, keys, [*single.calls[key]], [*split.calls[keys[0]]], fused.split))
            for key, keys in of_one.items()
        )
        found = next((each for each in matrices if each is not None), None)
        if found is None:
            return None
        one, joins_of_parts = found[0], found[1].several

        def load() -> list[Any]:
            return [*map(array_of, (one, *joins_of_parts))]

        return find_rows(one.shape, [each.shape for each in joins_of_parts], fused.groups, load, named=fused.named)

    def _beside(self, key: Key, keys: Sequence[Key], of_whole: Sequence[Piece], of_split: Sequence[Piece], i: int) -> Beside:
        """Return what the values of several modules come to beside those of one. i: the side that has the several."""
        split, single = self._tables[i], self._tables[1 - i]
        there = parts_of(single.calls[key], of_whole, key, single)
        parts = [parts_of(split.calls[each], of_split, each, split) for each in keys]
        classes = [first_of(of, pieces).cls for of, pieces in ((single.calls[key], of_whole), (split.calls[keys[0]], of_split))]

        def rules(slot: str) -> tuple[SplitRule | None, SplitRule | None]:
            return self._known.find(key[1], classes[0], slot), self._known.find(keys[0][1], classes[1], slot)

        return beside(there, parts, {slot: _role(key, slot) for slot in there}, rules)

    def _calls_of_fused(
        self, fused: Fused, key: Key, keys: Sequence[Key], groups: Sequence[Group], base: int, rows: RowOrder | None
    ) -> Iterator[tuple[tuple[int, ...], Call, Call]]:
        split, single = self._tables[fused.split], self._tables[1 - fused.split]
        whole, first = single.calls[key], split.calls[keys[0]]
        mine, theirs = (first, whole) if fused.split == 0 else (whole, first)
        for micro, *pieces in self._groups(key, mine, theirs, groups):
            of_split, of_whole = pieces[fused.split], pieces[1 - fused.split]
            values: list[dict[str, Value]] = [{}, {}]
            found = self._beside(key, keys, of_whole, of_split, fused.split)
            for slot, (one, several) in found.joined.items():
                if several.several and rows is not None:
                    weights = key[0] == "parameter" or slot.startswith("parameters")
                    several = replace(several, laid=Laid(rows, fused.short_names, weights))
                if _role(key, slot) != "weight" or (_held(one.parts) and _held(several.parts)):
                    values[1 - fused.split][slot] = self._sides[1 - fused.split].add(one)
                    values[fused.split][slot] = self._sides[fused.split].add(several)
            self._unjoined.update(dict.fromkeys(f"{slot} of {_text(key)}" for slot in found.unjoined))
            self._values_alone[1 - fused.split].update(dict.fromkeys(f"{slot} of {_text(key)}" for slot in found.alone))
            of_parts = [f"{slot} of {_text(keys[i])}" for i, slot in found.alone_in_parts]
            self._values_alone[fused.split].update(dict.fromkeys(of_parts))
            if not values[0]:
                continue
            named = (key[0], fused.name, key[2], key[3]), (key[0], fused.whole.name, key[2], key[3])
            likes = first_of(first, of_split), first_of(whole, of_whole)
            calls = [
                self._call(i, named[which], micro, values[i], likes[which])
                for i, which in ((0, fused.split), (1, 1 - fused.split))
            ]
            of_base = [here for piece in pieces[base] for here in (mine, theirs)[base].get(piece, ())]
            yield order_of(of_base, micro, self._tables[base]), calls[0], calls[1]

    def _groups(
        self, key: Key, mine: Mapping[Piece, Any], theirs: Mapping[Piece, Any], groups: Sequence[Group]
    ) -> Sequence[Group]:
        """Return which pieces of a call are compared; an expert is given tokens of all samples, wherever it is.

        Gradients of weights are those of all ranks together, as one side may show them reduced.
        """
        a, b = self._tables
        if key[0] == "parameter" and not self._together and max(len(a.pieces) - a.micros, len(b.pieces) - b.micros) > 0:
            groups = by_micro_batch(a, b)
        whole = set(mine) == set(a.pieces) and set(theirs) == set(b.pieces)
        if not whole or in_expert(key[1]):
            shared = all(not mine.keys().isdisjoint(of_a) and not theirs.keys().isdisjoint(of_b) for _, of_a, of_b in groups)
            if not whole and a.micros == b.micros and len(groups) == a.micros and shared:
                return groups  # else a gradient that is reduced with the last micro-batch alone, say
            return [(0, sorted(mine), sorted(theirs))]
        return groups

    def _pair(
        self,
        key: Key,
        micro: int,
        a: tuple[Mapping[Piece, list[Here]], Sequence[Piece]],
        b: tuple[Mapping[Piece, list[Here]], Sequence[Piece]],
    ) -> tuple[Call, Call] | None:
        found = [parts_of(of, pieces, key, table) for (of, pieces), table in zip((a, b), self._tables, strict=True)]
        values: list[dict[str, Value]] = [{}, {}]
        classes = [first_of(of, pieces).cls for of, pieces in (a, b)]
        for side in (0, 1):
            lacking = _lacking(found[side], found[1 - side])
            self._values_alone[side].update(dict.fromkeys(f"{slot} of {_text(key)}" for slot in lacking))
        for slot, parts in found[0].items():
            others = found[1].get(slot)
            if others is None or (_role(key, slot) == "weight" and not (_held(parts) and _held(others))):
                continue  # gathered for the forward alone, and compared as the optimizer has it
            blind = next((part for part in (*parts, *others) if part.value.row < 0 and part.size), None)
            if blind is not None:
                self._blind.setdefault(f"{slot} of {_text(key)}{blind.value.note and f', as {blind.value.note}'}")
                continue
            rules = [self._rule(i, key, classes[i], slot, both) for i, both in enumerate(((parts, others), (others, parts)))]
            if slot.startswith("grad_input"):
                rules = [rule or self._of_split_rows(i, key, classes[i], (parts, others)[i]) for i, rule in enumerate(rules)]
            made = joins(parts, others, _role(key, slot), (rules[0], rules[1]))
            if made is None and _role(key, slot) == "weight":  # shards are of all ranks together
                every = [parts_of(of, [*of], key, table)[slot] for (of, _), table in zip((a, b), self._tables, strict=True)]
                made = joins(every[0], every[1], "weight")
            if made is None:
                unjoined = [f"{slot} of {_text(key)}"] if any(part.size for part in (*parts, *others)) else []
                self._unjoined.update(dict.fromkeys(unjoined))
                continue
            for i, side in enumerate(self._sides):
                values[i][slot] = side.add(made[i])
            self._operators.known.add(parts, others, cut=self._cuts.get(_parameter(key, slot)) or _cut_of(made))
            self._operators.follow(parts, others)
        if not values[0]:
            return None
        calls = [self._call(i, key, micro, values[i], first_of(of, pieces)) for i, (of, pieces) in enumerate((a, b))]
        return calls[0], calls[1]

    def _rule(
        self, i: int, key: Key, cls: str, slot: str, both: tuple[Sequence[RankPart], Sequence[RankPart]]
    ) -> SplitRule | None:
        """Return what a table says of how the parts of a side lie over its ranks, or else what its collectives prove.

        both: what this side holds, and what the other does.
        """
        rule = self._known.find(key[1], cls, slot)
        proven = self._collectives[i].rule(*both) if rule is None and _role(key, slot) in ("activation", "gradient") else None
        return rule or proven

    def _of_split_rows(self, i: int, key: Key, cls: str, parts: Sequence[RankPart]) -> SplitRule | None:
        """Return that gradients at the input of a linear layer are terms, where each rank has some rows of the weight.

        The other side has all rows on one rank. Where several layers share an input, autograd adds up their gradients before a
        collective adds up those of the ranks, so that no collective is given the gradient of one layer.
        """
        if cls != "Linear" or not self._collectives[i].recorded or len(parts) < 2 or agree(parts):
            return None
        forward = key[0], key[1], "forward", key[3]
        of_both = [parts_of(of, [*of][:1], forward, table) for table in self._tables if (of := table.calls.get(forward))]
        weights = [values.get("parameters.weight", []) for values in of_both]
        if len(weights) < 2 or len(weights[1 - i]) != 1 or len(weights[i]) != len({part.tensor for part in parts}):
            return None
        rows = sum(part.shape[0] for part in weights[i])
        split = all(part.shape != weights[1 - i][0].shape for part in weights[i])
        whole = (rows, *weights[i][0].shape[1:]) == weights[1 - i][0].shape
        return TERMS_OF_ROWS if split and whole and all(part.box is None for part in parts) else None

    def _call(self, i: int, key: Key, micro: int, values: Mapping[str, Value], like: Call) -> Call:
        kind, name, phase, number = key
        own = self._in_a.get(name, name) if i == 0 else name
        call = Call(like.kind, own, number, like.phase, cls=like.cls, micro=micro)
        fill(call, values)
        parent = like.parent
        if isinstance(parent, Call):
            around = self._rename(parent.name) if i == 0 else parent.name
            made = self._parents[i]
            call.parent = made.get((around, str(like.phase), number, micro)) or made.get((around, "forward", number, micro))
        if kind == "module":
            self._parents[i][name, phase, number, micro] = call
        return call

    def missing(self) -> list[str]:
        """Return sentences on each side that has calls, or values of calls, which the other has not."""
        values = [(side, alone) for side, alone in zip("AB", self._values_alone, strict=True) if alone]
        return [
            *self._alone_sentences("parameter", False),
            *(f"values in {side} alone: {len(alone)}; the first is {next(iter(alone))}" for side, alone in values),
        ]

    def _alone_sentences(self, kind: str, of_kind: bool) -> list[str]:
        """Return a sentence for each side with keys in it alone: those of one kind, or all others.

        Gradients of weights count as any other call unless both sides hold them as the optimizer sees them.
        """
        said: list[str] = []
        for side, alone in zip("AB", self._alone, strict=True):
            through = self._looked_through["AB".index(side)]
            found = [
                text
                for text, key in alone.items()
                if (key[0] == kind and self._both_reduce(key)) == of_kind and key[1] not in through
            ]
            if found:
                said.append(f"calls in {side} alone: {len(found)}; the first is {found[0]}")
        return said

    def _both_reduce(self, key: Key) -> bool:
        """Return whether both sides hold the reduced gradients of a module's weights."""
        owners = [{owner_of(name) for name in held_gradients(side.ranks)} for side in self._sides]
        return key[1] in {self._rename(name) for name in owners[0]} and key[1] in owners[1]

    def about_copies(self, judged: Sequence[Judged]) -> list[str]:
        """Return what may explain activations of which ranks hold other copies, where a dump does not hold what was sent."""
        apart = any(
            value.interval.evidence == "replicas" and one.call.kind == "module" and not value.slot.startswith("parameters")
            for one in judged
            for value in one.values
        )
        blind = [
            side
            for side, table, seen in zip("AB", self._tables, self._collectives, strict=True)
            if table.layout.sizes.get("tp", 1) > 1 and not seen.recorded
        ]
        if not apart or not blind:
            return []
        return [
            f"{' and '.join(blind)} holds no collectives: what ranks hold otherwise may be terms that one adds up, which "
            "`level: mix` shows, and a table of splits (`--layout`) says"
        ]

    def notes(self) -> list[str]:
        """Return what was left out of the comparison."""
        said: list[str] = []
        if self._together:
            said.append("micro-batches hold other samples on the two sides: those of a whole step were compared together")
        left = sum(table.left_out for table in self._tables)
        if left:
            said.append(f"{left} calls of collectives and around them are not compared: another layout runs others")
        said += [about_rows(self._rows)] if self._rows else []
        said += self._operators.notes()
        said += [
            f"{sentence}; they are compared as the optimizer sees them" for sentence in self._alone_sentences("parameter", True)
        ]
        if self._unjoined:
            said.append(f"{len(self._unjoined)} values could not be joined; the first is {next(iter(self._unjoined))}")
        if self._blind:
            said.append(f"of {len(self._blind)} values a rank's dump holds nothing; the first is {next(iter(self._blind))}")
        return said


def _lacking(mine: Mapping[str, list[RankPart]], theirs: Mapping[str, list[RankPart]]) -> list[str]:
    """Return the slots of a call that one side alone has.

    A pipeline's last stage may hold a copy of a weight in a module that has no weight in one process.
    """
    copied = not any(slot.startswith("parameters") for slot in theirs)
    lone = [slot for slot, parts in mine.items() if slot not in theirs and _held(parts)]
    return [slot for slot in lone if not (copied and slot.startswith("parameters"))]


def _parameter(key: Key, slot: str) -> str:
    """Return the name of the weight at a slot of a module's forward, or "" for what is none."""
    first, _, short = slot.partition(".")
    return f"{key[1]}.{short}" if first == "parameters" else ""


def _cut_of(joins: tuple[Join, Join]) -> Cut | None:
    """Return the cut of the side that holds a value in rectangles, where the other holds it whole."""
    one, several = sorted(joins, key=lambda join: len(join.parts))
    return cut_of_boxes(several.boxes, several.shape) if len(one.parts) == 1 and several.boxes else None


def _held(parts: Sequence[RankPart]) -> bool:
    return any(part.size for part in parts)


def _role(key: Key, slot: str) -> Role:
    if key[0] == "parameter":
        return "weight gradient"
    if slot.startswith("parameters"):
        return "weight"
    return "gradient" if key[2] == "backward" else "activation"


def _text(key: Key) -> str:
    kind, name, phase, _ = key
    return f"{name} ({phase})" if kind != "parameter" else f"{name} (gradients of its weights)"
