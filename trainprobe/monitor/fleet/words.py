"""Ranks of a fleet in words: a whole pipeline stage is called so, and not by its thousand numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trainprobe.engine.core.records import Place
from trainprobe.engine.core.words import briefly

_AXES = {
    "pp": "pipeline stage",
    "dp": "data-parallel index",
    "tp": "tensor-parallel index",
    "ep": "expert-parallel index",
    "cp": "context-parallel index",
    "vpp": "virtual stage",
    "sp": "sequence-parallel index",
}


def ranks_in_words(ranks: Collection[int], places: Mapping[int, Place]) -> str:
    """Name some ranks: "rank 17", "all 512 ranks with pipeline stage 2", "ranks 3, 5–9"."""
    if len(ranks) == 1:
        return f"rank {next(iter(ranks))}"
    if len(ranks) == len(places):
        return f"all {len(ranks)} ranks"
    chosen = {*ranks}
    for axis, word in _AXES.items():
        index = {places[rank].axes.get(axis) for rank in chosen if rank in places}
        at = next(iter(index), None)
        if len(index) == 1 and at is not None and chosen == {r for r, place in places.items() if place.axes.get(axis) == at}:
            return f"all {len(ranks)} ranks with {word} {at[0]}"
    return briefly("rank", chosen)


def place_in_words(place: Place) -> str:
    """Say where a rank stands: "dp 307, tp 0, pp 0"."""
    return ", ".join(f"{axis} {index}" for axis, (index, size) in place.axes.items() if size > 1)
