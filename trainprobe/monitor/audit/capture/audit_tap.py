"""Gathers, for each audited step, the facts that the relations of the audit are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture import AUDIT, Tap
from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.capture.parameter_states import ParameterStateTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import StepData
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.set_up import model_facts
from trainprobe.monitor.audit.facts import Facts
from trainprobe.monitor.audit.facts.model import ModelFacts, TrainingState
from trainprobe.monitor.audit.facts.updates import Progress
from trainprobe.monitor.audit.observers import Audited, Observers

if TYPE_CHECKING:
    from trainprobe.monitor.audit.program import AuditProgram


class AuditTap(Tap):
    """Has the observers listen while a step is audited; `take` returns the facts once the step has crossed to the host.

    names: id of parameter → recorded name, as it is now. rescan: learn the names anew when the model has other parameters than
    before. pause_others: is called when the audit begins and ends to run the model.
    """

    part = AUDIT
    can_declare_loss = True

    def __init__(
        self,
        guard: Guard,
        states: ParameterStateTap,
        names: Callable[[], dict[int, str]],
        rescan: Callable[[], None],
        pause_others: Callable[[bool], None],
    ) -> None:
        self._states = states
        self._rescan = rescan
        self._audited = Audited(states, names)
        self._audited.pause_others = pause_others
        self._observers = Observers(guard, self._audited)
        self._set_up: ModelFacts | None = None

    def attach(self, run: AuditProgram) -> None:
        """Ask `run` about the run; called before `open`."""
        self._audited.run = run

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Learn what the user declares to be the loss of the step (see `trainprobe.Probe.declare_loss`)."""
        self._audited.loss = loss

    def follow(self, progress: Callable[[], Progress]) -> None:
        """Learn what returns how far a trainer is that reports it."""
        self._audited.progress = progress

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember the model as it is set up."""
        self._audited.models = chunks_of(model)
        several = isinstance(optimizer, list | tuple)
        self._audited.optimizers = list(optimizer) if several else [optimizer] if optimizer else []
        self._observers.start(self._audited.run.observers)
        if self._set_up is None:
            self._set_up = self._facts()

    def begin(self, tape: Tape) -> None:
        """Listen to a step."""
        self._audited.tape = tape
        if self._parameters_changed():
            self._rescan()
            self._states.open(self._audited.models, self._audited.optimizers)
        self._states.more = STATS | CHECKSUM if self._audited.fingerprints else STATS
        self._audited.modes = None
        run = self._audited.run
        self._observers.begin(run.observers, run.observers_due())

    def rest(self, begins: bool) -> None:
        """Take no notice of the model while the tool itself runs it; begins: False when that has ended."""
        self._audited.asleep = begins

    def end(self, again: bool = False) -> None:
        """Listen no more; what was seen stays until `take`."""
        self._observers.end()
        self._audited.tape = None
        self._states.more = 0

    def close(self) -> None:
        """Leave nothing behind."""
        self.end()
        self._observers.stop()

    @property
    def awaits(self) -> bool:
        """Whether something was loaded, or a run goes on, and no comparison was made yet: the next step is audited."""
        return self._observers.awaits

    # ---- moments of the step -------------------------------------------------------------------------------------

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are whole and not yet clipped."""
        self._observers.notify("unclipped", parameters)

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        audited = self._audited
        if audited.tape is None:
            return
        if not any(optimizer is known for known in audited.optimizers):
            audited.optimizers.append(optimizer)
        self.unclipped(list(parameters_of(optimizer)))
        if audited.plain:
            self._observers.notify("before_update", audited.tape, optimizer)
        self._observers.notify("steps", optimizer)

    def after_update(self) -> None:
        """An optimizer has stepped."""
        if self._audited.tape is not None:
            self._observers.notify("stepped")

    def notify(self, event: str) -> None:
        """Tell the observers of a moment that a loop knows: another model's update, or that all so far was for it."""
        if self._audited.tape is not None:
            self._observers.notify(event)

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def take(self, step_data: StepData) -> Facts:
        """Return the facts of the step that `step_data` holds."""
        assert self._set_up is not None
        model = self._facts()
        model = model if self._audited.modes is None else replace(model, modes=self._audited.modes)
        return Facts(TrainingState(self._set_up, model, self._audited.run.ordinal), *self._observers.facts(step_data))

    def late_evaluations(self) -> Facts | None:
        """Return facts of evaluations after the last audited step, or None when there were none."""
        late = self._observers.late()
        if self._set_up is None or not late:
            return None
        return Facts(TrainingState(self._set_up, self._set_up), *late)

    def _facts(self) -> ModelFacts:
        audited = self._audited
        known = audited.plain and bool(audited.optimizers)
        return model_facts(audited.models, audited.optimizers, audited.names(), owners_known=known)

    def _parameters_changed(self) -> bool:
        names: Mapping[int, str] = self._audited.names()
        return any(id(p) not in names for p in parameters_in(self._audited.models))
