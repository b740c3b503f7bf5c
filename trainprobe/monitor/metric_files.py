"""Reads metric CSV files as records: the tidy layout, and the wide files of both monitors of mindstudio-probe.

* tidy: `step,micro,rank,kind,name,call,slot,statistic,value,dtype,shape,phase`; without `phase` it is guessed from the slot
* wide: `{sort}_{a}-{b}.csv` with `vpp_stage,name,step[,micro_step],<statistics…>,shape,dtype` under `…-rank{R}-…/`
* second version: `{monitor}_step{a}-{b}.csv` with `vpp_stage,step,module_name,scope[,micro_step],<statistics…>` under
  `rank_{R}/`

A row in which nothing but the text `nan` stands and which has no shape is a value that was absent, and gives no record.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from trainprobe.engine.core.records import MOST_RANKS, Kind, Phase, Place, Record, Site, Step
from trainprobe.engine.storage.dumps.layout import files_of_run
from trainprobe.engine.storage.left_out import leave_out
from trainprobe.engine.storage.safe_files import text_lines
from trainprobe.errors import FormatError

TIDY = {"step", "rank", "kind", "name", "slot", "statistic", "value"}
WIDE = {"name", "step"}
SECOND = {"step", "module_name", "scope"}
_ADDRESS = {"vpp_stage", "name", "step", "micro_step", "shape", "dtype", "module_name", "scope"}
_RANK = re.compile(r"rank_?(\d{1,5})(?:\D|$)")
_SIDE = re.compile(r"^(?:(?P<name>.*)\.)?(?P<side>input|output)(?:_(?P<number>\d+))?$")
_FEATURE = re.compile(
    r"^(?P<name>.*)\.(?P<slot>(?:attention|router|underflow|overflow)_\w+(?:\.[\w.]+)?|spectral_norm|stable_rank|dead_units\.[\w.]+|loss_row(?:_[a-z]+)?)$"
)
_SLOT = re.compile(r"^(?P<name>.*?)\.?(?P<slot>(?:grad_)?(?:input|output)\.\d+)$")

# sort of file or scope → (phase, kind, slot)
_PARAMETER: dict[str, tuple[Phase, str]] = {
    "grad_unreduced": ("backward", "grad_unreduced"),
    "unreduced": ("backward", "grad_unreduced"),
    "grad_reduced": ("backward", "grad"),
    "reduced": ("backward", "grad"),
    "param_origin": ("forward", "value"),
    "param_updated": ("optimizer", "updated"),
    "exp_avg": ("optimizer", "exp_avg"),
    "exp_avg_sq": ("optimizer", "exp_avg_sq"),
}
_ORDER = ("actv", "param_origin", "actv_grad", "grad_unreduced", "grad_reduced", "exp_avg", "exp_avg_sq", "param_updated")


@dataclass(frozen=True, slots=True)
class MetricStep:
    """All records of one step and rank, in order of execution as far as the files tell."""

    step: int
    place: Place
    records: Sequence[Record]


def read_metrics(folder: Path) -> Iterator[MetricStep]:
    """Yield the steps of all metric files under a folder (or of one file), rank by rank, steps ascending.

    Raises FormatError when there is no metric file, or one that cannot be read as what its header says.
    """
    files = [folder] if folder.is_file() else sorted(files_of_run(folder, "*.csv"), key=_execution_order)
    by_rank: dict[int, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    reduced = any(f.name.startswith("grad_reduced") for f in files)
    found = False
    for file in files:
        for record in _read_file(file, reduced):
            found = True
            by_rank[record.place.rank][record.step.number].append(record)
    if not found:
        raise FormatError(
            f"no metric rows under {folder}: expected tidy CSV files or the wide files of a monitor (`sinks: [csv]` in a plan "
            "writes them, and `sinks: [tensorboard]` the event files themselves)"
        )
    for rank, steps in sorted(by_rank.items()):
        for step, records in sorted(steps.items()):
            yield MetricStep(step, Place(rank, max(by_rank) + 1), records)


def is_metric_file(path: Path) -> bool:
    """Tell by the first line of a file whether `read_metrics` reads it."""
    try:
        return _is_read(_MetricRows(path).columns)
    except (csv.Error, FormatError):
        return False


def _is_read(columns: set[str]) -> bool:
    return columns >= TIDY or columns >= SECOND or (columns >= WIDE and "vpp_stage" in columns)


def _execution_order(path: Path) -> tuple[str, int, int]:
    sort = path.name.rpartition("_")[0]
    first = re.search(r"(\d+)-\d+\.csv$", path.name)
    place = _ORDER.index(sort) if sort in _ORDER else len(_ORDER)
    return (str(path.parent), place, int(first[1]) if first else 0)


def _read_file(path: Path, reduced: bool) -> Iterator[Record]:
    rows = _MetricRows(path)
    columns = rows.columns
    if columns >= TIDY:
        yield from _read_tidy(rows, path)
    elif columns >= SECOND:
        yield from _read_wide(rows, path, reduced, second=True)
    elif columns >= WIDE and "vpp_stage" in columns:
        yield from _read_wide(rows, path, reduced, second=False)


def _read_tidy(rows: _MetricRows, path: Path) -> Iterator[Record]:
    """Join neighbouring rows that differ in the statistic only."""
    address: tuple[str, ...] | None = None
    values: dict[str, float | int] = {}
    last: dict[str, str] = {}
    for number, row in rows:
        here = tuple(row.get(key) or "" for key in ("step", "micro", "rank", "kind", "name", "call", "slot", "phase"))
        if address is not None and here != address:
            yield _tidy_record(last, values, path, number - 1)
            values = {}
        statistic, text = row["statistic"], row["value"] or ""
        whole = statistic in ("checksum", "crc32") and text.isdecimal() and len(text) < 40
        try:
            values[statistic] = int(text) if whole else _number(text, path, number)
            _tidy_record(row, {}, path, number)  # a row that is damaged costs itself
        except FormatError as error:
            leave_out(str(error))
        else:
            address, last = here, row
    if address is not None:
        yield _tidy_record(last, values, path, -1)


class _MetricRows:
    """The rows of a file with the numbers of their lines; one that cannot be read, or that a cut has shortened, is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = True  # the line that was read last
        self._reader = csv.DictReader(self._lines())
        self.columns = set(self._reader.fieldnames or ())

    def _lines(self) -> Iterator[str]:
        for line in text_lines(self._path):
            self._ended = line.endswith("\n")
            yield line

    def __iter__(self) -> Iterator[tuple[int, dict[Any, Any]]]:
        while True:
            fault: object = "the file ends within the row"
            try:
                row = next(self._reader, None)
            except csv.Error as error:
                row, fault = {}, error
            if row is None:
                return
            number = self._reader.line_num
            if row and (self._ended or None not in row.values()):
                yield number, row
            else:
                leave_out(f"{self._path}, line {number}: {fault}")


