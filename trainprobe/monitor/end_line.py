"""The one line that a person reads when a run is over: steps, findings by rule, and where to read them.

What a finding says was printed when it was made, and is not repeated.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.core.words import counted
from trainprobe.errors import FormatError
from trainprobe.monitor.findings_of_run import OWN
from trainprobe.monitor.run_folder import read_findings
from trainprobe.monitor.watcher import causes


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over, as one rank saw it.

    steps, collected: how many there were, and how many were looked at. cut_short: how many of the others an error or the end of
    the run cut short while they were looked at. judged: whether the plan has a monitor or an audit. written: whether `output`
    can be read back. stopped: whether the tool has disabled itself. left_out: parts that failed. recorded: how many steps were
    recorded, where some were lost.
    """

    steps: int
    collected: int
    first_step: int
    place: Place
    output: Path
    cut_short: int = 0
    judged: bool = True
    written: bool = True
    stopped: bool = False
    left_out: tuple[str, ...] = ()
    recorded: str = ""


def end_line(run: Run, findings: Sequence[Finding]) -> str:
    """Return the line, without the tool's name. findings: of this rank; what other ranks wrote in this run is added."""
    found = [f for f in causes([*findings, *_of_other_ranks(run)]) if _matters(f)]
    nothing = _nothing_found(run, findings)
    outcome = f"{counted(len(found), 'finding')} ({_by_rule(found)}{_since(found)})" if found else nothing
    share = f"{run.recorded}: " if run.recorded else ""
    return f"{share}{_steps(run)}, {outcome}; {_where(run, bool(found))}"


def _nothing_found(run: Run, findings: Sequence[Finding]) -> str:
    if not run.judged:
        return "nothing judged (monitor=True and audit=True judge the steps)"
    if run.collected:
        told = sum(f.rule in OWN and f.severity != "info" for f in findings)
        return "no findings" + (
            f" on the training, {counted(told, 'warning')} about the plan or the tool above" if told else ""
        )
    if run.cut_short:
        return "no step judged as a whole"
    unnamed = run.steps and not run.stopped
    return "nothing judged" + (" (none of them is among the steps that the plan names)" if unnamed else "")


def _steps(run: Run) -> str:
    all_of_them = run.steps == run.collected
    seen = counted(run.steps, "step") + (" watched" if all_of_them else f", {run.collected} of them watched")
    seen += f", {run.cut_short} cut short" if run.cut_short else ""
    if run.stopped:
        return f"{seen}, then disabled by a fault of its own"
    return seen + (f" (without {' and '.join(run.left_out)}, left out after a fault)" if run.left_out else "")


def _matters(finding: Finding) -> bool:
    return finding.severity != "info" and finding.rule not in OWN


def _of_other_ranks(run: Run) -> list[Finding]:
    """Return what the other ranks wrote since this run began; nothing where their files are elsewhere."""
    if run.place.world_size == 1 or not run.written:
        return []
    try:
        found = read_findings(run.output)
    except (FormatError, OSError):
        return []  # one that is being written
    others = [f for f in found if f.place is not None and f.place.rank != run.place.rank]
    return [f for f in others if f.step is None or f.step >= run.first_step]


def _by_rule(found: Sequence[Finding]) -> str:
    return ", ".join(f"{rule} {n}" if n > 1 else rule for rule, n in Counter(f.rule for f in found).items())


def _since(found: Sequence[Finding]) -> str:
    steps = [finding.step for finding in found if finding.step is not None]
    return f", first at step {min(steps)}" if steps else ""


def _where(run: Run, found: bool) -> str:
    folder = shlex.quote(str(run.output))
    if not run.written:
        return "nothing was written to disk"
    if found:
        return f"read them with `trainprobe judge {folder}`, or as a page with `trainprobe report {folder}`"
    return f"output in {folder}"
