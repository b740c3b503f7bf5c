"""Which ranks are replicas of each other: those that differ in their data-parallel index alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainprobe.engine.core.records import Place

SAMPLE = 5  # ranks of a group that show what its majority holds
SHARE = 128  # ranks that are looked at together


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that should hold the same parameters. label: what they have in common, in words.

    sample: the ranks whose values show the majority's. by_topology: whether the run itself recorded that they are replicas.
    """

    number: int
    label: str
    ranks: tuple[int, ...]
    sample: tuple[int, ...]
    by_topology: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """Some ranks that are looked at together, with the groups that they are of. parts: group → its ranks in this share."""

    groups: tuple[Group, ...]
    parts: Mapping[int, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that this share is about."""
        return tuple(rank for ranks in self.parts.values() for rank in ranks)


def groups_of(places: Mapping[int, Place]) -> list[Group]:
    """Return the groups that the topology tells: ranks that differ in `dp` alone, in the order of their lowest ranks."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in sorted(places.items()):
        found.setdefault(tuple(sorted((axis, at[0]) for axis, at in place.axes.items() if axis != "dp")), []).append(rank)
    return [_group(i, _label(key), ranks) for i, (key, ranks) in enumerate(found.items())]


def _group(number: int, label: str, ranks: Sequence[int], by_topology: bool = True) -> Group:
    return Group(number, label, tuple(ranks), _sample(ranks), by_topology)


def _label(key: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in key) or "all ranks"


def _sample(ranks: Sequence[int]) -> tuple[int, ...]:
    at = np.unique(np.linspace(0, len(ranks) - 1, min(SAMPLE, len(ranks))).round().astype(int))
    return tuple(ranks[i] for i in at.tolist())


def regrouped(groups: Sequence[Group], signatures: Mapping[int, tuple[int, int]]) -> list[Group]:
    """Return groups of replicas: a group most of whose sample hold other bits is taken apart by what its ranks hold.

    signatures: rank → (digest of its layout, digest of its parameters at the first step). Where more than half of the ranks
    agree, the group stays whole, because those that differ are what is looked for.
    """
    out: list[Group] = []
    for group in groups:
        known = {rank: signatures[rank] for rank in group.ranks if rank in signatures}
        classes: dict[tuple[int, int], list[int]] = {}
        for rank, signature in known.items():
            classes.setdefault(signature, []).append(rank)
        if len(classes) < 2 or 2 * max(map(len, classes.values())) > len(known):
            out.append(replace(group, number=len(out)))
            continue
        for ranks in classes.values():
            label = f"{group.label}, equal parameters at first" if len(ranks) > 1 else f"{group.label}, rank {ranks[0]} alone"
            out.append(_group(len(out), label, ranks, by_topology=False))
    return out


def undecided(groups: Sequence[Group], signatures: Mapping[int, tuple[int, int]], places: Mapping[int, Place]) -> list[int]:
    """Return the ranks whose signature is needed as well, because the sample of their group does not show what it holds.

    That is so where the sample does not agree, and where the topology says no more than that all ranks are data parallel, which
    is assumed of a job that tells nothing.
    """
    needed: list[int] = []
    for group in groups:
        shown = [signatures[rank] for rank in group.sample if rank in signatures]
        if shown and (2 * max(map(shown.count, shown)) <= len(shown) or _assumed(places[group.ranks[0]])):
            needed += [rank for rank in group.ranks if rank not in signatures]
    return needed


def _assumed(place: Place) -> bool:
    return all(axis == "dp" and size == place.world_size for axis, (_, size) in place.axes.items())


def shares_of(groups: Sequence[Group], size: int = SHARE) -> list[Share]:
    """Return the groups in shares of about `size` ranks: large groups are cut, small ones joined; lone ranks come along."""
    shares: list[Share] = []
    waiting: list[Group] = []
    for group in groups:
        if len(group.ranks) >= size:
            cuts = [group.ranks[i : i + size] for i in range(0, len(group.ranks), size)]
            shares += [Share((group,), {group.number: cut}) for cut in cuts]
            continue
        if waiting and sum(len(g.ranks) for g in waiting) + len(group.ranks) > size:
            shares.append(_joined(waiting))
            waiting = []
        waiting.append(group)
    return [*shares, _joined(waiting)] if waiting else shares


def _joined(groups: Sequence[Group]) -> Share:
    return Share(tuple(groups), {group.number: group.ranks for group in groups})
