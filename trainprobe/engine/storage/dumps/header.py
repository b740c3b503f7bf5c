"""What a dump says about itself beyond what existing tools know, so that reading it back gives the same collected step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from trainprobe.engine.core.records import MOST_RANKS, Call, Place, StepData
from trainprobe.engine.storage.dumps.entry_text import read_number

FORMAT = 1


def header(step_data: StepData, about_calls: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header of a collected step, with what `about_calls` says of its calls."""
    return {
        "format": FORMAT,
        "step": step_data.step,
        "place": place_text(step_data.place),
        "wanted": list(step_data.statistics),
        "complete": step_data.complete,
        "scalars": {name: _scalar(x) for name, x in step_data.scalars.items()},
        "notes": list(step_data.notes),
        **about_calls,
    }


def states_text(step_data: StepData, text: Callable[[Any], Any]) -> list[list[Any]]:
    """Return what was seen of parameters and optimizers, apart from the calls: [name, moment, micro-batch, {slot: leaf}] each.

    text: turns a value into a leaf of JSON. A leaf has the `shard` that this process holds, where it is not all of the tensor.
    """
    return [
        [call.name, call.node, call.micro, {slot: text(value) for slot, value in call.params.items()}]
        for call in step_data.calls
        if call.kind == "state" and isinstance(call.params, dict)
    ]


def about_calls(step_data: StepData, names: Sequence[tuple[str, Call]]) -> dict[str, Any]:
    """Return what a header says of calls. micro, phase, kind: run lengths over the entries, [[value, how many], …]."""
    calls = [call for _, call in names]
    return {
        "recomputed": list(map(attrgetter("phase"), step_data.calls)).count("recompute"),
        **{about: run_lengths(map(attrgetter(about), calls)) for about in ("micro", "phase", "kind")},
        "nodes": {name: call.node for name, call in names if call.node is not None},
    }


def place_text(place: Place) -> dict[str, Any]:
    """Return a place as JSON knows it."""
    return {"rank": place.rank, "world_size": place.world_size, "axes": {k: list(v) for k, v in place.axes.items()}}


def read_place(text: dict[str, Any]) -> Place:
    """Return the place that `place_text` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    axes = {str(k): (int(v[0]), int(v[1])) for k, v in text.get("axes", {}).items()}
    rank, world_size = int(text["rank"]), int(text["world_size"])
    if not 0 <= rank < MOST_RANKS or not 0 < world_size <= MOST_RANKS:
        raise ValueError(f"rank {rank} of {world_size} is no place in a job")
    return Place(rank, world_size, axes)


def run_lengths(values: Iterable[Any]) -> list[list[Any]]:
    """Return [[value, how often in a row], …]."""
    return [[value, len(list(run))] for value, run in groupby(values)]


def spread(runs: Any, length: int, default: Any) -> list[Any]:
    """Undo `run_lengths` to `length` values; what is missing or unreadable is `default`."""
    out: list[Any] = []
    for run in runs if isinstance(runs, list) else ():
        if not (isinstance(run, list) and len(run) == 2 and isinstance(run[1], int) and 0 <= run[1] <= length - len(out)):  # pyright: ignore[reportUnknownArgumentType]
            break
        out += [run[0]] * run[1]
    return out + [default] * (length - len(out))


def read_scalars(scalars: dict[str, Any]) -> dict[str, float]:
    """Return the scalars of a header as floats."""
    return {name: read_number(x) for name, x in scalars.items()}


def _scalar(x: float) -> float | str:
    return x if x - x == 0 else str(x)
