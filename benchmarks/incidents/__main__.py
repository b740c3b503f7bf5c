"""Incidents of whole runs and noisy healthy ones: found, named in the first line, findings an incident, false alarms.

python -m benchmarks.incidents --cache /tmp/incidents                # trains what the cache lacks, and judges all
python -m benchmarks.incidents --cache /tmp/incidents --first-seed 500
python -m benchmarks.incidents --only "layer drifts" --why

What the audit found is kept with a run; the rules judge its log anew each time, as `trainprobe judge` does.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.incidents.catalogue import INCIDENTS, score
from benchmarks.incidents.healthy_runs import KINDS, each
from benchmarks.incidents.tasks import TASKS
from benchmarks.incidents.training import train
from tests.distributed.launch import launch
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.findings import OWN, causes
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.rules import rule_names
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames

TRAINING = Path(__file__).with_name("training.py")


def alarms(folder: Path) -> list[Finding]:
    """Return the warnings and errors of a recorded run, causes first: the audit's as recorded, those of the rules anew."""
    kept = [f for f in read_findings(folder) if f.rule not in rule_names() and f.rule not in OWN]
    found = causes([*kept, *judge_frames(read_frames(folder), make_rules(None))])
    return [f for f in found if f.severity != "info"]


def recorded(cache: Path, name: str, record: Callable[[Path], None]) -> Path:
    """Return the folder of a run, which is recorded if it is not there."""
    folder = cache / name.replace(" ", "_")
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        record(folder)
        (folder / "done").touch()
    return folder


def train_incident(incident: str, task: str, seed: int) -> Callable[[Path], None]:
    """Return what records an incident in a folder."""
    if INCIDENTS[incident].ranks > 1:
        return lambda folder: _in_ranks(folder, incident, task, seed)
    return lambda folder: train(folder, incident, task, seed)


def _in_ranks(folder: Path, incident: str, task: str, seed: int) -> None:
    launch(TRAINING, INCIDENTS[incident].ranks, str(folder), incident, task, str(seed))


def incidents(cache: Path, seed: int, only: list[str] | None, why: bool) -> Iterator[tuple[bool, bool, int, int]]:
    """Print one line an incident."""
    for incident, kind in INCIDENTS.items():
        for i, (task, of) in enumerate(TASKS.items()):
            if only and incident not in only:
                continue
            folder = recorded(cache, f"{incident} {task} {seed + i}", train_incident(incident, task, seed + i))
            found = alarms(folder)
            answer = score(kind, of, found)
            words = [
                "found" if answer.found else "NOT FOUND",
                "named" if answer.named else "not named",
                f"{answer.findings} findings",
            ]
            print(f"{incident:20} {task:9} {', '.join(words)}{', EARLY' * bool(answer.early)}")
            for f in found if why else ():
                print(f"    step {f.step}{f'-{f.last_step}' * bool(f.last_step)} {f.severity} {f.rule}: {f.message}")
            if not why and not answer.named:
                print(f"    {answer.first[:300]}")
            yield answer.found, answer.named, answer.findings, answer.early


def healthy(cache: Path, seeds: int, seed: int, only: list[str] | None) -> Iterator[int]:
    """Print what healthy runs were told."""
    for kind, one in each(seeds, seed):
        if only and kind not in only:
            continue
        folder = recorded(cache, f"healthy {kind} {one}", lambda f, kind=kind, one=one: KINDS[kind](one).run(f))
        found = alarms(folder)
        for f in found:
            print(f"healthy {kind} {one}: step {f.step} {f.rule}: {f.message[:300]}")
        yield len(found)


def main(
    cache: Annotated[Path | None, typer.Option(help="folder that keeps the recorded runs")] = None,
    first_seed: Annotated[int, typer.Option(help="of all runs")] = 100,
    seeds: Annotated[int, typer.Option(help="of each healthy kind")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="names of incidents or healthy kinds")] = None,
    why: Annotated[bool, typer.Option(help="print every finding")] = False,
) -> None:
    """Print the figures; the exit code is 1 when a bar is missed: 90 % found, 90 % of these named, no alarm."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="trainprobe_incidents_") as passing:
        cache = cache or Path(passing)
        answers = list(incidents(cache, first_seed, only, why))
        told = list(healthy(cache, seeds, first_seed, only))
    found, named = sum(a[0] for a in answers), sum(a[1] for a in answers)
    each_found = [a[2] for a in answers if a[0]]
    mean = sum(each_found) / max(1, len(each_found))
    print(
        f"{found} of {len(answers)} found, {named} of them named in the first line, {mean:.2f} findings an incident "
        f"({max(each_found, default=0)} at most), {sum(a[3] for a in answers)} before their incident; "
        f"{sum(map(bool, told))} of {len(told)} healthy runs with an alarm ({time.perf_counter() - began:.0f} s)"
    )
    raise typer.Exit(int(found < 0.9 * len(answers) or named < 0.9 * found or any(told)))


if __name__ == "__main__":
    typer.run(main)
