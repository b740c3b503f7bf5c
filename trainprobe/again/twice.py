"""The same step twice on the same machine: forward and backward once more, before the optimizer moves.

The second run begins with the buffers, attributes and random states of the first, is given the same inputs, and its backward
the same gradients of the model's outputs. Where a fingerprint differs, more runs decide: an op that gives another answer each
time is not deterministic; a value that only one run of many had was changed by the hardware, and where a single flipped bit
explains it, that bit is named. Afterwards everything is as it was (`engine.state_guard`).

What runs outside of the model (a loss that the loop computes) is not run again, and a fault that is the same each time on this
machine is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.again.first_place import Difference, first_difference, missing
from trainprobe.again.model_calls import ModelCall, ModelCalls
from trainprobe.again.recording import Key, Recorder, Run, Shown, parameter_of
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.optimizer_steps import OptimizerStepTap
from trainprobe.engine.capture.patching import module_calls
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.state_guard import StateGuard, bits_of
from trainprobe.engine.stats.flipped import Flip, flip_behind
from trainprobe.engine.stats.partials import CHECKSUM
from trainprobe.errors import StopTraining
from trainprobe.monitor.audit.capture.audit_tap import AuditTap
from trainprobe.monitor.audit.capture.registered import unwrapped

PART = "the repeated step"
FURTHER = 4  # runs that decide once two differ


class RepeatedStep(Program):
    """See the module text. every: at each so many steps. stops: raise StopTraining instead of an unsound update."""

    def __init__(self, making: Making, every: int, stops: bool) -> None:
        super().__init__("repeat", Schedule(), part=PART)
        self.every, self._stops = every, stops
        self._making = making
        self._recorder: Recorder | None = None
        self._replaced: Replaced | None = None
        self._stepping: OptimizerStepTap | None = None
        self._roots: dict[int, Any] = {}
        self._calls = ModelCalls()
        self._before: StateGuard | None = None
        self._begun: dict[str, int] = {}  # fingerprints of parameters as the step began
        self._versions: dict[str, int] = {}
        self._reported: dict[str, Finding] = {}  # ops that are not deterministic, by name
        self._within = self._asked = self._done = False
        self._why = ""  # the last step that was not run again, or not judged, was not
        self._unjudged = 0  # steps that ran again and were not judged
        self.repeated = 0  # steps that were run again

    # ---- events ------------------------------------------------------------------------------------------------------

    def attached(self, probe: EngineProbe) -> None:
        """Where the probe stops, leave nothing installed."""
        self._probe = probe
        probe.guard.of(PART).on_trip(self._remove)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn the model."""
        self._roots = {id(root): root for root in map(inside_of_ranks, chunks_of(model))}
        self._recorder = Recorder(self._making, self._probe.report)
        self._recorder.open(model, optimizer)
        self._recorder.guard.on_trip(self._remove)
        self._stepping = OptimizerStepTap(self._probe.guard, self._updates, lambda optimizer: None)

    def begins(self, step: int) -> None:
        """Begin to record a step that is due."""
        self._remove()
        if step % self.every or self._recorder is None:
            return
        why = why_not(list(self._roots.values()))
        if why:
            self._say(why)
            return
        tape = self._recorder.begin()
        self._asked, self._done, self._calls, self._before = True, False, ModelCalls(), None
        self._begun = self._fingerprints()
        self._versions = {name: p._version for root in self._roots.values() for name, p in self._named(root)}
        if self._stepping is not None:
            self._stepping.begin(tape)
        self._replaced = module_calls.through(self._called)

    def ended(self, step: int, complete: bool) -> None:
        """Let go of the step."""
        if self._asked and not self._done and complete:
            self._say("were not run again: no optimizer of torch stepped in them")
        self._remove()

    def dropped(self) -> None:
        """Forget the step."""
        self._remove()

    def closed(self) -> None:
        """Let go of everything; say how many steps were run again."""
        self._remove()
        ran, why = self.repeated, self._why.partition(": ")[2]
        if ran or why:
            told = f"{ran or 'No'} step{'s' * (ran != 1)} ran twice"
            unjudged = f", {self._unjudged} of them not judged" if self._unjudged else ""
            self._probe.at_end(f"{told}{unjudged}: {why}." if why else f"{told}.")

    # ---- the first run -----------------------------------------------------------------------------------------------

    def _called(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if id(module) not in self._roots or self._within or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        part = partial(self._probe.guard.run, self._probe.guard.part, PART)
        call = part(self._take, module, args, kwargs)
        self._within = True
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._within = False
        if call is not None:
            part(call.outputs.listen, tensors_of(result))
        return result

    def _take(self, module: Any, args: Any, kwargs: Any) -> ModelCall:
        if self._before is None:
            self._before = StateGuard(list(self._roots.values()), parameters=False)
            self._before.__enter__()
        return self._calls.take(module, args, kwargs)

    # ---- again -------------------------------------------------------------------------------------------------------

    def _updates(self, optimizer: Any) -> None:
        if self._asked and not self._done:
            self._done = True
            self._probe.guard.part(PART, self._repeat)

    def _repeat(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        first = recorder.end(self._probe.step_number, self._probe.place)[0]
        self._calls.over = True
        if not self._calls.passes:
            self._say("were not run again: no gradient was seen at the outputs of the model")
            return
        if self._calls.not_again:
            self._say(f"were not run again: {self._calls.not_again}")
            return
        self.repeated += 1
        with self._others_rest(), StateGuard(list(self._roots.values())):
            found = self._compared(first)
        if found is None:
            return
        known = self._reported.get(repr(found.site)) if found.severity == "warning" else None
        if known is not None:
            self._reported[repr(found.site)] = self._probe.reporter.count([known], self._probe.step_number)[0]
            return
        self._reported[repr(found.site)] = found
        self._probe.report(found)
        if self._stops and found.severity == "error":
            raise StopTraining(f"the update of step {found.step} is not made: {found.message}")

    def _compared(self, first: Run) -> Finding | None:
        """Run the step again, and more often where the runs differ; return what that comes to."""
        second = self._run()
        written, changed = self._weights_changed(first)
        if written:
            return changed
        place = first_difference(first, second)
        odd = missing(first, second) if place is None else None
        if place is None:
            if odd is not None:
                self._say(f"were not judged: {odd} ran in one of two runs alone")
            return None
        return self._judged([first, second, *(self._run() for _ in range(FURTHER))])

    def _run(self, keep: Callable[[str, Any], None] | None = None) -> Run:
        """Run all calls of the model of this step again, and return what they showed."""
        recorder, before = self._recorder, self._before
        assert recorder is not None and before is not None
        before.put_back()
        tape = recorder.begin()
        recorder.keep = keep
        gradients: dict[str, list[Any]] = {}
        try:
            for name, value in self._calls.again(recorder.names):
                gradients.setdefault(name, []).append((tape.value(value, CHECKSUM), value))
            run, step_data = recorder.end(self._probe.step_number, self._probe.place)
        finally:
            recorder.keep = None
            if recorder.tape is not None:
                recorder.drop()
        sums = step_data.checksums
        for name, values in gradients.items():
            for number, (value, t) in enumerate(values):
                key = Key("parameter", name, "backward", number)
                if key not in run and value.row >= 0 and sums is not None:
                    run[key] = Shown(key, None, made={"grad": int(sums[value.row])})
                    if keep is not None:
                        keep(str(key), t)
        return run

    @contextmanager
    def _others_rest(self) -> Generator[None]:
        """Have all that listens to the training rest."""
        audit = self._making.taps.get("audit", AuditTap)
        self._probe.pause()
        self._within = True
        if audit is not None:
            audit.rest(True)
        try:
            yield
        finally:
            if audit is not None:
                audit.rest(False)
            self._within = False
            self._probe.resume()

    # ---- what it comes to --------------------------------------------------------------------------------------------

    def _weights_changed(self, first: Run) -> tuple[bool, Finding | None]:
        """Tell whether a parameter was written since the step began, which nobody may do before the update; and by what."""
        used = {
            parameter_of(key, slot): fingerprint
            for key, shown in first.items()
            for slot, fingerprint in shown.given.items()
            if slot.startswith("parameters.")
        }
        now = self._fingerprints()
        for name, p in (pair for root in self._roots.values() for pair in self._named(root)):
            for when, then in (("since the step began", self._begun.get(name)), ("since its forward", used.get(name))):
                if then is not None and now.get(name, then) != then:
                    quiet = p._version == self._versions.get(name)
                    flip = flip_behind(host_bits(p), then, str(p.dtype)) if quiet else None
                    return True, self._weight_finding(name, when, flip)
        return False, None

    def _weight_finding(self, name: str, when: str, flip: Flip | None) -> Finding | None:
        rank = self._probe.place.rank
        if flip is None:
            self._say(f"were not judged: {name} was written {when}, in more than one bit, or by a write that torch knows of")
            return None
        text = f"hardware: on rank {rank} one bit of the weight {name} changed {when}: element {flip}"
        return self._finding("error", text, Site("parameter", name, "value"), str(flip), _OF_HARDWARE)

    def _judged(self, runs: list[Run]) -> Finding:
        """Return the finding of a step whose runs differ."""
        groups: list[list[int]] = []
        for i, run in enumerate(runs):
            same = next((g for g in groups if first_difference(runs[g[0]], run) is None), None)
            if same is None:
                groups.append([i])
            else:
                same.append(i)
        odd = next((g[0] for g in groups if len(groups) == 2 and len(g) == 1), None)
        most = max(groups, key=len)
        if odd is None:
            pairs = [(a, b) for a in runs for b in runs if a is not b]
            place = next(found for found in (first_difference(a, b) for a, b in pairs) if found is not None)
            return self._not_deterministic(place, len(groups), len(runs))
        steady = runs[most[0]]
        place = first_difference(steady, runs[odd])
        assert place is not None
        return self._odd_run(place, steady, runs[odd], odd, len(runs))

    def _odd_run(self, place: Difference, steady: Run, other: Run, odd: int, runs: int) -> Finding:
        rank, key = self._probe.place.rank, place.key
        shown = other[key]
        seen = {**shown.given, **shown.made}[place.slot]
        flip = self._flip(place, steady, seen)
        which = "the training's own run" if odd == 0 else f"run {odd + 1}"
        where = f"{key}, {place.slot}"
        if flip is not None:
            text = f"hardware: on rank {rank} one bit of {where} was flipped in {which} of {runs} of this step: element {flip}"
            return self._finding("error", text, _site(place), str(flip), _OF_HARDWARE)
        text = (
            f"on rank {rank} {where} had other bits in {which} than in all of {runs - 1} others, by more than one flipped bit; "
            f"from there on {place.total} of {place.compared} values differ"
        )
        return self._finding("warning", text, _site(place), None, _OF_STATE if odd == 0 else _OF_HARDWARE)

    def _not_deterministic(self, place: Difference, outcomes: int, runs: int) -> Finding:
        text = (
            f"not deterministic: {place.key}, {place.slot}: {outcomes} different outcomes in {runs} runs of the same step; "
            f"from there on {place.total} of {place.compared} values differ"
        )
        return self._finding("warning", text, _site(place), None, _OF_OPS)

    def _flip(self, place: Difference, steady: Run, seen: int) -> Flip | None:
        """Return the bit that turns the value of the steady runs into the one with the fingerprint `seen`."""
        value = steady[place.key].values.get(place.slot)
        wanted = value.tensor if value is not None else str(place.key)
        held: list[Any] = []

        def keep(key: str, t: Any) -> None:
            if key == wanted and not held:
                held.append(t.detach().clone())

        self._run(keep)
        return flip_behind(host_bits(held[0]), seen, str(held[0].dtype)) if held else None

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _finding(self, severity: Any, text: str, site: Site, measured: str | None, following: str) -> Finding:
        step, place = self._probe.step_number, self._probe.place
        return Finding("repeat", severity, text, step, place, site, measured=measured, next=following)

    def _fingerprints(self) -> dict[str, int]:
        """Return name → fingerprint of each parameter as it is now."""
        recorder = self._recorder
        assert recorder is not None
        with torch.no_grad(), DisableTorchFunction():
            rows = recorder.library.stats_rows(CHECKSUM)
            names = [(name, rows.add(p)) for root in self._roots.values() for name, p in self._named(root)]
            sums = rows.drain()[1]
        return {name: int(sums[row]) for name, row in names if row >= 0 and sums is not None}

    def _named(self, root: Any) -> Iterator[tuple[str, Any]]:
        names = self._recorder.names if self._recorder is not None else {}
        return ((names[id(p)], p) for p in root.parameters() if id(p) in names)

    def _say(self, why: str) -> None:
        """Say once why a step was not run again, or not judged."""
        self._why = why
        self._unjudged += why.startswith("were not judged")
        step, place = self._probe.step_number, self._probe.place
        note = Finding("repeat", "info", f"step {step} and others like it {why}", step, place)
        self._probe.reporter.report_once(note, key=f"repeat: {why}")

    def _remove(self) -> None:
        self._asked = False
        self._calls.over = True
        self._calls, self._before = ModelCalls(), None
        if self._replaced is not None:
            self._replaced.back()
            self._replaced = None
        if self._stepping is not None:
            self._stepping.end()
        if self._recorder is not None and self._recorder.tape is not None:
            self._recorder.drop()


_OF_HARDWARE = (
    "test this device before it is used again (`nvidia-smi -q`, the vendor's diagnostics), and go on from a checkpoint before "
    "this step"
)
_OF_OPS = "`torch.use_deterministic_algorithms(True)` names such ops; give each generator a seed"
_OF_STATE = "look for state outside of the model that its forward reads or writes; if there is none, test this device"


def _site(place: Difference) -> Site:
    key = place.key
    return Site(key.kind, key.name, place.slot, key.number)  # pyright: ignore[reportArgumentType]


def inside_of_ranks(model: Any) -> Any:
    """Return a model without the wrappers that exchange gradients, but as it is compiled."""
    layers = list(unwrapped(model))
    return next((layer for layer in layers if type(layer).__name__ == "OptimizedModule"), layers[-1])


def why_not(roots: Sequence[Any]) -> str:
    """Return why a model cannot be run again; empty where it can."""
    for root in roots:
        for name, p in root.named_parameters():
            why = next((text for sign, text in _NOT_AGAIN.items() if hasattr(p, sign)), "")
            if not why and type(p) not in (torch.Tensor, torch.nn.Parameter):
                why = f"it is a {type(p).__name__}"
            if why:
                return f"were not run again: {name}: {why}"
    return ""


# attribute of a parameter → why its model cannot be run a second time within a step
_NOT_AGAIN = {
    "main_grad": "its gradient is added to main_grad by kernels of the backward pass",
    "ds_id": "DeepSpeed gathers it for the run",
    "_is_flat_param": "FSDP gathers it for the run",
}


def host_bits(t: Any) -> Any:
    """Return the bits of a tensor on the host, as a NumPy array of its shape; whole and complex numbers as they are."""
    t = t.detach().cpu().contiguous()
    t = bits_of(t) if t.is_floating_point() else t
    return t.numpy()
