"""All operator calls of a dump, judged: equal calls once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from trainprobe.engine.core.records import Value
from trainprobe.engine.storage.dumps.layout import DUMP_FILE, find_dumps
from trainprobe.errors import FormatError
from trainprobe.op_check.cases import Case, NotChecked
from trainprobe.op_check.check import Checked, check
from trainprobe.op_check.execution import run_here
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement, Tolerance
from trainprobe.op_check.properties import is_random
from trainprobe.op_check.recorded import RecordedRank, Unit

# what is to be known of each call besides its verdict: from the call, whether it is the backward, and what was judged
Measure = Callable[[Case, bool, Checked], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Called:
    """One direction of a call. call: `Functional.linear.3`. of_inputs: see Unit."""

    call: str
    direction: str
    of_inputs: bool


@dataclass(slots=True)
class Row:
    """One direction of one recorded call. equal: how many more calls were the same bits in and out.

    same_inputs: an earlier entry that had the same inputs and gave another result. key: fingerprint of what it was given,
    where two dumps are compared. calls: it, and those that are equal to it. measured: what a Measure made of it.
    """

    step: int
    rank: int
    entry: str
    name: str
    module: str
    checked: Checked
    equal: int = 0
    same_inputs: str = ""
    folder: Path | None = None
    key: str = ""
    calls: list[Called] = field(default_factory=list[Called])
    measured: Sequence[Any] = ()
    unit: Unit | None = field(default=None, repr=False)

    @property
    def worst(self) -> Judgement:
        """Return the gravest judgement of its results."""
        return self.checked.worst


@dataclass(slots=True)
class DumpChecked:
    """All rows of a dump. made: steps whose dump holds statistics alone, so that this machine's operators were judged."""

    rows: list[Row] = field(default_factory=list[Row])
    made: bool = False
    notes: list[str] = field(default_factory=list[str])


def rank_folders(path: Path) -> list[tuple[int, int, Path]]:
    """Return (step, rank, folder) of all that a path holds: a dump, a step of it, a rank of it. Raises FormatError for none."""
    found = [
        (step, rank, folder)
        for step, ranks in find_dumps(path).items()
        for rank, folder in ranks.items()
        if (folder / DUMP_FILE).is_file()
    ]
    if not found:
        raise FormatError(
            f"no dump at {path}: expected step folders (step0, …), rank folders (rank0, …) or a {DUMP_FILE} there"
        )
    return found


def check_dump(
    folders: Sequence[tuple[int, int, Path]],
    names: Sequence[str] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
    *,
    skip: Sequence[str] = (),
    keys: bool = False,
    measure: Measure | None = None,
    run: Callable[..., Iterator[DumpChecked]] | None = None,
    threads: int = 1,
) -> DumpChecked:
    """Judge all operator calls in these folders.

    names: patterns of operators or entries; skip: of those to leave out. advance: called with the calls done and all calls of
    a folder. keys: rows carry fingerprints of what their calls were given. measure: rows carry what it returns. run: carries
    out one task a folder, such as `on_ray` or `on_cores`, which get all folders. threads: of each of these tasks.
    """
    found = DumpChecked()
    if run is None:
        parts = (check_folder(folder, names, skip, advance, keys, measure) for folder in folders)
    else:
        parts = run(_check_alone, [(folder, names, skip, keys, measure, threads) for folder in folders], threads)
    for done, part in enumerate(parts):
        found.rows += part.rows
        found.notes += part.notes
        found.made |= part.made
        if run is not None:
            advance(done + 1, len(folders))
    return found


def _check_alone(task: tuple[tuple[int, int, Path], Sequence[str], Sequence[str], bool, Measure | None, int]) -> DumpChecked:
    folder, names, skip, keys, measure, threads = task
    torch.set_num_threads(threads)
    found = check_folder(folder, names, skip, keys=keys, measure=measure)
    for row in found.rows:
        row.unit = None  # it knows its whole step
    return found


def check_folder(
    at: tuple[int, int, Path],
    names: Sequence[str] = (),
    skip: Sequence[str] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
    keys: bool = False,
    measure: Measure | None = None,
) -> DumpChecked:
    """Judge the operator calls of one step and rank. Arguments as for `check_dump`."""
    step, rank, folder = at
    recorded = RecordedRank.read(folder)
    units = [unit for unit in recorded.units() if selected(unit, names) and not (skip and selected(unit, skip))]
    found = DumpChecked(made=not recorded.has_tensors)
    if not units and not names and not skip:
        found.notes.append(f"{folder} holds no operators: record with `level: L1` or `mix`")
    rows = check_rank(recorded, units, found, (step, rank), advance, measure=measure)
    for row in rows if keys else ():
        row.key = recorded.key(row.unit)[0] if row.unit is not None else ""
    return found


def selected(unit: Unit, names: Iterable[str]) -> bool:
    """Return whether a unit is meant by one of the patterns, or there is none: an operator, an entry, or either with `*`."""
    wanted = list(names)
    return not wanted or any(fnmatchcase(name, pattern) for pattern in wanted for name in names_of(unit))


def names_of(unit: Unit) -> tuple[str, ...]:
    """Return what a unit can be called: its entry, the entry without its direction, the operator with and without prefix."""
    return unit.entry, unit.entry.rpartition(".")[0], unit.call.name, api(unit.call.name), numbered(unit)


