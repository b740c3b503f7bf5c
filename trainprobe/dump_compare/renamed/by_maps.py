"""Which modules of two families of models are the same by what maps say of their names (see engine.model_names).

A map gives each tensor of a family the one name that it has everywhere. Modules whose tensors have the same such names belong
together, and a module whose tensors are several of another family (q, k and v in one projection) belongs to those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from trainprobe.dump_compare.renamed.fused import Fused, make
from trainprobe.dump_compare.renamed.modules import Looks, Module, weight_names
from trainprobe.engine.model_names import ONE_AFTER_THE_OTHER, NameMap, built_in

_NOT_ONE_MODULE = frozenset(["by_index", "rotary_pairs"])  # experts of one tensor; rows of each head in another order


@dataclass(frozen=True, slots=True)
class _MappedName:
    """What a map may say of a module. names: of the modules that it is everywhere else. groups: see Fused."""

    names: tuple[str, ...]
    groups: int


def pair_by_maps(
    lone: tuple[Sequence[Module], Sequence[Module]],
    sides: tuple[Mapping[str, Module], Mapping[str, Module]],
    looks: tuple[Looks, Looks],
) -> tuple[dict[str, str], list[Fused]]:
    """Return name in A → name in B of modules without a partner (`lone`), and which of them are one on one side alone."""
    known = tuple(
        [_known([*side.values()], {module.name for module in alone}) for side, alone in zip(sides, lone, strict=True)]
    )
    pairs: dict[str, str] = {}
    found: list[Fused] = []
    if not all(known):
        return pairs, found
    single = tuple([_by_name(side, modules) for side, modules in zip(known, lone, strict=True)])
    for name, module in single[0].items():
        other = single[1].get(name)
        if other is not None and looks[0].form(module) == looks[1].form(other):
            pairs[module.name] = other.name
    for split in range(2):
        for whole in lone[1 - split]:
            for each in known[1 - split].get(whole.name, ()):
                parts = [part for name in each.names if (part := single[split].get(name)) is not None]
                if 1 < len(each.names) == len(parts) and make(parts, whole, looks, split):
                    found.append(Fused(tuple(parts), whole, split, named=True, groups=each.groups))
    return pairs, found


def _by_name(known: Mapping[str, Sequence[_MappedName]], modules: Sequence[Module]) -> dict[str, Module]:
    """Return the name that a module has everywhere → module, of those that are one everywhere."""
    of_all = [(each.names[0], module) for module in modules for each in known.get(module.name, ()) if len(each.names) == 1]
    counts = Counter(name for name, _ in of_all)
    return {name: module for name, module in of_all if counts[name] == 1}


def _known(modules: Sequence[Module], lone: Set[str]) -> dict[str, list[_MappedName]]:
    """Return module of those in `lone` → what the map of its family says of it; nothing where no map knows these names."""
    weights = {module.name: weight_names(module) for module in modules if not module.within}
    names = [name for of_module in weights.values() for name in of_module]
    for family in built_in():
        prefix = family.wrapper(names)
        if prefix is not None:
            found = {
                module: _of_all(family, prefix, of_module)
                for module, of_module in weights.items()
                if of_module and module in lone
            }
            return {module: each for module, each in found.items() if each}
    return {}


def _of_all(family: NameMap, prefix: str, names: Sequence[str]) -> list[_MappedName]:
    """Return what a map may say of a module with these weights: which are, all of them, weights of the same modules."""
    first, *others = [_of_weight(family, family.stripped(name.removeprefix(prefix))) for name in names]
    return [each for each in first if all(each in other for other in others)]


def _of_weight(family: NameMap, name: str) -> list[_MappedName]:
    """Return what a map may say of a weight; several where it depends on the configuration, which a dump does not hold."""
    found: list[_MappedName] = []
    for rule in family.kind_of(name)[1]:
        match = rule.pattern.fullmatch(name)
        if match is None or rule.drop or not _NOT_ONE_MODULE.isdisjoint(rule.by):
            continue
        logical = tuple([to.format_map({**match.groupdict(), "i": 0}).rpartition(".")[0] for to in rule.to])
        found.append(_MappedName(logical, int(not ONE_AFTER_THE_OTHER.isdisjoint(rule.by))))
        if not rule.when:
            break
    return found
