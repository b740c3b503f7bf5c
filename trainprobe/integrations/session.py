"""One training as a callback sees it: a probe from its first step to its last, and what the next training inherits.

A framework's callback tells a Session when training begins, when a step begins and ends, and when training ends, in the
framework's own step numbers. The Session takes what frameworks do besides: events reported twice, a second training, a crash, a
resumed run.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.stats import finish
from trainprobe.engine.storage.script_logs import SCRIPT_LOGS
from trainprobe.errors import StopTraining
from trainprobe.integrations import announce
from trainprobe.integrations.output_folder import placed
from trainprobe.monitor.audit.facts.updates import Progress
from trainprobe.monitor.watcher import Watcher, keep_state, resume_state
from trainprobe.watching import PlanSource, Probe

WriteLine = Callable[[str], Any]
Follow = Callable[[Probe], Any]
KEPT = 5  # files of rule states that each rank keeps


class Session:
    """Watches one training after the other under one plan. plan: as for `trainprobe.Probe`; None for the default plan.

    probe_kind: the class of its probes.
    """

    probe_kind: type[Probe] = Probe

    def __init__(self, plan: PlanSource = None, **overrides: Any) -> None:
        self.plan = load_plan(plan, self.probe_kind.backend.name, **overrides)
        self.asked = self.plan.output  # the plan has the folder that is written to
        self.probe: Probe | None = None
        self.findings: list[Finding] = []
        self.step_data: StepData | None = None  # of the last step that was collected
        self.inherited: Mapping[str, Any] | None = None  # what `state` returned before a restart
        self._watcher: Watcher | None = None
        self._place: Place | None = None
        self._model: Any = None
        self._loop_hooks: Any = None
        self._open: int | None = None  # number of the step that has begun
        self._last: int | None = None
        self._micro = -1
        self._loss: Any = None
        self._later: list[Any] = []  # losses of the step since `losses_begin_again`
        self._of_others = False  # what was added to the loss may have been for another model
        self._seen = 0
        self._trainings = 0
        self._about = ""
        self.more = False  # values of a step are told until the next one begins

    # ---- a training ----------------------------------------------------------------------------------------------

    def begin(
        self,
        model: Any,
        optimizers: Sequence[Any],
        *,
        step: int,
        first: int = 1,
        place: Place | None = None,
        rename: Rename | None = None,
        write_line: WriteLine | None = None,
        follow: Follow | None = None,
        progress: Callable[[], Progress] | None = None,
        logs: Mapping[str, Any] | None = None,
    ) -> None:
        """Training begins. Raises what `Probe.open` raises.

        step: the number of its first step. first: what that is in a new run; a higher one goes on with an earlier run.
        rename: gives modules their names over all ranks. write_line: prints a line (what is watched at the start, each
        finding, the outcome at the end). follow: attaches the open probe to an engine that trains by its own rules; returns
        an object with `end()`, or None. progress: returns how far the training is; called at audited steps.
        logs: where the framework's own loggers write, by the name of the sink that goes there, too (SCRIPT_LOGS).
        """
        if self.probe is not None and self._model is model and self._last is None:
            return  # the callback was added twice: each event comes twice
        self.end(complete=False)
        if not self._trainings:
            hint = (self.inherited or {}).get("output")
            self.plan = placed(self.plan, self.probe_kind.backend.place(), resumed=step > first, hint=hint)
        plan = self.plan
        if self._trainings or step > first:  # what this run or the one that it resumes wrote stays
            plan = load_plan(plan, on_existing="continue")
        probe = self.probe_kind(plan, place=place, rename=rename)
        if write_line is not None:
            probe.console.write_line = write_line
        probe.console.about = self._about
        told = SCRIPT_LOGS.set(logs or {})
        try:
            probe.open(model, list(optimizers))
        finally:
            SCRIPT_LOGS.reset(told)
        if progress is not None and probe.audit is not None:
            probe.audit.tap.follow(progress)
        probe.watchers.append(self._keep_step)
        self.probe, self._model, self._place = probe, model, probe.place
        self._loop_hooks = follow(probe) if follow is not None else None
        self._inherit(probe, step, first)
        self._last = self._open = None
        self._seen = 0
        self._trainings += 1
        self.findings = probe.findings
        announce(probe)
        atexit.register(self.end, complete=False)

    def end(self, *, complete: bool = True, error: BaseException | None = None) -> None:
        """Training is over; complete=False where something cut it short, error: what did. Safe to call at any time."""
        probe, self.probe = self.probe, None
        if probe is None:
            return
        if error is not None:
            probe.interrupted(error)
        atexit.unregister(self.end)
        if self._open is not None:
            self._open = None
            probe.end_step(complete=complete)
        self._model = None
        if self._loop_hooks is not None:
            self._loop_hooks.end()
        probe.close()

    def tell_of(self, model: str) -> None:
        """Begin what is printed from now on with the name of its model, as there are several."""
        self._about = model
        if self.probe is not None:
            self.probe.console.about = model

    # ---- a step --------------------------------------------------------------------------------------------------

    def step_begins(self, number: int) -> bool:
        """Tell that step `number` begins, unless it has; return whether it is collected."""
        probe = self.probe
        if probe is None:
            return False
        if self._open != number:
            if self._open is not None:
                probe.end_step(complete=False)
            self._open, self._micro, self._loss = number, -1, None
            self._later, self._of_others = [], False
            probe.begin_step(number)
        return probe.tape is not None

    def micro_begins(self) -> None:
        """Tell that the next micro-batch of the step begins."""
        self._micro += 1
        if self.probe is not None:
            self.probe.moment("micro", self._micro)

    def add_loss(self, loss: Any) -> None:
        """Add a micro-batch's share to the step's loss. loss: tensor of one element, divided by their number already."""
        probe = self.probe
        if probe is not None and probe.tape is not None:
            probe.guard.run(self._add_loss, probe, loss)

    def others_updated(self) -> None:
        """Tell that another model was updated: if a further loss comes, all before it was for that model."""
        self._of_others = True
        self._to_audit("others_updated")

    def _to_audit(self, event: str) -> None:
        if self.probe is not None and self.probe.audit is not None:
            self.probe.audit.tap.notify(event)

    def losses_begin_again(self) -> None:
        """Remember where in the step this is: `only_later_losses` may be told of it."""
        self._later = []

    def only_later_losses(self) -> None:
        """Leave out the losses that came before `losses_begin_again`: nothing used their gradients."""
        later, self._later, self._loss = self._later, [], None
        for share in later:
            self.add_loss(share)

    def note(self, name: str, value: Any) -> None:
        """Keep a scalar of the step that is open; anything but a number or a tensor of one element is left out."""
        probe = self.probe
        if probe is None or probe.tape is None or value is None or isinstance(value, str):
            return
        if name == "loss_scale" and name in probe.tape.scalars:
            return  # the one in use was seen; by now the scaler may hold that of the next step
        probe.note(name, value)

    def step_ends(self, *, complete: bool = True) -> StopTraining | None:
        """Tell that the step has ended; return the wish of a rule to stop the training, if there is one.

        complete: False for one that was cut short.
        """
        if self.probe is None or self._open is None:
            return None
        self._last, self._open = self._open, None
        try:
            self.probe.end_step(complete=complete, more=self.more)
        except StopTraining as stop:
            return stop
        return None

    def drop_step(self) -> None:
        """Forget the step that has begun, as if it had not: it is neither written nor judged."""
        if self.probe is not None and self._open is not None:
            self._open = None
            self.probe.drop_step()

    @property
    def is_of_others(self) -> bool:
        """Whether all losses of the step so far may have been for the update of another model."""
        return self._of_others

    @property
    def is_inside(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._open is not None

    @property
    def may_stop(self) -> bool:
        """Whether a rule of the plan may stop the training; ranks then have to agree after each step."""
        return self._watcher is not None and any("stop" in rule.actions for rule in self._watcher.rules.values())

    # ---- what the user's loggers get -------------------------------------------------------------------------------

    def fresh_findings(self) -> list[Finding]:
        """Return the findings that were made since the last call, of warnings and errors."""
        fresh, self._seen = self.findings[self._seen :], len(self.findings)
        return [finding for finding in fresh if finding.severity != "info"]

    def scalars(self, *, wait: bool = True) -> dict[str, float]:
        """Return a few numbers of the last step for the user's loggers; nothing when it was not collected.

        wait: for a device that has not brought them yet; without it nothing is returned of such a step.
        """
        if self.probe is not None and wait:
            self.probe.settle()
        if self.step_data is None or self.step_data.step != self._last:
            return {}
        found = {"trainprobe/findings": float(sum(f.severity != "info" for f in self.findings))}
        norm = gradient_norm(self.step_data)
        return found if norm is None else {**found, "trainprobe/grad_norm": norm}

    # ---- over a restart ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what the rules remember, for the framework's checkpoint; ranks other than 0 keep theirs next to the output."""
        watcher, place = self._watcher, self._place
        if self.probe is not None:
            self.probe.settle()
        if watcher is None or place is None:
            return dict(self.inherited or {})
        step = -1 if self._last is None else self._last
        if place.rank:
            self.keep()
        return {"step": step, "rank": place.rank, "output": str(self.plan.output), "rules": watcher.state()}

    def keep(self) -> None:
        """Write what the rules of this rank remember next to the output, for the run that goes on after the last step."""
        if self.probe is not None:
            self.probe.settle()
        watcher, place = self._watcher, self._place
        if watcher is None or place is None:
            return
        path = self._state_file(place.rank, -1 if self._last is None else self._last)
        failed = keep_state(watcher, path)
        if failed is not None:
            if self.probe is not None:
                self.probe.report(failed)
            return
        for old in sorted(path.parent.glob("rules_step*.json"), key=lambda p: p.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)

    def _keep_step(self, step_data: StepData) -> tuple[()]:
        self.step_data = step_data
        return ()

    def _inherit(self, probe: Probe, step: int, first: int) -> None:
        """Let the rules go on from the checkpoint, or from the training before when this one continues it."""
        if probe.monitor is None:
            return
        watcher = probe.monitor.watcher
        inherited, self.inherited = self.inherited, None
        if inherited and inherited.get("rules"):
            if probe.place.rank == inherited["rank"]:
                probe.guard.run(watcher.restore, inherited["rules"])
            else:
                probe.report(probe.guard.run(resume_state, watcher, self._state_file(probe.place.rank, int(inherited["step"]))))
        elif self._watcher is not None and self._last is not None and step > self._last:
            probe.guard.run(watcher.restore, self._watcher.state())
        elif step > first:
            probe.report(
                probe.guard.run(resume_state, watcher, self._state_file(probe.place.rank, step - 1))
            )  # where it was kept
        self._watcher = watcher

    def _state_file(self, rank: int, step: int) -> Path:
        return self.plan.output / f"rank{rank}" / f"rules_step{step}.json"

    def _add_loss(self, probe: Probe, loss: Any) -> None:
        if self._of_others:
            self._of_others, self._loss, self._later = False, None, []
            if probe.tape is not None:
                probe.tape.scalars.pop("loss_scale", None)  # of their scaler
            self._to_audit("was_of_others")
        share = loss.detach() if hasattr(loss, "detach") else loss
        self._loss = share if self._loss is None else self._loss + share
        self._later.append(share)
        probe.note("loss", self._loss)


def gradient_norm(step_data: StepData) -> float | None:
    """Return the norm over all gradients as the optimizer saw them; None where this process does not hold them whole."""
    rows: list[int] = []
    for call in step_data.calls:
        gradient = (call.params or {}).get("grad") if call.kind == "state" and call.node == "before_step" else None
        if gradient is not None:
            if gradient.extra or gradient.row < 0:
                return None
            rows.append(gradient.row)
    if not rows:
        return None
    norms = finish(step_data.partials[rows], ("norm",))["norm"]
    return float((norms**2).sum() ** 0.5)


def agreed(stop: bool, device: Any = None) -> bool:
    """Return whether any rank wants to stop: one small collective, which only a plan with the action "stop" causes."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return stop
    import torch

    from trainprobe.engine.capture.gathering import released

    wish = torch.tensor(float(stop), device=device)
    distributed.all_reduce(wish, distributed.ReduceOp.MAX)
    released([wish])
    return bool(wish.item())
