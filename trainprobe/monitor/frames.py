"""One collected step of one rank as two flat arrays: which number (a track), and its value, in execution order.

A *track* is the address of one series of numbers over steps: what it belongs to, its slot, and the statistic. Tracks are
numbered once in a `Tracks` table, so that a rule works on arrays of numbers and looks at names only when it has
something to say. `frame_of_reel` serves a live run and `frame_of_records` a recorded one: the same frame comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.addresses import Spot, in_order, order, spot, stage_and_phase
from trainprobe.engine.core.records import Feature, Place, Record, Reel
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import all_finite, column

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]


class Track(NamedTuple):
    """The address of one series of numbers of one rank."""

    spot: Spot
    statistic: str

    def __str__(self) -> str:
        if self.spot.kind == "scalar":
            return self.spot.name
        call = f".{self.spot.call}" if self.spot.call else ""
        return f"{self.spot.name}{call} {self.spot.slot} {self.statistic}"


_SHORT_DTYPES = ("bfloat16", "float16", "half", "bf16", "f16", "float8")


class Tracks:
    """Numbers tracks in the order in which they were first seen; grows, never forgets."""

    def __init__(self) -> None:
        self.tracks: list[Track] = []
        self.spots: list[Spot] = []
        self.dimensions: list[int] = []  # of each spot's tensor; 0 where it has one element
        self.short: list[bool] = []  # whether each spot's tensor is of 16 bits or less
        self._spot_at: dict[Spot, int] = {}
        self._track_at: dict[tuple[int, str], int] = {}
        self._spot_of: list[int] = []
        self._spot_array: I64 = np.zeros(0, dtype=np.int64)
        self._layouts: dict[tuple[bytes, tuple[str, ...]], I64] = {}
        self._arrays: dict[bytes, I64] = {}
        self._features: dict[tuple[tuple[str, str, int, int], ...], I64] = {}

    def spot(self, spot: Spot, dimensions: int = 0, dtype: str = "") -> int:
        """Return the number of a spot."""
        found = self._spot_at.get(spot)
        if found is None:
            found = self._spot_at[spot] = len(self.spots)
            self.spots.append(spot)
            self.dimensions.append(dimensions)
            self.short.append(dtype.rpartition(".")[2].lower().startswith(_SHORT_DTYPES))
        return found

    def track(self, spot: int, statistic: str) -> int:
        """Return the number of the track of a numbered spot."""
        found = self._track_at.get((spot, statistic))
        if found is None:
            found = self._track_at[spot, statistic] = len(self.tracks)
            self.tracks.append(Track(self.spots[spot], statistic))
            self._spot_of.append(spot)
        return found

    def spots_of(self, tracks: I64) -> I64:
        """Return the spot number of each track number, [n]."""
        if self._spot_array.size < len(self._spot_of):
            self._spot_array = np.array(self._spot_of, dtype=np.int64)
        return self._spot_array[tracks]

    def layout(self, spots: I64, statistics: tuple[str, ...]) -> I64:
        """Return track numbers [spots × statistics], spot by spot; remembered, because steps repeat."""
        key = (spots.tobytes(), statistics)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) > 16:
                self._layouts.clear()
            flat = [self.track(s, name) for s in spots.tolist() for name in statistics]
            found = self._layouts[key] = np.array(flat, dtype=np.int64)
        return found

    def of_features(self, told: tuple[tuple[str, str, int, int], ...], features: Sequence[Feature]) -> I64:
        """Return the track numbers of features, one a number; told: what they follow from, remembered, because steps repeat."""
        found = self._features.get(told)
        if found is None:
            if len(self._features) > 16:
                self._features.clear()
            spots = [Spot("forward", "feature", f.name, f.call, slot) for f in features for slot, _ in f.each()]
            found = self._features[told] = np.array([self.track(self.spot(spot), "value") for spot in spots], np.int64)
        return found

    def same(self, at: I64) -> I64:
        """Return an equal array that was handed in before, or this one: steps repeat, and what is worked out of an array, such
        as the places that a rule looks at, is remembered by the array itself. It must not be written to.
        """
        if len(self._arrays) > 16:
            self._arrays.clear()
        at.flags.writeable = False
        return self._arrays.setdefault(at.tobytes(), at)

    def __len__(self) -> int:
        return len(self.tracks)


# How bad a value is: nothing wrong, minus infinity alone (as in an attention mask), an infinity, a NaN.
FINE, MASKED, INFINITE, NOT_A_NUMBER = 0, 1, 2, 3
STATISTICS = ("norm", "absmax", "mean")
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One collected step of one rank.

    at: track numbers [n] in execution order, scalars last. values: float64 [n]. spots: spot numbers [m] in execution order,
    scalars last. bad: for each of these spots FINE, MASKED, INFINITE or NOT_A_NUMBER. scalars: name → value.
    """

    step: int
    place: Place
    tracks: Tracks
    at: I64
    values: F64
    spots: I64
    bad: U8
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    complete: bool = True


