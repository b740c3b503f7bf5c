"""Which module of A is which of B where their names say nothing: by their weights, and by the order in which they are called.

1. Modules of equal names belong together, and those of which maps of two families of models say so (see by_maps).
2. A module that calls no other belongs to the one of its form (see modules) whose weights have the same extremes, if there is
   one alone on each side. That holds whatever the order is in which they are called.
3. The others are aligned as sequences of forms, in the order of their calls, around those that are known.
4. A module that calls others belongs to the one that calls the partners of these, and no more.

A module that finds no partner so has none. Values are compared as those of any other pair, so that two modules that do not
belong together are different and never the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

import numpy as np

from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.renamed.by_maps import pair_by_maps
from trainprobe.dump_compare.renamed.fused import Fused, find_fused
from trainprobe.dump_compare.renamed.modules import (
    Looks,
    Module,
    has_weights,
    in_order,
    is_root,
    modules_of,
    passes_on,
)

Evidence = Literal["names of both families", "equal weights", "order of calls and shapes", "what it calls"]
_MOST_CELLS = 30_000_000  # of a table of all against all; beyond, difflib aligns
_FUSED_BY = {"names of both families": "names of both families", "sizes that add up": "equal input and sizes that add up"}
_KNOWN, _CLASS, _LAST = 8.0, 0.25, 0.5  # what a known partner, an equal class and an equal last name count beside a form's 1


@dataclass(slots=True)
class Structure:
    """What was paired by structure. pairs: name in A → (name in B, evidence). fused: modules that are one on one side.

    looked_through: for each side modules without a partner that only call others, all of which have partners, or only pass on
    what they are given.
    """

    fused: list[Fused] = field(default_factory=list[Fused])
    pairs: dict[str, tuple[str, Evidence]] = field(default_factory=dict[str, tuple[str, Evidence]])
    looked_through: tuple[set[str], set[str]] = field(default_factory=lambda: (set[str](), set[str]()))

    def __bool__(self) -> bool:
        """Return whether anything was paired by structure."""
        return bool(self.pairs or self.fused)

    def renaming(self, rename: Callable[[str], str]) -> Callable[[str], str]:
        """Return what gives a name of A as B has it. rename: what the user says of all others."""
        found = {name: other for name, (other, _) in self.pairs.items()}
        return lambda name: found.get(name) or rename(name)

    def evidence(self) -> dict[str, str]:
        """Return module of A that was not paired by name → what it was paired by."""
        of_fused = {each.name if each.split == 0 else each.whole.name: each.evidence for each in self.fused}
        return {**{name: evidence for name, (_, evidence) in self.pairs.items()}, **of_fused}

    def note(self) -> list[str]:
        """Return what to say of it."""
        said = self._said_of_pairs() if self.pairs else []
        if self.fused:
            first = self.fused[0]
            names = first.name, first.whole.name
            a, b = names if first.split == 0 else names[::-1]
            said.append(
                f"{len(self.fused)} times several modules of one side are one of the other "
                f"({_counted([_FUSED_BY[each.evidence] for each in self.fused])}), the first {a} and {b}"
            )
        return said

    def _said_of_pairs(self) -> list[str]:
        counted = _counted([evidence for _, evidence in self.pairs.values()])
        name, (other, evidence) = next(iter(self.pairs.items()))
        said = [
            f"{len(self.pairs)} modules of A have other names in B and were paired by structure ({counted}), "
            f"the first {name} with {other} by {evidence}: `--json` lists them, `--rename` or `--mapping` says otherwise"
        ]
        for side, names in zip("AB", self.looked_through, strict=True):
            if names:
                said.append(
                    f"{len(names)} modules of {side} have no partner and are left out, as they only call others that have one, "
                    f"or pass on what they are given: {', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}"
                )
        return said


def _counted(evidence: Sequence[str]) -> str:
    return ", ".join(f"{count} by {each}" for each, count in Counter(evidence).items())


def pair_modules(a: Side, b: Side, rename: Callable[[str], str] = str) -> Structure:
    """Return the partners of modules whose names, after `rename` of those of A, are in one dump alone."""
    sides = modules_of(a.step_data.calls), modules_of(b.step_data.calls)
    return pair_trees(sides, (Looks(a), Looks(b)), rename)


def pair_trees(
    sides: tuple[Mapping[str, Module], Mapping[str, Module]],
    looks: tuple[Looks, Looks],
    rename: Callable[[str], str],
) -> Structure:
    """Do so for the modules of two sides."""
    known = {name: sides[1][new] for name in sides[0] if (new := rename(name)) in sides[1]}
    taken = {module.name for module in known.values()}
    lone = [m for m in sides[0].values() if m.name not in known], [m for m in sides[1].values() if m.name not in taken]
    if not all(any(not is_root(module) for module in side) for side in lone):
        return Structure()
    pairs, fused = pair_by_maps(lone, sides, looks)
    found = Structure(pairs={name: (other, "names of both families") for name, other in pairs.items()})
    settled = [{*names, *(name for each in fused for name in each.names(i))} for i, names in enumerate((pairs, pairs.values()))]
    left = [_without(in_order(side), names) for side, names in zip(lone, settled, strict=True)]
    _by_weights(found, left[0], left[1], looks)
    partners = {**known, **{name: sides[1][other] for name, (other, _) in found.pairs.items()}}
    of_fused = [{name for each in fused for name in each.names(i)} for i in range(2)]
    _by_order(found, [_without(in_order([*side.values()]), of_fused[i]) for i, side in enumerate(sides)], partners, looks)
    partners |= {name: sides[1][other] for name, (other, _) in found.pairs.items()}
    _by_what_they_call(found, lone, partners, looks)
    partners |= {name: sides[1][other] for name, (other, _) in found.pairs.items()}
    paired = {*partners, *of_fused[0]}, {*of_fused[1], *(module.name for module in partners.values())}
    still = tuple([module for module in side if module.name not in names] for side, names in zip(lone, paired, strict=True))
    found.fused = [*fused, *find_fused((still[0], still[1]), partners, looks)]
    if found:
        paired[0].update(name for each in found.fused for name in each.names(0))
        paired[1].update(name for each in found.fused for name in each.names(1))
        for i in range(2):
            found.looked_through[i].update(_left_out(lone[i], paired[i], looks[i]))
    order = {name: i for i, name in enumerate(sides[0])}
    found.pairs = dict(sorted(found.pairs.items(), key=lambda pair: order[pair[0]]))
    return found


def _without(modules: Sequence[Module], names: Set[str]) -> list[Module]:
    return [module for module in modules if module.name not in names]


def _by_weights(found: Structure, a: Sequence[Module], b: Sequence[Module], sides: tuple[Looks, Looks]) -> None:
    """Pair modules whose weights are the only ones on both sides that have these extremes."""
    looks = _by_look(a, sides[0]), _by_look(b, sides[1])
    for look, mine in looks[0].items():
        theirs = looks[1].get(look, [])
        if len(mine) == len(theirs) == 1:
            found.pairs[mine[0].name] = theirs[0].name, "equal weights"


def _by_look(modules: Sequence[Module], looks: Looks) -> dict[Hashable, list[Module]]:
    found: dict[Hashable, list[Module]] = defaultdict(list)
    for module in modules:
        look = looks.weights(module)
        if look is not None:
            found[look, looks.form(module)].append(module)
    return found


def _by_order(
    found: Structure,
    sides: Sequence[Sequence[Module]],
    partners: Mapping[str, Module],
    looks: tuple[Looks, Looks],
) -> None:
    """Pair modules of one form in the order of their calls, around those that are known."""
    a, b = sides
    theirs = {module.name for module in partners.values()}
    for mine, other in _aligned(a, b, partners, theirs, looks):
        if mine.name not in partners and other.name not in theirs and not is_root(mine) and not is_root(other):
            found.pairs[mine.name] = other.name, "order of calls and shapes"


def _aligned(
    a: Sequence[Module],
    b: Sequence[Module],
    partners: Mapping[str, Module],
    taken: set[str],
    looks: tuple[Looks, Looks],
) -> list[tuple[Module, Module]]:
    """Return pairs in order of which the sum of what speaks for each is largest."""
    keys = [_key(module, partners, {}, looks[0]) for module in a], [_key(module, {}, taken, looks[1]) for module in b]
    if keys[0] == keys[1]:
        return list(zip(a, b, strict=True))
    if len(a) * len(b) > _MOST_CELLS:
        blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
        return [(a[block.a + k], b[block.b + k]) for block in blocks for k in range(block.size)]
    places: dict[Hashable, list[int]] = defaultdict(list)
    for j, key in enumerate(keys[1]):
        places[key].append(j)
    best = np.zeros((len(a) + 1, len(b) + 1), np.float32)
    scores = np.zeros(len(b), np.float32)
    for i, module in enumerate(a):
        scores[:] = 0
        for j in places.get(keys[0][i], ()):
            scores[j] = _score(module, b[j], partners)
        here = best[i + 1]
        np.maximum(best[i, 1:], np.where(scores > 0, best[i, :-1] + scores, 0), out=here[1:])
        np.maximum.accumulate(here, out=here)
    return _traced(best, a, b, keys)


def _traced(
    best: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    a: Sequence[Module],
    b: Sequence[Module],
    keys: tuple[list[Hashable], list[Hashable]],
) -> list[tuple[Module, Module]]:
    """Return the pairs on the best way through a table of sums, from its end."""
    found: list[tuple[Module, Module]] = []
    i, j = len(a), len(b)
    while i and j:
        if best[i, j] == best[i, j - 1]:
            j -= 1
        elif best[i, j] == best[i - 1, j]:
            i -= 1
        else:
            i, j = i - 1, j - 1
            if keys[0][i] == keys[1][j]:
                found.append((a[i], b[j]))
    return found[::-1]


def _key(module: Module, partners: Mapping[str, Module], taken: Mapping[str, object] | set[str], looks: Looks) -> Hashable:
    """Return what must be equal for two modules to be paired: the partner where it is known, else the form."""
    if module.name in partners:
        return "known", partners[module.name].name
    return ("known", module.name) if module.name in taken else looks.form(module)


def _score(a: Module, b: Module, partners: Mapping[str, Module]) -> float:
    if a.name in partners:
        return _KNOWN
    last = (module.name.rpartition(".")[2] for module in (a, b))
    return 1.0 + _CLASS * (a.cls == b.cls) + _LAST * (len(set(last)) == 1)


def _by_what_they_call(
    found: Structure,
    lone: tuple[Sequence[Module], Sequence[Module]],
    partners: Mapping[str, Module],
    looks: tuple[Looks, Looks],
) -> None:
    """Pair modules that call others: those whose inner modules with partners are the same; of nested ones in order."""
    names = set(partners), {module.name for module in partners.values()}
    chains: tuple[dict[Hashable, list[Module]], dict[Hashable, list[Module]]] = (defaultdict(list), defaultdict(list))
    for i, modules in enumerate(lone):
        for module in modules:
            leaves = [leaf.name for leaf in module.leaves() if leaf.name in names[i]]
            if module.within and leaves and not is_root(module):
                chains[i][frozenset(partners[name].name for name in leaves) if i == 0 else frozenset(leaves)].append(module)
    for key, mine in chains[0].items():
        theirs = chains[1].get(key, [])
        for one, other in _nested(mine, theirs, looks):
            found.pairs[one.name] = other.name, "what it calls"


def _nested(a: Sequence[Module], b: Sequence[Module], looks: tuple[Looks, Looks]) -> list[tuple[Module, Module]]:
    """Return pairs of modules that call the same ones and stand within each other: of equal results, from the inside."""
    a, b = sorted(a, key=_depth, reverse=True), sorted(b, key=_depth, reverse=True)
    forms = [looks[0].results(module) for module in a], [looks[1].results(module) for module in b]
    blocks = SequenceMatcher(None, *forms, autojunk=False).get_matching_blocks()
    return [(a[block.a + k], b[block.b + k]) for block in blocks for k in range(block.size)]


def _depth(module: Module) -> int:
    return sum(1 for _ in module.around())


def _left_out(lone: Sequence[Module], paired: set[str], looks: Looks) -> list[str]:
    """Return modules without a partner whose results are seen elsewhere: where they run within one that has a partner."""
    found: set[str] = set()
    for module in sorted(lone, key=_depth, reverse=True):  # from the inside
        if module.name in paired or has_weights(module) or not any(outer.name in paired for outer in module.around()):
            continue
        seen = all(inner.name in paired or inner.name in found for inner in module.within)
        if seen if module.within else passes_on(module, looks.side_of(module)):
            found.add(module.name)
    return [module.name for module in lone if module.name in found]
