"""What the results of a dump come to by one of the standards, as a sentence, a table and records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from trainprobe.comparison.terminal import plain_table
from trainprobe.errors import UsageError, did_you_mean
from trainprobe.op_check.conclusion import Conclusion
from trainprobe.op_check.dump import Row
from trainprobe.op_check.standards.limits import ALIASES, BY_OPERATOR, NAMES, assigned
from trainprobe.op_check.standards.measured import Output, without_metrics
from trainprobe.op_check.standards.verdicts import ERROR, PASS, SKIP, StandardVerdict


@dataclass(slots=True)
class StandardResult:
    """One result with its verdict. number: of the result, None where the call could not be measured."""

    row: Row
    number: int | None
    verdict: StandardVerdict
    output: Output | None = None


def standard_named(name: str) -> str:
    """Return the name of a standard, which may be given as mindstudio-probe writes it. Raises UsageError."""
    found = ALIASES.get(name, name)
    if found not in (*NAMES, BY_OPERATOR):
        names = [*NAMES, BY_OPERATOR]
        raise UsageError(f"--standard {name!r} is not known{did_you_mean(name, names)}: {', '.join(names)}")
    return found


def pair(a: Sequence[Row], b: Sequence[Row]) -> None:
    """Let the results of B be the second ones of A where a call was given the same bits in both."""
    theirs = by_call(b)
    for place, row in by_call(a).items():
        other = theirs.get(place)
        numbered_results = {} if other is None or other.key != row.key else {o.number: o for o in other.measured}
        for output in row.measured:
            same = numbered_results.get(output.number)
            output.second = same.metrics if same is not None and same.dtype == output.dtype else None


def by_call(rows: Sequence[Row]) -> dict[tuple[int, int, str, str], Row]:
    """Return (step, rank, call, direction) → its row; calls that are equal have one row.

    Of the gradients of a call, those that the module around it shows come before those at its autograd node.
    """
    found: dict[tuple[int, int, str, str], Row] = {}
    of_inputs: dict[tuple[int, int, str, str], bool] = {}
    for row in rows:
        for each in row.calls:
            place = (row.step, row.rank, each.call, each.direction)
            if place not in found or (each.of_inputs and not of_inputs[place]):
                found[place], of_inputs[place] = row, each.of_inputs
    return found


def results_by(rows: Sequence[Row], standard: str) -> Iterator[StandardResult]:
    """Judge all results by a standard, or each by the one that is assigned to its operator."""
    for row in rows:
        if not row.measured:
            yield StandardResult(row, None, without_metrics(row.worst, standard))
        for output in row.measured:
            name = assigned(row.name, output.dtype) if standard == BY_OPERATOR else standard
            yield StandardResult(row, output.number, output.verdict(name, row.name), output)


def conclude_by(standard: str, results: Sequence[StandardResult], ours: Conclusion) -> Conclusion:
    """Return what to say first, with our own verdict behind it, and the exit code: 2 an error, 3 a SKIP, 0 neither."""
    counts = Counter(result.verdict.status for result in results)
    said = ", ".join(f"{counts[status]} {status}" for status in (ERROR, SKIP, PASS) if counts[status])
    whole = f"by the standard {standard}, {len(results)} results judged ({said})"
    details = [f"by its own rounding: {ours.sentence}", *ours.details]
    first = next((r for status in (ERROR, SKIP) for r in results if r.verdict.status == status), None)
    if first is None:
        return Conclusion(0 if results else 3, f"every result passes: {whole}", details, ours.worst)
    row, verdict = first.row, first.verdict
    which = "" if first.number is None else f" result {first.number}"
    where = f" in {row.module}" if row.module else ""
    word = "is an error" if verdict.status == ERROR else "is not judged"
    by = f" by {verdict.standard}" if verdict.standard and standard == BY_OPERATOR else ""
    text = f"step {row.step}, rank {row.rank}: {row.entry}{where}{which} {word}{by}: {verdict.reason}; {whole}"
    return Conclusion(2 if counts[ERROR] else 3, text, details, row)


def table(results: Sequence[StandardResult]) -> Table:
    """Return a table with a line for each operator, direction and standard."""
    groups: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for result in results:
        groups[result.row.name, result.row.checked.direction, result.verdict.standard][result.verdict.status] += 1
    numbers = (ERROR, SKIP, PASS)
    shown = plain_table(("operator", "direction", "standard", *numbers), numbers, ("operator",))
    for place, counts in sorted(groups.items(), key=lambda item: (-item[1][ERROR], -item[1][SKIP], item[0])):
        shown.add_row(*place, *(str(counts[status] or "") for status in numbers))
    return shown


def records(results: Sequence[StandardResult]) -> list[dict[str, Any]]:
    """Return each result with the numbers that it was judged by."""
    found: list[dict[str, Any]] = []
    for result in results:
        row, output = result.row, result.output
        numbers = [output.metrics, output.second] if output is not None else [None, None]
        metrics, second = ({} if each is None else _plain(asdict(each)) for each in numbers)
        place = {"step": row.step, "rank": row.rank, "entry": row.entry, "result": result.number}
        verdict = {"standard": result.verdict.standard, "status": result.verdict.status, "reason": result.verdict.reason}
        found.append({**place, **verdict, "metrics": metrics, "second": second})
    return found


def _plain(metrics: dict[str, float | None]) -> dict[str, float | str]:
    """Leave out what is not known; JSON has no infinities: these are text."""
    return {k: v if math.isfinite(v) else str(v) for k, v in metrics.items() if v is not None}
