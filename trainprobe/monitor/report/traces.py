"""What else a run's folder has of a finding: the line of the program, the operator, the dump of that step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.storage.dumps import read
from trainprobe.engine.storage.dumps.layout import DUMP_FILE, find_dumps
from trainprobe.monitor.program import line_of

Dumps = Mapping[int, Mapping[int, Path]]


def dumps_of(folder: Path) -> Dumps:
    """Return step → rank → folder of the dumps beside a run's log; nothing where there are none."""
    return attempt(lambda: find_dumps(folder), otherwise=lambda _: {})


def trace_of(dumps: Dumps, finding: Finding) -> list[tuple[str, str]]:
    """Return (what it is, what it is called) of what leads from a finding to its cause; nothing where its step has no dump."""
    rank = finding.place.rank if finding.place is not None else 0
    dump = None if finding.step is None else dumps.get(finding.step, {}).get(rank)
    if dump is None or not (dump / DUMP_FILE).is_file():
        return []
    step_data = attempt(lambda: _read(dump, (dump / DUMP_FILE).stat().st_mtime_ns), otherwise=lambda _: None)
    line = line_of(finding, step_data) if step_data is not None else ""
    kind = _class_of(finding, step_data) if step_data is not None else ""
    line = "" if line in finding.message else line  # that of a NaN says it already
    told = [("in the code ", line), ("of class ", kind), ("dump ", f"{dump.parent.name}/{dump.name}")]
    return [(what, name) for what, name in told if name]


@lru_cache(4)
def _read(dump: Path, _: int) -> StepData:
    return read(dump)


def _class_of(finding: Finding, step_data: StepData) -> str:
    """Return the class of the module, or the operator, that a finding is about; of a parameter that of its module."""
    site = finding.site
    if site is None:
        return ""
    name = site.name.rpartition(".")[0] if site.kind == "parameter" else site.name
    kind = "module" if site.kind == "parameter" else site.kind
    return next((call.cls for call in step_data.calls if call.kind == kind and call.name == name), "")
