"""PyTorch's taps: how each is made for a plan, and what they do around an optimizer step."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainprobe.engine.capture import AUDIT, part_of
from trainprobe.engine.capture.awaited import AwaitedTap
from trainprobe.engine.capture.clipping import ClippingTap
from trainprobe.engine.capture.collectives import CollectiveTap
from trainprobe.engine.capture.features.batches import BatchTap
from trainprobe.engine.capture.features.feature import FeatureKind, FeatureTap, Surroundings, feature_in, part_of_feature
from trainprobe.engine.capture.gradients import functions_off, hook_on_gradient
from trainprobe.engine.capture.loss_scaling import LossScalingTap
from trainprobe.engine.capture.module_buffers import BufferTap
from trainprobe.engine.capture.optimizer_steps import OptimizerStepTap
from trainprobe.engine.capture.parameter_states import ParameterStateTap
from trainprobe.engine.capture.requests import ModuleRequest, OpRequest, StatesRequest, flags_of
from trainprobe.engine.capture.saved import SavedTap
from trainprobe.engine.capture.torch_modules import ModuleTap
from trainprobe.engine.capture.torch_ops import OpTap
from trainprobe.engine.capture.unreduced import UnreducedTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.position import OPTIMIZER, UPDATED
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats.partials import STATS
from trainprobe.monitor.audit.capture.audit_tap import AuditTap
from trainprobe.monitor.feature_plan import Features
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.run.composition import TapMaker
from trainprobe.run.schedules import Parts, guard_of


class TorchTaps(TapMaker):
    """Makes the taps of a PyTorch training."""

    needed = (
        (LossScalingTap, part_of(ParameterStateTap)),
        (OptimizerStepTap, part_of(ParameterStateTap)),
        (ParameterStateTap, AUDIT),
        (ClippingTap, AUDIT),
    )

    def __init__(self, guard: Guard, stacks: Stacks | None = None, rename: Rename | None = None) -> None:
        super().__init__(guard)
        self._stacks = stacks
        self._rename = rename

    def saved(self, flags: int) -> SavedTap:
        """Return the tap of values that the program hands over."""
        return SavedTap(flags, guard_of(self.guard, SavedTap), hook_on_gradient, functions_off)

    def modules(self, request: ModuleRequest, dumped: bool) -> ModuleTap:
        """Return a tap of modules; the monitor's keeps no call stacks."""
        return ModuleTap(request, guard_of(self.guard, ModuleTap), self._stacks if dumped else None, self._rename)

    def ops(self, request: OpRequest, parts: Parts, plan: Plan) -> OpTap:
        """Return the tap of ops; collectives are recorded with them."""
        ops = OpTap(request, guard_of(self.guard, OpTap), self._stacks, parts.modules)
        inside: list[Call] = parts.modules.stack if parts.modules is not None else []
        own = guard_of(self.guard, CollectiveTap)
        parts.collectives = CollectiveTap(flags_of(plan.base_detail, parts.cuts), own, self._stacks, inside)
        return ops

    def states(self, request: StatesRequest, parts: Parts) -> ParameterStateTap:
        """Return the tap of parameters, gradients and optimizer state; the loss scale is followed with it."""
        states = ParameterStateTap(request, parts.naming.names)
        parts.scaling = LossScalingTap(guard_of(self.guard, LossScalingTap), states.scaled, states.unscaled)
        return states

    def audit(self, parts: Parts) -> AuditTap:
        """Return the tap of the audit."""
        naming = parts.naming
        own, pause = guard_of(self.guard, AuditTap), partial(_pause_for_audit, parts)
        return AuditTap(own, parts.states, lambda: naming.parameter_names, naming.scan, pause)

    def stepping(self, parts: Parts, plan: Plan) -> OptimizerStepTap:
        """Return the tap that tells when the optimizer runs."""
        begins, ends = partial(_before, parts), partial(_after, parts)
        return OptimizerStepTap(guard_of(self.guard, OptimizerStepTap), begins, ends, partial(_trial, parts))

    def collect(self, parts: Parts, plan: Plan, before: MonitorPlan | None = None) -> None:
        """Add the taps of what a plan collects beside these. before: the monitor's plan whose taps are there already."""
        if before is None and parts.modules is not None:
            parts.buffers = BufferTap(parts.modules)
        parts.awaited = parts.awaited or AwaitedTap(guard_of(self.guard, AwaitedTap))
        _collect(parts, plan, self.guard, before)


