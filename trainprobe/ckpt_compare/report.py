"""A comparison as JSON, CSV and a terminal table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainprobe.ckpt_compare.results import INCOMPLETE, CheckpointComparison, TensorRow
from trainprobe.ckpt_compare.verdict import TOLERATED, by_error, relative
from trainprobe.comparison.files import write_csv, write_json
from trainprobe.comparison.terminal import plain_table, show_verdict
from trainprobe.comparison.verdict import NAMES, Verdict
from trainprobe.errors import OutputError

COLUMNS = (
    "name", "verdict", "what", "l2", "cos", "relative_l2", "max_abs", "max_ulp", "changed", "numel", "nan_a", "nan_b",
    "dtype_a",
    "dtype_b", "shape_a", "shape_b", "noise_floor", "where", "note", "native_a", "native_b",
)  # fmt: skip
SUMMARY = "__comparison__"  # no tensor has this name
_NUMBERS = re.compile(r"(?<![A-Za-z_\d])\d+(?![A-Za-z_\d])")
_STYLE = {"identical": "green", "rounding": "cyan", "differ": "red"}


def entry(row: TensorRow) -> dict[str, Any]:
    """Return one tensor's result in the classic shape (l2, cos, numel, shape) with everything else beside it."""
    d = row.difference
    measured = row.verdict in ("identical", "rounding", "differ")
    same_shape = row.shape_a == row.shape_b
    sizes = [math.prod(s) if s is not None else None for s in (row.shape_a, row.shape_b)]
    return {
        "l2": d.l2 if measured else None,
        "cos": d.cosine if measured else None,
        "numel": sizes[0] if same_shape else sizes,
        "shape": list(row.shape_a or ())
        if same_shape
        else [list(s) if s is not None else None for s in (row.shape_a, row.shape_b)],
        "verdict": row.verdict,
        "what": row.what,
        "relative_l2": d.relative_l2 if measured else None,
        "max_abs": d.max_abs if measured else None,
        "max_abs_at": list(d.at) if d.at is not None else None,
        "max_ulp": d.max_ulp if measured else None,
        "changed": d.changed_share if measured else None,
        "nan_a": d.nan_a if measured else None,
        "nan_b": d.nan_b if measured else None,
        "dtype": [row.dtype_a or None, row.dtype_b or None],
        "noise_floor": row.floor if measured else None,
        "where": row.where,
        "note": row.note,
        "native": [row.native_a or None, row.native_b or None],
    }


def write_tensors(c: CheckpointComparison, path: Path, verdict: Verdict) -> None:
    """Write `{name: {l2, cos, numel, shape, …}}`, one entry a logical tensor, and the verdict under `SUMMARY`.

    Tensors that both sides store under one other name have an entry of four values under that name as well.
    """
    held: dict[str, Any] = {SUMMARY: summary(c, verdict)} | {r.key: entry(r) for r in c.rows}
    write_json(_by_native_names(c.rows) | held, path)


def _by_native_names(rows: Sequence[TensorRow]) -> dict[str, dict[str, Any]]:
    """Return name in the files → l2, cos, numel and shape; of one that was split (q, k and v) those of its parts together."""
    parts: dict[str, list[TensorRow]] = {}
    for row in rows:
        if row.a is not None and row.b is not None and row.native_a == row.native_b and not row.a.slot:
            parts.setdefault(row.native_a, []).append(row)
    found: dict[str, dict[str, Any]] = {}
    for name, held in parts.items():
        one, d = entry(held[0]), held[0].difference
        for row in held[1:]:
            d = d.merge(replace(row.difference, at=None))
        known = {"l2": d.l2, "cos": d.cosine, "numel": sum(math.prod(row.shape_a or ()) for row in held), "shape": None}
        found[name] = {k: one[k] for k in known} if len(held) == 1 else known
    return found


def keep_earlier(path: Path) -> str:
    """Move a result that is in the way to the next free name, `NAME.1`, and say so; nothing where there is none."""
    if not path.is_file():
        return ""
    kept = next(free for n in count(1) if not (free := path.with_name(f"{path.name}.{n}")).exists())
    try:
        path.rename(kept)
    except OSError as error:
        raise OutputError(f"{path} holds an earlier result, which cannot be kept as {kept.name}: {error}") from error
    return f"{path} held an earlier result: it is kept as {kept.name}"


