"""Runs a step of a training once more, before the optimizer moves: forward and backward.

The second run begins with the buffers, attributes and random states of the first, is given the same inputs, and its backward
the same gradients of the model's outputs. Afterwards everything is as it was (`engine.state_guard`).

What runs outside of the model (a loss that the loop computes) is not run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.again.model_calls import ModelCall, ModelCalls
from trainprobe.again.recording import Key, Recorder, Run, Shown
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.optimizer_steps import OptimizerStepTap
from trainprobe.engine.capture.patching import module_calls
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.engine.state_guard import StateGuard, bits_of
from trainprobe.engine.stats.partials import CHECKSUM
from trainprobe.monitor.audit.capture.audit_tap import AuditTap
from trainprobe.monitor.audit.capture.registered import unwrapped

PART = "the repeated step"


class StepAgain(Program):
    """Runs each `every`-th step once more. A condition compares the runs in `judged`."""

    def __init__(self, making: Making, every: int) -> None:
        super().__init__("repeat", Schedule(), part=PART)
        self.every = every
        self._making = making
        self._recorder: Recorder | None = None
        self._replaced: Replaced | None = None
        self._stepping: OptimizerStepTap | None = None
        self.roots: dict[int, Any] = {}
        self._calls = ModelCalls()
        self._before: StateGuard | None = None
        self.begun: dict[str, int] = {}  # fingerprints of parameters as the step began
        self.versions: dict[str, int] = {}
        self._within = self._asked = self._done = False
        self._why = ""  # the last step that was not run again, or not judged, was not
        self._unjudged = 0  # steps that ran again and were not judged
        self.repeated = 0  # steps that were run again

    # ---- events ------------------------------------------------------------------------------------------------------

    def attached(self, probe: EngineProbe) -> None:
        """Where the probe stops, leave nothing installed."""
        self.probe = probe
        probe.guard.of(PART).on_trip(self._remove)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn the model."""
        self.roots = {id(root): root for root in map(inside_of_ranks, chunks_of(model))}
        self._recorder = Recorder(self._making, self.probe.report)
        self._recorder.open(model, optimizer)
        self._recorder.guard.on_trip(self._remove)
        self._stepping = OptimizerStepTap(self.probe.guard, self._updates, lambda optimizer: None)

    def begins(self, step: int) -> None:
        """Begin to record a step that is due."""
        self._remove()
        if step % self.every or self._recorder is None:
            return
        why = why_not(list(self.roots.values()))
        if why:
            self.say(why)
            return
        tape = self._recorder.begin()
        self._asked, self._done, self._calls, self._before = True, False, ModelCalls(), None
        self.begun = self.fingerprints()
        self.versions = {name: p._version for name, p in self.named()}
        if self._stepping is not None:
            self._stepping.begin(tape)
        self._replaced = module_calls.through(self._called)

    def ended(self, step: int, complete: bool) -> None:
        """Let go of the step."""
        if self._asked and not self._done and complete:
            self.say("were not run again: no optimizer of torch stepped in them")
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
            self.probe.at_end(f"{told}{unjudged}: {why}." if why else f"{told}.")

    # ---- the first run -----------------------------------------------------------------------------------------------

    def _called(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if id(module) not in self.roots or self._within or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        part = partial(self.probe.guard.run, self.probe.guard.part, PART)
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
            self._before = StateGuard(list(self.roots.values()), parameters=False)
            self._before.__enter__()
        return self._calls.take(module, args, kwargs)

    # ---- again -------------------------------------------------------------------------------------------------------

    def _updates(self, optimizer: Any) -> None:
        if self._asked and not self._done:
            self._done = True
            self.probe.guard.part(PART, self._repeat)

    def _repeat(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        first = recorder.end(self.probe.step_number, self.probe.place)[0]
        self._calls.over = True
        if not self._calls.passes:
            self.say("were not run again: no gradient was seen at the outputs of the model")
            return
        if self._calls.not_again:
            self.say(f"were not run again: {self._calls.not_again}")
            return
        self.repeated += 1
        with self._others_rest(), StateGuard(list(self.roots.values())):
            found = self.compared(first)
        self.told(found)

    def compared(self, first: Run) -> Finding | None:
        """Compare the training's own run of the step with further ones (`run_again`); return what that comes to."""
        raise NotImplementedError

    def told(self, found: Finding | None) -> None:
        """Report what was found. May raise StopTraining in the place of the update."""
        raise NotImplementedError

    def run_again(self, keep: Callable[[str, Any], None] | None = None) -> Run:
        """Run all calls of the model of this step again, and return what they showed."""
        recorder, before = self._recorder, self._before
        assert recorder is not None and before is not None
        before.put_back()
        tape = recorder.begin()
        recorder.keep = keep
        made: list[tuple[Key, Any, Any]] = []  # gradients
        counts = Counter[str]()
        try:
            for name, t in self._calls.again(recorder.names):
                made.append((Key("parameter", name, "backward", counts[name]), tape.value(t, CHECKSUM), t))
                counts[name] += 1
            run, step_data = recorder.end(self.probe.step_number, self.probe.place)
        finally:
            recorder.keep = None
            if recorder.tape is not None:
                recorder.drop()
        sums = step_data.checksums
        for key, value, t in made:
            if key not in run and value.row >= 0 and sums is not None:
                run[key] = Shown(key, None, made={"grad": int(sums[value.row])})
                if keep is not None:
                    keep(str(key), t)
        return run

    @contextmanager
    def _others_rest(self) -> Generator[None]:
        """Have all that listens to the training rest."""
        audit = self._making.taps.get("audit", AuditTap)
        self.probe.pause()
        self._within = True
        if audit is not None:
            audit.rest(True)
        try:
            yield
        finally:
            if audit is not None:
                audit.rest(False)
            self._within = False
            self.probe.resume()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def fingerprints(self) -> dict[str, int]:
        """Return name → fingerprint of each parameter as it is now."""
        recorder = self._recorder
        assert recorder is not None
        with torch.no_grad(), DisableTorchFunction():
            rows = recorder.library.stats_rows(CHECKSUM)
            names = [(name, rows.add(p)) for name, p in self.named()]
            sums = rows.drain()[1]
        return {name: int(sums[row]) for name, row in names if row >= 0 and sums is not None}

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, parameter) of all models."""
        names = self._recorder.names if self._recorder is not None else {}
        return ((names[id(p)], p) for root in self.roots.values() for p in root.parameters() if id(p) in names)

    def say(self, why: str) -> None:
        """Say once why a step was not run again, or not judged."""
        self._why = why
        self._unjudged += why.startswith("were not judged")
        step, place = self.probe.step_number, self.probe.place
        note = Finding("repeat", "info", f"step {step} and others like it {why}", step, place)
        self.probe.reporter.report_once(note, key=f"repeat: {why}")

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
