"""Records the runs of three other benches, each in a folder that stays: bugs and their healthy twins."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bugs.published import PUBLISHED
from benchmarks.bugs.two_ranks import launch
from benchmarks.incidents.__main__ import recorded, train_incident
from benchmarks.incidents.catalogue import INCIDENTS, is_about
from benchmarks.incidents.healthy_runs import KINDS
from benchmarks.incidents.tasks import TASKS
from benchmarks.sight.catalogue import CASES
from benchmarks.sight.running import record
from trainprobe.engine.core.records import Finding

SEED = 100
Truth = Callable[[Finding], bool]


@dataclass(frozen=True, slots=True)
class Kept:
    """A recorded run. truth: whether a finding names what is wrong; None of a healthy twin."""

    bench: str
    name: str
    folder: Path
    truth: Truth | None


def sight(cache: Path) -> Iterator[Kept]:
    """Yield the silent bugs of the sight bench, under the default plan, and their twins."""
    twins = {case.program.__name__: case for case in CASES}
    for name, case in twins.items():
        yield Kept("sight", name, _sight_run(cache, name, case.program, "", case.ranks), None)
    for case in CASES:

        def truth(finding: Finding, case: Any = case) -> bool:
            told = asdict(finding)
            return case.in_kind(told) and case.at_its_place(told)

        yield Kept("sight", case.name, _sight_run(cache, case.name, case.program, case.name, case.ranks), truth)


def _sight_run(cache: Path, name: str, program: Any, bug: str, ranks: int) -> Path:
    folder = cache / "sight" / (bug or f"healthy {name}").replace(" ", "_")
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record(program, folder, bug, ranks=ranks)
        (folder / "done").touch()
    return folder


def incidents(cache: Path) -> Iterator[Kept]:
    """Yield incidents of whole runs, one of each kind, with the tasks in turn; and noisy healthy runs."""
    for name, kind in KINDS.items():
        yield Kept("incidents", name, recorded(cache / "incidents", f"healthy {name}", lambda f, k=kind: k(SEED).run(f)), None)
    for i, (name, kind) in enumerate(INCIDENTS.items()):
        task, of = list(TASKS.items())[i % len(TASKS)]

        def truth(finding: Finding, kind: Any = kind, of: Any = of) -> bool:
            return any(is_about(word, finding, of) for word in kind.names)

        folder = recorded(cache / "incidents", f"{name} {task}", train_incident(name, task, SEED))
        yield Kept("incidents", name, folder, truth)


def planted(cache: Path) -> Iterator[Kept]:
    """Yield the published bugs, audited at every step, and their twins."""
    folder = cache / "planted"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        launch(list(PUBLISHED), keep=folder)
        (folder / "done").touch()
    for name in dict.fromkeys(bug.twin.__name__ for bug in PUBLISHED):
        yield Kept("planted", name, folder / name, None)
    for bug in PUBLISHED:
        yield Kept("planted", bug.name, folder / bug.run.__name__, bug.located)


def run_of(folder: Path) -> Path:
    """Return the one run in a folder of a bench: of several, which a restart makes, the last."""
    runs = sorted({path.parent.parent for path in folder.rglob("findings.jsonl")} | {*folder.glob("probe_out*")})
    return runs[-1] if runs else folder


BENCHES: dict[str, Callable[[Path], Iterator[Kept]]] = {"sight": sight, "incidents": incidents, "planted": planted}
