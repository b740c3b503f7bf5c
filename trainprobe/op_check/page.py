"""The page of op-check: one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text
from trainprobe.op_check.conclusion import Conclusion, outcomes
from trainprobe.op_check.dump import Row
from trainprobe.op_check.judge import OUTCOMES
from trainprobe.op_check.report import lines

_PARTS = ("body.html", "style.css", "main.js")
_GRAVEST = tuple(reversed(OUTCOMES))
_WRITTEN = 50  # results that can be read without a script


def write_page(
    rows: Sequence[Row], conclusion: Conclusion, dumps: Sequence[Path], standard: Mapping[str, Any] | None, path: Path
) -> Path:
    """Write the page and return it; it appears whole or not at all. Raises OutputError."""
    counts = outcomes(rows)
    results = sorted(lines(rows), key=_gravity)
    document = {
        "outcomes": [[outcome, counts[outcome]] for outcome in _GRAVEST if counts[outcome]],
        "results": results,
        "standard": standard,
    }
    written = {
        "head": markup.verdict_head(
            conclusion.sentence, conclusion.page_code, [str(dump) for dump in dumps], conclusion.details
        ),
        "results": markup.table(
            ("entry", "verdict", "bounds", "reason"),
            [(r["entry"], markup.verdict(r["verdict"]), _number(r["bounds"]), r["reason"] or "") for r in results[:_WRITTEN]],
            ("name", "", "number", "text"),
            id="results",
        ),
    }
    assets = files("trainprobe.op_check") / "page_assets"
    parts = [*(assets / name for name in _PARTS), shared("foot.html")]
    return write_text(path, make_page("op-check", "op-check", parts, document, written=written), "--html")


def _gravity(result: Mapping[str, Any]) -> tuple[int, float]:
    """Return by what results are sorted: the gravest first."""
    bounds = float(result["bounds"] or 0)
    return _GRAVEST.index(result["verdict"]), -(math.inf if math.isnan(bounds) else bounds)


def _number(bounds: float | str | None) -> str:
    return "" if bounds is None else f"{float(bounds):.3g}"