def _tidy_record(row: dict[Any, Any], values: dict[str, float | int], path: Path, line: int) -> Record:
    slot = row["slot"]
    try:
        micro = _whole(row["micro"]) if row.get("micro") else None
        step, rank, call = _whole(row["step"]), _whole(row["rank"]), _whole(row.get("call") or "0")
        if not 0 <= rank < MOST_RANKS:
            raise ValueError(f"{rank} is no rank")
        if not all(isinstance(row[key], str) for key in ("kind", "name")):  # None of a row that is too short
            raise ValueError("the row has not all columns")
        shape = _shape(row)
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}, line {line}: {error}") from error
    kind: Kind = row["kind"]  # pyright: ignore[reportAssignmentType]
    where = Site(kind, row["name"], slot, call)
    phase_text = row.get("phase")
    if phase_text and phase_text not in _PHASES:
        raise FormatError(f"{path}, line {line}: {phase_text!r} is not a phase (there are: {', '.join(_PHASES)})")
    phase: Phase = phase_text or _phase(kind, slot)  # pyright: ignore[reportAssignmentType]
    return Record(Step(step, micro, phase), Place(rank), where, row.get("dtype") or "", shape, values)


_PHASES = get_args(Phase)


def _phase(kind: str, slot: str) -> Phase:
    """Guess the phase of a value from its slot, where a file does not tell it."""
    if kind == "scalar":
        return "step"
    if slot.startswith("grad"):
        return "backward"
    return "optimizer" if slot.endswith("_after") or slot in ("update", "updated") else "forward"


