"""The probe of a MindSpore training: the plan, writers and rules that PyTorch has, with taps and a library of MindSpore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import mindspore

from trainprobe.composition import TapMaker
from trainprobe.config_check.capture.mindspore_capture import CellCapture
from trainprobe.engine.arrays.mindspore_library import MindSporeLibrary, copy_out
from trainprobe.engine.capture import AUDIT, part_of
from trainprobe.engine.capture.mindspore.audit import CellAuditTap
from trainprobe.engine.capture.mindspore.calls import KnownCalls, OptimizerTap
from trainprobe.engine.capture.mindspore.cells import COMPILED, CellTap, is_graph_mode, wait
from trainprobe.engine.capture.mindspore.gathering import gathering
from trainprobe.engine.capture.mindspore.graph_callback import GraphCallbacks
from trainprobe.engine.capture.mindspore.graph_cells import GraphCellTap
from trainprobe.engine.capture.mindspore.ops import PrimitiveTap, ops_are_seen
from trainprobe.engine.capture.mindspore.saved import SavedTensors
from trainprobe.engine.capture.mindspore.states import CellStateTap
from trainprobe.engine.capture.mindspore.tape import HostTape
from trainprobe.engine.capture.requests import ModuleRequest, OpRequest, StatesRequest
from trainprobe.engine.core.gathering import Gathering
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.position import OPTIMIZER, SOMEWHERE, UPDATED, Position
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.program import Program
from trainprobe.engine.tape import Tape
from trainprobe.errors import PlanError, UsageError
from trainprobe.integrations.mindspore_limits import NOT_JUDGED, NOT_JUDGED_IN_A_GRAPH, refuse
from trainprobe.integrations.mindspore_place import place_of_process
from trainprobe.monitor.audit.relations import relation_names
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.monitor.plan import validate as monitor_plan
from trainprobe.monitor.requests import no_flags
from trainprobe.schedules import Parts, guard_of
from trainprobe.watching import Probe

REPLACED = (
    "the optimizer of {cell} was replaced: MindSpore does not compile the step anew for it, and goes on with the first one, "
    "whose state is recorded; only a step that it compiles later, for other shapes, has the new one. Begin a training with it"
)


@dataclass(slots=True, kw_only=True)
class CellParts(Parts):
    """The taps of a probe on a MindSpore training."""

    naming: CellTap
    saved: SavedTensors
    modules: CellTap | None = None
    ops: PrimitiveTap | None = None
    watched: CellTap | None = None
    states: CellStateTap | None = None
    clipping: KnownCalls | None = None  # of the cell that clips gradients, where there is one
    audit: CellAuditTap | None = None
    with_ops: bool = False  # operators of the update are recorded too
    position: Position | None = None  # is told where in a step the training is
    stepping: OptimizerTap = None  # pyright: ignore[reportAssignmentType]  (every composition makes it)

    def follow(self, position: Position) -> None:
        """Have `position` told which cell runs, and of the optimizer."""
        self.position = position
        for tap in (self.modules, self.watched):
            if tap is not None:
                tap.position = position

    def _is_in(self, phase: int) -> None:
        if self.position is not None and not is_graph_mode():
            self.position.is_in(phase)

    def before(self, optimizers: Sequence[Any], gradients: Any = ()) -> None:
        """Handle the beginning of a step of these optimizers."""
        self._is_in(OPTIMIZER)
        if self.ops is not None:
            self.ops.parent = "optimizer"
            self.ops.asleep |= not self.with_ops
        if self.audit is not None:
            self.let(self.audit.before_update, optimizers)
        if self.states is not None:
            self.let(self.states.moment, "before_step", optimizers, gradients)

    def clips(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a call of the cell that clips gradients: what it is given are those before."""
        if self.states is not None and args:
            self.let(self.states.unclipped, self.stepping.cells, args[0])

    def after(self, optimizers: Sequence[Any]) -> None:
        """Handle its end."""
        self._is_in(UPDATED)
        if self.ops is not None:
            self.ops.parent = None
            self.ops.resume()
        if self.states is not None:
            self.let(self.states.moment, "after_step", optimizers)
        if self.audit is not None:
            self.let(self.audit.after_update, optimizers)


