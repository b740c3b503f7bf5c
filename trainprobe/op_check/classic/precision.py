"""`api_precision_compare_result_*.csv` and `…_details_*.csv`: two details files against each other."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from trainprobe.engine.storage.safe_files import text_lines
from trainprobe.errors import FormatError
from trainprobe.op_check.classic.columns import (
    ALGORITHM,
    ALGORITHMS,
    BLANK,
    COMPARED_COLUMNS,
    DETAILS_COLUMNS,
    DEVICE,
    MESSAGE,
    NAME,
    OUTCOME,
    OWN_COLUMNS,
    PRECISION_COLUMNS,
    RATIO_COLUMNS,
    SHAPE,
    STATUS,
    THOUSANDTH_COLUMNS,
    ULP_COLUMNS,
    metrics_of,
    number,
)
from trainprobe.op_check.classic.tables import Record, dtype_of, overall, write_table
from trainprobe.op_check.standards.limits import EIGHT_BITS, LIMITS, RATIOS, SMALL_SHARE_RATIO, assigned, level
from trainprobe.op_check.standards.metrics import Metrics
from trainprobe.op_check.standards.verdicts import ERROR, PASS, SKIP, StandardVerdict, by_standard, ratios

_NEEDED = {  # standard → the fields without which it cannot judge
    "absolute": ("not_finite", "relative_wrong", "small_wrong"),
    "binary": ("unequal",),
    "ulp": ("ulp_share",),
    "thousandth": ("thousandth",),
    "benchmark": ("small_wrong", "rmse", "largest_relative", "mean_relative"),
}


def read_details(path: Path) -> list[Record]:
    """Read a details file. Raises FormatError for what is none."""
    try:
        reader = csv.DictReader(text_lines(path))
        missing = [column for column in DETAILS_COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise FormatError(f"{path} is no accuracy_checking_details file: it has no column {', '.join(missing[:3])}")
        records = [{column: row.get(column) or BLANK for column in DETAILS_COLUMNS} for row in reader]
    except csv.Error as error:
        raise FormatError(f"{path} cannot be read as CSV: {error}") from None
    names = [record[NAME] for record in records]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise FormatError(f"{path} has {twice} twice: it is not of one dump.json")
    return records


def write_precision(a: Sequence[Record], b: Sequence[Record], folder: Path, stamp: str) -> list[str]:
    """Compare rows of A (the NPU) with those of B (the GPU), write both files, and return the statuses of all calls.

    Raises OutputError.
    """
    theirs = {record[NAME]: record for record in b}
    compared = [_compared(record, theirs.get(record[NAME])) for record in a]
    write_table(folder / f"api_precision_compare_details_{stamp}.csv", PRECISION_COLUMNS, compared)
    calls: dict[str, list[Record]] = defaultdict(list)
    for record in compared:
        calls[record[NAME].rpartition(".output.")[0].rpartition(".")[0]].append(record)
    results = [_result(call, records) for call, records in calls.items()]
    write_table(folder / f"api_precision_compare_result_{stamp}.csv", COMPARED_COLUMNS, results)
    return [result[column] for result in results for column in COMPARED_COLUMNS[1:3]]


def _result(call: str, records: Sequence[Record]) -> Record:
    both = [
        overall([r[OUTCOME] for r in records if f".{direction}.output." in r[NAME]]) for direction in ("forward", "backward")
    ]
    told = [f"{r[NAME]}: {r[MESSAGE]}" for r in records if r[OUTCOME] in (SKIP, ERROR)]
    return dict(zip(COMPARED_COLUMNS, (call, *both, "\n".join(told)), strict=True))


def _compared(a: Record, b: Record | None) -> Record:
    """Return one result's row."""
    blank = {**dict.fromkeys(PRECISION_COLUMNS, BLANK), NAME: a[NAME]}
    dtype = dtype_of(a[DEVICE])
    name = a[NAME].rpartition(".output.")[0].rpartition(".")[0].rpartition(".")[0]
    if b is None:
        return blank | {OUTCOME: SKIP, MESSAGE: "the second file does not have it"}
    if dtype is None or a[SHAPE] in ("(0,)", "torch.Size([0])"):
        return blank | {OUTCOME: SKIP, MESSAGE: a[MESSAGE].strip() or "it has no numbers"}
    standard = assigned(name, dtype)
    try:
        ours, second = metrics_of(a), metrics_of(b)
    except ValueError as error:
        return blank | {OUTCOME: SKIP, MESSAGE: f"a cell holds no number: {error}"}
    if standard == "absolute" and ours.relative_wrong is None:  # as 26.2.0 writes it, which takes floats for the benchmark
        standard = "benchmark"
    lacking = [field for field in _NEEDED[standard] if getattr(ours, field) is None]
    if lacking:
        why = a[MESSAGE].strip() if a[STATUS] == SKIP else f"the file lacks {', '.join(lacking)}, which {standard} needs"
        return blank | {OUTCOME: SKIP, MESSAGE: why}
    verdict = by_standard(standard, name, dtype, ours, second)
    return blank | _cells(standard, name, dtype, (ours, second), verdict)


def _cells(standard: str, name: str, dtype: torch.dtype, both: tuple[Metrics, Metrics], verdict: StandardVerdict) -> Record:
    """Return the numbers that a standard judged by, each with its own verdict, and the outcome."""
    a, b = both
    found: Record = {OUTCOME: verdict.status, ALGORITHM: ALGORITHMS[standard], MESSAGE: verdict.reason}
    if standard == "benchmark" and dtype in LIMITS:
        limits: dict[str, float] = dict(zip(("rmse", "largest_relative", "mean_relative"), RATIOS[level(name)], strict=True))
        known = ratios(a, b, dtype)
        for column, status, field in RATIO_COLUMNS:
            limit = limits.get(field, SMALL_SHARE_RATIO)
            found |= {column: number(known[field]), status: PASS if known[field] <= limit else ERROR}
    for column, status, field in OWN_COLUMNS:
        if standard == ("binary" if field == "unequal" else "absolute"):
            found |= {column: number(getattr(a, field)), status: ERROR if getattr(a, field) else PASS}
    if standard == "ulp":
        ratio = None if dtype in EIGHT_BITS else ratios(a, b, dtype)["ulp_share"]
        numbers = (number(a.ulp_mean), number(a.ulp_share), number(ratio), verdict.status)
        found |= dict(zip(ULP_COLUMNS, numbers, strict=True))
    if standard == "thousandth":
        found |= dict(zip(THOUSANDTH_COLUMNS, (number(a.thousandth), verdict.status), strict=True))
    return found