def summary(c: CheckpointComparison, verdict: Verdict) -> dict[str, Any]:
    """Return the whole comparison in a few plain values: for CI, which should not read sentences."""
    return {
        "verdict": "incomplete" if verdict.code == 3 else NAMES[verdict.code],
        "exit_code": verdict.code,
        "sentence": verdict.sentence,
        "checkpoints": {side: {"path": one.path, "format": one.format} for side, one in (("A", c.a), ("B", c.b))},
        "details": list(verdict.details),
        "causes": [{"sentence": cause.sentence, "tensors": sorted(cause.keys)} for cause in c.causes],
        "moves": [{"a": m.a_key, "b": m.b_key, "transposed": m.turned} for m in c.moves],
        "renamed": [{"a": m.a_key, "b": m.b_key, "transposed": m.turned} for m in c.renamed],
        "faults": [{"side": f.side, "where": f.where, "message": f.message} for f in c.faults],
        "missing": [{"name": r.key, "verdict": r.verdict, "note": r.note} for r in c.rows if r.verdict in INCOMPLETE],
        "tolerated": [r.key for r in c.rows if r.verdict == "rounding" and r.note.startswith(TOLERATED)],
        "warnings": {side: list(one.warnings) for side, one in (("A", c.a), ("B", c.b))},
    }


def write_table(c: CheckpointComparison, path: Path) -> None:
    """Write one line a tensor as CSV, largest relative error first. Raises OutputError."""
    write_csv(COLUMNS, map(_line, by_error(c.rows)), path)


def _line(row: TensorRow) -> list[Any]:
    found = entry(row)
    found |= {"name": row.key, "numel": row.difference.count or found["numel"]}
    found |= {name: getattr(row, name) for name in COLUMNS if name.endswith(("_a", "_b")) and not name.startswith("nan")}
    return ["x".join(map(str, v)) or "scalar" if isinstance(v, tuple) else v for v in (found[name] for name in COLUMNS)]


@dataclass(frozen=True, slots=True)
class KindOfTensor:
    """Tensors whose names differ by numbers only (one parameter of all layers), worst first."""

    name: str
    rows: tuple[TensorRow, ...]

    @property
    def worst(self) -> TensorRow:
        """The row with the largest relative error."""
        return self.rows[0]


def kinds(rows: Sequence[TensorRow]) -> list[KindOfTensor]:
    """Group rows by kind of layer; kinds with the largest relative error first."""
    grouped: dict[str, list[TensorRow]] = {}
    for row in by_error(rows):
        grouped.setdefault(_NUMBERS.sub("*", row.key), []).append(row)
    found = [KindOfTensor(name, tuple(rs)) for name, rs in grouped.items()]
    return sorted(found, key=lambda k: (-relative(k.worst), k.name))


def show(c: CheckpointComparison, verdict: Verdict, console: Console, most: int = 20, every: bool = False) -> None:
    """Print the verdict, what explains it, and a table of what is not identical."""
    sides: list[str] = []
    for side, checkpoint in (("A", c.a), ("B", c.b)):
        layout = " ".join(f"{k}{v}" for k, v in checkpoint.layout.items() if v > 1)
        sides.append(f"  {side}  {checkpoint.path}  {checkpoint.format}{f', {layout}' if layout else ''}")
    show_verdict(verdict, console, most, "--json, --html list all", sides)
    mismatches = [r for r in c.rows if r.verdict in ("differ", "rounding")]
    if mismatches:
        console.print(_table(mismatches, most, every))


def _table(mismatches: Sequence[TensorRow], most: int, every: bool) -> Table:
    numbers = ("n", "rel. error", "max |a−b|", "ulp", "changed")
    table = plain_table(("tensor" if every else "kind of tensor", *numbers, "verdict", "dtypes"), numbers)
    found = [KindOfTensor(r.key, (r,)) for r in by_error(mismatches)] if every else kinds(mismatches)
    for kind in found if every else found[:most]:
        table.add_row(*_cells(kind))
    if not every and len(found) > most:
        table.add_row(f"… and {len(found) - most} more kinds")
    return table


def _cells(kind: KindOfTensor) -> tuple[str | Text, ...]:
    row = kind.worst
    d = row.difference
    changed = sum(r.difference.changed for r in kind.rows) / max(1, sum(r.difference.count for r in kind.rows))
    dtypes = row.dtype_a if row.dtype_a == row.dtype_b else f"{row.dtype_a}/{row.dtype_b}"
    error = "nan/inf" if d.misplaced else f"{d.relative_l2:.2e}"
    verdict = Text(row.verdict, style=_STYLE.get(row.verdict, ""))
    return kind.name, str(len(kind.rows)), error, f"{d.max_abs:.2e}", f"{d.max_ulp:.3g}", f"{changed:.2%}", verdict, dtypes
