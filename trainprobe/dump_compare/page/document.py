"""What the page holds of one rank and step: the tree at once, and the numbers of its calls in chunks that are read when needed.

Texts that occur often stand once in a list and are referred to by their place in it. Numbers are those of the dump, in full.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainprobe.dump_compare.arguments import plain_arguments
from trainprobe.dump_compare.call_slots import group_ranks
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.dump_side import Side, hexadecimal
from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.page.histograms import histogram
from trainprobe.dump_compare.page.tree import Node, build_tree
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import entry_name, slots

CHUNK = 1_024  # calls
ELEMENTS = 1 << 28  # that histograms are worked out of, in one rank and step
LONGEST = 400  # characters of a plain argument
MOST_ARGUMENTS = 60
MOST_SLOTS = 400  # values of one call: an optimizer's update of all parameters at once has thousands
VERDICTS = ("identical", "rounding", "carried", "unknown", "suspicious", "missing", "bug", "recorded", "nonfinite", "part")
Sides = tuple[Side, Side | None]


class Texts:
    """Distinct texts in order, and the place of each."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return the place of a text, which is added where it is new."""
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        """Return the texts by place."""
        return list(self._places)


@dataclass
class _Budget:
    elements: int = ELEMENTS
    left_out: int = field(default=0)


def outcomes(judged: Sequence[Judged], sides: Sides) -> list[str]:
    """Return the verdict of each call; of one dump alone, whether its numbers are finite."""
    if sides[1] is not None:
        return [one.outcome for one in judged]
    return ["nonfinite" if _holds_nonfinite(one.call, sides[0]) else "recorded" for one in judged]


def _holds_nonfinite(call: Call, side: Side) -> bool:
    return any(holds_nonfinite(value, side) for _, value in slots(call))


def holds_nonfinite(value: Value, side: Side) -> bool:
    """Return whether a dump says of a value that it holds NaN or infinities."""
    return any(not math.isfinite(number) for number in side.numbers(value).values())


def tree_document(judged: Sequence[Judged], sides: Sides) -> tuple[dict[str, Any], list[Node]]:
    """Return the tree in columns, a number a line, and its lines.

    depth, call (place of the call, -1), label, aside, a and b (entries of both dumps, -1 where there is none), micro (-1 for
    none), verdict, and far: the lower end of the distance of the worst result; of one dump alone the l2 norm of the last value.
    """
    nodes, texts = build_tree(judged), Texts()
    verdicts = outcomes(judged, sides)
    frameworks = [sides[0].step_data.framework, (sides[1] or sides[0]).step_data.framework]
    columns: dict[str, list[Any]] = {
        name: [] for name in ("depth", "call", "label", "aside", "a", "b", "micro", "verdict", "far")
    }
    for node in nodes:
        one = judged[node.call] if node.call >= 0 else None
        columns["depth"].append(node.depth)
        columns["call"].append(node.call)
        columns["label"].append(texts.place(node.label))
        columns["aside"].append(texts.place(node.aside))
        for name, framework in zip("ab", frameworks, strict=True):
            call = None if one is None else getattr(one.pair, name)
            columns[name].append(-1 if call is None else texts.place(entry_name(call, framework)))
        columns["micro"].append(-1 if one is None or one.call.micro is None else one.call.micro)
        columns["verdict"].append(VERDICTS.index("part" if one is None else verdicts[node.call]))
        columns["far"].append(None if one is None else _far(one) if sides[1] is not None else _norm(one.call, sides[0]))
    return {**columns, "texts": texts.all(), "links": collective_links(judged)}, nodes


def _far(one: Judged) -> float | str | None:
    worst = one.worst
    return None if worst is None or worst.interval.evidence in ("nothing", "absent") else _number(worst.low)


def _norm(call: Call, side: Side) -> float | str | None:
    values = [value for _, value in slots(call)]
    number = side.numbers(values[-1]).get("norm") if values else None
    return None if number is None else _number(number)


def collective_links(judged: Sequence[Judged]) -> list[list[Any]]:
    """Return [place of the call, key, ranks] of each collective: the same call has the same key on all ranks of its group."""
    links: list[list[Any]] = []
    counts: dict[str, int] = defaultdict(int)
    for i, one in enumerate(judged):
        call = one.call
        if call.kind != "collective" or call.phase == "backward":
            continue
        ranks = group_ranks(call)
        name = f"{call.name} {ranks}"
        links.append([i, f"{name} {counts[name]}", ranks])
        counts[name] += 1
    return links


def chunk_documents(judged: Sequence[Judged], sides: Sides) -> Iterator[dict[str, Any]]:
    """Yield the numbers of `CHUNK` calls at a time: their texts, call stacks, and a list a call (see `_call`)."""
    budget = _Budget()
    for start in range(0, len(judged), CHUNK):
        texts = Texts()
        calls = [_call(one, sides, texts, budget) for one in judged[start : start + CHUNK]]
        yield {"calls": calls, "texts": texts.all()}


