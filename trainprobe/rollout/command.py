"""`trainprobe rollout-compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainprobe.rollout.compare import SingleComparator


def rollout_compare(
    a: Annotated[Path, typer.Argument(help="folder that SingleSave wrote to")],
    b: Annotated[Path, typer.Argument(help="the other run's")],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for a sheet a key and verdict.json")] = Path(
        "rollout_compare"
    ),
    floor: Annotated[
        Path | None, typer.Option(help="folder of a repeated run of A: twice its distance from A counts as noise")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="arrays that are compared at a time")] = 8,
) -> int:
    """Say where two runs' key data first differ. Exit code: 0 the same, 1 within noise, 2 they differ, 3 not comparable."""
    found = SingleComparator.compare(a, b, output, workers, floor=floor)
    typer.echo(found.sentence)
    typer.echo(f"sheets and verdict.json in {output}")
    return found.code
