"""`trainprobe judge --fleet DIR` and `trainprobe report --fleet DIR`: all ranks of a run log in columns at once."""

from __future__ import annotations

from pathlib import Path

import orjson
import typer
from rich.console import Console
from rich.text import Text

from trainprobe.engine.core.processes import in_turn
from trainprobe.engine.core.ray_cluster import on_ray
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import counted
from trainprobe.errors import UsageError
from trainprobe.monitor.findings import JudgedFinding
from trainprobe.monitor.fleet.survey import survey
from trainprobe.monitor.fleet.verdict import FleetVerdict, judge_fleet
from trainprobe.monitor.remote_run import is_copy, origin

SHOWN = 20  # findings in the terminal; --json prints all
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def judge_all_ranks(folder: Path, ray: bool, json: bool) -> FleetVerdict:
    """Print what is wrong in a fleet, the gravest first, and return it."""
    verdict = verdict_of(folder, ray)
    if json:
        for finding in verdict.findings:
            typer.echo(orjson.dumps(JudgedFinding(finding, "judged").to_json(), default=str).decode())
    else:
        _show(verdict)
    return verdict


def report_all_ranks(folder: Path, ray: bool, output: Path, title: str) -> int:
    """Write the page of a fleet."""
    from trainprobe.monitor.fleet.page import write_fleet_page

    verdict = verdict_of(folder, ray)
    page = write_fleet_page(verdict, title, output)
    Console(highlight=False, soft_wrap=True).print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", markup=False)
    rules = {finding.rule for finding in verdict.findings if finding.severity != "info"}
    return 3 if verdict.code == 3 or rules == {"fleet_files"} else 0


def verdict_of(folder: Path, ray: bool) -> FleetVerdict:
    """Judge the fleet in a folder, on this machine or on a Ray cluster."""
    if ray and is_copy(folder):
        raise UsageError(f"--ray needs a path that all machines see, and {origin(folder)} is read through a copy on this one")
    return judge_fleet(survey(folder, on_ray if ray else in_turn))


def _show(verdict: FleetVerdict) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if verdict.short:
        console.print(f"{verdict.short}: the others are not judged", markup=False)
    for number, finding in enumerate(verdict.findings[:SHOWN]):
        console.print(_line(finding, first=number == 0))
        if finding.next and number:
            console.print(Text(f"        → {finding.next}", style="dim"))
    if len(verdict.findings) > SHOWN:
        console.print(f"and {len(verdict.findings) - SHOWN} more: --json prints all", markup=False)
    for note in verdict.notes:
        console.print(Text(f"note     {note}", style="dim"))
    console.print(summary(verdict), markup=False)


def _line(finding: Finding, first: bool) -> Text:
    """Return a finding as a line; the first one, which is the verdict, says on the same line what to do next."""
    line = Text(f"{finding.severity:<8}", style=_COLOURS[finding.severity])
    line.append(f"{finding.rule}: ", style="bold not dim").append(finding.message)
    return line.append(f" → {finding.next}", style="dim") if first and finding.next else line


def summary(verdict: FleetVerdict) -> str:
    """Return what was looked at and what came of it, in one line."""
    seen = f"{counted(len(verdict.table.ranks), 'rank')}, {counted(len(verdict.table.steps), 'step')}"
    compared = (
        f"{counted(verdict.compared, 'value')} a step compared among the replicas of {counted(verdict.compared_ranks, 'rank')}"
    )
    what = compared if verdict.compared else "no values compared: no rank has a replica in this log"
    return f"{seen}, {what}: {counted(len(verdict.findings), 'finding') if verdict.findings else 'nothing found'}"