class MindSporeProbe(Probe):
    """A probe of MindSpore cells and optimizers. Raises PlanError for what a plan asks and only PyTorch shows."""

    framework = "mindspore"
    has_watched = False  # a probe of this process began a step
    _limits_reported = False
    _capture: CellCapture | None = None
    _trains: tuple[Any, Any] = (None, None)  # the cell that trains, and the optimizer that it held at first

    @property
    def cells(self) -> CellParts:
        """The taps."""
        return cast("CellParts", self.parts)

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value under a name; see `Probe.save`. In PyNative mode only: a graph does not call Python."""
        if self.tape is not None:
            wait()
        super().save(value, name, save_backward)

    def moment(self, name: str, *values: Any) -> None:
        """Tell that something happens; "before_step" and "after_step" have parameters and optimizer state looked at."""
        super().moment(name, *values)
        if self.tape is not None and name in ("before_step", "after_step"):
            self.guard.run(self.cells.before if name == "before_step" else self.cells.after, self.cells.stepping.cells)
            self.guard.run(self._tell_of_another_optimizer)

    def _tell_of_another_optimizer(self) -> None:
        """Keep as a finding, once, that the optimizer was replaced where the step is compiled."""
        cell, first = self._trains
        if first is not None and cell.optimizer is not first:
            self._trains = (None, None)
            self.report(Finding("mindspore", "warning", REPLACED.format(cell=type(cell).__name__), step=self.step_number))

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
        position = self.cells.position
        if position is not None and (is_graph_mode() or not any((self.cells.modules, self.cells.watched))):
            position.is_in(SOMEWHERE)
        return collects

    def end_step(self, *, complete: bool = True) -> StepData | None:
        """End the step; see `Probe.end_step`. Waits for a graph that runs: what goes wrong there is the training's error."""
        if self.tape is not None and complete:
            wait()
        return super().end_step(complete=complete)

    def train_with(self, cell: Any) -> None:
        """Tell which cell trains: in graph mode its arguments are the data; MindFormers' holds the cell that clips."""
        self._trains = cell, getattr(cell, "optimizer", None)
        clips = getattr(cell, "clip_grad_norm", None) if getattr(cell, "use_clip_grad", False) else None
        if self.cells.clipping is not None:
            self.cells.clipping.know([] if clips is None or is_graph_mode() else [clips])
        if self.cells.audit is not None:
            self.cells.audit.training_cell = cell
        if self._capture is not None:
            self._capture.watch(cell)

    def close(self) -> None:
        """Write everything that is pending."""
        super().close()
        if isinstance(self.cells.naming, GraphCellTap):
            self.cells.naming.callbacks.remove()

    def report_limits(self) -> None:
        """Keep as findings what cannot be judged or seen here: one a relation of the plan's audit, and one of the graph."""
        plan = self.cells.audit_plan
        why = {**NOT_JUDGED, **(NOT_JUDGED_IN_A_GRAPH if is_graph_mode() and not self.plan.graph_callbacks else {})}
        if self.cells.clipping is not None and self.cells.clipping.cells:
            why.pop("clipping", None)
        for relation in relation_names() if plan is not None else ():
            if plan is not None and relation in why and plan.interval(relation):
                self.report(Finding(relation, "info", f"{relation} is not judged under MindSpore: {why[relation]}"))
        for hidden in self.hidden_by_a_graph():
            self.report(Finding("mindspore", "info", hidden))

    def hidden_by_a_graph(self) -> list[str]:
        """Return what graph mode hides of what the plan asks for, as sentences."""
        monitor = self.cells.monitor
        asked = any((self.cells.modules, self.cells.ops)) or (
            monitor is not None and (monitor.gradients.on or monitor.activations.on or monitor.activation_gradients.on)
        )
        if not asked or not is_graph_mode():
            return []
        naming = self.cells.naming
        return naming.limits() if isinstance(naming, GraphCellTap) else [COMPILED]

    def _gathering(self) -> Gathering:
        return gathering()

    def _taps(self, plan: Plan, guard: Guard, stacks: Any, rename: Any) -> TapMaker:
        refuse(plan, monitor_plan(plan.monitor) if plan.monitor else None)
        return CellTaps(plan, guard, stacks)

    def _config_check(self, plan: Plan) -> Program | None:
        if plan.config_check:
            self._capture = CellCapture(plan.config_check, plan.output, plan.on_error)
        return self._capture

    def _op_check(self, plan: Plan, rename: Any) -> Program | None:
        if plan.op_check:
            raise PlanError("op_check: operators of PyTorch alone are judged: leave the section out")
        return None

    def _tapes(self, plan: Plan) -> Callable[[int], Tape]:
        library = MindSporeLibrary(plan.native)
        return lambda number: HostTape(library, self._keep, reuse=False, journal=self.journal(number))

    def _without_dispatch(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _follow(self, position: Position) -> None:
        """Have the taps tell where in a step the training is, as far as they see it."""
        self.cells.follow(position)

    def _where(self) -> Place:
        return place_of_process()

    def _random_state(self) -> Mapping[str, Any]:
        state = mindspore.get_rng_state() if hasattr(mindspore, "get_rng_state") else None
        return {} if state is None else {"mindspore": hashlib.sha256(state.asnumpy().tobytes()).hexdigest()}

    def _keep(self, key: str, t: Any, value: Any, cut: int) -> None:
        copy = copy_out(t)
        if cut:
            inner = self.cells.cuts[cut - 1].index(copy.shape)
            copy = copy_out(t[inner])
        self._submit(key, copy)


class CellTaps(TapMaker):
    """Makes the taps of a MindSpore training."""

    needed = ((OptimizerTap, part_of(CellStateTap)), (CellStateTap, AUDIT), (KnownCalls, AUDIT))

    def __init__(self, plan: Plan, guard: Guard, stacks: Stacks | None = None) -> None:
        super().__init__(guard)
        self._callbacks = GraphCallbacks(plan.graph_callbacks == "all") if plan.graph_callbacks else None
        self.fullest = "mix" if ops_are_seen() else "L0"
        self._stacks = stacks

    def parts(self, naming: CellTap, saved: SavedTensors) -> CellParts:
        """Return the parts of a probe, with no more taps than these."""
        return CellParts(guard=self.guard, naming=naming, saved=saved)

    def saved(self, flags: int) -> SavedTensors:
        """Return the tap of values that the program hands over."""
        return SavedTensors(flags, guard_of(self.guard, SavedTensors))

    def modules(self, request: ModuleRequest, dumped: bool) -> CellTap:
        """Return a tap of cells, also within a graph where the plan asks for that; the monitor's keeps no call stacks."""
        own, stacks = guard_of(self.guard, CellTap), self._stacks if dumped else None
        if self._callbacks is None:
            return CellTap(request, own, stacks)
        self._callbacks.backward |= request.backward
        return GraphCellTap(request, own, stacks, callbacks=self._callbacks)

    def ops(self, request: OpRequest, parts: Parts, plan: Plan) -> PrimitiveTap:
        """Return the tap of primitives."""
        inside = parts.modules.stack if parts.modules is not None else []
        return PrimitiveTap(request, guard_of(self.guard, PrimitiveTap), inside, self._stacks)

    def states(self, request: StatesRequest, parts: Parts) -> CellStateTap:
        """Return the tap of parameters, gradients and optimizer state."""
        if "grad" in request.without:
            request = replace(request, gradient=no_flags)
        states = CellStateTap(request, parts.naming.names, lambda: parts.stepping.cells)
        if isinstance(parts.naming, GraphCellTap):
            parts.naming.handed = states.handed
        return states

    def audit(self, parts: Parts) -> CellAuditTap:
        """Return the tap of the audit."""
        return CellAuditTap(guard_of(self.guard, CellAuditTap), parts.states, self._callbacks is not None)

    def stepping(self, parts: Parts, plan: Plan) -> OptimizerTap:
        """Return the tap that tells when the optimizer runs."""
        cells = cast("CellParts", parts)
        cells.with_ops = "optimizer" in plan.phases
        own = guard_of(self.guard, OptimizerTap)
        return OptimizerTap(own, lambda o, gradients: cells.before([o], gradients), lambda o: cells.after([o]))

    def collect(self, parts: Parts, plan: Plan, before: MonitorPlan | None = None) -> None:
        """Add the tap of the cell that clips gradients."""
        monitor = parts.monitor
        if parts.audit is not None or (monitor is not None and monitor.gradients.on and monitor.gradients.unclipped):
            parts.clipping = KnownCalls(guard_of(self.guard, KnownCalls), cast("CellParts", parts).clips)


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