def frame_of_reel(reel: Reel, tracks: Tracks) -> Frame:
    """Lay out the numbers of a reel as a frame: norm, absmax, mean, the share of zeros and, where taken, the checksum.

    They come from the partials, whatever statistics the reel was to be written with. An empty tensor is absent.
    """
    spots, rows = _entries(reel, tracks)
    partials = reel.partials[rows]
    numbers = finish(partials, STATISTICS)
    numbers["zero_share"] = column(partials, "zero") / np.maximum(column(partials, "count"), 1)
    if reel.checksums is not None:
        numbers["checksum"] = (reel.checksums[rows] & np.uint64(SHORT)).astype(np.float64)
    at = tracks.layout(spots, tuple(numbers))
    values = np.stack(list(numbers.values()), axis=1).reshape(-1)
    if reel.checksums is not None and not (taken := reel.checksums[rows] != 0).all():
        there = np.ones((len(rows), len(numbers)), dtype=bool)
        there[:, -1] = taken  # of a value whose checksum was not asked for, there is none
        at, values = at[there.reshape(-1)], values[there.reshape(-1)]
    counts = (column(partials, name) for name in ("neginf", "posinf", "nan"))
    bad = np.full(len(partials), FINE, np.uint8) if all_finite(partials) else badness(*counts)
    series = [f for f in reel.features if f.edges is None]
    if series:
        more = tracks.of_features(tuple((f.name, f.slot, f.call, f.numbers.size) for f in series), series)
        at, values = np.concatenate([at, more]), np.concatenate([values, *(f.numbers for f in series)])
    return with_scalars(reel.step, reel.place, tracks, (at, values, spots, bad), reel.scalars, reel.complete)


def badness(neginf: Numbers, posinf: Numbers, nan: Numbers) -> U8:
    """Return how bad each value is, uint8 [n], by how many of its elements are -inf, +inf and NaN, [n] each."""
    return np.where(nan > 0, NOT_A_NUMBER, np.where(posinf > 0, INFINITE, np.where(neginf > 0, MASKED, FINE))).astype(np.uint8)


def _with_features(tracks: Tracks, at: I64, values: F64, features: Sequence[tuple[Spot, float]]) -> tuple[I64, F64]:
    """Append features behind the values: each is one number, and never the place where something went wrong first."""
    if not features:
        return at, values
    more = [tracks.track(tracks.spot(spot), "value") for spot, _ in features]
    return np.concatenate([at, np.array(more, np.int64)]), np.concatenate([values, [number for _, number in features]])


def _entries(reel: Reel, tracks: Tracks) -> tuple[I64, I64]:
    """Return the spot and the row of every value of a reel that has elements, in the order of execution, [n] each."""
    spots, rows = layout_of(reel).derived(tracks, lambda: _number_spots(reel, tracks))
    there = rows >= 0
    there[there] = column(reel.partials, "count")[rows[there]] > 0
    return (spots, rows) if there.all() else (spots[there], rows[there])


def _number_spots(reel: Reel, tracks: Tracks) -> tuple[I64, I64]:
    """Return the spot and the row of every value, row -1 for one without numbers."""
    entries = in_order(reel)
    spots = [tracks.spot(where, dimensions_of(value.shape), value.dtype) for where, _, value in entries]
    return np.array(spots, np.int64), np.array([value.row for _, _, value in entries], np.int64)


def dimensions_of(shape: Sequence[int]) -> int:
    """Return how many dimensions a tensor has; 0 for one element, which is no matrix whatever its shape."""
    return len(shape) if math.prod(shape) > 1 else 0


def frame_of_records(step: int, place: Place, records: Iterable[Record], tracks: Tracks, complete: bool = True) -> Frame:
    """Lay out the records of one step and rank as a frame, in their order, with the statistics that they have."""
    at: list[int] = []
    values: list[float] = []
    spots: list[int] = []
    bad: list[int] = []
    scalars: dict[str, float] = {}
    features: list[tuple[Spot, float]] = []
    for record in _as_they_arose(records):
        site, numbers = record.site, record.values
        if site.kind == "scalar":
            scalars[site.name] = float(numbers.get("value", np.nan))
            continue
        if site.kind == "feature" and "value" in numbers:
            features.append((Spot("forward", "feature", site.name, site.call, site.slot), float(numbers["value"])))
        if not numbers or site.kind == "feature":
            continue
        phase = record.step.phase
        if site.kind == "parameter" and phase == "optimizer":
            phase = stage_and_phase(site.slot)[1]
        where = tracks.spot(spot(phase, site.kind, site.name, site.call, site.slot), dimensions_of(record.shape), record.dtype)
        spots.append(where)
        bad.append(_badness(numbers))
        for statistic, value in _watched(numbers).items():
            at.append(tracks.track(where, statistic))
            values.append(value)
    both = _with_features(tracks, np.array(at, np.int64), np.array(values, np.float64), features)
    flat = (*both, np.array(spots, np.int64), np.array(bad, np.uint8))
    return with_scalars(step, place, tracks, flat, scalars, complete)