def _read_wide(rows: _MetricRows, path: Path, reduced: bool, *, second: bool) -> Iterator[Record]:
    rank = rank_of(path)
    sort = path.name.rpartition("_")[0]
    for number, row in rows:
        if None in row:  # a row with more fields than the header, as the existing monitor writes some of
            continue
        texts = {name: text for name, text in row.items() if name not in _ADDRESS and text not in (None, "")}
        absent = all(text == "nan" for text in texts.values()) and row.get("shape") in (None, "", "nan")
        if not texts or (absent and not second):
            continue
        try:
            values = {name: _number(text, path, number) for name, text in texts.items()}
            phase, where = _site_second(row) if second else _site_wide(row, sort, reduced)
            vpp = row.get("vpp_stage") or "0"
            if vpp.lstrip("-").isdecimal() and int(vpp) > 0:
                where = Site(where.kind, f"{vpp}.{where.name}", where.slot)
            micro = _whole(row["micro_step"]) if row.get("micro_step") not in (None, "", "nan") else None
            record = Record(
                Step(_whole(row["step"]), micro, phase), Place(rank), where, row.get("dtype") or "", _shape(row), values
            )
        except (FormatError, TypeError, AttributeError, ValueError) as error:
            leave_out(str(error) if isinstance(error, FormatError) else f"{path}, line {number}: {error}")
        else:
            yield record


def _site_wide(row: dict[str, str], sort: str, reduced: bool) -> tuple[Phase, Site]:
    name = row["name"]
    if sort in _PARAMETER:
        phase, slot = _PARAMETER[sort]
        return phase, Site("parameter", name, "grad" if slot == "grad_unreduced" and not reduced else slot)
    if sort == "scalar":
        return "step", Site("scalar", name, "value")
    if sort == "feature" and (feature := _FEATURE.match(name)):
        return "forward", Site("feature", feature["name"], feature["slot"])
    match = _SIDE.match(name)
    if match and sort in ("actv", "actv_grad"):
        side = f"grad_{match['side']}" if sort == "actv_grad" else match["side"]
        phase: Phase = "backward" if sort == "actv_grad" else "forward"
        return phase, Site("module", match["name"] or "", f"{side}.{match['number']}" if match["number"] else side)
    return "forward", Site("module", name, sort or "value")


def _site_second(row: dict[str, str]) -> tuple[Phase, Site]:
    name, scope = row["module_name"], row["scope"]
    if scope in _PARAMETER:
        phase, slot = _PARAMETER[scope]
        after = slot if phase != "optimizer" or slot == "updated" else f"{slot}_after"  # moments are those of the update
        return phase, Site("parameter", name.removesuffix(f".{slot}"), after)
    match = _SLOT.match(name)
    if match and scope in ("forward", "backward"):
        return scope, Site("module", match["name"], match["slot"])  # pyright: ignore[reportReturnType]
    return "forward", Site("collective" if scope == "comm" else "module", name, "value")


def rank_of(path: Path) -> int:
    """Return the rank that a file's folders name, 0 where none does."""
    for part in (path.name, *(folder.name for folder in path.parents)):
        if found := _RANK.search(part):
            return int(found[1])
    return 0


def _number(text: str, path: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise FormatError(f"{path}, line {line}: {text!r} is not a number") from None


def _whole(text: str) -> int:
    """Return a whole number that a file may hold. Raises ValueError."""
    number = int(text)
    if abs(number) >= 1 << 53:
        raise ValueError(f"{text} is no step and no rank")
    return number


def _shape(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(_whole(n) for n in re.findall(r"\d+", row.get("shape") or ""))
