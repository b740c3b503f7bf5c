"""The probe of a MindSpore training: the plan, writers and rules that PyTorch has, with taps and a library of MindSpore."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import mindspore

from trainprobe.engine.arrays.mindspore_library import MindSporeLibrary, copy_out
from trainprobe.engine.detail import Detail
from trainprobe.engine.guard import Guard
from trainprobe.engine.plan import Plan
from trainprobe.engine.probe import Program, Wants
from trainprobe.engine.records import Finding, Place
from trainprobe.engine.selection import parse_steps
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps import Tap
from trainprobe.engine.taps.mindspore_cells import COMPILED, CellTap
from trainprobe.engine.taps.mindspore_states import CellStateTap, OptimizerTap, ValuesWanted
from trainprobe.engine.taps.mindspore_tape import HostTape
from trainprobe.engine.wanted import ModulesWanted, modules_of_plan
from trainprobe.errors import PlanError, UsageError
from trainprobe.monitor.plan import MonitorPlan
from trainprobe.monitor.plan import validate as monitor_plan
from trainprobe.monitor.wanted import flags_where, modules_of_monitor
from trainprobe.watching import Probe


@dataclass(slots=True)
class CellParts:
    """The taps of one probe, as `trainprobe.build.Parts`; whatever exists under PyTorch only is None."""

    naming: CellTap
    stepping: OptimizerTap
    modules: CellTap | None = None
    watched: CellTap | None = None
    states: CellStateTap | None = None
    monitor: MonitorPlan | None = None
    dumps_when_asked: bool = False  # a plan of level off whose rules or black box may ask for a dump
    cuts: list[Detail] = field(default_factory=list[Detail])

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def notes(self) -> list[str]:
        """Return what could not be seen, and why."""
        return list(dict.fromkeys(note for tap in (self.naming, self.modules, self.watched) if tap for note in tap.notes))


class MindSporeProbe(Probe):
    """A probe of MindSpore cells and optimizers. Raises PlanError for what a plan asks and only PyTorch shows."""

    framework = "mindspore"

    @property
    def cells(self) -> CellParts:
        """The taps."""
        return cast("CellParts", self.parts)

    def moment(self, name: str, *values: Any) -> None:
        """Tell that something happens; "before_step" and "after_step" have parameters and optimizer state looked at."""
        super().moment(name, *values)
        if self.tape is not None and self.cells.states is not None and name in ("before_step", "after_step"):
            self.guard.run(self.cells.states.moment, name)

    def tell_what_is_compiled(self) -> str:
        """Keep as a finding what a graph hides, and return the sentence; empty when the plan asks for nothing of it."""
        monitor = self.cells.monitor
        hidden = self.cells.modules is not None or (
            monitor is not None and (monitor.gradients.on or monitor.activations.on or monitor.activation_gradients.on)
        )
        if hidden:
            self._tell(Finding("mindspore", "info", COMPILED))
        return COMPILED if hidden else ""

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Raise UsageError: a MindSpore training is watched through its callback only."""
        raise UsageError(f"save({name!r}) records torch tensors only; under MindSpore dump the cell that makes the value")

    def _compose(self, plan: Plan, guard: Guard, stacks: Any, rename: Any) -> tuple[Any, list[Program]]:
        refuse(plan)
        return compose(plan, guard)

    def _tapes(self, plan: Plan) -> Callable[[int], Tape]:
        library = MindSporeLibrary(plan.native)
        return lambda number: HostTape(library, self._keep, reuse=False)

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
        self._writer.submit_tensor(self.step_number, key, copy)


