"""`trainprobe why RUN`: what may be wrong with a run, from all that it left on disk, in at most five ranked causes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from trainprobe.again.why.against import Parting, partings
from trainprobe.again.why.causes import MOST, Cause, about_training, ranked
from trainprobe.comparison.files import write_json
from trainprobe.comparison.terminal import say
from trainprobe.engine.core.findings import sentence
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import FormatError
from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box
from trainprobe.monitor.findings import OWN, all_findings
from trainprobe.monitor.frames import Frame
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.remote_run import as_given, run_folder
from trainprobe.monitor.rules_of_run import rules_of_run
from trainprobe.monitor.run_folder import check_one_run, find_logs, read_frames
from trainprobe.monitor.scalar_names import scalar
from trainprobe.monitor.watcher import Watcher, judge_run, judged_nothing

# bytes of a run's log that the rules judge once more: where the run found nothing itself, and where it did
LARGEST_LOG, LARGEST_KNOWN = 64 << 20, 4 << 20
_WINDOW = 10  # steps on both sides of a cause


@dataclass(slots=True)
class Left:
    """What a run left. findings: causes before consequences. loss: step → that of the first rank.

    unseen: what limits the answer. judged: whether anything of the run was judged, then or now. seen: what, in words.
    """

    folder: Path
    findings: list[Finding] = field(default_factory=list[Finding])
    loss: dict[int, float] = field(default_factory=dict[int, float])
    unseen: list[str] = field(default_factory=list[str])
    judged: bool = False
    seen: str = ""


def why(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to, or its URL", metavar="RUN", parser=as_given)],
    against: Annotated[Path | None, typer.Option(help="a run of the same training that was good", parser=as_given)] = None,
    json: Annotated[Path | None, typer.Option(help="Write the answer as JSON.")] = None,
) -> int:
    """Say what may be wrong with the run in RUN, from what is on disk: nothing is run again.

    At most five causes, those with exact evidence first; of each its evidence, what speaks against it, and the next command.
    Exit code: 0 nothing found, 1 there is a cause, 3 nothing was judged, or nothing was found and the record is incomplete.
    """
    folder = run_folder(folder)
    left = left_by(folder)
    causes, details = answer(left, run_folder(against) if against is not None else None)
    code = 1 if causes else 3 if left.unseen or not left.judged else 0
    console = Console(highlight=False)
    for number, cause in enumerate(causes, 1):
        _show(number, cause, console)
    if not causes:
        say(console, f"nothing found: {left.seen}" if left.judged else "nothing of this run was judged", "bold")
    for line in (*details, *left.unseen):
        say(console, line, "dim")
    if json is not None:
        write_json({"code": code, "causes": [cause.to_json() for cause in causes], "notes": [*details, *left.unseen]}, json)
    return code


def answer(left: Left, good: Path | None = None) -> tuple[list[Cause], list[str]]:
    """Return at most five causes, the likeliest first, and sentences on what was compared. Raises FormatError."""
    where = shlex.quote(str(left.folder))
    if good is None:
        causes = [*_ends(left), *ranked(left.findings, where)]
        return [_against_loss(cause, left.loss) for cause in causes[:MOST]], []
    other = left_by(good)
    own = [*_ends(left), *ranked(left.findings, where, other.findings)]
    parted, details = partings(left.folder, good)
    return _joined(parted, own)[:MOST], details


def left_by(folder: Path) -> Left:
    """Read what a run left, and judge its log once more where that is quick. Raises FormatError where there is nothing."""
    left = Left(folder)
    recorded = read_findings(folder)
    logs = find_logs(folder)
    check_one_run(folder, logs)
    size = sum(path.stat().st_size for log in logs for path in (log.iterdir() if log.is_dir() else [log]) if path.is_file())
    watchers, found, seen = dict[int, Watcher](), list[Finding](), LookedAt(folder)
    if size > (LARGEST_KNOWN if about_training(recorded) else LARGEST_LOG):
        more = f"`trainprobe judge --fleet {shlex.quote(str(folder))}` judges all ranks at once"
        left.seen = f"{counted(len(logs), 'rank')}, as the run itself judged them"
        left.unseen.append(f"the log has {size / 1e6:.0f} MB and was not judged again: {more}")
        left.judged = bool(about_training(recorded))
    else:
        try:
            frames = _noting_loss(seen.passing(read_frames(folder)), left.loss)
            found = judge_run(frames, rules_of_run(folder)[0], watchers)[0]
        except FormatError:
            if not recorded and not _boxes(folder):
                raise
        short = seen.shortfall(folder)
        left.judged = bool(recorded) or bool(seen.values and not judged_nothing(watchers.values()))
        left.seen = seen.amount() if seen else "what the run itself judged"
        left.unseen += [f"{short}: the others are not judged"] if short else []
    left.findings = [one.finding for one in all_findings(recorded, found)]
    own = [finding for finding in left.findings if finding.rule in OWN and finding.severity != "info"]
    left.unseen += [f"about the tool itself: {sentence(finding)}" for finding in own[:MOST]]
    return left


def _noting_loss(frames: Iterable[Frame], loss: dict[int, float]) -> Iterator[Frame]:
    for frame in frames:
        value = scalar(frame.scalars, "loss")
        if value is not None:
            loss.setdefault(frame.step, value)
        yield frame


def _against_loss(cause: Cause, loss: dict[int, float]) -> Cause:
    """Say whether the loss was worse behind the step of a cause than before it."""
    if cause.step is None or not loss:
        return cause
    before = [x for step, x in loss.items() if cause.step - _WINDOW <= step < cause.step]
    after = [x for step, x in loss.items() if cause.step <= step < cause.step + _WINDOW]
    if len(before) < _WINDOW or len(after) < _WINDOW or not np.isfinite([*before, *after]).all():
        return cause
    then, now = float(np.median(before)), float(np.median(after))
    told = f"the loss: median {then:.4g} in the {_WINDOW} steps before, {now:.4g} from step {cause.step} on"
    (cause.evidence if now > max(before) else cause.against).append(told)
    return cause


def _boxes(folder: Path) -> list[Path]:
    with suppress(FormatError):
        return find_boxes(folder)
    return []


def _ends(left: Left) -> list[Cause]:
    """Return how the process ended, where it was killed and no rank wrote an end."""
    killed: list[tuple[Path, int | None]] = []
    for path in _boxes(left.folder)[:MOST]:
        if path.suffix != ".ring":
            continue
        _, steps = read_box(path)
        killed.append((path, steps[-1]["reel"]["step"] if steps else None))
    if not killed:
        return []
    path, step = killed[0]
    at = f" in step {step}" if step is not None else " before its first step"
    command = f"`trainprobe black-box {shlex.quote(str(left.folder))}`"
    found = about_training(left.findings)
    against = [f"the run was not well before: {found[0].rule} (step {found[0].step})"] if found else []
    evidence = [f"{path} is the ring of a process that did not end"]
    return [Cause("killed", f"the process was ended from outside{at}", command, step, True, evidence, against)]


def _joined(parted: Sequence[Parting], own: Sequence[Cause]) -> list[Cause]:
    """Return the first place where the run left the good one, with what follows from it; then what the run itself shows."""
    if not parted:
        for cause in own:
            cause.against.append("no difference from the good run was found on disk")
        return list(own)
    first, *later = parted
    lead = first.causes[0]
    lead.evidence.extend(f"what follows, {parting.stage}: {parting.causes[0].sentence}" for parting in later)
    lead.evidence.extend(f"what the run itself shows: {cause.sentence}" for cause in own[:2])
    return [*first.causes, *own, *(cause for parting in later for cause in parting.causes)]


def _show(number: int, cause: Cause, console: Console) -> None:
    say(console, f"{number}. {cause.what}: {cause.sentence}", "bold red" if number == 1 else "bold")
    for label, lines in (("for", cause.evidence), ("against", cause.against), ("next", [cause.next])):
        for line in filter(None, lines):
            say(console, f"     {label}: {line}", "dim" if label == "against" else "")
