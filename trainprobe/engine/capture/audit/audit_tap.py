"""Gathers, for each audited step, the facts that the relations of the audit are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import numpy as np
from torch._C import DisableTorchFunction

from trainprobe.engine.capture import AUDIT
from trainprobe.engine.capture.audit.ambient_state import ambient_state
from trainprobe.engine.capture.audit.backward_starts import BackwardStarts
from trainprobe.engine.capture.audit.declared_loss import DeclaredGradient
from trainprobe.engine.capture.audit.given import Given
from trainprobe.engine.capture.audit.gradient_use import GradientUse
from trainprobe.engine.capture.audit.loss_factors import scaled_from
from trainprobe.engine.capture.audit.model_calls import ModelCalls, unwrapped
from trainprobe.engine.capture.audit.observers import Audited, Observers, let, observer, undo
from trainprobe.engine.capture.audit.registered import saved_buffers
from trainprobe.engine.capture.audit.run import AuditRun
from trainprobe.engine.capture.audit.saved_states import SavedStates
from trainprobe.engine.capture.audit.schedules import ScheduleWatch
from trainprobe.engine.capture.audit.set_up import bases_of, model_facts, modes_of, optimizer_groups, parameters_of, rates_of
from trainprobe.engine.capture.audit.waiting_gradients import waiting_gradients
from trainprobe.engine.capture.parameter_states import ParameterStateTap
from trainprobe.engine.capture.patching.step_hooks import StepListener
from trainprobe.engine.capture.random_state import random_fingerprint
from trainprobe.engine.capture.saved_shards import HeldShards
from trainprobe.engine.core.facts import (
    Base,
    Clip,
    Group,
    ModelFacts,
    Output,
    Progress,
    Repeat,
    SavedTensors,
    Scaled,
    StepFacts,
)
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Place, StepData, Value
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import CHECKSUM, STATS, column
from trainprobe.engine.tape import Tape

T = TypeVar("T")
_COMBINE = 0x100000001B3  # the prime of FNV-1a: joins the fingerprints of several tensors into one


class AuditTap:
    """Installs what the audit listens to while a step is audited; `take` returns the facts once the step has crossed to the
    host.

    names: id of parameter → recorded name, as it is now. rescan: learn the names anew when the model has other parameters than
    before. run: answers about the run; it is set before `open`. progress: how far a trainer is that tells it.
    """

    part = AUDIT
    run: AuditRun

    def __init__(
        self, guard: Guard, states: ParameterStateTap, names: Callable[[], dict[int, str]], rescan: Callable[[], None]
    ) -> None:
        self._guard = guard
        self.declared = observer(guard, DeclaredGradient, lambda _: DeclaredGradient())
        self._calls = ModelCalls(guard)
        self._backward = BackwardStarts(guard, self._first_backward, self._backward_begins, self._clears)
        self._use = observer(guard, GradientUse, lambda _: GradientUse(names))
        self._given = Given(guard, self._calls, lambda: self._backward.count)
        due = lambda relation: self.run.due(relation)  # noqa: E731
        audited = Audited(
            names=names,
            models=lambda: self._models,
            due=due,
            inside=lambda: self._calls.runs,
            tape=lambda: self._tape,
            plain=self._plain,
            at_address=states.at_address,
            world_size=lambda: self.run.world_size,
        )
        self._observers = Observers(guard, audited)
        self._schedules = observer(guard, ScheduleWatch, ScheduleWatch)
        remember = lambda own: SavedStates(own, self._held_now, lambda: self.run.step, self._schedules.positions)  # noqa: E731
        self.saves = observer(guard, SavedStates, remember)
        self.saves.pieces = states.pieces
        self.saves.settings = self._settings
        self.saves.world = lambda: self.run.world_size
        self.saves.loaded = lambda: self.run.loaded()
        self._loaded: HeldShards | None = None
        self.pause_others: Callable[[bool], None] = lambda begins: None  # told when the audit begins and ends to run the model
        self._states = states
        self._names = names
        self._rescan = rescan
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._tape: Tape | None = None
        self._set_up: ModelFacts | None = None
        self._left: dict[str, tuple[Any, Value]] = {}
        self._kept: dict[str, Value] = {}
        self._buffers: dict[str, Value] = {}
        self._begun: dict[str, Value] = {}  # the buffers before the first forward
        self._waiting: dict[str, None] = {}
        self._updates = 0
        self._repeated = False
        self._stepped: set[int] = set()  # ids of what an optimizer of this step holds
        self._modes: dict[str, bool] | None = None  # of the modules as the first backward of this step began
        self._rates: tuple[float, ...] = ()
        self._bases: tuple[Base, ...] = ()
        self.progress: Callable[[], Progress] = Progress
        self._groups: dict[int, tuple[Group, ...]] = {}  # id of each optimizer that steps → its groups as it steps
        self._between = 0  # updates since the last step that was listened to
        self._listener: StepListener | None = None
        self._random_begun = 0
        self._randoms: dict[str, int] = {}
        self._scaled: list[Scaled] = []
        self._ambient: dict[str, str] = {}
        self._dependent: frozenset[str] = frozenset()
        self._calls.before_first = self._first_forward

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember the model as it is set up."""
        self._models = list(model) if isinstance(model, list | tuple) else [model]
        self._optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer else []
        self._calls.open(self._models)
        self._let(self._schedules.start)
        self._observers.start()
        self._listener = self._listener or StepListener(lambda optimizer, args, kwargs: self._count_between())
        if self.run.keeps_saves:
            self._let(self.saves.start, self.run.folder, self.run.continues)
        if self._set_up is None:
            self._set_up = self._facts()

    def _let(self, call: Callable[..., T], *args: Any) -> T | None:
        return let(self._guard, call, *args)

    def begin(self, tape: Tape) -> None:
        """Listen to a step."""
        self._tape = tape
        if self._parameters_changed():
            self._rescan()
            self._states.open(self._models, self._optimizers)
        self._states.more = STATS | CHECKSUM if self._fingerprints() else STATS
        self._left, self._kept, self._buffers, self._begun = {}, {}, {}, {}
        self._let(self._use.begin)
        self._waiting = {}
        self._updates, self._rates, self._repeated, self._stepped, self._groups = 0, (), False, set(), {}
        self._bases = ()
        self._modes = None
        self._loaded = None
        self._ambient, self._scaled, self._dependent = {}, [], frozenset()
        self._random_begun = random_fingerprint()
        self._randoms = (self._let(self.saves.begins) or {}) if self.run.keeps_saves else {}
        self._let(self.declared.begin, tape)
        self._calls.looks_for_repeats = self.run.due("recomputed_forward")
        self._calls.begin(tape)
        self._given.begin(tape)
        self._observers.begin()
        self._backward.begin()

    def pause(self) -> None:
        """Nothing rests: these are calls of the whole model."""

    def resume(self) -> None:
        """Nothing rested."""

    def end(self, again: bool = False) -> None:
        """Listen no more; what was seen stays until `take`."""
        noted = self._tape.scalars.items() if self._tape is not None else ()
        self._dependent = frozenset(name for name, x in noted if isinstance(x, Value) and x.requires_grad) or self._dependent
        self._tape = None
        self._states.more = 0
        self._calls.end()
        self._given.end()
        self._observers.end()
        self._backward.end()

    def close(self) -> None:
        """Leave nothing behind."""
        self.end()
        self._calls.close()
        undo(self._guard, self._schedules.stop)
        self._observers.stop()
        if self._listener is not None:
            self._listener.remove()
            self._listener = None
        undo(self._guard, self.saves.stop)

    @property
    def awaits(self) -> bool:
        """Whether something was loaded, or a run goes on, and nobody has compared yet: the next step is audited."""
        return self.saves.awaits

    def everyone(self) -> Mapping[int, Sequence[SavedTensors]]:
        """Return on rank 0 what each rank saved."""
        return self.saves.everyone()

    def _fingerprints(self) -> bool:
        """Tell whether this step's parameters, gradients and states are fingerprinted."""
        return self.saves.awaits or self.run.wants("fingerprints")

    # ---- moments of the step -------------------------------------------------------------------------------------

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """The gradients of these parameters are whole and not yet clipped."""
        self._observers.unclipped(parameters)
        if self._tape is not None and self.declared.loss is not None and self.run.wants("rerun") and len(self._models) == 1:
            inner = list(unwrapped(self._models[0]))[-1]
            names = self._names()
            pairs = [(names[id(p)], p) for p in inner.parameters() if id(p) in names and p.requires_grad]
            self._calls.asleep = True
            self.pause_others(True)
            try:
                self._let(self.declared.compare, inner, pairs)
            finally:
                self.pause_others(False)
                self._calls.asleep = False

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if self._tape is None:
            return
        self._ambient = self._ambient or ambient_state(optimizer)
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        if self.saves.awaits and self._loaded is None:
            self._loaded = self._states.deferred_shards(self._tape)
        self.unclipped([p for group in optimizer.param_groups for p in group["params"]])
        if self._plain():
            self._observers.before_update(self._tape)
            self._let(self._use.before_update, optimizer)
            self._waiting |= dict.fromkeys(waiting_gradients(self._models, self._names()))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._repeated |= bool(held & self._stepped)
        self._stepped |= held
        self._observers.steps(optimizer)
        self._let(self._schedules.at_update, optimizer)
        self._rates += rates_of(optimizer)
        self._bases += bases_of(optimizer, len(self._groups), self._let(self._schedules.drives, optimizer) is False)
        self._groups[id(optimizer)] = optimizer_groups([optimizer], self._names())
        if not self._backward.cleared:
            names = self._names()
            own = {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
            others = {names[id(p)] for o in self._optimizers for p in parameters_of(o) if id(p) in names} - own
            mine = {name: left for name, left in self._left.items() if name in own or (not own and name not in others)}
            self._kept |= {name: value for name, (grad, value) in mine.items() if self._still(name, grad)}
            self._left = {name: left for name, left in self._left.items() if name not in mine}

    def after_update(self) -> None:
        """An optimizer has stepped."""
        if self._tape is None:
            return
        self._updates += 1
        self._let(self._use.after_update)
        self._backward.unused = 0
        self._observers.stepped()
        if self._fingerprints():
            self._buffers = self._look_at_buffers(self._tape)

    def _count_between(self) -> None:
        self._between += self._tape is None

    def _first_forward(self) -> None:
        self._let(self.declared.first_forward)
        if self._tape is not None and self._fingerprints():
            self._begun = self._look_at_buffers(self._tape)

    def _look_at_buffers(self, tape: Tape) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for name, buffer in (pair for model in self._models for pair in list(unwrapped(model))[-1].named_buffers()):
            found[name] = tape.value(buffer, STATS | CHECKSUM)
            tape.touched(buffer)  # later it is looked at again: a write through `.data` leaves no trace
        return found

    def _backward_begins(self, root: Any) -> None:
        self._scaled.append(scaled_from(root))
        if self._tape is not None and self._states.source is None:
            self._let(self._use.backward_begins, root, self._tape, self._models)

    def _clears(self, owner: Any) -> None:
        if self._plain() and self._let(self._use.cleared, owner, self._models, self._backward.unused):
            self._backward.unused = 0

    def _first_backward(self) -> None:
        if self._tape is None:
            return
        self._modes = modes_of(self._models)  # what is evaluated after the update, within the step, leaves the mode of training
        if self._states.source is not None:
            return
        names = self._names()
        with DisableTorchFunction():
            for model in self._models:
                for p in model.parameters():
                    if id(p) in names and p.is_leaf and p.grad is not None:
                        self._left[names[id(p)]] = (p.grad, self._tape.value(p.grad, STATS | CHECKSUM))

    def _still(self, name: str, grad: Any) -> bool:
        """Tell whether the gradient that was there is the tensor that is there now."""
        names = self._names()
        return any(p.is_leaf and p.grad is grad for m in self._models for p in m.parameters() if names.get(id(p)) == name)

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def take(self, step_data: StepData) -> StepFacts:
        """Return the facts of the step that `step_data` holds."""
        assert self._set_up is not None
        calls = self._calls
        kept = {name: (_checksum(step_data, v), _norm(step_data, v)) for name, v in self._kept.items()}
        facts = StepFacts(
            set_up=self._set_up,
            model=self._model_facts(),
            batches=tuple(_joined(step_data, values) for values in calls.batches),
            whole_numbers=any("int" in v.dtype for values in calls.batches for v in values),
            tokens=tuple(_tokens(values) for values in calls.batches),
            bypassed=calls.bypassed,
            backwards=self._backward.count,
            updates=self._updates,
            repeated=self._repeated,
            called=calls.called_names(),
            waiting=tuple(self._waiting),
            scaled=tuple(self._scaled),
            begun={name: _checksum(step_data, v) for name, v in self._begun.items()},
            ordinal=self.run.ordinal,
            updates_between=self._between,
            left={name: seen for name, seen in kept.items() if seen[1] != 0},
            buffers={name: _checksum(step_data, v) for name, v in self._buffers.items()},
            groups=self._used_groups() if self._plain() else (),
            rates=self._rates,
            bases=self._bases,
            progress=self.progress(),
            rates_next=tuple(rate for optimizer in self._optimizers for rate in rates_of(optimizer)),
            clips=tuple(Clip(c.names, _norm(step_data, c.norm), c.used, c.limit, c.others) for c in self._states.clips),
            random=random_fingerprint(),
            random_begun=self._random_begun,
            randoms=self._randoms,
            region=getattr(self._states.source, "random_region", lambda: 0)(),
            drawn=calls.drawn,
            evaluations=calls.take_evaluations(),
            dependent=self._dependent,
            spoiled=self._spoiled(step_data),
            ambient=self._ambient,
            recomputed=tuple(
                Repeat(name, order, _outputs(step_data, again), tuple(_outputs(step_data, f) for f in first))
                for name, order, again, first in calls.repeated()
            ),
            **self._observed(step_data),
        )
        self._left, self._kept, self._buffers, self._begun = {}, {}, {}, {}
        self._between = 0
        self._let(self._use.begin)
        if facts.batches:
            self._let(self.saves.trained_on, step_data.step, facts.batches)
        return facts

    def _observed(self, step_data: StepData) -> dict[str, Any]:
        """Return the facts that the observers saw, by their names; those of one that has failed are left out."""
        loaded = self._loaded
        taken = {
            "schedules": self._let(self._schedules.take),
            "plateaus": self._let(self._schedules.plateaus.seen),
            "projections": self._let(self.declared.take),
            "saved": self._let(self.saves.take),
            "loaded": None if loaded is None else self._let(loaded.read),
            "stale_copies": self._let(self._calls.copies.take),
        }
        used = self._let(self._use.take, self._optimizers, partial(_mean, step_data), partial(_norm, step_data)) or {}
        return (
            {name: facts for name, facts in taken.items() if facts is not None}
            | used
            | self._given.take()
            | self._observers.facts()
        )

    def _spoiled(self, step_data: StepData) -> tuple[str, ...]:
        """Return the buffers that hold a NaN, as they were last looked at."""
        held = (self._begun | self._buffers).items()
        return tuple(name for name, v in held if v.row >= 0 and column(step_data.partials[v.row : v.row + 1], "nan")[0] > 0)

    def _held_now(self) -> dict[tuple[str, str], int]:
        """Return (parameter, slot) → fingerprint of what is trained and this process holds; reads the device once."""
        if self._tape is not None:
            return {}
        tape, names = self.run.new_tape(), self._names()
        trained = {names.get(id(p)) for model in self._models for p in model.parameters() if p.requires_grad}
        values = [(key, value) for key, value in self._states.held(tape) if key[0] in trained]
        values += [((name, "buffer"), tape.value(b, STATS | CHECKSUM)) for name, b in saved_buffers(self._models)]
        sums = tape.drain(-1, Place(), framework="", level="off", task="statistics").checksums
        return {} if sums is None else {key: int(sums[value.row]) for key, value in values if value.row >= 0}

    def _used_groups(self) -> tuple[Group, ...]:
        """Return the groups of all optimizers as they stepped: behind the update a scheduler sets those of the next step."""
        names = self._names()
        used = (self._groups.get(id(optimizer)) or optimizer_groups([optimizer], names) for optimizer in self._optimizers)
        return tuple(group for groups in used for group in groups)

    def _settings(self) -> dict[str, Any]:
        groups = optimizer_groups(self._optimizers, self._names()) if self._plain() else ()
        return {f"{i} {name}": value for i, group in enumerate(groups) for name, value in group.options.items()}

    def has_declared_loss(self) -> bool:
        """Tell whether the loss was declared; True as well where a source keeps the gradients, as none could be compared."""
        return self.declared.loss is not None or not self._plain()

    def late_evaluations(self) -> StepFacts | None:
        """Return facts of evaluations after the last audited step, or None when there were none."""
        found = self._calls.take_evaluations()
        if not found or self._set_up is None:
            return None
        return StepFacts(set_up=self._set_up, model=self._set_up, evaluations=found)

    def _plain(self) -> bool:
        return self._states.source is None

    def _facts(self) -> ModelFacts:
        known = self._plain() and bool(self._optimizers)
        return model_facts(self._models, self._optimizers, self._names(), owners_known=known)

    def _model_facts(self) -> ModelFacts:
        facts = self._facts()
        return facts if self._modes is None else replace(facts, modes=self._modes)

    def _parameters_changed(self) -> bool:
        names: Mapping[int, str] = self._names()
        return any(id(p) not in names for model in self._models for p in model.parameters())


def _checksum(step_data: StepData, value: Value) -> int:
    return int(step_data.checksums[value.row]) if step_data.checksums is not None and value.row >= 0 else 0


def _norm(step_data: StepData, value: Value) -> float:
    return float(finish(step_data.partials[value.row : value.row + 1], ("norm",))["norm"][0]) if value.row >= 0 else 0.0


def _mean(step_data: StepData, value: Value) -> float:
    return (
        float(finish(step_data.partials[value.row : value.row + 1], ("mean",))["mean"][0]) if value.row >= 0 else float("nan")
    )


def _outputs(step_data: StepData, values: Sequence[Value]) -> tuple[Output, ...]:
    out: list[Output] = []
    for value in (value for value in values if value.row >= 0):
        row = step_data.partials[value.row : value.row + 1]
        total, count = float(column(row, "sum")[0]), float(column(row, "count")[0])
        out.append(Output(_checksum(step_data, value), _norm(step_data, value), total, count, value.dtype))
    return tuple(out)


def _tokens(values: Sequence[Value]) -> int:
    return next((prod(v.shape) for v in values if "int" in v.dtype), 0)


def _joined(step_data: StepData, values: Sequence[Value]) -> int:
    total = np.uint64(len(values))
    with np.errstate(over="ignore"):
        for value in values:
            total = total * np.uint64(_COMBINE) ^ np.uint64(_checksum(step_data, value))
    return int(total)
