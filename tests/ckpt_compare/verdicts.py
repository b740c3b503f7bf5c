"""Open, name, compare and judge two checkpoints in one call, as the command does."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.results import CheckpointComparison
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.comparison.verdict import Verdict


def compared(a: Path | str, b: Path | str, what=("weights", "optimizer")) -> CheckpointComparison:
    """Compare two checkpoints on disk."""
    return compare(*logical(open_checkpoint(a), open_checkpoint(b)), what)


def judged(a: Path | str, b: Path | str, what=("weights", "optimizer")) -> Verdict:
    """Judge two checkpoints on disk."""
    return verdict_of(compared(a, b, what))


def kinds(found: CheckpointComparison) -> dict[str, int]:
    """Count the compared tensors by kind."""
    return {what: sum(r.what == what for r in found.rows) for what in ("weights", "optimizer")}


def bytes_held(a: Path | str, b: Path | str) -> float:
    """Return the bytes that a comparison holds for each of its rows.

    The less of two measurements: in one of them the interpreter's own table of interned names may double.
    """
    compared(a, a)  # what is loaded once
    measured: list[float] = []
    for _ in range(2):
        gc.collect()
        tracemalloc.start()
        found = compared(a, b)
        measured.append(tracemalloc.get_traced_memory()[0] / len(found.rows))
        tracemalloc.stop()
        del found
    return min(measured)
