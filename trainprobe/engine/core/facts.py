"""What is known of a training's set-up without reading a device: who owns which parameter, modes, ties, schedules, data.

Taps take these facts; the audit judges them. A fingerprint is the 64-bit number of `engine.stats.checksum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """One parameter object. names: every name that leads to it, first one first. storage: the address of its data, 0 where it
    has none.

    owned: an optimizer steps it (None: unknown).
    """

    names: tuple[str, ...]
    identity: int
    storage: int
    trainable: bool
    shape: tuple[int, ...]
    dtype: str
    owned: bool | None = None

    @property
    def name(self) -> str:
        """The name under which it is recorded."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model and its optimizers at one moment.

    modes: module name → whether it is in training mode. strays: (shape, dtype) of tensors that an optimizer holds and the
    model does not. foreign: parameters that a data-parallel wrapper reduces and that are not the model's (and the other way
    round). hidden: parameters with a gradient that modules keep in plain lists and dicts, so that they are not the model's, and
    that no optimizer holds. hooked: (parameter or module, function) of each hook that is registered there more than once.
    dropouts: modules that drop with a probability above 0. adapters: parameters of active adapters on top of a base layer.
    broadcasts: a wrapper hands the buffers of one rank to the others at each forward. embeddings: weights of embeddings.
    """

    parameters: tuple[ParameterFact, ...] = ()
    modes: Mapping[str, bool] = field(default_factory=dict[str, bool])
    strays: tuple[tuple[tuple[int, ...], str], ...] = ()
    foreign: tuple[str, ...] = ()
    optimizer: str = ""
    wrapped: str = ""
    hidden: tuple[str, ...] = ()
    hooked: tuple[tuple[str, str], ...] = ()
    dropouts: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    broadcasts: bool = False
    embeddings: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One forward of the model in evaluation mode.

    live: modules in training mode. random: innermost modules that drew random numbers. dropped: those in which a dropout of
    `torch.nn.functional` was applied as in training.
    """

    live: tuple[str, ...]
    random: tuple[str, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning-rate scheduler since it was last looked at.

    advances: how often it was stepped, once its optimizer had. updates: how often its optimizer stepped. position: where it
    stood at the update, or where none was seen, at first. rates: what it declares for that position, a number a group, or empty
    where that is not a function of the position alone. actual: what the optimizer used. between: advances and updates from the
    update that was looked at before to this one. end: the position at which it has annealed the rate to its least, and behind
    which it raises it again; 0 of schedules that do not. astray: how often it was stepped in all while its own optimizer never
    was, and another one updated the same parameters with rates of its own.
    """

    kind: str
    advances: int
    position: int
    rates: tuple[float, ...]
    actual: tuple[float, ...]
    updates: int = 0
    between: tuple[int, int] = (0, 0)
    end: int = 0
    astray: int = 0


@dataclass(frozen=True, slots=True)
class Plateau:
    """A scheduler that lowers the rate when a metric gets no better, as it was seen from its first call on.

    mode: "min" or "max", what it takes for better. calls, reductions: how often it was stepped, and lowered the rate. first,
    low, high: the metric at first, and its bounds.
    """

    mode: str
    calls: int
    reductions: int
    first: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of the learning rate of a parameter group. optimizer: the number of its optimizer, by the order in which
    they step. rate: the one that schedules multiply; NaN where no scheduler was made. unstepped: a scheduler was made for the
    optimizer, and none has been stepped.
    """

    optimizer: int
    rate: float
    unstepped: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trainer is. epochs: those that have ended. updates: those that it is to make in all, 0 if unknown."""

    epochs: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A parameter group of an optimizer: its class, the names it steps, and its plain numbers (lr, betas …)."""

    kind: str
    names: frozenset[str]
    options: Mapping[str, float | bool | tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Clip:
    """One call that clipped gradients by norm: the parameters that it was given, and the norm that it found.

    used: an update came after it in the same step. limit: the largest norm that it leaves as it is. others: it was given
    gradients of more than the model, so that its norm is that of something else.
    """

    names: frozenset[str]
    norm: float
    used: bool = True
    limit: float = float("inf")
    others: bool = False


@dataclass(frozen=True, slots=True)
class Projection:
    """Gradient of the declared loss against the applied one: inner products over all elements of one parameter.

    applied: ‖a‖². declared: ‖d‖². both: ⟨a, d⟩, a the applied gradient before clipping, d that of the declared loss on this
    rank.
    """

    name: str
    applied: float
    declared: float
    both: float


@dataclass(frozen=True, slots=True)
class Reduction:
    """One parameter's gradient as one linear number: arrived: of this rank's own, summed over the micro-batches. used: of the
    one that is used, before clipping. norm: ‖g‖ of the latter.
    """

    name: str
    arrived: float
    used: float
    norm: float


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A piece of a logical tensor. place: digest of the rectangle that it is, 0 of the whole. count: its elements.

    whole: elements of the logical tensor. share: its share in the fingerprint of that (`engine.stats.checksum`).
    """

    place: int
    count: int
    whole: int
    share: int


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What this process held when it saved behind a step: (parameter, slot) → fingerprint, and (buffer, "buffer").

    positions: class of a scheduler → where it stood. batches: the first and the last audited steps until then, and the
    fingerprints of their data. world: how many ranks there were. pieces: of the tensors that were cut. settings: "GROUP NAME" →
    value of the plain numbers of each parameter group. scale: of the loss scaler that was saved with it; 0 where none was.
    randoms: generator → fingerprints of its state as the first step of the run began, and at the save.
    """

    step: int
    tensors: Mapping[tuple[str, str], int]
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    batches: tuple[tuple[int, tuple[int, ...]], ...] = ()
    world: int = 1
    pieces: Mapping[tuple[str, str], SavedShard] = field(default_factory=dict[tuple[str, str], SavedShard])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scale: float = 0.0
    randoms: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True, slots=True)
class Rerun:
    """One parameter's update, worked out again by its rule.

    worst: largest error of an element over its noise floor. moved, change: norm of the change that was made, and by the rule.
    total, lost: the sum of |change| by the rule, over all elements and over those that stayed as they were, of weights of 16
    bits; 0 of others.
    """

    name: str
    worst: float
    moved: float
    change: float
    total: float = 0.0
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """By which plain numbers the loss of a backward pass was multiplied last, the very last first. of_sum: what lies beneath
    them is a sum of several terms.
    """

    factors: tuple[float, ...] = ()
    of_sum: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that a module handed on. total: the sum of its elements."""

    fingerprint: int
    norm: float
    total: float
    count: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A forward that ran again within the backward pass: its outputs, and those of the module's forwards of this step.

    order: where the module's first forward stands among those that were looked at.
    """

    name: str
    order: int
    again: tuple[Output, ...]
    first: tuple[tuple[Output, ...], ...]


@dataclass(frozen=True, slots=True)
class LossCall:
    """One call of a loss function of torch, in training.

    kind: the function of `torch.nn.functional`. reduction: "mean", "sum", "none", or "weighted" by classes. forward: the call
    of the model that it follows, from 0 on in the step, -1 where none came before. backward: how many backward passes had
    begun. count: the elements of the target. shapes: of input and target, as they were before they were expanded. rows: of
    the tokens that the model was called with, 0 where there were none.

    numbers: "value" of the loss, NaN where it is not one number; "valid" targets, which are not ignored; "input_low",
    "input_high", "target_low", "target_high"; "off_one": the largest distance from 1 of a sum over the classes (of a part of
    the input). Of tokens [rows, columns], for time along dimension D and a shift of S: "pairs D S" valid targets that have a
    token S places further, "equal D S" of these that equal it, "masked D S" of these at which the attention mask is 0. Of the
    token that pads: "pad_low", "pad_high", the bounds of the tokens at which the mask is 0; "ends D", how many tokens are equal
    to the larger at places where the mask is not 0, and "ended D", how many of these are the next token of a valid target. Of
    targets [N]: "class_low", "class_high". Of an input [N, N] over classes: "self_low", "self_high", bounds of its diagonal,
    "self_below" the largest of a row, at most, and "self_targets" that are on it. Of CTC: "too_long" transcripts, which are
    longer than what they are read from. "apart", of a call without a gradient: the largest element of its result.

    classes: [2 C + 1], see `taps.class_shares`: targets of each class, the sum of its probability, and the sum of
    -log p(target), over the places that were looked at; empty where the targets are not indices of classes. smoothing: of the
    labels.
    """

    kind: str
    reduction: str
    forward: int
    backward: int
    count: int
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    rows: int = 0
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    classes: tuple[float, ...] = ()
    smoothing: float = 0.0

    def number(self, name: str) -> float:
        """Return one of the numbers; NaN for what was not looked at."""
        return self.numbers.get(name, float("nan"))


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """What a recurrent or attention module of torch was first given in a step: [batch, time, …] if `batch_first`.

    as_called: the model itself was called with a tensor of the same first two dimensions.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    batch_first: bool
    as_called: bool


@dataclass(frozen=True, slots=True)
class PaddingMask:
    """A mask of padding against the tokens that it belongs to.

    name: the module that was given it. argument: its name. rows: those that have padding and other tokens. inverted: those of
    them in which the mask hides all but the padding.
    """

    name: str
    argument: str
    rows: int
    inverted: int


@dataclass(frozen=True, slots=True)
class InputScale:
    """A tensor of numbers that the model was called with: its largest, how far its elements are from whole multiples of
    1/255², in these, at most, and how many of them are between 0 and the largest.
    """

    name: str
    high: float
    off: float
    between: int


@dataclass(frozen=True, slots=True)
class Outer:
    """One arithmetic operation outside of the model's modules that made [count, count] of [count] and [count, 1].

    place: file and line of the code that did it.
    """

    operation: str
    count: int
    place: str


@dataclass(frozen=True, slots=True)
class StepFacts:
    """All that the audit's taps saw of one step.

    batches: fingerprint of what the model was called with, a micro-batch each. tokens: how many whole numbers the first such
    tensor of each held. bypassed: the model inside a wrapper was called, and not the wrapper. left: parameter → (fingerprint,
    norm) of a gradient that was there when the first backward pass began. buffers: name → fingerprint after the update. rates:
    learning rate of each group as the optimizer used it; bases: of each; rates_next: as it is at the end of the step, where a
    scheduler may have moved it. groups: as the optimizer used them. repeated: a parameter was in two updates. twice: parameters
    that were stepped again with the gradient of the update before. called: module → whether it ran with gradients enabled, of
    the modules that ran in training. reached, unreached: parameters of the optimizers that stepped, with a gradient and
    without. idle: parameters of optimizers that stepped at each audited step before and not in this one. never: those of
    optimizers that have not stepped, now that eight audited steps are over. discarded: backward passes whose gradients were
    cleared before an update used them. waiting: parameters whose gradient `fully_shard` had not reduced when the optimizer
    stepped. mixed: parameter → norm of the part of its gradient that came before weights were written, where the update used
    more that came after. closure: an optimizer ran forward and backward within its step, more than once. in_turns: an optimizer
    stepped between two backward passes; climbs: the weights were written between two, by no optimizer. differentiated: the
    losses of the backward passes, empty where one began from more than a number. scaled: by what each of these was multiplied
    last. begun: name → fingerprint of a buffer before the first forward. ordinal: how many steps had begun with this one.
    updates_between: how often optimizers stepped since the audited step before, in steps that are not audited, or in none.
    clips: the calls that clipped. random: fingerprint of the random state at the end of the step; random_begun: of that at its
    beginning. region: that of the random state of what is split over tp, 0 if none was named. randoms: generator → fingerprint
    of its state at the beginning, of the first step of a run and of one that follows a load. reductions: gradients before and
    after they were joined over the ranks. recomputed: forwards that ran again. reruns: updates that were worked out again.
    saved: what was saved last, where something was loaded since; loaded: the pieces that were held then, before the update.
    same_epochs: epochs that a shuffling sampler began in the order of the one before. losses: calls of loss functions, in their
    order. ambient: what holds for the whole thread where the first update begins, in words: autocast, grad mode, default dtype
    … equal_rows: matrices whose rows are all equal, where that was looked at. stale_copies: running statistics of copies of the
    model that stood still while weights of the copy and statistics of the model moved. sampled: class of a distribution → a
    parameter that it depends on, of samples that let no gradient through. gathered: a parameter on which a tensor depends that
    was gathered over the ranks without its gradient, and was then multiplied with one that has one. gradient_term: a parameter
    on which a term of a loss depends that was made of a gradient without a graph. plateaus: see `Plateau`. ungraded: calls of
    loss functions whose result has no gradient. sequences, masks, scales: what modules were given. moved_twice: modules whose
    running statistics were moved by a forward and again by the one that a checkpoint ran in the backward pass. outer: see
    `Outer`. handed_out: batches that loaders with several workers have handed out in the epochs that run now; workers: how many
    the last of these loaders has. dependent: scalars that were noted as tensors with a gradient. spoiled: buffers with a NaN.
    saved_by_ranks: reads, on rank 0, what each rank saved. others: facts that have no field here, by their names.
    """

    set_up: ModelFacts
    model: ModelFacts
    batches: tuple[int, ...] = ()
    whole_numbers: bool = False
    tokens: tuple[int, ...] = ()
    bypassed: bool = False
    backwards: int = 0
    updates: int = 0
    repeated: bool = False
    twice: tuple[str, ...] = ()
    called: Mapping[str, bool] = field(default_factory=dict[str, bool])
    reached: frozenset[str] = frozenset()
    unreached: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    discarded: int = 0
    waiting: tuple[str, ...] = ()
    closure: bool = False
    in_turns: bool = False
    climbs: bool = False
    differentiated: tuple[float, ...] = ()
    scaled: tuple[Scaled, ...] = ()
    mixed: Mapping[str, float] = field(default_factory=dict[str, float])
    begun: Mapping[str, int] = field(default_factory=dict[str, int])
    ordinal: int = 0
    updates_between: int = 0
    left: Mapping[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    buffers: Mapping[str, int] = field(default_factory=dict[str, int])
    groups: tuple[Group, ...] = ()
    rates: tuple[float, ...] = ()
    bases: tuple[Base, ...] = ()
    progress: Progress = field(default_factory=Progress)
    rates_next: tuple[float, ...] = ()
    clips: tuple[Clip, ...] = ()
    random: int = 0
    random_begun: int = 0
    region: int = 0
    randoms: Mapping[str, int] = field(default_factory=dict[str, int])
    drawn: bool = False
    evaluations: tuple[Evaluation, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    plateaus: tuple[Plateau, ...] = ()
    projections: tuple[Projection, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    recomputed: tuple[Repeat, ...] = ()
    reruns: tuple[Rerun, ...] = ()
    saved: tuple[SavedTensors, ...] = ()
    loaded: Mapping[tuple[str, str], SavedShard] | None = None
    same_epochs: int = 0
    losses: tuple[LossCall, ...] = ()
    equal_rows: tuple[str, ...] = ()
    stale_copies: tuple[str, ...] = ()
    sampled: Mapping[str, str] = field(default_factory=dict[str, str])
    gathered: str = ""
    gradient_term: str = ""
    ambient: Mapping[str, str] = field(default_factory=dict[str, str])
    ungraded: tuple[LossCall, ...] = ()
    sequences: tuple[SequenceInput, ...] = ()
    masks: tuple[PaddingMask, ...] = ()
    scales: tuple[InputScale, ...] = ()
    moved_twice: tuple[str, ...] = ()
    outer: tuple[Outer, ...] = ()
    handed_out: int = 0
    workers: int = 0
    dependent: frozenset[str] = frozenset()
    spoiled: tuple[str, ...] = ()
    saved_by_ranks: Callable[[], Mapping[int, Sequence[SavedTensors]]] = dict
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def updated_once(self) -> bool:
        """Whether every parameter was in one update at most: of one optimizer, or of several that own different ones."""
        return self.updates > 0 and not self.repeated
