"""Where a run left a good one, from what both have on disk: configuration, weights, data, first step, first operation.

The first of these at which they differ is where to look; what differs behind it may follow from it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from trainprobe.again.why.causes import Cause
from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.headline import causes_and_consequences
from trainprobe.config_check.pack import Pack
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.plan import PACK
from trainprobe.dump_compare.command import compare_dumps
from trainprobe.dump_compare.first_difference import given_another, is_a_weight
from trainprobe.dump_compare.results import DumpsVerdict
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Site
from trainprobe.engine.storage.dumps.layout import find_ranks, find_steps, holds_dump
from trainprobe.errors import FormatError, ProbeError
from trainprobe.monitor.history import History
from trainprobe.monitor.report.from_run import collect_histories
from trainprobe.monitor.run_folder import find_logs, read_frames
from trainprobe.monitor.scalar_names import role_of
from trainprobe.monitor.two_runs import departures, first_departure, notes_on

CONFIGURATION, WEIGHTS, DATA, STEP, OPERATION = "configuration", "weights", "data", "first step", "first operation"
_EFFECTS = {"weights": WEIGHTS, "dataset": DATA}  # beginnings of topics of what a run did
_NOT_CAPTURED = ("missing", "captured")  # beginnings of topics of what a pack does not hold
_STATES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
_MOST = 3  # ranks whose series, dumps and saved states are compared; causes of one stage


@dataclass(frozen=True, slots=True)
class Parting:
    """One stage at which two runs differ, and what differs there, the gravest first; at least one cause."""

    stage: str
    causes: list[Cause]


def partings(run: Path, good: Path) -> tuple[list[Parting], list[str]]:
    """Return the stages at which a run differs from a good one, in their order, and sentences on what was compared."""
    found: dict[str, list[Cause]] = {}
    details: list[str] = []
    for looked, what in ((_packs, "settings"), (_states, "saved states"), (_series, "series"), (_dumps, "dumps")):
        try:
            pairs = looked(run, good)
        except ProbeError as error:
            details.append(f"not compared: {what}: {error}")
            continue
        if pairs is None:
            kept = " (`config_check: true` in a plan keeps them)" if looked is _packs else ""
            details.append(f"not compared: {what}, which not both runs have{kept}")
            continue
        for stage, cause in pairs:
            found.setdefault(stage, []).append(cause)
        if not pairs:
            details.append(f"the same in both, as far as both hold them: {what}")
    step, operation = (found.get(stage, [None])[0] for stage in (STEP, OPERATION))
    site = step.finding.site if step is not None and step.finding is not None else None
    rate = site is not None and site.kind == "scalar" and role_of(site.name) == "learning rate"
    stages = [CONFIGURATION, WEIGHTS, DATA, STEP, OPERATION]
    if step is not None and operation is not None and not rate and (operation.step or 0) <= (step.step or 0):
        stages[-2:] = OPERATION, STEP  # a call of the step says more than its series
    return [Parting(stage, found[stage][:_MOST]) for stage in stages if stage in found], details


Found = list[tuple[str, Cause]] | None  # None where not both have it


def _packs(run: Path, good: Path) -> Found:
    packs = [_pack(good), _pack(run)]
    bench, cmp = packs
    if bench is None or cmp is None:
        return None
    compared = compare_packs(bench, cmp)
    causes, consequences = causes_and_consequences(compared.checks)
    command = f"`trainprobe config-check compare {shlex.quote(bench.path)} {shlex.quote(cmp.path)}`"
    found: list[tuple[str, Cause]] = []
    for one in (one for one in causes if not one.topic.startswith(_NOT_CAPTURED)):
        stage = next((stage for topic, stage in _EFFECTS.items() if one.topic.startswith(topic)), CONFIGURATION)
        follows = [f"follows: {other.text}" for other in consequences[:_MOST]]
        weak = [f"told as a {one.level} only"] if one.level != "error" else []
        found.append((stage, Cause(stage, one.text, command, None, True, ["both runs captured it", *follows], weak)))
    return found


def _pack(folder: Path) -> Pack | None:
    path = folder / PACK
    try:
        return read_pack(path)
    except FormatError:
        if path.exists():
            raise
        return None


def _states(run: Path, good: Path) -> Found:
    """Compare what both saved under one name, in the order of the numbers in it, up to the first that differs."""
    names = [name for name in _saved(run) if (good / name).is_file()]
    if not names:
        return None
    same: Path | None = None
    for name in names[: 2 * _MOST]:
        a, b = logical(open_checkpoint(good / name), open_checkpoint(run / name))
        verdict = verdict_of(compare(a, b))
        if verdict.code in (0, 1):
            same = name
            continue
        paths = f"{shlex.quote(str(good / name))} {shlex.quote(str(run / name))}"
        evidence = [f"{same} is the same in both"] if same is not None else ["it is the first saved state of both"]
        stage = STEP if same is not None else WEIGHTS
        return [(stage, Cause(stage, f"{name}: {verdict.sentence}", f"`trainprobe ckpt-compare {paths}`", evidence=evidence))]
    return []


def _saved(folder: Path) -> list[Path]:
    found = (path.relative_to(folder) for suffix in _STATES for path in folder.rglob(f"*{suffix}"))
    return sorted((path for path in found if not re.match(r"(step|rank)\d+$", path.parts[0])), key=_numbers)


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", str(path))], str(path)


def _series(run: Path, good: Path) -> Found:
    here, there = (_histories(folder) for folder in (run, good))
    if not here or not there:
        return None
    found = departures(here, there)
    first = first_departure(found, str(good), measured=False)
    if first is None:
        return []
    steps = {int(step) for history in here.values() for step in history.steps}
    before = sum(step < (first.step or 0) for step in steps)
    stage = STEP if before or first.site is None else _stage_of(first.site)
    since = f"{before} steps before are the same within rounding" if before else "it is the first step of both"
    evidence = [since, f"{len(found)} series differ", *notes_on(here, there, str(good), found)]
    command = f"`trainprobe report {shlex.quote(str(run))} --beside {shlex.quote(str(good))}`"
    weak = "rounding is a model here: a third run, given to `trainprobe report --floor`, measures it"
    cause = Cause(stage, first.message, command, first.step, stage != STEP, evidence, [weak], first)
    return [(stage, cause)]


def _stage_of(site: Site) -> str:
    """Return the stage of what differs at the first step that both have."""
    if site.kind in ("parameter", "state") and site.slot.startswith("value") and not site.slot.endswith("_after"):
        return WEIGHTS
    return DATA if site.kind == "module" and site.slot.startswith(("input", "kwargs")) else STEP


def _histories(folder: Path) -> dict[int, History]:
    """Return the series of the first ranks of a run; none where it has no log of its own."""
    histories: dict[int, History] = {}
    for log in find_logs(folder)[:_MOST]:
        for _ in collect_histories(read_frames(log), histories):
            pass
    return histories


def _dumps(run: Path, good: Path) -> Found:
    """Compare the dumps of steps that both have, up to the first that differs."""
    here, there = (_dumped(folder) for folder in (run, good))
    both = sorted(here.keys() & there.keys())
    if not both:
        return None
    for step in both[:_MOST]:
        _, verdict = compare_dumps(there[step], here[step], all_calls=False)
        if verdict.code != 2:
            continue
        command = f"`trainprobe dump-compare {shlex.quote(str(there[step]))} {shlex.quote(str(here[step]))}`"
        evidence = [f"of the steps that both dumped, {step} is the first that differs", *verdict.details[:_MOST]]
        stage = _stage_of_dump(verdict, step == both[0])
        return [(stage, Cause(stage, verdict.sentence, command, step, evidence=evidence))]
    return []


def _stage_of_dump(verdict: DumpsVerdict, at_first: bool) -> str:
    """Return the stage of the first difference of two dumps; another operation made it, unless it was given something else."""
    judged = verdict.first[1] if verdict.first is not None else None
    given = given_another(judged) if judged is not None else None
    if judged is None or given is None:
        return OPERATION
    if is_a_weight(judged.call, given):
        return WEIGHTS if at_first else OPERATION
    return DATA if judged.call.name == ROOT else OPERATION


def _dumped(folder: Path) -> dict[int, Path]:
    return {step: path for step, path in find_steps(folder).items() if any(map(holds_dump, find_ranks(path).values()))}
