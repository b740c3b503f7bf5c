"""A step that has ended: its numbers come to the host, once a device, and are put together as `StepData`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.library import Deferred, Library, Reading, StatsRows, Transfer
from trainprobe.engine.core.records import Feature, StepData, Value
from trainprobe.engine.stats.checksum import MASK, joined
from trainprobe.engine.stats.partials import CHECKSUM, PARTIALS, finish

_Of = TypeVar("_Of")
_Drained = tuple[npt.NDArray[np.float64], Any, Any]  # partial sums, fingerprints, CRC-32


class DeferredFeature(NamedTuple):
    """Numbers of a feature that come from a device. `Tape.feature` explains the fields."""

    deferred: Deferred
    name: str
    slots: Sequence[str]
    call: int
    micro: int
    reading: Reading | None


class Fingerprinted(NamedTuple, Generic[_Of]):
    """Rows of fingerprints alone, None where none was asked for, and what they are of."""

    rows: StatsRows | None
    of: Sequence[_Of]


class SentStep:
    """What a tape collected of a step, while its numbers are on their way to the host.

    about: what `StepData` is given as it is. stats_rows: rows and the values that own them, by the kinds of numbers asked
    for. batches: of each call of the model, how many tensors it was given. shares: values of shards, each with the rows
    whose fingerprints make up its share. noted: twins of values, which have the same row.
    """

    def __init__(
        self,
        library: Library,
        about: dict[str, Any],
        stats_rows: dict[int, tuple[StatsRows, list[Value]]],
        batches: Fingerprinted[int],
        shares: Fingerprinted[tuple[Value, list[int]]],
        deferred: Sequence[Deferred],
        features: Sequence[DeferredFeature],
        scalars: dict[str, Any],
        noted: Sequence[tuple[Value, Value]],
    ) -> None:
        self.library = library
        self._about, self._batches, self._shares = about, batches, shares
        self._features, self._scalars, self._noted = features, scalars, noted
        self._deferred = [c for c in deferred if c.tensor is not None and not library.refusal(c.tensor)]
        self._buffers = list(stats_rows.values())
        self._has_sums = any(kinds & CHECKSUM for kinds in stats_rows)
        every = (*(rows for rows, _ in self._buffers), *(each.rows for each in (batches, shares) if each.rows is not None))
        self._blocks = [(rows, rows.blocks()) for rows in every]
        waiting = [*(t for _, some in self._blocks for t in some), *(c.tensor for c in self._deferred)]
        self._transfer: Transfer | None = library.to_host(waiting) if waiting else None

    def arrived(self) -> bool:
        """Tell whether all numbers are on the host."""
        return self._transfer is None or self._transfer.arrived()

    def receive(self) -> StepData:
        """Return the collected step, once its numbers are there; to be called once."""
        drained = iter(self._drained())
        values, partials, checksums, crc32, extras = self._joined_rows(drained)
        apart = (self._batches.rows, self._shares.rows)
        batches, shares = ([] if rows is None else [int(n) for n in next(drained)[1]] for rows in apart)
        for twin, value in self._noted:  # each value before its twins; until now rows were counted from their buffer's first
            if twin.row >= 0:
                twin.row = value.row
        return StepData(
            values=values,
            partials=partials,
            checksums=checksums,
            crc32=crc32 or None,
            histograms=extras.get("histogram"),
            quantiles=extras.get("quantiles"),
            scalars={name: _scalar(v, partials) for name, v in self._scalars.items()},
            features=self._read_features(),
            batches=_join_batches(self._batches.of, batches),
            shares=_join_shares(self._shares.of, shares),
            **self._about,
        )

    def _drained(self) -> list[_Drained]:
        """Drain the rows, with what came from devices; what is deferred has its numbers then."""
        arrays = iter(self._transfer.arrays() if self._transfer is not None else ())
        drained = [stats_rows.drain([next(arrays) for _ in some]) for stats_rows, some in self._blocks]
        for c in self._deferred:
            c.numbers, c.tensor = next(arrays), None
        self._transfer = None
        return drained

    def _joined_rows(
        self, drained: Iterator[_Drained]
    ) -> tuple[list[Value], npt.NDArray[np.float64], Any, dict[int, str], Any]:
        """Return all values, and the partial sums, fingerprints, CRC-32 and extras of their rows, numbered through."""
        partials: list[npt.NDArray[np.float64]] = []
        sums: list[npt.NDArray[np.uint64]] = []
        extras: dict[str, dict[int, Any]] = {name: {} for name in self.library.extras}
        crc: dict[int, str] = {}
        values: list[Value] = []
        base = 0
        for (stats_rows, owned), (rows, checks, crcs) in zip(self._buffers, drained, strict=False):
            for value in owned if base else ():
                if value.row >= 0:
                    value.row += base
            partials.append(rows)
            if extras:
                dtypes = [value.dtype for value in owned if value.row >= 0]
                for i, results in enumerate(stats_rows.drain_extras()):
                    for name, result in zip(extras, results, strict=True):
                        extras[name][base + i] = self.library.extra(name, result, dtypes[i])
            if self._has_sums:
                sums.append(checks if checks is not None else np.zeros(len(rows), np.uint64))
            crc.update((base + i, f"{c:08x}") for i, c in enumerate(crcs or ()))
            values = values + owned if values else owned  # no copy of the one list that there is as a rule
            base += len(rows)
        whole = partials[0] if len(partials) == 1 else np.concatenate(partials) if partials else np.zeros((0, len(PARTIALS)))
        return values, whole, np.concatenate(sums) if self._has_sums else None, crc, extras

    def _read_features(self) -> list[Feature]:
        found: list[Feature] = []
        for deferred, name, slots, call, micro, reading in self._features:
            numbers = deferred.numbers
            if numbers is not None:
                read = reading(numbers) if reading is not None else ((None, numbers.astype(np.float64)),)
                found += [Feature(name, slot, call, micro, x, bins) for slot, (bins, x) in zip(slots, read, strict=True)]
        return found


def _join_batches(counts: Sequence[int], sums: Sequence[int]) -> list[int]:
    each = iter(sums)
    return [joined([next(each) for _ in range(count)]) for count in counts]


def _join_shares(taken: Sequence[tuple[Value, list[int]]], sums: Sequence[int]) -> dict[int, int]:
    """Return row → share; nothing of a row that stands for two shards, such as one tensor under two names."""
    found: dict[int, set[int]] = {}
    for value, rows in taken:
        found.setdefault(value.row, set()).add(sum(sums[row] for row in rows) & MASK)
    return {row: shares.pop() for row, shares in found.items() if len(shares) == 1}


def _scalar(x: Any, rows: npt.NDArray[np.float64]) -> float:
    if not isinstance(x, Value):
        return float(x)
    return float(finish(rows[x.row : x.row + 1], ("mean",))["mean"][0]) if x.row >= 0 else float("nan")
