"""One collected step of one rank as two flat arrays: the number of a series, and its value, in execution order.

A *series* is what one number of a step is called in every step: what it belongs to, its slot, and the statistic. Series are
numbered once in a `SeriesTable`, so that a rule works on arrays of numbers and looks at names only when it has something to
say. `frame_of_step` serves a live run and `frame_of_records` a recorded one: the same frame comes out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.addresses import Address, address, in_order, order, stage_and_phase
from trainprobe.engine.core.records import Feature, Place, Record, StepData, logical_shape
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import all_finite, column, known

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[Any]


class Series(NamedTuple):
    """The address of one series of numbers of one rank."""

    address: Address
    statistic: str

    def __str__(self) -> str:
        if self.address.kind == "scalar":
            return self.address.name
        call = f".{self.address.call}" if self.address.call else ""
        return f"{self.address.name}{call} {self.address.slot} {self.statistic}"


_SHORT_DTYPES = ("bfloat16", "float16", "half", "bf16", "f16", "float8")


class SeriesTable:
    """Numbers series in the order in which they were first seen; grows, never forgets."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.addresses: list[Address] = []
        self.dimensions: list[int] = []  # of each address's tensor; 0 where it has one element
        self.short: list[bool] = []  # whether each address's tensor is of 16 bits or less
        self.shard: list[bool] = []  # whether this rank holds a part of each address's tensor
        self._address_at: dict[Address, int] = {}
        self._series_at: dict[tuple[int, str], int] = {}
        self._address_of: list[int] = []
        self._address_array: I64 = np.zeros(0, dtype=np.int64)
        self._layouts: dict[tuple[bytes, tuple[str, ...]], I64] = {}
        self._arrays: dict[bytes, I64] = {}
        self._features: dict[tuple[tuple[str, str, int, int], ...], I64] = {}

    def address(self, address: Address, shape: Sequence[int] = (), dtype: str = "", count: float = 0) -> int:
        """Return the number of an address. shape: of the logical tensor; count: elements that this rank holds, 0 if unknown."""
        found = self._address_at.get(address)
        if found is None:
            found = self._address_at[address] = len(self.addresses)
            self.addresses.append(address)
            self.dimensions.append(dimensions_of(shape))
            self.shard.append(0 < count < math.prod(shape))
            self.short.append(dtype.rpartition(".")[2].lower().startswith(_SHORT_DTYPES))
        return found

    def series_at(self, address: int, statistic: str) -> int:
        """Return the number of the series of a numbered address."""
        found = self._series_at.get((address, statistic))
        if found is None:
            found = self._series_at[address, statistic] = len(self.series)
            self.series.append(Series(self.addresses[address], statistic))
            self._address_of.append(address)
        return found

    def addresses_of(self, series: I64) -> I64:
        """Return the address number of each series number, [n]."""
        if self._address_array.size < len(self._address_of):
            self._address_array = np.array(self._address_of, dtype=np.int64)
        return self._address_array[series]

    def layout(self, addresses: I64, statistics: tuple[str, ...]) -> I64:
        """Return series numbers [addresses × statistics], address by address; remembered, because steps repeat."""
        key = (addresses.tobytes(), statistics)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) > 16:
                self._layouts.clear()
            flat = [self.series_at(s, name) for s in addresses.tolist() for name in statistics]
            found = self._layouts[key] = np.array(flat, dtype=np.int64)
        return found

    def of_features(self, key: tuple[tuple[str, str, int, int], ...], features: Sequence[Feature]) -> I64:
        """Return the series of features, one per number. key: what determines them; remembered, because steps repeat."""
        found = self._features.get(key)
        if found is None:
            if len(self._features) > 16:
                self._features.clear()
            addresses = [Address("forward", "feature", f.name, f.call, slot) for f in features for slot, _ in f.each()]
            found = self._features[key] = np.array(
                [self.series_at(self.address(address), "value") for address in addresses], np.int64
            )
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
        return len(self.series)


class Health(IntEnum):
    """The worst element of a value. Minus infinity alone is what an attention mask holds, so it is not yet an infinity."""

    FINITE = 0
    MINUS_INFINITY = 1
    INFINITE = 2
    NAN = 3


