"""A comparison as JSON, for programs."""

from __future__ import annotations

from pathlib import Path

from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.config_check.pack_writer import to_json
from trainprobe.config_check.report import MARK
from trainprobe.config_check.report.tables import grouped_rows

MOST_ROWS = 100_000


def write(comparison: PackComparison, path: Path) -> None:
    """Write sentence, verdicts, findings and rows; a row is an object whose keys are the columns."""
    checks = {}
    for check in comparison.checks:
        rows, left_out = grouped_rows(check, MOST_ROWS)
        checks[check.name] = {
            "verdict": check.verdict,
            "compared": check.compared,
            "findings": [{"level": f.level, "text": f.text, "topic": f.topic} for f in check.findings],
            "rows": [dict(zip(check.columns, row, strict=True)) for row in rows],
            "rows_left_out": left_out,
        }
    head = {
        "tool": MARK,
        "sentence": comparison.sentence,
        "consequences": comparison.consequences,
        "exit_code": comparison.exit_code,
    }
    path.write_bytes(
        to_json({**head, "bench": comparison.bench, "cmp": comparison.cmp, "notes": list(comparison.notes), "checks": checks})
    )
