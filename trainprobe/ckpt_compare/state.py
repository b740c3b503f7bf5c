"""Compare what is not a tensor: iteration, learning-rate scheduler, RNG states, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainprobe.ckpt_compare.pieces import KINDS, What

EXTRA = "_extra_state"  # what a module adds to its state dict; some versions of a library write none


@dataclass(frozen=True, slots=True)
class StateRow:
    """One plain value on both sides; None where a side does not hold it."""

    what: What
    path: str
    a: Any
    b: Any
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether both sides hold the same."""
        return self.a == self.b or repr(self.a) == repr(self.b)  # NaN is not equal to itself


def compare_state(a: Mapping[str, Mapping[str, Any]], b: Mapping[str, Mapping[str, Any]]) -> tuple[StateRow, ...]:
    """Return a row for each value of each section that both sides have; RNG states that moved to another rank are named."""
    rows: list[StateRow] = []
    for what in KINDS:
        x, y = a.get(what), b.get(what)
        if x is None or y is None:
            continue
        for path in sorted({*x, *y}):
            if what in ("weights", "optimizer") and not (path in x and path in y):
                continue  # what one format, or one version of torch, does not write
            note = _moved_rng(path, x, y) if what == "rng" else ""
            rows.append(StateRow(what, path, x.get(path), y.get(path), note))
    return tuple(rows)


def _moved_rng(path: str, x: Mapping[str, Any], y: Mapping[str, Any]) -> str:
    """Say whose state this rank holds on side B, if it is another rank's of side A."""
    if path not in x or path not in y or x[path] == y[path]:
        return ""
    rank, _, generator = path.partition("/")
    others = [p.partition("/")[0] for p, v in x.items() if p.partition("/")[2] == generator and v == y[path]]
    return f"B's {rank} holds the state of A's {others[0]}" if others else ""
