"""Steps of one rank as rows of the run log: whole columns of many steps are made at once, straight from their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from trainprobe.engine.core.addresses import in_order
from trainprobe.engine.core.records import StepData
from trainprobe.engine.core.step_data import fingerprinted
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import ASKED, F64, column, known
from trainprobe.engine.storage.dumps.header import place_text
from trainprobe.engine.storage.dumps.record_log import structure
from trainprobe.engine.storage.run_log import arrow_arrays
from trainprobe.engine.storage.run_log.arrow_arrays import StringDictionary
from trainprobe.engine.storage.run_log.schema import COLUMNS, SCHEMA, WORDS, kind_in_words

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]
_COUNTS = ("nan", "posinf", "neginf", "zero")
_STATISTICS = ("min", "max", "mean", "norm")
_PLACES = ("call", "micro", "position")  # whole numbers; -1 is null


@dataclass(slots=True)
class _Layout:
    """The rows of the steps of one layout: values, features, scalars and last what holds for all of the step.

    rows: row of the partials of each value [n], -1 where it has no numbers. columns: name → int32 [n + features + scalars + 1],
    codes of strings or whole numbers. key: what names this layout in the table. text: the calls as JSON. singles: which
    features are one number. others: which are several numbers.
    """

    key: str
    text: str
    rows: I64
    columns: Mapping[str, Codes]
    singles: list[int]
    others: list[int]

    def __len__(self) -> int:
        return len(self.columns["kind"])


class Rows:
    """Turns collected steps into record batches with the columns of the run log.

    after: the time of the last step that stands in the log, in microseconds since 1970; a clock may have been set back since.
    """

    def __init__(self, after: int = 0) -> None:
        self._words = {name: StringDictionary() for name in WORDS}
        self._written: set[str] = set()
        self._time = after

    def forget_layouts(self) -> None:
        """Write each layout once more when it is next met, because another file begins."""
        self._written.clear()

    def batch(self, steps: Sequence[tuple[int, StepData]]) -> pa.RecordBatch:
        """Return the rows of some steps of one rank, each with the time at which it came, in microseconds since 1970."""
        layouts = [
            layout_of(step_data).derived(self, lambda step_data=step_data: self._layout(step_data)) for _, step_data in steps
        ]
        table = _Table(sum(map(len, layouts)) + self._count_new(layouts))
        for (when, step_data), layout in zip(steps, layouts, strict=True):
            self._time = max(self._time + 1, when)  # no two steps have the same, which tells them apart
            begin = table.end
            if layout.key not in self._written:
                self._written.add(layout.key)
                table.add(self._columns(1, {"kind": "layout", "phase": "step", "name": layout.key}))
                table.texts["detail"][begin] = layout.text.encode()
            table.add_step(step_data, layout)
            table.common[begin : table.end] = (step_data.step, self._time, step_data.place.rank)
        return pa.RecordBatch.from_arrays(table.arrays(self._words), schema=SCHEMA)

    def _count_new(self, layouts: Iterable[_Layout]) -> int:
        return len({layout.key for layout in layouts} - self._written)

    def _layout(self, step_data: StepData) -> _Layout:
        entries, features = in_order(step_data), step_data.features
        n, more, scalars = len(entries), len(features), len(step_data.scalars)
        words: dict[str, list[str | None]] = {
            "phase": [*(address.phase for address, _, _ in entries), *["forward"] * more, *["step"] * (scalars + 1)],
            "kind": [
                *(kind_in_words(s.kind, s.slot) for s, _, _ in entries),
                *["feature"] * more,
                *["scalar"] * scalars,
                "step",
            ],
            "name": [*(address.name for address, _, _ in entries), *(f.name for f in features), *step_data.scalars, None],
            "slot": [*(address.slot for address, _, _ in entries), *(f.slot for f in features), *["value"] * scalars, None],
            "dtype": [value.dtype for _, _, value in entries],
            "shape": [str(list(value.shape)) for _, _, value in entries],
            "note": [value.note for _, _, value in entries],
        }
        numbers: dict[str, list[int | None]] = {
            "call": [*(address.call for address, _, _ in entries), *(f.call for f in features)],
            "micro": [*(None if call.kind == "state" else call.micro for _, call, _ in entries), *(f.micro for f in features)],
            "position": [*range(n + more + scalars)],
        }
        text = structure(step_data, [value for _, _, value in entries]).decode()
        rows = np.array([value.row for _, _, value in entries], np.int64)
        columns = self._columns(n + more + scalars + 1, words, numbers)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        singles = [i for i, feature in enumerate(features) if feature.edges is None and feature.numbers.size == 1]
        others = sorted({*range(more)} - {*singles})
        return _Layout(key, text, rows, columns, singles, others)

    def _columns(
        self,
        n: int,
        words: Mapping[str, str | Sequence[str | None]],
        numbers: Mapping[str, Sequence[int | None]] = {},
    ) -> dict[str, Codes]:
        """Return codes and whole numbers [n]; what is missing at the end is null."""
        columns = {name: np.full(n, -1, np.int32) for name in (*words, *numbers)}
        for name, texts in words.items():
            known = [texts] if isinstance(texts, str) else texts
            columns[name][: len(known)] = self._words[name].numbers(known)
        for name, given in numbers.items():
            columns[name][: len(given)] = [-1 if number is None else number for number in given]
        return columns


class _Table:
    """The columns of a batch while it is filled, [n] each."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.end = 0  # of the rows that are filled
        self.common = np.zeros((n, 3), np.int64)  # step, time, rank
        self.texts: dict[str, dict[int, bytes]] = {"detail": {}, "crc32": {}}
        self._codes = {name: np.full(n, -1, np.int32) for name in (*WORDS, *_PLACES)}
        self._lists: dict[str, dict[int, Any]] = {"numbers": {}, "edges": {}, "quantiles": {}}
        self._value = np.full(n, np.nan)
        self._has_value = np.zeros(n, bool)
        self._steps: list[tuple[int, StepData, I64]] = []  # where the values of a step begin, and their rows

    def add(self, columns: Mapping[str, Codes]) -> None:
        """Fill the next rows."""
        n = len(columns["kind"])
        for name, codes in columns.items():
            self._codes[name][self.end : self.end + n] = codes
        self.end += n

    def add_step(self, step_data: StepData, layout: _Layout) -> None:
        """Fill the next rows with those of a step."""
        begin = self.end
        self.add(layout.columns)
        self._steps.append((begin, step_data, layout.rows))
        self._rare(begin, step_data, layout.rows)
        begin_features, features = begin + len(layout.rows), step_data.features
        if layout.singles:
            at = [begin_features + i for i in layout.singles]
            self._value[at], self._has_value[at] = np.concatenate([features[i].numbers for i in layout.singles]), True
        for i in layout.others:
            self._lists["numbers"][begin_features + i] = features[i].numbers
            if features[i].edges is not None:
                self._lists["edges"][begin_features + i] = features[i].edges
        scalars = slice(begin_features + len(features), self.end - 1)
        self._value[scalars], self._has_value[scalars] = list(step_data.scalars.values()), True
        self.texts["detail"][self.end - 1] = _about(step_data, layout)

    def _rare(self, begin: int, step_data: StepData, rows: I64) -> None:
        """Fill what few steps have: CRC-32, quantiles and histograms."""
        if not (step_data.crc32 or step_data.quantiles or step_data.histograms):
            return
        for at, row in enumerate(rows.tolist(), begin):
            if step_data.crc32 and row in step_data.crc32:
                self.texts["crc32"][at] = step_data.crc32[row].encode()
            if step_data.quantiles and row in step_data.quantiles:
                self._lists["quantiles"][at] = step_data.quantiles[row]
            if step_data.histograms and row in step_data.histograms:
                self._lists["edges"][at], self._lists["numbers"][at] = step_data.histograms[row]

    def arrays(self, words: Mapping[str, StringDictionary]) -> list[pa.Array]:
        """Return the columns in the order of the schema."""
        step, time, rank = np.ascontiguousarray(self.common.T)
        numbers = {**self._numbers(), "value": (self._value, self._has_value)}
        found: dict[str, pa.Array] = {
            **{name: words[name].column(self._codes[name]) for name in WORDS},
            **{name: arrow_arrays.texts(self.n, texts) for name, texts in self.texts.items()},
            **{name: arrow_arrays.lists(self.n, lists) for name, lists in self._lists.items()},
        }
        for name, whole in (("step", step), ("time", time), ("rank", rank.astype(np.int32))):
            found[name] = arrow_arrays.numbers(COLUMNS[name][0], whole)
        for name in _PLACES:
            found[name] = arrow_arrays.numbers(COLUMNS[name][0], self._codes[name], self._codes[name] >= 0)
        for name, (values, valid) in numbers.items():
            found[name] = arrow_arrays.numbers(COLUMNS[name][0], values, valid)
        return [found[name] if name in found else pa.nulls(self.n, kind) for name, (kind, _) in COLUMNS.items()]

    def _numbers(self) -> dict[str, tuple[npt.NDArray[Any], Bools]]:
        """Return the columns that come from the partials, and where each has a number."""
        at = np.concatenate([np.arange(begin, begin + len(rows)) for begin, _, rows in self._steps])
        lengths = [len(rows) for _, _, rows in self._steps]
        partials = np.concatenate([_rows_of(step_data.partials, rows) for _, step_data, rows in self._steps])
        there = np.concatenate([rows >= 0 for _, _, rows in self._steps])

        def spread(values: npt.NDArray[Any], valid: Bools | None = None) -> tuple[npt.NDArray[Any], Bools]:
            whole, has = np.zeros(self.n, values.dtype), np.zeros(self.n, bool)
            whole[at], has[at] = values, True if valid is None else valid
            return whole, has

        def asked(name: str) -> Bools:
            return np.repeat([name in step_data.statistics for _, step_data, _ in self._steps], lengths)

        def whole(values: F64, valid: Bools) -> tuple[npt.NDArray[Any], Bools]:
            return spread(np.where(valid, values, 0).astype(np.int64), valid)

        counted, filled = known(partials, "nan"), column(partials, "count") > 0
        found = {"count": whole(column(partials, "count"), there)}
        found.update({name: whole(column(partials, name), counted) for name in _COUNTS})
        found.update({name: spread(values, counted & filled) for name, values in finish(partials, _STATISTICS).items()})
        for name, (_, title, _, _, is_whole) in ASKED.items():
            if (wants := asked(name)).any():
                values, valid = finish(partials, (name,))[name], wants & known(partials, name) & filled
                found[title] = whole(values, valid) if is_whole else spread(values, valid)
        if any(step_data.checksums is not None for _, step_data, _ in self._steps):
            sums = np.concatenate([_sums_of(step_data, rows) for _, step_data, rows in self._steps])
            taken = np.concatenate([_taken_of(step_data, rows) for _, step_data, rows in self._steps])
            found["checksum"] = spread(sums, taken)
        return found


