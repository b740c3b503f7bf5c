"""The modules of a dump as a tree of what called what, with what tells one from another whatever its name is."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import slots

_RESULT = "output"


@dataclass(slots=True, eq=False)
class Module:
    """A module as its first forward call shows it. calls: how often it ran. within: the modules that it called, in order."""

    name: str
    first: Call
    parent: Module | None = None
    within: list[Module] = field(default_factory=list["Module"])
    calls: int = 0

    @property
    def cls(self) -> str:
        """Return the name of its class."""
        return self.first.cls

    def leaves(self) -> Iterator[Module]:
        """Yield the modules within it that call no others; itself where it is one."""
        if not self.within:
            yield self
        for inner in self.within:
            yield from inner.leaves()

    def around(self) -> Iterator[Module]:
        """Yield the modules that it runs within, from the inside."""
        outer = self.parent
        while outer is not None:
            yield outer
            outer = outer.parent


def modules_of(calls: Iterable[Call]) -> dict[str, Module]:
    """Return name → module, in the order of their first forward calls."""
    found: dict[str, Module] = {}
    for call in calls:
        if call.kind != "module" or call.phase != "forward":
            continue
        module = found.get(call.name)
        if module is None:
            module = found[call.name] = Module(call.name, call)
        module.calls += 1
    for module in found.values():
        parent = module.first.parent
        outer = found.get(parent.name) if isinstance(parent, Call) else None
        if outer is not None and outer is not module and module not in outer.around():
            module.parent = outer
            outer.within.append(module)
    return found


class Looks:
    """What tells the modules of one rank's dump from one another."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def form(self, module: Module) -> Hashable:
        """Return what two implementations of one module have in common: how much goes in and out, the sizes of its weights.

        The number of elements and not the shape, since one may be given [sample, token, …] and the other [token, sample, …];
        a matrix may be kept transposed.
        """
        values = slots(module.first)
        given = next((_size(value) for slot, value in values if slot.startswith(("input", "kwargs"))), 0)
        weights = sorted(tuple(sorted(value.shape)) for slot, value in values if slot.startswith("parameters"))
        return given, _result_size(module), tuple(weights), module.calls

    def results(self, module: Module) -> Hashable:
        """Return what two modules give that call the same ones."""
        return _result_size(module), module.calls

    def weights(self, module: Module) -> Hashable:
        """Return what hardly two modules share, the extremes of their weights; None where there are none, or constant ones."""
        found = [self.side.numbers(value) for slot, value in slots(module.first) if slot.startswith("parameters")]
        return extremes_look([(each.get("max", 0.0), each.get("min", 0.0)) for each in found])

    def side_of(self, module: Module) -> Side:
        """Return the dump that the first call of a module is of."""
        return self.side

    def sizes(self, module: Module) -> tuple[int, int]:
        """Return the numbers of elements of what a module gives and of its weights; those of parts add up to a whole's."""
        weights = (math.prod(value.shape) for slot, value in slots(module.first) if slot.startswith("parameters"))
        return _result_size(module), sum(weights)


def _result_size(module: Module) -> int:
    return next((_size(value) for slot, value in slots(module.first) if slot.startswith(_RESULT)), 0)


def extremes_look(found: Sequence[tuple[float, float]]) -> Hashable:
    """Return the largest and smallest numbers of some weights, rounded; None where they are all constant or not finite."""
    extremes = [pair for pair in found if pair[0] != pair[1]]
    rounded = sorted(tuple(f"{x:.3e}" for x in pair) for pair in extremes)  # after a step, both sides are apart by rounding
    return tuple(rounded) if rounded and all(map(math.isfinite, (x for pair in extremes for x in pair))) else None


def has_weights(module: Module) -> bool:
    """Return whether a module has weights of its own."""
    return any(slot.startswith("parameters") for slot, _ in slots(module.first))


def passes_on(module: Module, side: Side) -> bool:
    """Return whether a module gives the numbers that it is given, as dropout does that drops nothing."""
    values = slots(module.first)
    ends = [[value for slot, value in values if slot.startswith(start)] for start in (("input", "kwargs"), (_RESULT,))]
    return len(ends[0]) >= 1 == len(ends[1]) and value_look(side, ends[0][0]) == value_look(side, ends[1][0]) is not None


def value_look(side: Side, value: Value) -> Hashable:
    """Return all that a dump holds of a value, which tells it from others; None where it holds no numbers of it."""
    numbers = {**side.numbers(value), **side.bits(value)}
    return (tuple(value.shape), *sorted(numbers.items())) if numbers else None


def weight_names(module: Module) -> list[str]:
    """Return the names of a module's own weights, as the model calls them."""
    short = [slot.partition(".")[2] for slot, _ in slots(module.first) if slot.startswith("parameters")]
    return [name if is_root(module) else f"{module.name}.{name}" for name in short]


def is_root(module: Module) -> bool:
    """Return whether this is the model itself."""
    return module.name == ROOT


def in_order(modules: Sequence[Module]) -> list[Module]:
    """Return the modules that call no others, in the order of their first calls."""
    return [module for module in modules if not module.within]


def _size(value: Value) -> int:
    return math.prod(value.shape)
