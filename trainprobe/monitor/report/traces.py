"""What else a run's folder has of a finding: the lines of the program, the class of the module, the dump of that step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.records import Site, StepData
from trainprobe.engine.storage.dumps import read
from trainprobe.engine.storage.dumps.layout import DUMP_FILE, find_dumps
from trainprobe.monitor.program import lines_of

LINES = 4  # of a call stack
Dumps = Mapping[int, Mapping[int, Path]]


def dumps_of(folder: Path) -> Dumps:
    """Return step → rank → folder of the dumps beside a run's log; nothing where there are none."""
    return attempt(lambda: find_dumps(folder), otherwise=lambda _: {})


def trace_of(dumps: Dumps, step: int | None, rank: int, site: Site | None) -> list[tuple[str, str]]:
    """Return (what it is, what it is called) of what leads from a finding to its cause; nothing where its step has no dump."""
    dump = None if step is None else dumps.get(step, {}).get(rank)
    if dump is None or not (dump / DUMP_FILE).is_file():
        return []
    step_data = attempt(lambda: _read(dump, (dump / DUMP_FILE).stat().st_mtime_ns), otherwise=lambda _: None)
    lines, kind = ([], "") if step_data is None else (lines_of(site, step_data)[:LINES], _class_of(site, step_data))
    places = [("called from " if i else "in the code ", line) for i, line in enumerate(lines)]
    return [*places, *([("of class ", kind)] if kind else []), ("dump ", f"{dump.parent.name}/{dump.name}")]


@lru_cache(4)
def _read(dump: Path, _: int) -> StepData:
    return read(dump)


def _class_of(site: Site | None, step_data: StepData) -> str:
    """Return the class of a module, of a parameter that of its module; "" of anything else."""
    if site is None:
        return ""
    name = site.name.rpartition(".")[0] if site.kind == "parameter" else site.name
    kind = "module" if site.kind == "parameter" else site.kind
    return next((call.cls for call in step_data.calls if call.kind == kind and call.name == name), "")
