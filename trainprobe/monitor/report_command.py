"""`trainprobe report DIR`: writes the page of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.report import write_page
from trainprobe.monitor.report.from_run import collect_series, view_of
from trainprobe.monitor.run_folder import read_findings, read_frames
from trainprobe.monitor.series import Series
from trainprobe.monitor.watcher import in_order, judge_frames


def report(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to", metavar="DIR")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the page; by default DIR/report.html")] = None,
    title: Annotated[str | None, typer.Option("--title", help="by default the folder's name")] = None,
    judge: Annotated[bool, typer.Option("--judge", help="apply the rules now instead of showing what the run found")] = False,
) -> int:
    """Write one self-contained HTML page of the run in DIR."""
    series: dict[int, Series] = {}
    findings = [] if judge else read_findings(folder)
    judged = judge or not findings
    found = judge_frames(collect_series(read_frames(folder), series), make_rules(None) if judged else {})
    findings = found if judged else findings
    meta = {"findings by": "rules applied when this page was written" if judged else "the run itself"}
    target = output or (folder if folder.is_dir() else folder.parent) / "report.html"
    page = write_page(view_of(title or folder.resolve().name, series, in_order(findings), meta), target)
    Console(highlight=False, soft_wrap=True).print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", markup=False)
    return 0
