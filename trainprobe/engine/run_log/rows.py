"""One step of one rank as rows of the run log. What repeats from step to step is worked out once, in a `Layout`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from trainprobe.engine.addresses import in_order
from trainprobe.engine.dumps.header import place_text
from trainprobe.engine.dumps.record_log import structure
from trainprobe.engine.dumps.shared import Pattern, pattern_of
from trainprobe.engine.records import Feature, Reel
from trainprobe.engine.run_log.schema import COLUMNS, SCHEMA, WORDS, kind_in_words
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import column

I64 = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
_COUNTS = ("count", "nan", "posinf", "neginf", "zero")
_STATISTICS = ("min", "max", "mean", "norm")


class Words:
    """The distinct strings of one column, numbered as they come; null is number -1."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._array: pa.Array = pa.array([], pa.string())

    def number(self, word: str | None) -> int:
        """Return the number of a string."""
        if word is None:
            return -1
        return self._numbers.setdefault(word.encode(errors="backslashreplace").decode(), len(self._numbers))

    def column(self, codes: npt.NDArray[np.int32]) -> pa.DictionaryArray:
        """Return numbers [n] as a column of strings."""
        if len(self._array) < len(self._numbers):
            self._array = pa.array(list(self._numbers), pa.string())
        known = pa.array(codes, mask=codes < 0) if (codes < 0).any() else pa.array(codes)
        return pa.DictionaryArray.from_arrays(known, self._array)


@dataclass(slots=True)
class Layout:
    """What the steps with equal calls share: where each row's numbers stand in a reel, and all columns but the numbers.

    rows: row of the partials [n], -1 for a value without numbers. columns: name → int32 [n], codes of strings or numbers.
    key: what names this layout. text: the calls as JSON.
    """

    key: str
    text: str
    rows: I64
    columns: Mapping[str, Codes]


Piece = tuple[int, dict[str, Any]]  # how many rows, and their columns: an array or list [n], or one value for all


