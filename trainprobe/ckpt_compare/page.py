"""A comparison as one self-contained HTML page: the verdict, a layer × parameter heatmap, and a table to search."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.report import entry
from trainprobe.ckpt_compare.results import CheckpointComparison, TensorRow
from trainprobe.ckpt_compare.verdict import by_error
from trainprobe.comparison.verdict import NAMES, Verdict
from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text

_LAYER = re.compile(r"(?<![A-Za-z_])(?P<n>\d+)(?=\.)")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_WRITTEN = 50  # tensors that can be read without a script


def write_page(c: CheckpointComparison, verdict: Verdict, path: Path) -> None:
    """Write the page; it needs no network and no other file."""
    title = f"{Path(c.a.path).name} and {Path(c.b.path).name}: {NAMES[verdict.code]}"
    folder = files("trainprobe.ckpt_compare")
    own = (folder / name for name in ("page.html", "page.css", "page.js"))
    data = page_data(c, verdict)
    sides = [f"{s['path']} ({', '.join(filter(None, (s['format'], s['layout'])))})" for s in data["sides"]]
    graver = [row for row in data["rows"] if row["verdict"] != "identical"] or data["rows"]
    written = {
        "head": markup.verdict_head(verdict.sentence, verdict.code, sides, verdict.details),
        "tensors": markup.table(
            ("tensor", "verdict", "rel. error", "max |a−b|"),
            [
                (r["name"], markup.verdict(r["verdict"]), *map(_text, (r["relative_l2"], r["max_abs"])))
                for r in graver[:_WRITTEN]
            ],
            ("name", "", "number", "number"),
            id="list",
        ),
        "state": _state(data["state"]) if data["state"] else markup.Markup(),
    }
    parts = [*own, shared("foot.html")]
    write_text(path, make_page(title, "ckpt-compare", parts, data, written=written), "--html")


def _state(state: Sequence[dict[str, Any]]) -> markup.Markup:
    """Return the card of what is not the same beside the tensors."""
    rows = [(f"{s['what']}: {s['path']}", s["a"], " · ".join(filter(None, (s["b"], s["note"])))) for s in state]
    title = markup.element("h2", "Beside the tensors: what is not the same")
    values = markup.table(("value", "A", "B"), rows, ("name", "text", "text"))
    return markup.element("section", title, markup.element("div", values, class_="scroll"), class_="card", id="state")


def _text(number: float | str | None) -> str:
    return "–" if number is None else number if isinstance(number, str) else f"{number:.3g}"


def page_data(c: CheckpointComparison, verdict: Verdict) -> dict[str, Any]:
    """Return what the page shows, as plain values."""
    sides = [
        {"path": s.path, "format": s.format, "layout": " ".join(f"{k}{v}" for k, v in s.layout.items() if v > 1)}
        for s in (c.a, c.b)
    ]
    rows = [_plain(r) for r in by_error(c.rows)]
    state = [{"what": s.what, "path": s.path, "a": repr(s.a), "b": repr(s.b), "note": s.note} for s in c.state if not s.equal]
    return {
        "code": verdict.code, "sentence": verdict.sentence, "details": verdict.details, "sides": sides, "rows": rows,
        "state": state, "maps": [m for slot in _slots(c.rows) if (m := heatmap(c.rows, slot)) is not None],
    }  # fmt: skip


def _plain(row: TensorRow) -> dict[str, Any]:
    found = {k: v for k, v in entry(row).items() if k not in ("native", "numel")}
    if row.difference.misplaced:  # what the finite elements beside it would give is no answer
        found |= dict.fromkeys(("relative_l2", "l2", "cos"), "nan/inf")
    found = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}  # JSON has no inf
    return {"name": row.key, "count": row.difference.count, **found}


def _slots(rows: Sequence[TensorRow]) -> list[str]:
    return sorted({r.key.partition("#")[2] for r in rows})


def heatmap(rows: Sequence[TensorRow], slot: str) -> dict[str, Any] | None:
    """Return one heatmap: parameters down, layers across; the worst expert stands for all. None when there are no layers.

    A cell is [verdict, log10 of the relative error, name of the worst tensor]; None for the error where something is NaN or
    infinite on one side alone.
    """
    cells: dict[str, dict[int, TensorRow]] = {}
    for row in rows:
        name, _, of = row.key.partition("#")
        match = _LAYER.search(name)
        if of != slot or match is None:
            continue
        kind = _EXPERT.sub("*", name[match.end() + 1 :])
        held = cells.setdefault(kind, {})
        layer = int(match["n"])
        if layer not in held or _gravity(row) > _gravity(held[layer]):
            held[layer] = row
    if not cells:
        return None
    layers = sorted({layer for held in cells.values() for layer in held})
    grid = [[_cell(cells[kind].get(layer)) for layer in layers] for kind in sorted(cells)]
    return {"slot": slot or "weights", "layers": layers, "kinds": sorted(cells), "grid": grid}


def _gravity(row: TensorRow) -> tuple[int, float]:
    order = {"identical": 0, "rounding": 1, "differ": 2}
    return order.get(row.verdict, 3), row.difference.relative_l2


def _cell(row: TensorRow | None) -> list[Any] | None:
    if row is None:
        return None
    error = row.difference.relative_l2
    return [row.verdict, math.log10(error) if error > 0 and not row.difference.misplaced else None, row.key]
