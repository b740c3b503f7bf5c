"""Calls of the model and its loss functions in a step, and what its modules were given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One forward of the model in evaluation mode."""

    live: tuple[str, ...]
    """Modules in training mode."""
    random: tuple[str, ...]
    """Innermost modules that drew random numbers."""
    dropped: tuple[str, ...] = ()
    """Modules in which a dropout of `torch.nn.functional` was applied as in training."""


@dataclass(frozen=True, slots=True)
class TrainingCalls:
    """Calls of the model as a whole."""

    batches: tuple[int, ...] = ()
    """Fingerprint of what the model was called with, one for each micro-batch."""
    whole_numbers: bool = False
    """It was called with whole numbers."""
    tokens: tuple[int, ...] = ()
    """How many whole numbers the first such tensor of each micro-batch held."""
    bypassed: bool = False
    """The model inside a wrapper was called, and not the wrapper."""
    called: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Module that ran in training → whether it ran with gradients enabled."""
    drawn: bool = False
    """A forward drew random numbers."""
    evaluations: tuple[Evaluation, ...] = ()
    """Forwards in evaluation mode since the last audited step."""
    asked: frozenset[str] = frozenset()
    """Modules that ran in the step only with gradients disabled, as a teacher does."""


@dataclass(frozen=True, slots=True)
class RandomFingerprints:
    """Fingerprints of the random state of the host."""

    begun: int = 0
    """At the beginning of the step."""
    ended: int = 0
    """At its end."""
    region: int = 0
    """Of the random state for what is split over tp; 0 if none was named."""


@dataclass(frozen=True, slots=True)
class DependentScalars:
    """Scalars that depend on the weights."""

    names: frozenset[str] = frozenset()
    """Those that the program noted as tensors with a gradient."""


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """What a recurrent or attention module of torch was first given in a step."""

    name: str
    """The module."""
    kind: str
    """Its class."""
    shape: tuple[int, ...]
    """[batch, time, …] if `batch_first`, otherwise [time, batch, …]."""
    batch_first: bool
    """What the module takes to be first."""
    as_called: bool
    """The model itself was called with a tensor of the same first two dimensions."""


@dataclass(frozen=True, slots=True)
class PaddingMask:
    """A mask of padding against the tokens that it belongs to."""

    name: str
    """The module that was given it."""
    argument: str
    """The name of the mask among its arguments."""
    rows: int
    """Rows that have padding and other tokens."""
    inverted: int
    """Those of them in which the mask hides all but the padding."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """A tensor of numbers that the model was called with."""

    name: str
    """The argument."""
    high: float
    """Its largest element."""
    off: float
    """Largest distance of an element from a whole multiple of 1/255², in these."""
    between: int
    """How many elements are between 0 and the largest."""


@dataclass(frozen=True, slots=True)
class GivenInputs:
    """What modules of the model were given."""

    sequences: tuple[SequenceInput, ...] = ()
    """Of recurrent and attention modules."""
    masks: tuple[PaddingMask, ...] = ()
    """Masks of padding."""
    scales: tuple[InputScale, ...] = ()
    """Tensors of numbers that the model was called with."""
    moved_twice: tuple[str, ...] = ()
    """Modules whose running statistics a forward moved, and again the one that a checkpoint ran in the backward pass."""


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a loss function of torch, in training."""

    kind: str
    """The function of `torch.nn.functional`."""
    reduction: str
    """"mean", "sum", "none", or "weighted" by classes."""
    backward: int
    """How many backward passes had begun."""
    count: int
    """The elements of the target."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of input and target, as they were before they were expanded."""
    rows: int = 0
    """Rows of the tokens that the model was called with; 0 where there were none."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """What was counted, by name.

    "value": the loss, NaN where it is not one number. "valid": targets that are not ignored. "input_low", "input_high",
    "target_low", "target_high": bounds. "off_one": the largest distance from 1 of a sum over the classes (of a part of the
    input). "apart", of a call without a gradient: the largest element of its result. "too_long", of CTC: transcripts that are
    longer than what they are read from. "blanks", of CTC: letters that are the blank. "ignored_class": `ignore_index`, where it
    is one of the input's classes, otherwise -1. "copy of NAME", "column of NAME", "looked up by NAME": see
    `observers.loss_inputs`. "arguments": tensors that the model was called with.

    Of tokens [rows, columns], for time along dimension D and a shift of S: "pairs D S": valid targets that have a token S
    places further. "equal D S": those of them that equal it. "masked D S": those at which the attention mask is 0. "pad_low",
    "pad_high": bounds of the tokens at which the mask is 0. "ends D": how many tokens equal the larger of them where the mask
    is not 0. "ended D": how many of these are the next token of a valid target. "rows D", "bare D": rows, and those without a
    valid target. "hidden_low D", "hidden_high D": bounds of the tokens at the same place as valid targets that differ from
    them.

    Of targets [N]: "class_low", "class_high". Of an input [N, N] over classes: "self_low", "self_high": bounds of its diagonal.
    "self_below": how far the diagonal is below the largest of its row, at most. "self_targets": targets on the diagonal.
    """
    classes: tuple[float, ...] = ()
    """[2 C + 1], see `capture.class_shares`; empty where the targets are not indices of classes."""
    smoothing: float = 0.0
    """Of the labels."""

    def number(self, name: str) -> float:
        """Return one of the numbers; NaN for what was not looked at."""
        return self.numbers.get(name, float("nan"))


@dataclass(frozen=True, slots=True)
class LossCalls:
    """Calls of loss functions, in their order."""

    losses: tuple[LossCall, ...] = ()
    """Those whose result has a gradient."""
    ungraded: tuple[LossCall, ...] = ()
    """Those whose result has none."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that the model was called with."""

    name: str
    """Of the argument."""
    shape: tuple[int, ...]
    """Of the tensor."""
    fingerprint: int
    """Of its numbers."""
    unordered: bool = False
    """An element is smaller than the one before; not known of few or very many elements."""
    wholes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    """Of whole numbers, short dtype → how many are above what it holds exactly, how many of these are odd, and how many of the
    others are."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenNumbers:
    """What the model was first called with in a step."""

    arguments: tuple[Argument, ...] = ()
    """Its tensors."""
    tokens: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """[different tokens]: how often each came in rows of tokens, but for the padding behind them."""
