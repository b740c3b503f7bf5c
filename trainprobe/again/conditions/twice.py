"""The same step twice on the same machine: nothing differs.

Where a fingerprint differs, more runs decide: an op that gives another answer each time is not deterministic; a value that only
one run of many had was changed by the hardware, and where a single flipped bit explains it, that bit is named. A fault that is
the same each time on this machine is not seen.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from trainprobe.again.first_place import Difference, first_difference, missing
from trainprobe.again.recording import Run, parameter_of
from trainprobe.again.script_runs import Script, of_a_script, run_script, script_of
from trainprobe.again.step_again import StepAgain, host_bits
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.findings import ranks_of
from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.core.words import counted, numbered
from trainprobe.engine.program import Making
from trainprobe.engine.stats.flipped import Flip, flip_behind
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.layout import find_dumps
from trainprobe.errors import StopTraining

FURTHER = 4  # runs that decide once two differ


class RepeatedStep(StepAgain):
    """See the module text. stops: raise StopTraining instead of an unsound update."""

    def __init__(self, making: Making, every: int, stops: bool) -> None:
        super().__init__(making, every)
        self._stops = stops
        self._reported: dict[str, Finding] = {}  # ops that are not deterministic, by name

    def compared(self, first: Run) -> Finding | None:
        """Run the step again, and more often where the runs differ; return what that comes to."""
        second = self.run_again()
        changed = self._changed_weight(first)
        if changed is not None:
            return self._of_weight(*changed)
        place = first_difference(first, second)
        if place is not None:
            return self._judged(place, [first, second, *(self.run_again() for _ in range(FURTHER))])
        odd = missing(first, second)
        if odd is not None:
            self.say(f"were not judged: {odd} ran in one of two runs alone")
        return None

    def told(self, found: Finding | None) -> None:
        """Report a fault; an op that is not deterministic is reported once, and counted."""
        if found is None:
            return
        known = self._reported.get(repr(found.site)) if found.severity == "warning" else None
        if known is None:
            self.probe.report(found)
        else:
            found = self.probe.reporter.count([known], self.probe.step_number)[0]
        self._reported[repr(found.site)] = found
        if self._stops and found.severity == "error":
            raise StopTraining(f"the update of step {found.step} is not made: {found.message}")

    def _changed_weight(self, first: Run) -> tuple[str, str, Flip | None] | None:
        """Return which parameter was written since the step began, which nobody may do before the update; when; which bit."""
        used = {
            parameter_of(key, slot): fingerprint
            for key, shown in first.items()
            for slot, fingerprint in shown.given.items()
            if slot.startswith("parameters.")
        }
        now = self.fingerprints()
        for name, p in self.named():
            for when, then in (("since the step began", self.begun.get(name)), ("since its forward", used.get(name))):
                if then is not None and now.get(name, then) != then:
                    quiet = p._version == self.versions.get(name)
                    return name, when, flip_behind(host_bits(p), then, str(p.dtype)) if quiet else None
        return None

    def _of_weight(self, name: str, when: str, flip: Flip | None) -> Finding | None:
        if flip is None:
            self.say(f"were not judged: {name} was written {when}, in more than one bit, or by a write that torch knows of")
            return None
        text = f"hardware: on rank {self.probe.place.rank} one bit of the weight {name} changed {when}: element {flip}"
        return self._finding("error", text, Site("parameter", name, "value"), str(flip), _OF_HARDWARE)

    def _judged(self, place: Difference, runs: list[Run]) -> Finding:
        """Return the finding of a step whose runs differ. place: where the first two do."""
        alike = [frozenset(j for j, b in enumerate(runs) if first_difference(a, b) is None) for a in runs]
        outcomes = len(set(alike))
        odd = next((i for i, same in enumerate(alike) if outcomes == 2 and len(same) == 1), None)
        if odd is None:
            many = f"{outcomes} different outcomes in {len(runs)} runs of the same step"
            text = f"not deterministic: {place.key}, {place.slot}: {many}; {_behind(place)}"
            return self._finding("warning", text, _site(place), None, _OF_OPS)
        steady = runs[min(max(alike, key=len))]
        place = first_difference(steady, runs[odd]) or place
        shown = runs[odd][place.key]
        flip = self._flip(place, steady, {**shown.given, **shown.made}[place.slot])
        which = "the training's own run" if odd == 0 else f"run {odd + 1}"
        rank, where, count = self.probe.place.rank, f"{place.key}, {place.slot}", len(runs)
        if flip is not None:
            text = f"hardware: on rank {rank} one bit of {where} was flipped in {which} of {count} of this step: element {flip}"
            return self._finding("error", text, _site(place), str(flip), _OF_HARDWARE)
        others = f"than in all of {count - 1} others, by more than one flipped bit"
        text = f"on rank {rank} {where} had other bits in {which} {others}; {_behind(place)}"
        return self._finding("warning", text, _site(place), None, _OF_STATE if odd == 0 else _OF_HARDWARE)

    def _flip(self, place: Difference, steady: Run, seen: int) -> Flip | None:
        """Return the bit that turns the value of the steady runs into the one with the fingerprint `seen`."""
        value = steady[place.key].values.get(place.slot)
        wanted = value.tensor if value is not None else str(place.key)
        held: list[Any] = []

        def keep(key: str, t: Any) -> None:
            if key == wanted and not held:
                held.append(t.detach().clone())

        self.run_again(keep)
        return flip_behind(host_bits(held[0]), seen, str(held[0].dtype)) if held else None

    def _finding(self, severity: Any, text: str, site: Site, measured: str | None, following: str) -> Finding:
        step, place = self.probe.step_number, self.probe.place
        return Finding("repeat", severity, text, step, place, site, measured=measured, next=following)


_OF_HARDWARE = (
    "test this device before it is used again (`nvidia-smi -q`, the vendor's diagnostics), and go on from a checkpoint before "
    "this step"
)
_OF_OPS = "`torch.use_deterministic_algorithms(True)` names such ops; give each generator a seed"
_OF_STATE = "look for state outside of the model that its forward reads or writes; if there is none, test this device"


def _behind(place: Difference) -> str:
    return f"from there on {place.total} of {place.compared} values differ"


def _site(place: Difference) -> Site:
    key = place.key
    return Site(key.kind, key.name, place.slot, key.number)  # pyright: ignore[reportArgumentType]


@of_a_script
def again(
    words: Script = None,
    step: Annotated[int, typer.Option(help="The step, as the training counts.", min=0)] = 0,
    ranks: Annotated[int, typer.Option(help="Processes; several are started by torchrun.", min=1)] = 1,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run a script, and forward and backward of one of its steps twice: is the hardware or an op unsteady?

    Let the script end behind the step. Exit code: 0 the same bits, 2 not deterministic or a fault of the hardware, 3 the step
    was not run again.
    """
    script = script_of(words, "again --step 100 -- train.py --steps 101")
    with tempfile.TemporaryDirectory() as folder:
        audit = {"repeat": max(step, 1), "every": max(step, 1)}
        verdict = _verdict(run_script(script, Path(folder) / "run", [step], ranks=ranks, audit=audit).to_its_end().folder, step)
    return answered(verdict, "again", " ".join(script), json, html)


def _verdict(folder: Path, step: int) -> Verdict:
    """Return what the repeat of a step came to on all ranks of a run."""
    ranks = find_dumps(folder).get(step, {})
    found = [f for f in read_findings(folder) if f.rule == "repeat"]  # step 0 runs twice too, and one fault is told once
    bad = sorted((f for f in found if f.severity != "info"), key=lambda f: f.severity != "error")
    if bad:
        told = {rank for finding in found for rank in ranks_of(finding)}
        same = [f"the same bits in both runs: {numbered('rank', sorted(ranks.keys() - told))}"] if ranks.keys() - told else []
        return Verdict(2, bad[0].message, [*filter(None, [bad[0].next]), *same, *(f.message for f in bad[1:])])
    if not ranks or found:
        why = found[0].message if found else f"step {step} was not reached: which steps does the script count?"
        return Verdict(3, f"not comparable: {why}")
    text = f"forward and backward of step {step} ran twice on {counted(len(ranks), 'rank')}, with the same bits"
    return Verdict(0, f"identical: {text}")
