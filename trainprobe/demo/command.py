"""`trainprobe demo`: train a small GPT with the probe on, and show what it saw."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trainprobe.errors import MissingExtra, OutputError, UsageError

if TYPE_CHECKING:
    from trainprobe.demo.training import Outcome
    from trainprobe.monitor.history import History

LAST = 20  # the loss is reported as the mean of so many last steps


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="folder for everything; each run makes a new one in it")
    ] = Path("demo_out"),
    steps: Annotated[int, typer.Option(help="training steps")] = 300,
    threads: Annotated[int | None, typer.Option(help="CPU threads of PyTorch; by default its own choice")] = None,
) -> None:
    """Train about 5 million parameters on Python's own source, dump two steps in full, and write one HTML page."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch", "the demo")
    if steps < 2:
        raise UsageError(f"--steps {steps} is too short to show anything: use 2 or more")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads that spin stall a machine that others use too
    import torch

    from trainprobe.demo.training import train

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console(highlight=False, soft_wrap=True)
    folder = new_folder(output)
    dumped = (steps // 10, steps - 1)
    console.print(
        f"A small GPT learns Python's own source: {steps} steps, monitored; {dumped[0]} and {dumped[1]} dumped in full."
    )
    began = time.perf_counter()
    with Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        bar = progress.add_task("training", total=steps)
        outcome = train(folder, steps, dumped, lambda step: progress.update(bar, completed=step + 1))
    seconds = time.perf_counter() - began
    history, page = write_report(folder, outcome, seconds)
    console.print(telling_numbers(folder, history, outcome, dumped, seconds))
    for finding in outcome.findings:
        console.print(f"{finding.severity}: {finding.message}", markup=False)
    console.print("\nWritten:")
    for label, path in (
        ("page", page),
        *((f"step {step}", folder / f"step{step}" / "rank0") for step in dumped),
        ("every step", folder / "rank0"),
    ):
        console.print(f"  {label:<12}{path}", markup=False)


def new_folder(output: Path) -> Path:
    """Make and return the first free `output`/runN."""
    number = 1
    while (output / f"run{number}").exists():
        number += 1
    folder = output / f"run{number}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error}; choose another with --output") from error
    return folder


def write_report(folder: Path, outcome: Outcome, seconds: float) -> tuple[History, Path]:
    """Read the run back from its record log, write its page, and return its history and the page's path."""
    from trainprobe.monitor.report import write_page
    from trainprobe.monitor.report.from_run import collect_histories, view_of
    from trainprobe.monitor.run_folder import read_frames

    histories: dict[int, History] = {}
    for _ in collect_histories(read_frames(folder), histories):
        pass  # the series grow as the frames pass
    meta = {"parameters": f"{outcome.parameters:,}", "tokens": f"{outcome.tokens:,}", "time": f"{seconds:.0f} s"}
    view = view_of("trainprobe demo: a small GPT learns Python's own source", histories, meta)
    return histories[0], write_page(replace(view, findings=outcome.findings), folder / "report.html")


def telling_numbers(folder: Path, history: History, outcome: Outcome, dumped: tuple[int, ...], seconds: float) -> Table:
    """Return the table of what is most worth knowing about the run."""
    table = Table(title="What the probe saw", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    scalars = {series.address.name: history.get(series) for series in history.series if series.address.kind == "scalar"}
    losses, norms = scalars["loss"][1], scalars["grad_norm"]
    final = float(losses[-LAST:].mean())
    table.add_row(
        "loss", f"{losses[0]:.3f} → {final:.3f} nats a byte, {final / math.log(2):.2f} bits (mean of the last {LAST} steps)"
    )
    highest = int(norms[1].argmax())
    table.add_row("gradient norm", f"highest {norms[1][highest]:.2f} at step {norms[0][highest]}, last {norms[1][-1]:.2f}")
    for label, kind, slot, statistic in (
        ("largest gradient", "parameter", "grad", "norm"),
        ("largest parameter", "parameter", "value", "norm"),
        ("largest activation", "module", "output", "absmax"),
    ):
        found = last_values(history, kind, slot, statistic)
        if found:
            name = max(found, key=lambda row: found[row])
            table.add_row(label, f"{name}: {statistic} {found[name]:.3g} at the last step")
    size = sum(path.stat().st_size for step in dumped for path in (folder / f"step{step}").rglob("*") if path.is_file())
    table.add_row(
        "dumped in full", f"steps {dumped[0]} and {dumped[1]}: {size / 1e6:.0f} MB, all ops and modules, values of layers.0"
    )
    watched = sum(series.address.kind != "op" for series in history.series)
    table.add_row("watched", f"{watched:,} series at every step; findings: {len(outcome.findings)}")
    table.add_row(
        "speed",
        f"{outcome.tokens / seconds:,.0f} tokens a second with {outcome.parameters / 1e6:.1f} M parameters, all included",
    )
    return table


def last_values(history: History, kind: str, slot: str, statistic: str) -> dict[str, float]:
    """Return name → value at the last step of one statistic of one kind of value."""
    chosen = [
        t for t in history.series if (t.address.kind, t.address.slot.split(".")[0], t.statistic) == (kind, slot, statistic)
    ]
    return {series.address.name: float(history.get(series)[1][-1]) for series in chosen if history.get(series)[1].size}
