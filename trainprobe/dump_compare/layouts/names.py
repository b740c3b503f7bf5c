"""Modules of other names in two layouts: paired by structure, by what all ranks together hold of their weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.joined import JoinedSide
from trainprobe.dump_compare.layouts.splits import by_boxes
from trainprobe.dump_compare.layouts.states import held_values
from trainprobe.dump_compare.renamed.by_structure import Structure, pair_trees
from trainprobe.dump_compare.renamed.modules import Looks, Module, extremes_look, modules_of, weight_names
from trainprobe.engine.core.records import Call


def pair_names(sides: tuple[JoinedSide, JoinedSide], rename: Callable[[str], str]) -> Structure:
    """Return the partners of modules whose names, after `rename` of those of A, only one of two layouts has.

    Weights tell it, where the dumps hold those of all ranks, and the order of calls; sizes of activations do not count, as each
    layout has its own. Of virtual stages, whose names are numbered, none is known.
    """
    if any(side.ranks[0].step_data.place.axes.get("vpp", (0, 1))[1] > 1 for side in sides):
        return Structure()
    trees = modules_of(_calls(sides[0])), modules_of(_calls(sides[1]))
    return pair_trees(trees, (_LooksOfRanks(sides[0]), _LooksOfRanks(sides[1])), rename)


def _calls(side: JoinedSide) -> list[Call]:
    """Return the calls of modules that a rank is the first to run: stages and experts are on several."""
    found: list[Call] = []
    known: set[str] = set()
    for rank in side.ranks:
        here = [call for call in rank.step_data.calls if call.kind == "module" and call.name not in known]
        found += here
        known |= {call.name for call in here}
    return found


class _LooksOfRanks(Looks):
    """Modules by the shapes and extremes of their whole weights."""

    def __init__(self, side: JoinedSide) -> None:
        super().__init__(side.ranks[0])
        self._whole: Mapping[str, tuple[int, tuple[float, float]]] = dict(_whole_weights(side))
        self._side_of = {id(call): rank for rank in side.ranks for call in rank.step_data.calls}

    def form(self, module: Module) -> Hashable:
        """Return the sizes of a module's weights."""
        return tuple(sorted(self._whole.get(name, (0, ()))[0] for name in weight_names(module)))

    def results(self, module: Module) -> Hashable:
        """Return nothing: how much a module gives is another in each layout."""
        return None

    def weights(self, module: Module) -> Hashable:
        """Return the extremes of a module's whole weights."""
        names = weight_names(module)
        return extremes_look([self._whole[name][1] for name in names]) if all(name in self._whole for name in names) else None

    def side_of(self, module: Module) -> Side:
        """Return the rank that the first call of a module is of."""
        return self._side_of[id(module.first)]

    def sizes(self, module: Module) -> tuple[int, int]:
        """Return the number of elements of a module's whole weights; how much it gives is another in each layout."""
        names = weight_names(module)
        return 0, sum(self._whole[name][0] for name in names) if all(name in self._whole for name in names) else -1


def _whole_weights(side: JoinedSide) -> list[tuple[str, tuple[int, tuple[float, float]]]]:
    """Return the size and the extremes of each weight, of those of which the dump holds these."""
    found: list[tuple[str, tuple[int, tuple[float, float]]]] = []
    for name, of in held_values(side.ranks).items():
        join = by_boxes(of.get("value", [])) if of.get("value") else None
        if join is not None:
            numbers = side.numbers(side.add(replace(join, shape=(join.size,))))
            if "max" in numbers and "min" in numbers:
                found.append((name, (join.size, (numbers["max"], numbers["min"]))))
    return found
