"""PyTorch's taps: how each is made for a run, and what they do around an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trainprobe.engine.capture import AUDIT, Tap, part_of
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
from trainprobe.engine.capture.requests import NO_STATES, FeatureRequest, ModuleRequest, OpRequest, StatesRequest
from trainprobe.engine.capture.saved import SavedTap
from trainprobe.engine.capture.torch_modules import ModuleTap
from trainprobe.engine.capture.torch_ops import OpTap
from trainprobe.engine.capture.unreduced import UnreducedTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.position import OPTIMIZER, UPDATED
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.sources import Source
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.stats.partials import STATS
from trainprobe.engine.taps import Taps
from trainprobe.monitor.audit.capture.audit_tap import AuditTap


class TorchTaps(Taps):
    """The taps of a PyTorch training."""

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

    @property
    def naming(self) -> ModuleTap:
        """What knows the names of the model."""
        tap = super().naming
        assert isinstance(tap, ModuleTap)
        return tap

    def use_source(self, source: Source) -> Mapping[str, Callable[..., None]]:
        """Take parameters, gradients and optimizer state from `source`, whose integration tells the moments."""
        states = self.get("states", ParameterStateTap)
        if states is None:
            return {}
        states.source = source
        return {moment: partial(states.moment, moment) for moment in ("before_step", "after_step", "unreduced", "unclipped")}

    # ---- what programs ask for -----------------------------------------------------------------------------------

    def saved(self, flags: int) -> SavedTap:
        """Return the tap of values that the program hands over."""
        return self.once("saved", lambda: SavedTap(flags, self.own(SavedTap), hook_on_gradient, functions_off))

    def _of_modules(self, request: ModuleRequest, stacks: bool) -> ModuleTap:
        return ModuleTap(request, self.own(ModuleTap), self._stacks if stacks else None, self._rename)

    def ops(self, request: OpRequest) -> OpTap:
        """Return the dump's tap of ops."""
        modules = self.get("modules", ModuleTap)
        return self.once("ops", lambda: OpTap(request, self.own(OpTap), self._stacks, modules))

    def collectives(self, flags: int) -> CollectiveTap:
        """Return the dump's tap of collectives."""
        modules, own = self.get("modules", ModuleTap), self.own(CollectiveTap)
        inside: list[Call] = modules.stack if modules is not None else []
        return self.once("collectives", lambda: CollectiveTap(flags, own, self._stacks, inside))

    def buffers(self) -> BufferTap | None:
        """Return the dump's tap of the buffers of modules."""
        modules = self.get("modules", ModuleTap)
        return None if modules is None else self.once("buffers", lambda: BufferTap(modules))

    def awaited(self) -> AwaitedTap:
        """Return the tap of what functional collectives still write."""
        return self.once("awaited", lambda: AwaitedTap(self.own(AwaitedTap)))

    def states(self, request: StatesRequest | None = None) -> ParameterStateTap:
        """Return the tap of parameters, gradients and optimizer state."""
        states = self.once("states", lambda: ParameterStateTap(request or NO_STATES, self.naming.names))
        if request is not None:
            states.change(request)
        return states

    def scaling(self) -> LossScalingTap:
        """Return the tap that follows the loss scale."""
        states, own = self.states(), self.own(LossScalingTap)
        return self.once("scaling", lambda: LossScalingTap(own, states.scaled, states.unscaled))

    def audit(self) -> AuditTap:
        """Return the tap of the audit."""
        naming, states, own = self.naming, self.states(), self.own(AuditTap)
        known = lambda: naming.parameter_names  # noqa: E731
        return self.once("audit", lambda: AuditTap(own, states, known, naming.scan, self._pause_for_audit))

    def stepping(self) -> OptimizerStepTap:
        """Return the tap that tells when the optimizer runs."""
        own = self.own(OptimizerStepTap)
        return self.once("stepping", lambda: OptimizerStepTap(own, self._before, self._after, partial(self._rest, "a trial")))

    def clipping(self) -> ClippingTap:
        """Return the tap that tells when gradients are clipped."""
        norm, own = self.states().reported_norm, self.own(ClippingTap)
        return self.once("clipping", lambda: ClippingTap(own, self._unclipped, norm))

    def unreduced(self, per_micro: bool) -> UnreducedTap:
        """Return the tap of gradients before they are joined over the ranks."""
        states, own = self.states(), self.own(UnreducedTap)
        arrives, plain = partial(states.arrived, per_micro=per_micro), lambda: states.source is None
        return self.once("unreduced", lambda: UnreducedTap(own, arrives, plain, per_micro), per_micro)

    def batches(self) -> BatchTap:
        """Return the tap of what the model is called with."""
        return self.once("batches", lambda: BatchTap(self.own(BatchTap)))

    def exchanged(self, names: tuple[str, ...]) -> CollectiveTap:
        """Return the monitor's tap of collectives."""
        around, own = self.get("watched", ModuleTap) or self.naming, self.own(CollectiveTap)
        make = lambda: CollectiveTap(STATS, own, None, around.stack, Names(names).__contains__)  # noqa: E731
        return self.once("exchanged", make, (names, around))

    def features(self, requests: Sequence[FeatureRequest]) -> FeatureTap:
        """Return the tap of deeper features."""
        return self.once("features", lambda: self._of_features(requests), requests)

    def _of_features(self, requests: Sequence[FeatureRequest]) -> FeatureTap:
        naming = self.naming
        inside: list[tuple[str, Any]] = []
        kinds: list[FeatureKind] = []
        for observer, names, settings in requests:
            kind = feature_in(observer)
            own, chosen = self.guard.of(part_of_feature(kind)), Names(names).__contains__
            kinds.append(kind(Surroundings(chosen, own, naming.names, inside), **settings))
        known = lambda: {key: info.name for key, info in naming.known.items()}  # noqa: E731
        return FeatureTap(kinds, self.own(FeatureTap), known, inside)

    # ---- what they do around an update -----------------------------------------------------------------------------

    def _unclipped(self, parameters: list[Any]) -> None:
        """Handle gradients that are about to be clipped."""
        for tap in (self.get("states", ParameterStateTap), self.get("audit", AuditTap)):
            if tap is not None:
                self.let(tap.unclipped, parameters)

    def _before(self, optimizer: Any) -> None:
        """Handle the beginning of an optimizer step."""
        if self.position is not None:
            self.position.is_in(OPTIMIZER)
        if (modules := self.get("modules", ModuleTap)) is not None:
            self.let(modules.unwatched_parameters)
        if (buffers := self.get("buffers", BufferTap)) is not None:
            self.let(buffers.look)
        if (audit := self.get("audit", AuditTap)) is not None:
            self.let(audit.before_update, optimizer)
        if (features := self.get("features", FeatureTap)) is not None:
            self.let(features.stepping)
        if (states := self.get("states", ParameterStateTap)) is not None:
            self.let(states.stepping, optimizer)
            if states.source is None:  # an integration with a source of its own places the moments itself
                self.let(states.moment, "before_step")
        if (ops := self.get("ops", OpTap)) is not None:
            ops.parent = "optimizer"
            if not self.records_update:
                self.pauses.begin("the optimizer", [ops])

    def _after(self, optimizer: Any) -> None:
        """Handle the end of an optimizer step."""
        if self.position is not None:
            self.position.is_in(UPDATED)
        if (ops := self.get("ops", OpTap)) is not None:
            ops.parent = None
            self.pauses.end("the optimizer", [ops])
        if (states := self.get("states", ParameterStateTap)) is not None and states.source is None:
            self.let(states.moment, "after_step")
        if (audit := self.get("audit", AuditTap)) is not None:
            self.let(audit.after_update)

    def _pause_for_audit(self, begins: bool) -> None:
        """Have all that records rest while the audit runs the model itself."""
        self._pause("the audit", begins, "ops", "modules", "collectives")
        self._rest("the audit", begins)

    def _rest(self, whom: str, begins: bool) -> None:
        """Have all that the monitor has installed for forward calls rest, or take them again.

        It rests too while an optimizer tries other weights: those are no values of the training.
        """
        self._pause(whom, begins, "watched", "exchanged", "batches", "features")
        if (unreduced := self.get("unreduced", UnreducedTap)) is not None:
            unreduced.paused = begins

    def _pause(self, whom: str, begins: bool, *roles: str) -> None:
        (self.pauses.begin if begins else self.pauses.end)(whom, [self.get(role, Tap) for role in roles])