def _call(one: Judged, sides: Sides, texts: Texts, budget: _Budget) -> dict[str, Any]:
    """Return a call: what it was given and its own rounding, its arguments, values and the stacks of both sides."""
    calls = one.pair.a, one.pair.b
    given = [{} if call is None else plain_arguments(call) for call in calls]
    names = list(dict.fromkeys([*given[0], *given[1]]))[:MOST_ARGUMENTS]
    present = [side for side in sides if side is not None]
    stacks = [_stack(call, side, texts) for call, side in zip(calls, present, strict=False)]
    document: dict[str, Any] = {"values": [], "stacks": stacks}
    if names:
        document["arguments"] = [[texts.place(name), *(_text(each, name, texts) for each in given)] for name in names]
    if sides[1] is not None:
        document |= {"given": _number(one.given), "own": _number(one.own)}
    if one.argument:
        document["argument"] = one.argument[:LONGEST]
    distances = {value.slot: value for value in one.values}
    values = [{} if call is None else dict(slots(call)) for call in calls]
    found = list(dict.fromkeys([*values[0], *values[1]]))
    for slot in found[:MOST_SLOTS]:
        both = values[0].get(slot), values[1].get(slot)
        document["values"].append(_value(slot, both, distances.get(slot), sides, texts, budget))
    if len(found) > MOST_SLOTS:
        document["more"] = len(found) - MOST_SLOTS
    return document


def _text(arguments: Mapping[str, Any], name: str, texts: Texts) -> int:
    return texts.place(repr(arguments[name])[:LONGEST]) if name in arguments else -1


def _stack(call: Call | None, side: Side, texts: Texts) -> list[int]:
    stacks = side.step_data.stacks
    if call is None or not 0 <= call.stack < len(stacks):
        return []
    return [texts.place(str(frame)) for frame in stacks[call.stack]]


def _value(
    slot: str,
    both: tuple[Value | None, Value | None],
    distance: Distance | None,
    sides: Sides,
    texts: Texts,
    budget: _Budget,
) -> dict[str, Any]:
    document: dict[str, Any] = {"slot": texts.place(slot)}
    for name, value, side in zip("ab", both, sides, strict=True):
        if value is not None and side is not None:
            document[name] = _side(value, side, texts)
    if distance is not None:
        far = distance.interval
        document["far"] = [_number(distance.low), _number(far.low), _number(far.high), texts.place(far.evidence)]
        document["result"] = distance.result
        if far.note:
            document["note"] = texts.place(far.note)
        if distance.floor:
            document["floor"] = _number(distance.floor)
        if distance.from_truth is not None:
            document["truth"] = [_number(number) for number in distance.from_truth]
    counts = _histogram(both, distance, sides, budget)
    if counts is not None:
        document["histogram"] = counts
    return document


def _side(value: Value, side: Side, texts: Texts) -> dict[str, Any]:
    document: dict[str, Any] = {
        "type": texts.place(f"{value.dtype.rpartition('.')[2]} {list(value.shape)}"),
        "numbers": [[texts.place(name), _number(number)] for name, number in side.numbers(value).items()],
    }
    bits = side.bits(value)
    if bits:
        document["bits"] = [[texts.place(name), hexadecimal(name, number)] for name, number in bits.items()]
    if value.note:
        document["note"] = texts.place(value.note)
    if value.requires_grad is not None:
        document["grad"] = value.requires_grad
    return document


def _histogram(both: tuple[Value | None, Value | None], distance: Distance | None, sides: Sides, budget: _Budget) -> Any:
    """Return the histogram that the dumps hold, or that of stored elements as long as the budget lasts."""
    recorded = [
        (side.step_data.histograms or {}).get(value.row) if side is not None and value is not None else None
        for value, side in zip(both, sides, strict=True)
    ]
    if any(each is not None for each in recorded):
        return {"recorded": [None if each is None else [each[0].tolist(), each[1].tolist()] for each in recorded]}
    stored = [value for value in both if value is not None and value.tensor is not None]
    size = sum(math.prod(value.shape) for value in stored)
    if not stored or size < 2 or (distance is not None and distance.interval.high == 0):
        return None
    if size > budget.elements:
        budget.left_out += 1
        return "left out"
    budget.elements -= size
    arrays = [None if v is None or side is None else side.array(v) for v, side in zip(both, sides, strict=True)]
    return histogram((arrays[0], arrays[1]))


def _number(number: float) -> float | str:
    """Return a number that JSON can hold: NaN and infinities become their names."""
    return number if math.isfinite(number) else str(number)