STATISTICS = ("norm", "absmax", "mean")
SCALED = "grad_scaled"  # the slot of a gradient that a call showed in the backward pass of a step with a loss scale
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One collected step of one rank.

    at: series numbers [n] in execution order, scalars last. values: float64 [n]. addresses: address numbers [m] in execution
    order, scalars last. health: for each of these addresses the `Health` of its value. scalars: name → value.
    """

    step: int
    place: Place
    table: SeriesTable
    at: I64
    values: F64
    addresses: I64
    health: U8
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    complete: bool = True


def frame_of_step(step_data: StepData, table: SeriesTable) -> Frame:
    """Lay out the numbers of a step as a frame: norm, absmax, mean, the share of zeros and, where taken, the checksum.

    They come from the partials, whatever statistics the step was to be written with. An empty tensor is absent.
    """
    addresses, rows = _entries(step_data, table)
    partials = step_data.partials[rows]
    numbers = finish(partials, STATISTICS)
    numbers["zero_share"] = column(partials, "zero") / np.maximum(column(partials, "count"), 1)
    if step_data.checksums is not None:
        numbers["checksum"] = (step_data.checksums[rows] & np.uint64(SHORT)).astype(np.float64)
    at = table.layout(addresses, tuple(numbers))
    values = np.stack(list(numbers.values()), axis=1).reshape(-1)
    if step_data.checksums is not None and not (taken := step_data.checksums[rows] != 0).all():
        there = np.ones((len(rows), len(numbers)), dtype=bool)
        there[:, -1] = taken  # of a value whose checksum was not asked for, there is none
        at, values = at[there.reshape(-1)], values[there.reshape(-1)]
    counts = (column(partials, name) for name in ("neginf", "posinf", "nan"))
    health = np.full(len(partials), Health.FINITE, np.uint8) if all_finite(partials) else health_of(*counts)
    single = [f for f in step_data.features if f.edges is None]
    if single:
        more = table.of_features(tuple((f.name, f.slot, f.call, f.numbers.size) for f in single), single)
        at, values = np.concatenate([at, more]), np.concatenate([values, *(f.numbers for f in single)])
    return with_scalars(
        step_data.step, step_data.place, table, (at, values, addresses, health), step_data.scalars, step_data.complete
    )


def health_of(neginf: Numbers, posinf: Numbers, nan: Numbers) -> U8:
    """Return the `Health` of each value, uint8 [n], from how many of its elements are -inf, +inf and NaN, [n] each."""
    return np.where(
        nan > 0, Health.NAN, np.where(posinf > 0, Health.INFINITE, np.where(neginf > 0, Health.MINUS_INFINITY, Health.FINITE))
    ).astype(np.uint8)


def _with_features(table: SeriesTable, at: I64, values: F64, features: Sequence[tuple[Address, float]]) -> tuple[I64, F64]:
    """Append features behind the values: each is one number, and never the place where something went wrong first."""
    if not features:
        return at, values
    more = [table.series_at(table.address(address), "value") for address, _ in features]
    return np.concatenate([at, np.array(more, np.int64)]), np.concatenate([values, [number for _, number in features]])


def _entries(step_data: StepData, table: SeriesTable) -> tuple[I64, I64]:
    """Return address and row of every value of a step that has numbers, in the order of execution, [n] each."""
    addresses, rows = layout_of(step_data).derived(table, lambda: _number_addresses(step_data, table))
    there = rows >= 0
    partials = step_data.partials[rows[there]]
    there[there] = known(partials, "nan") & (column(partials, "count") > 0)
    return (addresses, rows) if there.all() else (addresses[there], rows[there])


def _number_addresses(step_data: StepData, table: SeriesTable) -> tuple[I64, I64]:
    """Return the address and the row of every value, row -1 for one without numbers."""
    entries = in_order(step_data)
    scaled = "loss_scale" in step_data.scalars
    shown = (where._replace(slot=SCALED) if scaled and call.kind == "parameter" else where for where, call, _ in entries)
    values = [value for _, _, value in entries]
    rows = np.array([value.row for value in values], np.int64)
    counts = (
        np.where(rows >= 0, column(step_data.partials, "count")[rows], 0) if len(step_data.partials) else np.zeros(len(rows))
    )
    told = zip(shown, values, counts.tolist(), strict=True)
    return np.array([table.address(at, logical_shape(v), v.dtype, n) for at, v, n in told], np.int64), rows


def dimensions_of(shape: Sequence[int]) -> int:
    """Return how many dimensions a tensor has; 0 for one element, which is no matrix whatever its shape."""
    return len(shape) if math.prod(shape) > 1 else 0


def frame_of_records(
    step: int, place: Place, records: Iterable[Record], table: SeriesTable, complete: bool = True, *, parted: bool = False
) -> Frame:
    """Lay out the records of one step and rank as a frame, in their order, with the statistics that they have.

    parted: a value that does not say how many elements this rank holds may be a part of its tensor.
    """
    unknown = 0.5 if parted else 0.0  # elements: less than any tensor has
    at: list[int] = []
    values: list[float] = []
    addresses: list[int] = []
    health: list[int] = []
    scalars: dict[str, float] = {}
    features: list[tuple[Address, float]] = []
    for record in _as_they_arose(records):
        site, numbers = record.site, record.values
        if site.kind == "scalar":
            scalars[site.name] = float(numbers.get("value", np.nan))
            continue
        if site.kind == "feature" and "value" in numbers:
            features.append((Address("forward", "feature", site.name, site.call, site.slot), float(numbers["value"])))
        if not numbers or site.kind == "feature":
            continue
        phase = record.step.phase
        if site.kind == "parameter" and phase == "optimizer":
            phase = stage_and_phase(site.slot)[1]
        where = table.address(
            address(phase, site.kind, site.name, site.call, site.slot),
            record.shape,
            record.dtype,
            numbers.get("count", unknown),
        )
        addresses.append(where)
        health.append(_health_of_record(numbers))
        for statistic, value in _watched(numbers).items():
            at.append(table.series_at(where, statistic))
            values.append(value)
    both = _with_features(table, np.array(at, np.int64), np.array(values, np.float64), features)
    flat = (*both, np.array(addresses, np.int64), np.array(health, np.uint8))
    return with_scalars(step, place, table, flat, scalars, complete)


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


def _health_of_record(numbers: Mapping[str, float | int]) -> int:
    both = numbers.get("min") == -math.inf and numbers.get("max") == math.inf  # the mean of which is NaN
    present = [float(numbers[name]) for name in ("max", "min", "mean", "norm", "absmax", "value") if name in numbers]
    present = [x for x in present if not (both and math.isnan(x))]
    if numbers.get("nan") or any(math.isnan(x) for x in present):
        return Health.NAN
    if not (numbers.get("inf") or any(math.isinf(x) for x in present)):
        return Health.FINITE
    only_below = numbers.get("min") == -math.inf and numbers.get("max", math.inf) != math.inf
    return Health.MINUS_INFINITY if only_below else Health.INFINITE


def with_scalars(
    step: int,
    place: Place,
    table: SeriesTable,
    flat: tuple[I64, F64, I64, U8],
    scalars: Mapping[str, float],
    complete: bool,
    like: Frame | None = None,
) -> Frame:
    """Return the frame of these values, the scalars last. flat: `at`, `values`, `addresses` and `health` of the frame.

    like: a frame of the same series in the same order, from which `at` and `addresses` are taken.
    """
    at, values, addresses, health = flat
    if like is None:
        extra = [table.address(Address("step", "scalar", name, 0, "value")) for name in scalars]
        at = table.same(np.concatenate([at, np.array([table.series_at(s, "value") for s in extra], dtype=np.int64)]))
        addresses = np.concatenate([addresses, np.array(extra, dtype=np.int64)])
    else:
        at, addresses = like.at, like.addresses
    numbers = np.array(list(scalars.values()), dtype=np.float64)
    worse = np.isinf(numbers) * np.uint8(Health.INFINITE) + np.isnan(numbers) * np.uint8(Health.NAN)
    values, health = np.concatenate([values, numbers]), np.concatenate([health, worse])
    return Frame(step, place, table, at, values, addresses, health, dict(scalars), complete)


def as_slice(numbers: I64) -> slice | I64:
    """Return numbers [n] that pick neighbours as a slice, which copies them in a tenth of the time, others as they are."""
    if not numbers.size or not (np.diff(numbers) == 1).all():
        return numbers
    return slice(int(numbers[0]), int(numbers[-1]) + 1)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which series a rule looks at: kinds, slots (by their first part) and statistics; empty means any.

    names: patterns of `engine.plan.selection` over dotted names. first_call: only the first call of a name in a step.
    """

    kinds: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    names: tuple[str, ...] = ("**",)

    def wants(self, series: Series, names: Names) -> bool:
        """Tell whether a series belongs to the selection; `names` are its patterns, compiled."""
        address = series.address
        return (
            (not self.kinds or address.kind in self.kinds)
            and (not self.slots or address.slot.split(".")[0] in self.slots)
            and (not self.statistics or series.statistic in self.statistics)
            and address.name in names
        )


class Picker:
    """Finds the series of some selections in frames; remembers the answer for each series."""

    def __init__(self, selections: Sequence[Selection]) -> None:
        self._selections = [(s, Names(s.names)) for s in selections]
        self._selected: list[bool] = []

    def pick(self, frame: Frame) -> I64:
        """Return the places in `frame.at` that belong to the selection, [k]."""
        for series in frame.table.series[len(self._selected) :]:
            self._selected.append(any(s.wants(series, names) for s, names in self._selections))
        mask = np.array(self._selected, dtype=bool)
        return np.flatnonzero(mask[frame.at]) if mask.size else np.zeros(0, dtype=np.int64)