def refuse(plan: Plan) -> None:
    """Raise PlanError for what cannot be carried out under MindSpore."""
    monitor = monitor_plan(plan.monitor) if plan.monitor else None
    problems = {
        "monitor: collectives, features and batches are looked at by torch: leave them out": monitor is not None
        and any(getattr(kind, "on", False) for kind in (monitor.collectives, monitor.features, monitor.batches)),
        f"level {plan.level!r} records torch operations: use L0, which records cells": plan.level in ("L1", "mix", "debug"),
        "audit: its relations are about PyTorch trainings: leave the section out": bool(plan.audit),
        "config_check: it looks into a PyTorch process: use `trainprobe config_check` on the files of the run": bool(
            plan.config_check
        ),
        "histogram and quantiles are computed by torch: leave them out": plan.histogram is not None or bool(plan.quantiles),
        "tensor_format 'pt' is written by torch: use safetensors or npy": plan.tensor_format == "pt",
    }
    found = [text for text, is_so in problems.items() if is_so]
    if found:
        raise PlanError("under MindSpore this plan cannot be carried out: " + "; ".join(found))


def compose(plan: Plan, guard: Guard) -> tuple[CellParts, list[Program]]:
    """Build the taps that a plan asks for and the programs that say when they run."""
    cuts: list[Detail] = []
    monitor = monitor_plan(plan.monitor) if plan.monitor else None
    asked = plan.level == "off" and (bool(plan.black_box) or (monitor is not None and monitor.may_dump))
    modules = CellTap(modules_of_plan(plan, cuts), guard) if plan.level == "L0" or asked else None
    watched = CellTap(modules_of_monitor(monitor), guard) if monitor is not None else None
    naming = modules or watched or CellTap(ModulesWanted(_none, _nothing, frozenset()), guard)
    states = CellStateTap(_states_of_monitor(monitor)) if monitor is not None else None
    stepping = OptimizerTap(guard, partial(_before, states), partial(_after, states))
    parts = CellParts(naming, stepping, modules, watched, states, monitor, dumps_when_asked=asked, cuts=cuts)
    named: tuple[tuple[Tap, Wants], ...] = ((naming, lambda n: False),)
    dump = tuple(tap for tap in (modules, stepping) if tap is not None)
    pairs = (*((tap, plan.wants_step) for tap in dump), *named)
    programs = [Program("dump", plan.wants_step, pairs, asked=dump, level="L0" if asked else "")]
    if monitor is not None and states is not None and watched is not None:
        light: list[tuple[Tap, Wants]] = [(states, lambda n: True), (stepping, lambda n: True)]
        kinds = [kind.every for kind in (monitor.activations, monitor.activation_gradients) if kind.on]
        whole = plan.level == "L0"
        light.append((watched, lambda n: any(n % e == 0 for e in kinds) and not (whole and plan.wants_step(n))))
        programs.append(
            Program("monitor", parse_steps(monitor.step).__contains__, tuple(light), beside=(watched,) if modules else ())
        )
    return parts, programs


def _before(states: CellStateTap | None, optimizer: Any, gradients: Any) -> None:
    if states is not None:
        states.moment("before_step", [optimizer], gradients)


def _after(states: CellStateTap | None, optimizer: Any) -> None:
    if states is not None:
        states.moment("after_step", [optimizer])


def _states_of_monitor(monitor: MonitorPlan) -> ValuesWanted:
    return ValuesWanted(
        value=flags_where(monitor.parameters),
        gradient=flags_where(monitor.gradients) if monitor.gradients.reduced else _none,
        state=flags_where(monitor.optimizer_state),
        update=flags_where(monitor.update),
        every={
            "value": monitor.parameters.every,
            "gradient": monitor.gradients.every,
            "state": monitor.optimizer_state.every,
            "update": monitor.update.every,
        },
    )


def _none(name: str) -> int:
    return 0


def _nothing(name: str) -> bool:
    return False


def place_of_process() -> Place:
    """Return this process's Place: from mindspore.communication once it is initialised, else from what msrun set.

    The whole world is taken as data parallel.
    """
    rank, world = int(os.environ.get("RANK_ID", "0")), int(os.environ.get("RANK_SIZE", "1"))
    if mindspore.communication.GlobalComm.INITED:
        rank, world = mindspore.communication.get_rank(), mindspore.communication.get_group_size()
    return Place(rank=rank, world_size=world, axes={"dp": (rank, world)} if world > 1 else {})


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
