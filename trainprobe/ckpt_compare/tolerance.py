"""What a user asks to be left out of a verdict: tensors by name, and differences up to a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.results import CheckpointComparison, TensorRow
from trainprobe.ckpt_compare.verdict import TOLERATED


def selected(checkpoint: Checkpoint, only: Sequence[str], ignore: Sequence[str]) -> Checkpoint:
    """Keep what has a logical name or key that matches a pattern of `only` (all where there is none) and none of `ignore`.

    Patterns are those of a shell: `layers.*.mlp.*`. What an optimizer holds for a tensor goes by `NAME#exp_avg`, or by NAME.
    """

    if not only and not ignore:
        return checkpoint

    def wanted(name: str) -> bool:
        return (not only or _matches(name, only)) and not _matches(name, ignore)

    kept = {k: t for k, t in checkpoint.tensors.items() if wanted(k)}
    state = {**checkpoint.state}
    if "weights" in state:
        state["weights"] = {k: v for k, v in state["weights"].items() if wanted(k)}
    options = " and ".join(option for option, given in (("--only", only), ("--ignore", ignore)) if given)
    said = f"{options} left out {len(checkpoint.tensors) - len(kept)} of {len(checkpoint.tensors)} tensors"
    return replace(checkpoint, tensors=kept, state=state, notes=(*checkpoint.notes, said))


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns for name in (key, key.partition("#")[0]))


def unmatched(patterns: Sequence[str], checkpoints: Sequence[Checkpoint]) -> dict[str, str]:
    """Return the patterns that match no tensor of any checkpoint, each with a hint where it matches a name in the files."""
    return {
        p: _hint(p, checkpoints)
        for p in patterns
        if not any(_matches(k, [p]) for c in checkpoints for k in (*c.tensors, *c.state.get("weights", ())))
    }


def _hint(pattern: str, checkpoints: Sequence[Checkpoint]) -> str:
    meant = next((t for c in checkpoints for t in c.tensors.values() if t.native and fnmatchcase(t.native, pattern)), None)
    return f"; patterns are for logical names: {meant.native} of the files is {meant.key}" if meant is not None else ""


def tolerated(found: CheckpointComparison, atol: float, rtol: float) -> CheckpointComparison:
    """Count differences within a tolerance as rounding: no element further apart than atol, or a relative l2 of at most rtol.

    A NaN or infinity on one side only is never tolerated.
    """
    if not (atol or rtol):
        return found
    rows = tuple(_tolerated(row, atol, rtol) for row in found.rows)
    mismatches = {row.key for row in rows if row.verdict == "differ"}
    return replace(found, rows=rows, causes=tuple(cause for cause in found.causes if cause.keys & mismatches))


def _tolerated(row: TensorRow, atol: float, rtol: float) -> TensorRow:
    d = row.difference
    if row.verdict != "differ" or d.misplaced or not (d.max_abs <= atol or d.relative_l2 <= rtol):
        return row
    return replace(row, verdict="rounding", note=f"{TOLERATED} {atol:g} or --rtol {rtol:g}")
