"""The page of op-check: one self-contained HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.html_page import make_page, shared, write_text
from trainprobe.op_check.conclusion import Conclusion
from trainprobe.op_check.dump import Row
from trainprobe.op_check.judge import OUTCOMES
from trainprobe.op_check.report import lines

_PARTS = ("body.html", "style.css", "main.js")
_GRAVEST = tuple(reversed(OUTCOMES))


def write_page(
    rows: Sequence[Row], conclusion: Conclusion, dumps: Sequence[Path], standard: Mapping[str, Any] | None, path: Path
) -> Path:
    """Write the page and return it; it appears whole or not at all. Raises OutputError."""
    counts = Counter(row.worst.outcome for row in rows)
    document = {
        "sentence": conclusion.sentence,
        "code": conclusion.code,
        "details": [*conclusion.details],
        "dumps": [str(dump) for dump in dumps],
        "outcomes": [[outcome, counts[outcome]] for outcome in _GRAVEST if counts[outcome]],
        "results": lines(rows),
        "standard": standard,
    }
    assets = files("trainprobe.op_check") / "page_assets"
    parts = [shared("verdict_head.html"), *(assets / name for name in _PARTS), shared("foot.html")]
    return write_text(path, make_page("op-check", "op-check", parts, document), "--html")