def numbered(unit: Unit) -> str:
    """Return the call that a unit is of, `Functional.linear.3`."""
    return f"{unit.call.name}.{unit.call.call}"


def called(unit: Unit) -> Called:
    """Return which call a unit is of."""
    return Called(numbered(unit), unit.direction, unit.of_inputs)


def check_rank(
    recorded: RecordedRank,
    units: Sequence[Unit],
    found: DumpChecked,
    at: tuple[int, int],
    advance: Callable[[int, int], None] = lambda done, total: None,
    tolerance: Tolerance | None = None,
    measure: Measure | None = None,
) -> list[Row]:
    """Judge some calls of one step and rank into `found`; return their rows.

    at: (step, rank). tolerance: judge floats by it instead of the bound.
    """
    judged = RankCheck(found, at, tolerance, lasting=True, measure=measure)
    before = len(found.rows)
    for i, unit in enumerate(units):
        advance(i, len(units))
        judged.add(recorded, unit)
    advance(len(units), len(units))
    return found.rows[before:]


@dataclass(slots=True)
class _Seen:
    """A call that was judged. keys: fingerprints of what it was given and gave, None as long as nobody asked."""

    row: Row
    unit: Unit
    keys: tuple[str, str] | None = None


class RankCheck:
    """Judges the calls of one step and rank into `found`, one at a time and equal ones once.

    at: (step, rank). lasting: what was recorded of earlier calls can still be read, so that fingerprints are taken only of
    calls that look alike; else they are taken of each call.
    """

    def __init__(
        self,
        found: DumpChecked,
        at: tuple[int, int],
        tolerance: Tolerance | None = None,
        *,
        lasting: bool = False,
        measure: Measure | None = None,
    ) -> None:
        self._found = found
        self._measure = measure
        self._at = at
        self._tolerance = tolerance
        self._lasting = lasting
        self._alike: dict[str, list[_Seen]] = defaultdict(list)  # by a sketch of what they were given
        self._backward: dict[int, Row] = {}  # by its call

    def add(self, recorded: RecordedRank, unit: Unit) -> tuple[Row, bool]:
        """Judge a call; return its row and whether it is new, which it is not where an equal call has one."""
        shown = self._shown_again(recorded, unit)
        if shown is not None:
            shown.equal += 1
            shown.calls.append(called(unit))
            return shown, False
        alike = self._alike[recorded.sketch(unit)]
        seen = _Seen(Row(*self._at, unit.entry, unit.call.name, unit.module, Checked("forward")), unit)
        seen.keys = recorded.key(unit) if alike or not self._lasting else None
        before = next((other for other in alike if _keys(recorded, other)[0] == _keys(recorded, seen)[0]), None)
        if before is not None and _keys(recorded, before) == _keys(recorded, seen):
            before.row.equal += 1
            before.row.calls.append(called(unit))
            return before.row, False
        row = seen.row
        row.checked, case = _judged(recorded, unit, self._tolerance, whole=self._measure is not None)
        if self._measure is not None and case is not None:
            row.measured = self._measure(case, unit.direction == "backward", row.checked)
        row.checked.expectation = None  # as large as the call's results, in float64
        row.folder, row.unit = recorded.folder, unit
        row.calls.append(called(unit))
        told = recorded.has_tensors and not is_random(unit.call.name) and unit.direction == "forward"
        if before is not None and told and recorded.knows_inputs(unit):
            row.same_inputs = before.row.entry
        if before is None:
            alike.append(seen)
        if unit.direction == "backward" and not unit.of_inputs and row.worst.outcome != "not checked":
            self._backward[id(unit.call)] = row
        self._found.rows.append(row)
        return row, True

    def _shown_again(self, recorded: RecordedRank, unit: Unit) -> Row | None:
        """Return the row of an operator whose gradients, bit by bit, are those that the module around it shows."""
        row = self._backward.get(id(unit.call)) if unit.of_inputs and self._lasting else None
        if row is None or row.unit is None:
            return None
        handed = [value for value in row.unit.results if isinstance(value, Value)]
        shown = [value for value in unit.results if isinstance(value, Value)]
        return row if all(any(recorded.same(a, b) for b in handed) for a in shown) else None


def _keys(recorded: RecordedRank, seen: _Seen) -> tuple[str, str]:
    seen.keys = seen.keys or recorded.key(seen.unit)
    return seen.keys


def _judged(recorded: RecordedRank, unit: Unit, tolerance: Tolerance | None, *, whole: bool) -> tuple[Checked, Case | None]:
    """Return the judgements of a call, and the call unless the dump lacks some of it."""
    backward = unit.direction == "backward"
    if not backward and not unit.handles_tensors:
        return Checked("forward", [Judgement("exact", "it takes and gives no tensor")]), None
    try:
        if recorded.has_tensors:
            case = recorded.case(unit)
        elif unit.of_inputs:
            raise NotChecked("the gradients of its arguments are made where values are recorded")
        else:
            case = run_here(recorded.made_case(unit), backward)
    except NotChecked as why:
        return Checked("backward" if backward else "forward", [Judgement("not checked", str(why))]), None
    return check(case, backward, tolerance, whole=whole), case