def _rows_of(partials: F64, rows: I64) -> F64:
    """Return the partials of each row, NaN for row -1."""
    if not len(partials):
        return np.full((len(rows), partials.shape[1]), np.nan)
    taken = partials[rows]
    taken[rows < 0] = np.nan
    return taken


def _taken_of(step_data: StepData, rows: I64) -> Bools:
    """Tell of which rows a fingerprint was taken."""
    taken = fingerprinted(step_data)
    return np.zeros(len(rows), bool) if not len(taken) else taken[rows] & (rows >= 0)


def _sums_of(step_data: StepData, rows: I64) -> npt.NDArray[np.uint64]:
    if step_data.checksums is None or not len(step_data.checksums):
        return np.zeros(len(rows), np.uint64)
    return np.where(rows >= 0, step_data.checksums[rows], np.uint64(0))


def _about(step_data: StepData, layout: _Layout) -> bytes:
    detail = {
        "layout": layout.key,
        "place": place_text(step_data.place),
        "framework": step_data.framework,
        "level": step_data.level,
        "task": step_data.task,
        "wanted": step_data.statistics,
        "programs": step_data.programs,
        "complete": step_data.complete,
        **({"notes": list(step_data.notes)} if step_data.notes else {}),
        **({"batches": list(step_data.batches)} if step_data.batches else {}),
    }
    return orjson.dumps(detail)
