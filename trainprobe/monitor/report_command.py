"""`trainprobe report DIR`: writes the page of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.engine.core.findings import in_folder
from trainprobe.monitor.findings_of_run import of_rules
from trainprobe.monitor.history import History
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.remote_run import as_given, is_copy, origin, run_folder
from trainprobe.monitor.report import write_page
from trainprobe.monitor.report.from_run import collect_histories, view_of
from trainprobe.monitor.run_folder import read_findings, read_frames
from trainprobe.monitor.watcher import judge_frames


def report(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to, or its URL", metavar="DIR", parser=as_given)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the page; by default DIR/report.html, of a URL ./report.html")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="by default the folder's name")] = None,
    judge: Annotated[bool, typer.Option("--judge", help="apply the rules now instead of showing what the run found")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="all ranks at once: which differ from their replicas, and when")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="--fleet on a Ray cluster whose machines see the same paths")] = False,
) -> int:
    """Write one self-contained HTML page of the run in DIR."""
    folder = run_folder(folder)
    beside = Path() if is_copy(folder) else folder if folder.is_dir() else folder.parent
    target = output or beside / "report.html"
    if fleet:
        from trainprobe.monitor.fleet.command import report_all_ranks

        return report_all_ranks(folder, ray, target, title or folder.resolve().name)
    histories: dict[int, History] = {}
    recorded = read_findings(folder)
    judged = judge or not of_rules(recorded)
    frames = collect_histories(read_frames(folder), histories)
    found = [in_folder(f, origin(folder)) for f in judge_frames(frames, make_rules(None) if judged else {})]
    findings = found if judge else [*recorded, *found]
    by = ["the run itself"] if recorded and not judge else []
    by += ["rules applied when this page was written"] if judged else []
    meta = {"findings by": ", ".join(by)}
    page = write_page(view_of(title or folder.resolve().name, histories, findings, meta), target)
    Console(highlight=False, soft_wrap=True).print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", markup=False)
    return 0
