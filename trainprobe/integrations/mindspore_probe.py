"""The probe of a MindSpore training: the plan, writers and rules that PyTorch has, with taps and a library of MindSpore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mindspore

from trainprobe.engine.arrays.mindspore_library import MindSporeLibrary, copy_out
from trainprobe.engine.capture import AUDIT, Tap, part_of
from trainprobe.engine.capture.mindspore.calls import KnownCalls, OptimizerTap
from trainprobe.engine.capture.mindspore.cells import COMPILED, UNCALLED, CellTap, is_graph_mode, is_optimizer
from trainprobe.engine.capture.mindspore.gathering import gathering
from trainprobe.engine.capture.mindspore.ops import PrimitiveTap, ops_are_seen
from trainprobe.engine.capture.mindspore.states import CellStateTap
from trainprobe.engine.capture.mindspore.tape import HostTape
from trainprobe.engine.capture.mindspore.tensor_hooks import hooked, wait
from trainprobe.engine.capture.requests import NO_STATES, ModuleRequest, OpRequest, StatesRequest, no_flags
from trainprobe.engine.capture.saved import SavedTap
from trainprobe.engine.core.gathering import Gathering
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename, chunks_of
from trainprobe.engine.core.position import OPTIMIZER, SOMEWHERE, UPDATED
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps import Taps
from trainprobe.errors import PlanError, UsageError
from trainprobe.integrations.mindspore_limits import NOT_JUDGED_IN_A_GRAPH, not_judged, refuse
from trainprobe.integrations.mindspore_place import declared_place, place_of_process
from trainprobe.monitor.audit.capture.mindspore_tap import CellAuditTap, counted
from trainprobe.monitor.audit.relations import relation_names
from trainprobe.monitor.plan import validate as monitor_plan
from trainprobe.run.backend import Backend, Journal, Keep
from trainprobe.run.probe import Probe

REPLACED = (
    "the optimizer of {cell} was replaced: MindSpore does not compile the step anew for it, and goes on with the first one, "
    "whose state is recorded; only a step that it compiles later, for other shapes, has the new one. Begin a training with it"
)


COMPILED_UPDATE = (
    "the optimizer ran inside a function that MindSpore compiles: parameters and optimizer state were not looked at before "
    "this step, and are not recorded of it; those of later steps are"
)


class CellTaps(Taps):
    """The taps of a MindSpore training."""

    needed = ((OptimizerTap, part_of(CellStateTap)), (CellStateTap, AUDIT), (KnownCalls, AUDIT))

    def __init__(self, guard: Guard, stacks: Stacks | None = None) -> None:
        super().__init__(guard)
        self.fullest = "mix" if ops_are_seen() else "L0"
        self._stacks = stacks

    def saved(self, flags: int) -> SavedTap:
        """Return the tap of values that the program hands over."""
        return self.once("saved", lambda: SavedTap(flags, self.own(SavedTap), hooked))

    def _of_modules(self, request: ModuleRequest, stacks: bool) -> CellTap:
        return CellTap(request, self.own(CellTap), self._stacks if stacks else None)

    def ops(self, request: OpRequest) -> PrimitiveTap:
        """Return the dump's tap of primitives."""
        modules, own = self.get("modules", CellTap), self.own(PrimitiveTap)
        inside = modules.stack if modules is not None else []
        return self.once("ops", lambda: PrimitiveTap(request, own, inside, self._stacks))

    def states(self, request: StatesRequest | None = None) -> CellStateTap:
        """Return the tap of parameters, gradients and optimizer state."""
        wanted = request or NO_STATES
        if "grad" in wanted.without:
            wanted = replace(wanted, gradient=no_flags)
        return self.once("states", lambda: CellStateTap(wanted, self.naming.names, lambda: self.stepping().cells))

    def audit(self) -> CellAuditTap:
        """Return the tap of the audit."""
        states = self.states()
        return self.once("audit", lambda: CellAuditTap(self.own(CellAuditTap), states))

    def stepping(self) -> OptimizerTap:
        """Return the tap that tells when the optimizer runs."""
        begins, ends = lambda o, gradients: self.before_update([o], gradients), lambda o: self.after_update([o])
        return self.once("stepping", lambda: OptimizerTap(self.own(OptimizerTap), begins, ends))

    def clipping(self) -> KnownCalls:
        """Return the tap of the cell that clips gradients."""
        return self.once("clipping", lambda: KnownCalls(self.own(KnownCalls), self._clips))

    # ---- what they do around an update -----------------------------------------------------------------------------

    def before_update(self, optimizers: Sequence[Any], gradients: Any = ()) -> None:
        """Handle the beginning of a step of these optimizers."""
        self._is_in(OPTIMIZER)
        if (ops := self.get("ops", PrimitiveTap)) is not None:
            ops.parent = "optimizer"
            ops.asleep |= not self.records_update
        self.look_before(optimizers, gradients)

    def look_before(self, optimizers: Sequence[Any], gradients: Any = (), early: bool = False) -> None:
        """Look at what these optimizers are about to change. early: they may do so inside a graph, some time in this step."""
        if (audit := self.get("audit", CellAuditTap)) is not None:
            self.let(audit.before_update, optimizers, early)
        if (states := self.get("states", CellStateTap)) is not None:
            self.let(states.moment, "before_step", optimizers, gradients)

    def after_update(self, optimizers: Sequence[Any]) -> None:
        """Handle its end."""
        self._is_in(UPDATED)
        if (ops := self.get("ops", PrimitiveTap)) is not None:
            ops.parent = None
            ops.resume()
        self.look_after(optimizers)

    def look_after(self, optimizers: Sequence[Any]) -> None:
        """Look at what these optimizers have changed."""
        if (states := self.get("states", CellStateTap)) is not None:
            self.let(states.moment, "after_step", optimizers)
        if (audit := self.get("audit", CellAuditTap)) is not None:
            self.let(audit.after_update, optimizers)

    def _is_in(self, phase: int) -> None:
        if self.position is not None and not is_graph_mode():
            self.position.is_in(phase)

    def _clips(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a call of the cell that clips gradients: what it is given are those before."""
        if args and (states := self.get("states", CellStateTap)) is not None:
            self.let(states.unclipped, self.stepping().cells, args[0])


class MindSporeBackend(Backend):
    """What a probe needs of MindSpore."""

    name = "mindspore"

    def taps(self, plan: Plan, guard: Guard, stacks: Stacks | None, rename: Rename | None) -> Taps:
        """Return the taps. Raises PlanError for what MindSpore does not show."""
        refuse(plan, monitor_plan(asked) if (asked := plan.section("monitor")) else None)
        return CellTaps(guard, stacks)

    def tapes(self, plan: Plan, keep: Keep, keep_chunk: Callable[[Any], None], journal: Journal) -> Callable[[int], Tape]:
        """Return what makes the tape of a step."""
        library = MindSporeLibrary(plan.native)
        return lambda number: HostTape(library, keep, reuse=False, journal=journal(number))

    def without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: MindSpore has no such modes."""
        return nullcontext()

    def place(self) -> Place:
        """Learn where this process stands."""
        return place_of_process()

    def place_by_model(self, model: Any) -> Place | None:
        """Return where this process stands by the configuration of a model and MindSpore's settings."""
        return declared_place(model)

    def gathering(self) -> Gathering:
        """Return what brings a few numbers of every rank to every rank."""
        return gathering()

    def random_state(self) -> Mapping[str, Any]:
        """Return the random state as text."""
        state = mindspore.get_rng_state() if hasattr(mindspore, "get_rng_state") else None
        return {} if state is None else {"mindspore": hashlib.sha256(state.asnumpy().tobytes()).hexdigest()}

    def copy(self, t: Any, detail: Detail | None) -> Any:
        """Return a tensor's values, or the part of them that is stored."""
        copy = copy_out(t)
        return copy if detail is None else copy_out(t[detail.index(copy.shape)])


class MindSporeProbe(Probe):
    """A probe of MindSpore cells and optimizers. Raises PlanError for what a plan asks and only PyTorch shows."""

    backend = MindSporeBackend()
    has_watched = False  # a probe of this process began a step
    _limits_reported = False
    _trains: tuple[Any, Any] = (None, None)  # the cell that trains, and the optimizer that it held at first
    _own_loop = False
    _updates_compiled: bool | None = None  # whether graphs hold the optimizer, in a loop of the user's own; None: not known yet
    _count = 0  # of updates, before the step
    _looked = False  # at parameters and optimizer state, as the step began

    @property
    def cell_taps(self) -> CellTaps:
        """The taps of the run."""
        assert isinstance(self.taps, CellTaps)
        return self.taps

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        if optimizer is None:  # a cell that trains holds its own
            inside = (cell for chunk in chunks_of(model) for _, cell in getattr(chunk, "cells_and_names", tuple)())
            optimizer = [cell for cell in inside if is_optimizer(cell)] or None
        super()._open(model, optimizer, place)

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value under a name; see `Probe.save`. In PyNative mode only: a graph does not call Python."""
        if self.tape is not None:
            wait()
        super().save(value, name, save_backward)

    def moment(self, name: str, *values: Any) -> None:
        """Tell that something happens; "before_step" and "after_step" have parameters and optimizer state looked at."""
        super().moment(name, *values)
        if self.tape is not None and name in ("before_step", "after_step"):
            taps = self.cell_taps
            self.guard.run(taps.before_update if name == "before_step" else taps.after_update, taps.stepping().cells)
            self.guard.run(self._report_replaced_optimizer)

    def _report_replaced_optimizer(self) -> None:
        """Keep as a finding, once, that the optimizer was replaced where the step is compiled."""
        cell, first = self._trains
        if first is not None and cell.optimizer is not first:
            self._trains = (None, None)
            self.report(Finding("mindspore", "warning", REPLACED.format(cell=type(cell).__name__), step=self.step_number))

    def watches_own_loop(self) -> None:
        """Learn that the loop is the user's own: nobody tells when a graph updates the parameters."""
        super().watches_own_loop()
        self._own_loop = True

    def _begin_compiled_update(self) -> None:
        """Look at parameters and optimizer state as a step begins in which a graph may update them."""
        optimizers = self.cell_taps.stepping().cells
        self._count = counted(optimizers)
        self._looked = self._updates_compiled is not False
        if self._looked:
            self.cell_taps.look_before(optimizers, early=True)

    def _end_compiled_update(self) -> None:
        """Look at them again if no optimizer was called from Python and they have stepped by their own count."""
        optimizers = self.cell_taps.stepping().cells
        if self.cell_taps.stepping().called:
            self._updates_compiled = False
            return
        counts = any(hasattr(optimizer, "global_step") for optimizer in optimizers)
        stepped = counted(optimizers) != self._count if counts else self._looked and is_graph_mode()
        if stepped and self._looked:
            self._updates_compiled = True
            self.cell_taps.look_after(optimizers)
        elif stepped:
            self._updates_compiled = None
            self.report(Finding("mindspore", "info", COMPILED_UPDATE, step=self.step_number))

    def _only_collects(self) -> bool:
        """Tell whether the step made no update in a loop whose optimizer is called from Python, as where gradients add up."""
        hidden = self.plan.level == "off" or is_graph_mode()
        collects = self._own_loop and self._updates_compiled is False and not self.cell_taps.stepping().called
        return super()._only_collects() or (hidden and collects)

    def change(self, **fields: Any) -> None:
        """Raise PlanError: a plan cannot change while a MindSpore training goes on."""
        raise PlanError(f"{', '.join(fields)}: under MindSpore a plan stays while a run goes on: resume it with another one")

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Raise UsageError: the gradient of a declared loss is worked out by torch."""
        raise UsageError(
            "declare_loss: under MindSpore no loss can be declared: leave the call out; `gradient_norm` and "
            "`movement` of the audit judge the gradients that the optimizer is given"
        )

    def use_source(self, source: Any) -> None:
        """Raise UsageError: what the optimizer holds is read from its cell."""
        raise UsageError(
            "use_source: under MindSpore parameters and optimizer state are read from the optimizer's cell: "
            "give the probe the optimizer"
        )

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step; see `Probe.begin_step`. The first one reports what the plan asks for and MindSpore does not show."""
        MindSporeProbe.has_watched = True
        if not self._limits_reported:
            self._limits_reported = True
            self.report_limits()
        collects = super().begin_step(number)
        position, seen = self.taps.position, self.taps.get("modules", Tap) or self.taps.get("watched", Tap)
        if position is not None and (is_graph_mode() or not seen):
            position.is_in(SOMEWHERE)
        if collects and self._own_loop:
            self.guard.run(self._begin_compiled_update)
        return collects

    def end_step(self, *, complete: bool = True, more: bool = False) -> StepData | None:
        """End the step; see `Probe.end_step`. Waits for a graph that runs: what goes wrong there is the training's error."""
        if self.tape is not None and complete:
            wait()
            if self._own_loop:
                self.guard.run(self._end_compiled_update)
        return super().end_step(complete=complete, more=more)

    def train_with(self, cell: Any) -> None:
        """Tell which cell trains: in graph mode its arguments are the data; MindFormers' holds the cell that clips."""
        self._trains = cell, getattr(cell, "optimizer", None)
        clips = getattr(cell, "clip_grad_norm", None) if getattr(cell, "use_clip_grad", False) else None
        clipping = self.taps.get("clipping", KnownCalls)
        if clipping is not None:
            clipping.know([] if clips is None or is_graph_mode() else [clips])
        audit = self.taps.get("audit", CellAuditTap)
        if audit is not None:
            audit.training_cell = cell
        capture = self.program("config_check")
        if capture is not None:
            capture.watch(cell)

    def report_limits(self) -> None:
        """Keep as findings what cannot be judged or seen here: one a relation of the plan's audit, and one of the graph."""
        plan = self.audit.plan if self.audit is not None else None
        why = {**not_judged(), **(NOT_JUDGED_IN_A_GRAPH if is_graph_mode() else {})}
        clipping = self.taps.get("clipping", KnownCalls)
        if clipping is not None and clipping.cells:
            why.pop("clipping", None)
        for relation in relation_names() if plan is not None else ():
            if plan is not None and relation in why and plan.interval(relation):
                self.report(Finding(relation, "info", f"{relation} is not judged under MindSpore: {why[relation]}"))
        for hidden in self.hidden_by_a_graph():
            self.report(Finding("mindspore", "info", hidden))

    def hidden_by_a_graph(self) -> list[str]:
        """Return what graph mode hides of what the plan asks for, as sentences."""
        monitor = self.monitor_plan
        asked = any(self.taps.get(role, Tap) for role in ("modules", "ops")) or (
            monitor is not None and (monitor.gradients.on or monitor.activations.on or monitor.activation_gradients.on)
        )
        if not asked or not is_graph_mode():
            return []
        return [COMPILED]

    def _about_step(self) -> dict[str, Any]:
        """Return what there is to know of a step."""
        about = super()._about_step()
        for note in about["notes"]:
            if not is_graph_mode() and (note == COMPILED or note.endswith(UNCALLED)):
                self.report(Finding("mindspore", "info", note, step=self.step_number))
        return about


def number_of(value: Any) -> float | None:
    """Return what a framework reports as a plain number; None where it is not one number. Waits for the device."""
    if isinstance(value, mindspore.Tensor):
        array = value.asnumpy().reshape(-1)
        return float(array[0]) if array.size == 1 else None
    return float(value) if isinstance(value, bool | int | float) else None


def agreed(stop: bool) -> bool:
    """Return whether any rank wants to stop: one small collective, which only a plan with the action "stop" causes."""
    if not mindspore.communication.GlobalComm.INITED or mindspore.communication.get_group_size() == 1:
        return stop
    wish = mindspore.ops.AllReduce(mindspore.ops.ReduceOp.MAX)(mindspore.Tensor([float(stop)], mindspore.float32))
    return bool(wish.asnumpy()[0])