def _as_they_arose(records: Iterable[Record]) -> list[Record]:
    """Sort in, as `_entries` does, what was looked at around the optimizer step."""
    found: list[tuple[tuple[int, int], Record]] = []
    mixed, call, last = False, 0, None
    for record in records:
        here = (record.site.kind, record.site.name, record.site.call, record.step.phase)
        call, last = call + (here != last), here
        around = record.site.kind == "parameter" and record.step.phase == "optimizer"
        mixed |= around
        stage = stage_and_phase(record.site.slot)[0] if around else 0
        found.append((order(stage, call), record))
    return [record for _, record in (sorted(found, key=itemgetter(0)) if mixed else found)]


SHORT = (1 << 52) - 1  # the bits of a checksum that a float64 holds exactly: enough to tell moved from not moved


def _watched(numbers: Mapping[str, float | int]) -> dict[str, float]:
    """Return a record's numbers in the monitor's words."""
    out = {name: float(x) for name, x in numbers.items() if name not in ("zero", "count", "checksum", "nan", "inf")}
    if "checksum" in numbers:
        out["checksum"] = float(int(numbers["checksum"]) & SHORT)
    if "zero" in numbers and numbers.get("count"):
        out["zero_share"] = numbers["zero"] / numbers["count"]
    if "absmax" not in out and "max" in out and "min" in out:
        out["absmax"] = max(abs(out["max"]), abs(out["min"])) if out["max"] == out["max"] else out["max"]
    return out


def _badness(numbers: Mapping[str, float | int]) -> int:
    both = numbers.get("min") == -math.inf and numbers.get("max") == math.inf  # the mean of which is NaN
    told = [float(numbers[name]) for name in ("max", "min", "mean", "norm", "absmax", "value") if name in numbers]
    told = [x for x in told if not (both and math.isnan(x))]
    if numbers.get("nan") or any(math.isnan(x) for x in told):
        return NOT_A_NUMBER
    if not (numbers.get("inf") or any(math.isinf(x) for x in told)):
        return FINE
    only_below = numbers.get("min") == -math.inf and numbers.get("max", math.inf) != math.inf
    return MASKED if only_below else INFINITE


def with_scalars(
    step: int, place: Place, tracks: Tracks, flat: tuple[I64, F64, I64, U8], scalars: Mapping[str, float], complete: bool
) -> Frame:
    """Return the frame of these values with the scalars behind them. flat: `at`, `values`, `spots` and `bad` of the frame."""
    at, values, spots, bad = flat
    extra = [tracks.spot(Spot("step", "scalar", name, 0, "value")) for name in scalars]
    numbers = np.array(list(scalars.values()), dtype=np.float64)
    worse = np.where(np.isnan(numbers), NOT_A_NUMBER, np.where(np.isinf(numbers), INFINITE, FINE)).astype(np.uint8)
    return Frame(
        step,
        place,
        tracks,
        tracks.same(np.concatenate([at, np.array([tracks.track(s, "value") for s in extra], dtype=np.int64)])),
        np.concatenate([values, numbers]),
        np.concatenate([spots, np.array(extra, dtype=np.int64)]),
        np.concatenate([bad, worse]),
        dict(scalars),
        complete,
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tracks a rule looks at: kinds, slots (by their first part) and statistics; empty means any.

    names: patterns of `engine.plan.selection` over dotted names. first_call: only the first call of a name in a step.
    """

    kinds: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    names: tuple[str, ...] = ("**",)
    phases: tuple[str, ...] = ()

    def wants(self, track: Track, names: Names) -> bool:
        """Tell whether a track belongs to the selection; `names` are its patterns, compiled."""
        spot = track.spot
        return (
            (not self.kinds or spot.kind in self.kinds)
            and (not self.slots or spot.slot.split(".")[0] in self.slots)
            and (not self.statistics or track.statistic in self.statistics)
            and (not self.phases or spot.phase in self.phases)
            and spot.name in names
        )


class Picker:
    """Finds the tracks of some selections in frames; remembers the answer for each track."""

    def __init__(self, selections: Sequence[Selection]) -> None:
        self._selections = [(s, Names(s.names)) for s in selections]
        self._wanted: list[bool] = []

    def pick(self, frame: Frame) -> I64:
        """Return the places in `frame.at` that belong to the selection, [k]."""
        for track in frame.tracks.tracks[len(self._wanted) :]:
            self._wanted.append(any(s.wants(track, names) for s, names in self._selections))
        mask = np.array(self._wanted, dtype=bool)
        return np.flatnonzero(mask[frame.at]) if mask.size else np.zeros(0, dtype=np.int64)