def _collect(parts: Parts, plan: Plan, guard: Guard, before: MonitorPlan | None = None) -> None:
    """Make the taps of what a plan collects beside the states of parameters. before: the plan whose taps are there already."""
    monitor, states = parts.monitor, parts.states
    gradients = monitor.gradients if monitor is not None and monitor.gradients.on else None
    clips = parts.audit is not None or (gradients is not None and gradients.unclipped)
    if states is not None and clips != (parts.clipping is not None):
        parts.clipping = (
            ClippingTap(guard_of(guard, ClippingTap), partial(_unclipped, parts), states.reported_norm) if clips else None
        )
    if states is not None and (before is None or gradients != before.gradients):
        wanted = gradients is not None and gradients.unreduced
        per_micro = gradients is not None and gradients.per_micro
        arrives = partial(states.arrived, per_micro=per_micro)
        parts.unreduced = (
            UnreducedTap(guard_of(guard, UnreducedTap), arrives, lambda: states.source is None, per_micro) if wanted else None
        )
    batched = bool(plan.section("black_box")) or (monitor is not None and monitor.batches.on)
    parts.batches = parts.batches or BatchTap(guard_of(guard, BatchTap)) if batched else None
    if monitor is not None and (before is None or monitor.collectives != before.collectives):
        inside, chosen = (parts.watched or parts.naming).stack, Names(monitor.collectives.names).__contains__
        own = guard_of(guard, CollectiveTap)
        parts.exchanged = CollectiveTap(STATS, own, None, inside, chosen) if monitor.collectives.on else None
    if monitor is not None and (before is None or monitor.features != before.features):
        parts.features = features_of_monitor(monitor.features, guard, parts.naming) if monitor.features.on else None


def _unclipped(parts: Parts, parameters: list[Any]) -> None:
    """Handle gradients that are about to be clipped."""
    if parts.states is not None:
        parts.let(parts.states.unclipped, parameters)
    if parts.audit is not None:
        parts.let(parts.audit.unclipped, parameters)


def _before(parts: Parts, optimizer: Any) -> None:
    """Handle the beginning of an optimizer step."""
    if parts.position is not None:
        parts.position.is_in(OPTIMIZER)
    if parts.modules is not None:
        parts.let(parts.modules.unwatched_parameters)
    if parts.buffers is not None:
        parts.let(parts.buffers.look)
    if parts.audit is not None:
        parts.let(parts.audit.before_update, optimizer)
    if parts.features is not None:
        parts.let(parts.features.stepping)
    if parts.states is not None:
        parts.let(parts.states.stepping, optimizer)
        if parts.states.source is None:  # an integration with a source of its own places the moments itself
            parts.let(parts.states.moment, "before_step")
    if parts.ops is not None:
        parts.ops.parent = "optimizer"
        if not parts.records_update:
            parts.pauses.begin("the optimizer", [parts.ops])


def _after(parts: Parts, optimizer: Any) -> None:
    """Handle the end of an optimizer step."""
    if parts.position is not None:
        parts.position.is_in(UPDATED)
    if parts.ops is not None:
        parts.ops.parent = None
        parts.pauses.end("the optimizer", [parts.ops])
    if parts.states is not None and parts.states.source is None:
        parts.let(parts.states.moment, "after_step")
    if parts.audit is not None:
        parts.let(parts.audit.after_update)


def _pause_for_audit(parts: Parts, begins: bool) -> None:
    """Have all that records rest while the audit runs the model itself."""
    (parts.pauses.begin if begins else parts.pauses.end)("the audit", [parts.ops, parts.modules, parts.collectives])
    _rest(parts, "the audit", begins)


def _trial(parts: Parts, begins: bool) -> None:
    """Have the monitor rest while an optimizer tries other weights: those are no values of the training."""
    _rest(parts, "a trial", begins)


def _rest(parts: Parts, whom: str, begins: bool) -> None:
    """Have all that the monitor has installed for forward calls rest, or take them again."""
    (parts.pauses.begin if begins else parts.pauses.end)(whom, [parts.watched, parts.exchanged, parts.batches, parts.features])
    if parts.unreduced is not None:
        parts.unreduced.paused = begins


# ---- what a plan wants, in the words of the taps -----------------------------------------------------------------------


def features_of_monitor(plan: Features, guard: Guard, naming: ModuleTap) -> FeatureTap:
    """Return the tap of the deeper features that a plan asks for."""
    inside: list[tuple[str, Any]] = []
    kinds: list[FeatureKind] = []
    for section in plan.chosen():
        kind = feature_in(section.OBSERVER)
        own, chosen = guard.of(part_of_feature(kind)), Names(section.names).__contains__
        settings = {name: getattr(section, name) for name in type(section).model_fields if name not in ("on", "names")}
        kinds.append(kind(Surroundings(chosen, own, naming.names, inside), **settings))
    known = lambda: {key: info.name for key, info in naming.known.items()}  # noqa: E731
    return FeatureTap(kinds, guard_of(guard, FeatureTap), known, inside)
