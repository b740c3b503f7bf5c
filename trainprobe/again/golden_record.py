"""A golden record: what the first steps of a small run showed, as text that git can hold and a person can compare.

A line a value: step, rank, phase, kind, name, call, slot, dtype, shape, fingerprint, max, min, mean, norm, floor. The floor is
what rounding does to these numbers, measured when the record was made, by runs of the same training with another rounding.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trainprobe.again.recording import Key
from trainprobe.comparison.files import writing
from trainprobe.engine.core.records import Record
from trainprobe.engine.storage.dumps import read
from trainprobe.engine.storage.dumps.layout import find_dumps
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

HEAD = "trainprobe golden 1"
MOST = 100_000  # bytes a step
_ONE_CELL = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})  # of names, which may hold anything
_STATISTICS = ("max", "min", "mean", "norm")
_COLUMNS = 15
_MOST_FILE = 1 << 28


@dataclass(frozen=True, slots=True)
class GoldenRow:
    """What a record says of one value. fingerprint: of its bits. floor: see the module text; 0 of what no rounding changes."""

    step: int
    rank: int
    key: Key
    slot: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: int
    numbers: tuple[float, float, float, float]  # max, min, mean, norm
    floor: float = 0.0

    @property
    def place(self) -> tuple[int, int, Key, str]:
        """Where the value stands in the run."""
        return self.step, self.rank, self.key, self.slot

    def line(self) -> str:
        """Return the row as a line of the file."""
        key = self.key
        about = (self.step, self.rank, key.phase, key.kind, key.name, key.number, self.slot, self.dtype)
        shape = "x".join(map(str, self.shape)) or "-"
        numbers = (*(f"{x:.9g}" for x in self.numbers), f"{self.floor:.2g}")
        return "\t".join((*map(str, about), shape, f"{self.fingerprint:016x}", *numbers))

    def distance(self, other: GoldenRow) -> float:
        """Return how far the numbers of two values are apart, as a part of their size; infinity where one is not finite."""
        if self.fingerprint == other.fingerprint and self.shape == other.shape and self.dtype == other.dtype:
            return 0.0
        if self.shape != other.shape:
            return math.inf
        pairs = list(zip(self.numbers, other.numbers, strict=True))
        if any(repr(x) != repr(y) and not (math.isfinite(x) and math.isfinite(y)) for x, y in pairs):
            return math.inf
        (high, max_now), (low, min_now), (mean, mean_now), (norm, norm_now) = (
            (x, y) if math.isfinite(x) else (0.0, 0.0) for x, y in pairs
        )
        elements = max(math.prod(self.shape), 1)
        largest, size = max(map(abs, (high, low, max_now, min_now))), max(norm, norm_now)
        apart = max(abs(high - max_now), abs(low - min_now)) / largest if largest else 0.0
        return max(apart, abs(norm - norm_now) / size if size else 0.0, abs(mean - mean_now) / (size / elements**0.5 or 1.0))

    def floors_to(self, now: GoldenRow) -> float:
        """Return how many floors a later value is away; infinity where no rounding was seen to change it, and it did."""
        if self.dtype != now.dtype:
            return math.inf
        distance = self.distance(now)
        if distance == 0 and self.fingerprint == now.fingerprint:
            return 0.0
        return max(distance / self.floor, 1e-9) if self.floor else math.inf


def rows_of_dump(folder: Path) -> list[GoldenRow]:
    """Return the rows of all steps and ranks of a dump, in the order in which the values came. Raises FormatError."""
    found: list[GoldenRow] = []
    for step, ranks in sorted(find_dumps(folder).items()):
        for rank, path in sorted(ranks.items()):
            found += [row for record in read(path).records() if (row := _row(record, step, rank)) is not None]
    return found


def _row(record: Record, step: int, rank: int) -> GoldenRow | None:
    site, values = record.site, record.values
    name, slot = (text.translate(_ONE_CELL) for text in (site.name, site.slot))
    if site.kind == "scalar":
        x = float(values["value"])
        return GoldenRow(step, rank, Key("scalar", name, "step", 0), "value", "float64", (), 0, (x, x, x, abs(x)))
    if "checksum" not in values or record.step.phase == "recompute":
        return None
    high, low, mean, norm = (float(values.get(statistic, 0.0)) for statistic in _STATISTICS)
    key, dtype = Key(site.kind, name, record.step.phase, site.call), record.dtype.removeprefix("torch.")
    return GoldenRow(step, rank, key, slot, dtype, record.shape, int(values["checksum"]), (high, low, mean, norm))


# ---- the file --------------------------------------------------------------------------------------------------------


def with_floors(rows: Sequence[GoldenRow], others: Iterable[Sequence[GoldenRow]]) -> list[GoldenRow]:
    """Return the rows with what rounding does to them, as runs of the same training with another rounding show it.

    Statistics can agree by chance: of a value whose own runs are nearer than is usual in its phase, the usual is taken. Not of
    whole numbers and of what the model is given, where no run had other bits: no rounding reaches these.
    """
    runs = [{row.place: row for row in other} for other in others]
    measured, moved = list[float](), list[bool]()
    usual: dict[tuple[int, str, str], list[float]] = {}
    for row in rows:
        theirs = [run[row.place] for run in runs if row.place in run]
        measured.append(max((row.distance(other) for other in theirs), default=0.0))
        moved.append(any(row.fingerprint != other.fingerprint for other in theirs))
        if math.isfinite(measured[-1]) and measured[-1]:
            usual.setdefault(_sort(row), []).append(measured[-1])
    typical = {sort: median(values) for sort, values in usual.items()}
    return [
        replace(row, floor=max(floor, typical.get(_sort(row), 0.0) if reached or _is_rounded(row) else 0.0))
        for row, floor, reached in zip(rows, measured, moved, strict=True)
    ]


def _is_rounded(row: GoldenRow) -> bool:
    return "float" in row.dtype and not is_given(row.key, row.slot)


def is_given(key: Key, slot: str) -> bool:
    """Tell whether a value is the data of the run."""
    return key.kind == "module" and key.name == "root" and slot.startswith(("input", "kwargs"))


def _sort(row: GoldenRow) -> tuple[int, str, str]:
    side = "weight" if row.slot.startswith("parameters.") else row.key.kind
    return row.step, row.key.phase, side


def within_reach(rows: Sequence[GoldenRow], most: int = MOST) -> tuple[list[GoldenRow], str]:
    """Return as many rows as take at most so many bytes a step, and a sentence about what was left out."""
    steps = max(len({row.step for row in rows}), 1)
    depths, kept = [row.key.name.count(".") for row in rows], list(rows)
    for deepest in range(max(depths, default=0), -1, -1):
        for whole, note in ((True, ""), (False, ", no inputs")):
            kept = [
                row
                for row, depth in zip(rows, depths, strict=True)
                if row.key.kind == "scalar" or (depth <= deepest and (whole or _made(row)))
            ]
            if sum(len(row.line()) + 1 for row in kept) <= most * steps:
                left = len(rows) - len(kept)
                return kept, f"{left} of {len(rows)} values are left out: depth {deepest}{note}" if left else ""
    return kept[: most * steps // 200], f"most of {len(rows)} values are left out"


def _made(row: GoldenRow) -> bool:
    return not row.slot.startswith(("input", "kwargs", "grad_output")) or row.key.name == "root"


def write_golden(path: Path, rows: Sequence[GoldenRow], command: Sequence[str], note: str = "") -> None:
    """Write a record. Raises OutputError."""
    lines = [HEAD, f"# {' '.join(command)}".replace("\n", " "), *([f"# {note}"] if note else []), *(row.line() for row in rows)]
    with writing(path):
        path.write_text("\n".join((*lines, _end(lines), "")), encoding="utf-8")


def _end(lines: Sequence[str]) -> str:
    """Return the last line of a file: a record that was cut short or edited is seen."""
    return f"# end of {len(lines)} lines, CRC-32 {zlib.crc32(chr(10).join(lines).encode()):08x}"


def read_golden(path: Path) -> list[GoldenRow]:
    """Return the rows of a record. Raises FormatError where the file is none, or was cut short or edited."""
    lines = read_bounded(path, _MOST_FILE).decode("utf-8", "replace").replace("\r\n", "\n").rstrip("\n").split("\n")
    if lines[0] != HEAD:
        raise FormatError(f"{path} is no golden record: its first line is not {HEAD!r}")
    if lines.pop() != _end(lines):
        raise FormatError(f"{path} was cut short or edited since it was written: take it back from git, or record it again")
    rows: list[GoldenRow] = []
    for number, line in enumerate(lines[1:], 2):
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        try:
            step, rank, phase, kind, name, call, slot, dtype, shape, bits, *numbers, floor = cells
            high, low, mean, norm = map(float, numbers)
            key = Key(kind, name, phase, int(call))
            sizes = () if shape == "-" else tuple(map(int, shape.split("x")))
            rows.append(
                GoldenRow(int(step), int(rank), key, slot, dtype, sizes, int(bits, 16), (high, low, mean, norm), float(floor))
            )
        except ValueError:
            raise FormatError(f"{path}, line {number}: not the {_COLUMNS} columns of a golden record: {line[:80]!r}") from None
    return rows
