"""What an update used and did: learning rates, parameter groups, schedules, buffers, and the change of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """How often optimizers stepped."""

    updates: int = 0
    """In this step."""
    repeated: bool = False
    """A parameter was in two updates."""
    between: int = 0
    """Since the audited step before, in steps that are not audited, or in none."""
    by_hand: frozenset[str] = frozenset()
    """Trainable parameters that no optimizer holds and that the program moved between the backward pass and the step's end."""
    another: bool = False
    """Other optimizers stepped than in the audited step before."""
    in_turns: bool = False
    """These had stepped earlier, too, or were there when the training began: they and the others take turns."""

    @property
    def once(self) -> bool:
        """Whether every parameter was in one update at most: of one optimizer, or of several that own different ones."""
        return self.updates > 0 and not self.repeated


@dataclass(frozen=True, slots=True)
class BaseRate:
    """What is known of the learning rate of a parameter group."""

    optimizer: int
    """The number of its optimizer, by the order in which they step."""
    rate: float
    """The rate that schedules multiply; NaN where no scheduler was made."""
    unstepped: bool
    """A scheduler was made for the optimizer, and none has been stepped."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trainer is."""

    epochs: int = 0
    """Those that have ended."""
    updates: int = 0
    """Those that it is to make in all; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of an optimizer."""

    kind: str
    """The class of the optimizer, where its rule is known."""
    names: frozenset[str]
    """The parameters that it steps."""
    options: Mapping[str, float | bool | tuple[float, ...]]
    """Its plain numbers: lr, betas …"""
    own: frozenset[str] = frozenset()
    """Those of them that the class of the optimizer knows nothing of."""
    made: float = float("nan")
    """The learning rate that it had when the run began; NaN where it was not there."""


@dataclass(frozen=True, slots=True)
class UsedGroups:
    """Parameter groups as an optimizer used them."""

    groups: tuple[ParameterGroup, ...] = ()
    """Of all optimizers."""
    rates: tuple[float, ...] = ()
    """Learning rate of each group."""
    bases: tuple[BaseRate, ...] = ()
    """What is known of each of these rates."""
    progress: Progress = field(default_factory=Progress)
    """How far the trainer is."""
    rates_next: tuple[float, ...] = ()
    """Learning rates at the end of the step, where a scheduler may have moved them."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """A learning-rate scheduler since it was last looked at."""

    kind: str
    """Its class."""
    advances: int
    """How often it was stepped, once its optimizer had."""
    position: int
    """Where it stood at the update, or where none was seen, at first."""
    rates: tuple[float, ...]
    """The rate that it declares for that position, one for each group; empty where the position alone does not give it."""
    actual: tuple[float, ...]
    """The rates that the optimizer used."""
    updates: int = 0
    """How often its optimizer stepped."""
    between: tuple[int, int] = (0, 0)
    """Advances and updates from the update that was looked at before to this one."""
    end: int = 0
    """The position at which the rate is at its least, and behind which it rises again; 0 where it never does."""
    astray: int = 0
    """How often it was stepped in all while only another optimizer updated the same parameters, with rates of its own."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Learning-rate schedulers that were stepped."""

    schedules: tuple[SchedulerState, ...] = ()
    """In the order in which they were first seen."""


@dataclass(frozen=True, slots=True)
class BufferStates:
    """Buffers of the model before the first forward of a step and after its update."""

    begun: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name → fingerprint before the first forward."""
    updated: Mapping[str, int] = field(default_factory=dict[str, int])
    """Name → fingerprint after the update."""
    spoiled: tuple[str, ...] = ()
    """Buffers that held a NaN when they were last looked at."""
    averaged: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """Counter of averaged batches → its number before the first forward and after the update."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """One parameter's update, worked out again by its rule."""

    name: str
    """The parameter."""
    worst: float
    """Largest error of an element over its noise floor."""
    moved: float
    """Norm of the change that was made."""
    change: float
    """Norm of the change by the rule."""
    total: float = 0.0
    """Sum of |change| by the rule, of weights of 16 bits; 0 of others."""
    lost: float = 0.0
    """The same over elements that stayed as they were."""


@dataclass(frozen=True, slots=True)
class Reruns:
    """Updates that were worked out again."""

    reruns: tuple[Rerun, ...] = ()
    """One for each parameter whose turn it was."""