class Rows:
    """Turns reels into record batches with the columns of the run log."""

    def __init__(self) -> None:
        self._words = {name: Words() for name in WORDS}
        self._last: dict[tuple[str, ...], tuple[Pattern, Layout]] = {}
        self._written: set[str] = set()
        self._features: dict[tuple[Any, ...], dict[str, Codes]] = {}
        self._time = 0

    def forget_layouts(self) -> None:
        """Write each layout once more when it is next met, because another file begins."""
        self._written.clear()

    def batch(self, reels: Iterable[Reel]) -> pa.RecordBatch:
        """Return the rows of some steps of one rank."""
        pieces = [piece for reel in reels for piece in self._pieces(reel)]
        return pa.RecordBatch.from_arrays([self._column(name, pieces) for name in COLUMNS], schema=SCHEMA)

    def _pieces(self, reel: Reel) -> Iterator[Piece]:
        layout = self._layout(reel)
        self._time = max(self._time + 1, time.time_ns() // 1000)  # no two steps have the same, which tells them apart
        common = {"step": reel.step, "rank": reel.place.rank, "time": self._time}
        n = len(layout.rows)
        yield n, {**common, **layout.columns, **_numbers(reel, layout.rows)}
        if reel.features:
            yield (
                len(reel.features),
                {
                    **common,
                    **self._places_of(reel.features),
                    "position": _count_from(n, len(reel.features)),
                    **_feature_numbers(reel.features),
                },
            )
        if reel.scalars:
            names, values = list(reel.scalars), np.array(list(reel.scalars.values()), np.float64)
            words = {"kind": "scalar", "phase": "step", "name": names, "slot": "value"}
            yield (
                len(names),
                {
                    **common,
                    **self._codes(len(names), words),
                    "value": values,
                    "position": _count_from(n + len(reel.features), len(names)),
                },
            )
        if layout.key not in self._written:
            self._written.add(layout.key)
            words = {"kind": "layout", "phase": "step", "name": layout.key}
            yield 1, {**common, **self._codes(1, words), "detail": [layout.text]}
        yield 1, {**common, **self._codes(1, {"kind": "step", "phase": "step"}), "detail": [_about(reel, layout)]}

    def _codes(self, n: int, words: Mapping[str, str | Sequence[str | None]]) -> dict[str, Codes]:
        codes = dict[str, Codes]()
        for name, said in words.items():
            number = self._words[name].number
            one = isinstance(said, str)
            codes[name] = np.full(n, number(said), np.int32) if one else np.array([number(word) for word in said], np.int32)
        return codes

    def _places_of(self, features: Sequence[Feature]) -> dict[str, Codes]:
        key = tuple((f.name, f.slot, f.call, f.micro) for f in features)
        if key not in self._features:
            names, slots, calls, micros = zip(*key, strict=True)
            words = {"kind": "feature", "phase": "forward", "name": names, "slot": slots}
            numbers = {"call": np.array(calls, np.int32), "micro": _micros(micros)}
            if len(self._features) > 16:
                self._features.clear()
            self._features[key] = {**self._codes(len(key), words), **numbers}
        return self._features[key]

    def _layout(self, reel: Reel) -> Layout:
        programs = tuple(reel.programs)
        last, layout = self._last.get(programs, (None, None))
        pattern = pattern_of(reel, last)
        if layout is None or pattern is not last:
            layout = self._new_layout(reel)
            self._last[programs] = pattern, layout
        return layout

    def _new_layout(self, reel: Reel) -> Layout:
        entries = in_order(reel)
        words: dict[str, list[str | None]] = {
            "phase": [spot.phase for spot, _, _ in entries],
            "kind": [kind_in_words(spot.kind, spot.slot) for spot, _, _ in entries],
            "name": [spot.name for spot, _, _ in entries],
            "slot": [spot.slot for spot, _, _ in entries],
            "dtype": [value.dtype for _, _, value in entries],
            "shape": [str(list(value.shape)) for _, _, value in entries],
            "note": [value.note for _, _, value in entries],
        }
        columns = {
            **self._codes(len(entries), words),
            "call": np.array([spot.call for spot, _, _ in entries], np.int32),
            "micro": _micros(None if call.kind == "state" else call.micro for _, call, _ in entries),
            "position": _count_from(0, len(entries)),
        }
        text = structure(reel, [value for _, _, value in entries]).decode()
        rows = np.array([value.row for _, _, value in entries], np.int64)
        return Layout(hashlib.sha256(text.encode()).hexdigest()[:16], text, rows, columns)

    def _column(self, name: str, pieces: Sequence[Piece]) -> pa.Array:
        kind = COLUMNS[name][0]
        data = [(n, columns.get(name)) for n, columns in pieces]
        if all(column is None for _, column in data):
            return pa.nulls(sum(n for n, _ in data), kind)
        if name in self._words:
            codes = [np.full(n, -1, np.int32) if column is None else column for n, column in data]
            return self._words[name].column(np.concatenate(codes))
        return pa.concat_arrays([_array(n, column, name, kind) for n, column in data])


def _array(n: int, column: Any, name: str, kind: pa.DataType) -> pa.Array:
    if column is None:
        return pa.nulls(n, kind)
    if isinstance(column, int):
        return pa.array(np.full(n, column)).cast(kind)
    if isinstance(column, list):
        return pa.array(column, kind)
    if isinstance(column, pa.Array):
        return column
    return pa.array(column, mask=column < 0 if name == "micro" else None).cast(kind)


def _count_from(first: int, n: int) -> Codes:
    return np.arange(first, first + n, dtype=np.int32)


def _micros(micros: Iterable[int | None]) -> Codes:
    return np.array([-1 if micro is None else micro for micro in micros], np.int32)


def _feature_numbers(features: Sequence[Feature]) -> dict[str, Any]:
    single = [f.edges is None and f.numbers.size == 1 for f in features]
    found: dict[str, Any] = {"value": [float(f.numbers[0]) if one else None for f, one in zip(features, single, strict=True)]}
    if not all(single):
        found["numbers"] = [None if one else f.numbers for f, one in zip(features, single, strict=True)]
        found["edges"] = [f.edges for f in features]
    return found


def _numbers(reel: Reel, rows: I64) -> dict[str, Any]:
    there = rows >= 0
    partials = reel.partials[np.where(there, rows, 0)] if len(reel.partials) else np.zeros((len(rows), reel.partials.shape[1]))
    if not there.all():
        partials[~there] = 0.0
    found: dict[str, Any] = {name: column(partials, name) for name in _COUNTS}
    wanted = [*_STATISTICS, *(["std"] if "std" in reel.wanted else [])]
    found.update(finish(partials, wanted))
    if "sublow" in reel.wanted:
        found["subnormal"] = column(partials, "sublow")
    if reel.checksums is not None:
        sums = np.where(there, reel.checksums[np.where(there, rows, 0)], 0)
        found["checksum"] = pa.array(sums, mask=(sums == 0) & (found["count"] > 0) | ~there)  # 0 where none was asked for
    listed = rows.tolist()
    if reel.crc32:
        found["crc32"] = [reel.crc32.get(row) for row in listed]
    if reel.quantiles:
        found["quantiles"] = [reel.quantiles.get(row) for row in listed]
    if reel.histograms:
        pairs = [reel.histograms.get(row) for row in listed]
        found["edges"] = [None if pair is None else pair[0] for pair in pairs]
        found["numbers"] = [None if pair is None else np.asarray(pair[1], float) for pair in pairs]
    return found


def _about(reel: Reel, layout: Layout) -> str:
    detail = {
        "layout": layout.key,
        "place": place_text(reel.place),
        "framework": reel.framework,
        "level": reel.level,
        "task": reel.task,
        "wanted": reel.wanted,
        "programs": reel.programs,
        "complete": reel.complete,
        **({"notes": list(reel.notes)} if reel.notes else {}),
        **({"batches": list(reel.batches)} if reel.batches else {}),
    }
    return orjson.dumps(detail).decode()
