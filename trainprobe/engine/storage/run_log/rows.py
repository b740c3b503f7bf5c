"""Steps of one rank as rows of the run log: whole columns of many steps are made at once, straight from their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from trainprobe.engine.core.addresses import in_order
from trainprobe.engine.core.records import StepData, logical_shape
from trainprobe.engine.core.step_data import fingerprinted
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import ASKED, F64, PARTIALS, column, known
from trainprobe.engine.storage.dumps.header import place_text
from trainprobe.engine.storage.dumps.record_log import structure
from trainprobe.engine.storage.run_log import arrow_arrays
from trainprobe.engine.storage.run_log.arrow_arrays import Sparse, StringDictionary, bits
from trainprobe.engine.storage.run_log.schema import COLUMNS, SCHEMA, WORDS, kind_in_words

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32]
_COUNTS = ("nan", "posinf", "neginf", "zero")
_STATISTICS = ("min", "max", "mean", "norm")
_PLACES = ("call", "micro", "position")  # whole numbers; -1 is null
_CODED = (*WORDS, *_PLACES)  # what follows from the layout


@dataclass(slots=True)
class _Layout:
    """The rows of the steps of one layout: values, features, scalars and last what holds for all of the step, n in all.

    codes: int32 [len(_CODED), n], codes of strings or whole numbers. key: what names this layout in the table. text: the calls
    as JSON. rows: row of the partials of each value [values], -1 where it has no numbers. singles: which features are one
    number. others: which are several numbers, binned: those of them that are counts of bins.
    """

    key: str
    text: bytes
    codes: Codes
    rows: I64
    singles: list[int]
    others: list[int]
    binned: list[int]


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
        table = _RowTable()
        for when, step_data in steps:
            layout = layout_of(step_data).derived(self, lambda step_data=step_data: self._layout(step_data))
            self._time = max(self._time + 1, when)  # no two steps have the same, which tells them apart
            begin = table.end
            if layout.key not in self._written:
                self._written.add(layout.key)
                table.add_layout(layout, self._codes(1, {"kind": ["layout"], "phase": ["step"], "name": [layout.key]}))
            table.add_step(step_data, layout)
            table.common.append((table.end - begin, step_data.step, self._time, step_data.place.rank))
        return pa.RecordBatch.from_arrays(table.arrays(self._words), schema=SCHEMA)

    def _layout(self, step_data: StepData) -> _Layout:
        entries, features, scalars = in_order(step_data), step_data.features, step_data.scalars
        addresses, calls, values = [list(column) for column in zip(*entries, strict=True)] if entries else ([], [], [])
        more, n = len(features), len(entries) + len(features) + len(scalars) + 1
        words: dict[str, list[str | None]] = {
            "phase": [*(address.phase for address in addresses), *["forward"] * more, *["step"] * (len(scalars) + 1)],
            "kind": [
                *(kind_in_words(address.kind, address.slot) for address in addresses),
                *["feature"] * more,
                *["scalar"] * len(scalars),
                "step",
            ],
            "name": [*(address.name for address in addresses), *(f.name for f in features), *scalars],
            "slot": [*(address.slot for address in addresses), *(f.slot for f in features), *["value"] * len(scalars)],
            "dtype": [value.dtype for value in values],
            "shape": [_shape_text(logical_shape(value)) for value in values],
            "note": [value.note for value in values],
        }
        numbers: dict[str, list[int | None]] = {
            "call": [*(address.call for address in addresses), *(f.call for f in features)],
            "micro": [*(None if call.kind == "state" else call.micro for call in calls), *(f.micro for f in features)],
            "position": [*range(n - 1)],
        }
        text = structure(step_data, values)
        singles = [i for i, feature in enumerate(features) if feature.edges is None and feature.numbers.size == 1]
        return _Layout(
            key=hashlib.sha256(text).hexdigest()[:16],
            text=text,
            codes=self._codes(n, words, numbers),
            rows=np.array([value.row for value in values], np.int64),
            singles=singles,
            others=sorted({*range(more)} - {*singles}),
            binned=[i for i, feature in enumerate(features) if feature.edges is not None],
        )

    def _codes(
        self, n: int, words: Mapping[str, Sequence[str | None]], numbers: Mapping[str, Sequence[int | None]] = {}
    ) -> Codes:
        """Return codes and whole numbers [len(_CODED), n]; what is missing at the end is null."""
        codes = np.full((len(_CODED), n), -1, np.int32)
        for row, name in zip(codes, _CODED, strict=True):
            if name in words:
                row[: len(words[name])] = self._words[name].numbers(words[name])
            elif name in numbers:
                row[: len(numbers[name])] = [-1 if number is None else number for number in numbers[name]]
        return codes


class _RowTable:
    """The columns of a batch while steps are added to it."""

    def __init__(self) -> None:
        self.end = 0  # of the rows that there are
        self.common: list[tuple[int, int, int, int]] = []  # of each step how many rows, its number, time and rank
        self._codes: list[Codes] = []
        self._texts = {"detail": Sparse[bytes](), "crc32": Sparse[bytes]()}
        self._lists = {"numbers": Sparse[Any](), "edges": Sparse[Any](), "quantiles": Sparse[Any]()}
        self._values = Sparse[float]()
        self._steps: list[tuple[int, StepData, I64]] = []  # where the values of a step begin, and their rows

    def add_layout(self, layout: _Layout, codes: Codes) -> None:
        """Add the row that holds the calls of a layout."""
        self._texts["detail"].add(self.end, [0], [layout.text])
        self._codes.append(codes)
        self.end += 1

    def add_step(self, step_data: StepData, layout: _Layout) -> None:
        """Add the rows of a step."""
        begin, features = self.end, step_data.features
        self._steps.append((begin, step_data, layout.rows))
        self._codes.append(layout.codes)
        self.end += layout.codes.shape[1]
        self._rare(begin, step_data, layout.rows)
        begin += len(layout.rows)
        self._values.add(begin, layout.singles, [features[i].numbers[0] for i in layout.singles])
        self._lists["numbers"].add(begin, layout.others, [features[i].numbers for i in layout.others])
        self._lists["edges"].add(begin, layout.binned, [features[i].edges for i in layout.binned])
        self._values.add(begin + len(features), range(len(step_data.scalars)), step_data.scalars.values())
        self._texts["detail"].add(self.end - 1, [0], [_about(step_data, layout)])

    def _rare(self, begin: int, step_data: StepData, rows: I64) -> None:
        """Add what few steps have: CRC-32, quantiles and histograms."""
        if not (step_data.crc32 or step_data.quantiles or step_data.histograms):
            return
        for at, row in enumerate(rows.tolist(), begin):
            if step_data.crc32 and row in step_data.crc32:
                self._texts["crc32"].add(at, [0], [step_data.crc32[row].encode()])
            if step_data.quantiles and row in step_data.quantiles:
                self._lists["quantiles"].add(at, [0], [step_data.quantiles[row]])
            if step_data.histograms and row in step_data.histograms:
                for name, numbers in zip(("edges", "numbers"), step_data.histograms[row], strict=True):
                    self._lists[name].add(at, [0], [numbers])

    def arrays(self, words: Mapping[str, StringDictionary]) -> list[pa.Array]:
        """Return the columns in the order of the schema."""
        lengths, *common = zip(*self.common, strict=True)
        codes = dict(zip(_CODED, np.concatenate(self._codes, axis=1), strict=True))
        found: dict[str, pa.Array] = {
            **{name: words[name].column(codes[name]) for name in WORDS},
            **{name: arrow_arrays.numbers(COLUMNS[name][0], codes[name], bits(codes[name] >= 0)) for name in _PLACES},
            **{name: arrow_arrays.texts(self.end, texts) for name, texts in self._texts.items()},
            **{name: arrow_arrays.lists(self.end, lists) for name, lists in self._lists.items()},
            **self._numbers(),
        }
        for name, of_steps in zip(("step", "time", "rank"), common, strict=True):
            kind = COLUMNS[name][0]
            found[name] = arrow_arrays.numbers(kind, np.repeat(np.array(of_steps, f"i{kind.bit_width // 8}"), lengths))
        value, has_value = np.zeros(self.end), np.zeros(self.end, bool)
        value[self._values.places], has_value[self._values.places] = self._values.things, True
        found["value"] = arrow_arrays.numbers(COLUMNS["value"][0], value, bits(has_value))
        return [found[name] if name in found else pa.nulls(self.end, kind) for name, (kind, _) in COLUMNS.items()]

    def _numbers(self) -> dict[str, pa.Array]:
        """Return the columns that come from the partials: worked out for each row of these, then taken to where it is shown."""
        steps = [step_data for _, step_data, _ in self._steps]
        sizes = [len(step_data.partials) for step_data in steps]
        at = np.full(self.end, -1, np.int64)
        for (begin, _, rows), offset in zip(self._steps, np.cumsum([0, *sizes]).tolist(), strict=False):
            np.add(rows, offset, out=at[begin : begin + len(rows)], where=rows >= 0)
        there = at >= 0
        if not there.any():
            return {}
        at[~there] = 0
        partials = np.empty((len(PARTIALS), sum(sizes))).T  # a column in one piece
        np.concatenate([step_data.partials for step_data in steps], out=partials)
        counted, filled = known(partials, "nan"), column(partials, "count") > 0

        def shown(names: Iterable[str], valid: Bools, of: Mapping[str, npt.NDArray[Any]]) -> dict[str, pa.Array]:
            mask = bits(valid.take(at) & there)
            return {name: arrow_arrays.numbers(COLUMNS[name][0], of[name].take(at), mask) for name in names}

        counts = {name: _whole(column(partials, name)) for name in ("count", *_COUNTS)}
        found = {
            **shown(["count"], np.ones(len(partials), bool), counts),
            **shown(_COUNTS, counted, counts),
            **shown(_STATISTICS, counted & filled, finish(partials, _STATISTICS)),
        }
        for name, (_, title, _, _, is_whole) in ASKED.items():
            wants = np.repeat([name in step_data.statistics for step_data in steps], sizes)
            if wants.any():
                values = finish(partials, (name,))[name]
                valid = wants & known(partials, name) & filled
                found.update(shown([title], valid, {title: _whole(values) if is_whole else values}))
        if any(step_data.checksums is not None for step_data in steps):
            taken = np.concatenate([fingerprinted(step_data) for step_data in steps])
            found.update(shown(["checksum"], taken, {"checksum": np.concatenate([*map(_sums, steps)])}))
        return found


@lru_cache(maxsize=1 << 12)
def _shape_text(shape: tuple[int, ...]) -> str:
    return str([*shape])


def _whole(values: F64) -> I64:
    """Return whole numbers; 0 for NaN, which is null in the table."""
    return np.where(np.isnan(values), 0, values).astype(np.int64)


def _sums(step_data: StepData) -> npt.NDArray[np.uint64]:
    sums = step_data.checksums
    return np.zeros(len(step_data.partials), np.uint64) if sums is None else np.asarray(sums, np.uint64)


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
