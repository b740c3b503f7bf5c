"""Backward passes of a step, and what became of the gradients that they left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Backwards:
    """Backward passes."""

    count: int = 0
    """How many began; one within another is a part of it."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """By which plain numbers the loss of a backward pass was multiplied last."""

    factors: tuple[float, ...] = ()
    """The last one first."""
    of_sum: bool = False
    """What was multiplied is a sum of several terms."""


@dataclass(frozen=True, slots=True)
class LossScales:
    """By what the losses were multiplied."""

    scaled: tuple[LossScale, ...] = ()
    """One for each backward pass."""


@dataclass(frozen=True, slots=True)
class LossGraphs:
    """The graph of the loss from which the first backward pass of a step began."""

    normalised_twice: str = ""
    """The parameter nearest to a softmax of a softmax; empty where there is none."""
    graded: int = 0
    """Terms that were added up last and have a gradient."""
    ungraded: int = 0
    """Those that have none, or are plain numbers."""


@dataclass(frozen=True, slots=True)
class UsedGradients:
    """Which parameters got a gradient, which update used it, and which gradients were thrown away."""

    twice: tuple[str, ...] = ()
    """Parameters that were stepped again with the gradient of the update before."""
    reached: frozenset[str] = frozenset()
    """Parameters with a gradient, of the optimizers that stepped."""
    unreached: tuple[str, ...] = ()
    """Parameters that no backward pass gave one, of the same optimizers."""
    removed: tuple[str, ...] = ()
    """Parameters that a backward pass gave one, which the program has taken away since."""
    idle: tuple[str, ...] = ()
    """Parameters of optimizers that stepped at each audited step before and not in this one."""
    never: tuple[str, ...] = ()
    """Parameters of optimizers that have not stepped, now that eight audited steps are over."""
    discarded: int = 0
    """Backward passes whose gradients were cleared before an update used them."""
    closure: bool = False
    """An optimizer ran forward and backward within its step, more than once."""
    in_turns: bool = False
    """An optimizer stepped between two backward passes."""
    climbs: bool = False
    """The weights were written between two backward passes, by no optimizer."""
    overwritten: tuple[str, ...] = ()
    """Parameters whose update used what an earlier pass left, as it was, though a later one left a gradient of its own."""
    differentiated: tuple[float, ...] = ()
    """The losses of the backward passes; empty where one began from more than a number."""
    mixed: Mapping[str, float] = field(default_factory=dict[str, float])
    """Parameter whose update used gradients from before and after weights were written → norm of the older part."""


@dataclass(frozen=True, slots=True)
class KeptGradients:
    """Gradients that were there when the first backward pass began, and that the update used."""

    left: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """Parameter → (fingerprint, norm)."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One call that clipped gradients by norm."""

    names: frozenset[str]
    """The parameters that it was given."""
    norm: float
    """The norm that it found."""
    used: bool = True
    """An update came after it in the same step."""
    limit: float = float("inf")
    """The largest norm that it leaves as it is."""
    others: bool = False
    """It was given gradients of more than the model, so that its norm is that of something else."""


@dataclass(frozen=True, slots=True)
class ClippedGradients:
    """Calls that clipped gradients by norm."""

    clips: tuple[Clip, ...] = ()
    """In their order."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The applied gradient a of one parameter, before clipping, against that of the declared loss d on this rank."""

    name: str
    """The parameter."""
    applied: float
    """‖a‖², over all elements."""
    declared: float
    """‖d‖²."""
    both: float
    """⟨a, d⟩."""


@dataclass(frozen=True, slots=True)
class Projections:
    """The applied gradients against those of the declared loss."""

    projections: tuple[Projection, ...] = ()
    """One for each parameter with a gradient."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One parameter's gradient as one linear number, before and after the ranks joined it."""

    name: str
    """The parameter."""
    arrived: float
    """Of this rank's own gradient, summed over the micro-batches."""
    used: float
    """Of the gradient that is used, before clipping."""
    norm: float
    """‖g‖ of that gradient."""


@dataclass(frozen=True, slots=True)
class Reductions:
    """Gradients before and after they were joined over the ranks."""

    reductions: tuple[Reduction, ...] = ()
    """One for each parameter."""


@dataclass(frozen=True, slots=True)
class TrainedPlaces:
    """At which places [rows, time] of the model's first output a gradient arrived that is not 0."""

    argument: str = ""
    """The argument [rows, time] or [rows, time, features] of the call; empty where there was none."""
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Places of padding, but for the first of each row; those of them with a gradient; rows that have both; rows with a
    gradient there alone."""
    prompts: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Neighbouring rows that begin with the same three tokens or more and are not equal; neighbouring rows; how many tokens all
    of the first share; those that share fewer."""
    prompted: tuple[int, int] = (0, 0)
    """Places whose next token all of these share, in rows with a gradient, and those of them with a gradient."""
