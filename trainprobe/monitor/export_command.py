"""`trainprobe export RUN --trend run.trend.db`: a run as a file that another tool opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainprobe.engine.core.words import counted
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.remote_run import as_given, run_folder
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.trend_db import write_trend_db


def export(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to, or its URL", metavar="RUN", parser=as_given)],
    trend: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            "--trend",
            help="the .trend.db to write, which the trend page of mindstudio-probe opens in TensorBoard",
        ),
    ],
) -> int:
    """Write the series of the run in RUN for another tool.

    Exit code: 0, or 3 there is no step, or some of the run's are not in its log; the file has those that are.
    """
    folder, seen = run_folder(folder), LookedAt()
    ranks, steps = write_trend_db(seen.passing(read_frames(folder)), trend)
    short, console = seen.shortfall(folder), Console(highlight=False, soft_wrap=True)
    if short:
        console.print(f"{short}: the file has no others", markup=False)
    console.print(f"{trend}: {counted(steps, 'step')} of {counted(ranks, 'rank')}", markup=False)
    return 3 if short else 0
