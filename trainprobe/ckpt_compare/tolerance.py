"""What a user asks to be left out of a verdict: tensors by name, and differences up to a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainprobe.ckpt_compare.conclusion import TOLERATED
from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.results import Comparison, Row


def selected(checkpoint: Checkpoint, only: Sequence[str], ignore: Sequence[str]) -> Checkpoint:
    """Keep the tensors whose logical name or key matches a pattern of `only` (all where there is none) and none of `ignore`.

    Patterns are those of a shell: `layers.*.mlp.*`. What an optimizer holds for a tensor goes by `NAME#exp_avg`, or by NAME.
    """

    def matches(key: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, p) for p in patterns for name in (key, key.partition("#")[0]))

    if not only and not ignore:
        return checkpoint
    kept = {k: t for k, t in checkpoint.tensors.items() if (not only or matches(k, only)) and not matches(k, ignore)}
    said = f"{len(checkpoint.tensors) - len(kept)} of {len(checkpoint.tensors)} tensors are left out by --only and --ignore"
    return replace(checkpoint, tensors=kept, notes=(*checkpoint.notes, said))


def tolerated(found: Comparison, atol: float, rtol: float) -> Comparison:
    """Count differences within a tolerance as rounding: no element further apart than atol, or a relative l2 of at most rtol.

    A NaN or infinity on one side only is never tolerated.
    """
    if not (atol or rtol):
        return found
    rows = tuple(_tolerated(row, atol, rtol) for row in found.rows)
    odd = {row.key for row in rows if row.verdict == "differ"}
    return replace(found, rows=rows, causes=tuple(cause for cause in found.causes if cause.keys & odd))


def _tolerated(row: Row, atol: float, rtol: float) -> Row:
    d = row.difference
    if row.verdict != "differ" or d.misplaced or not (d.max_abs <= atol or d.relative_l2 <= rtol):
        return row
    return replace(row, verdict="rounding", note=f"{TOLERATED} {atol:g} or --rtol {rtol:g}")
