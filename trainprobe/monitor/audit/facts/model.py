"""The model and its optimizers without a look at any number: who owns which parameter, modes, ties. The taps establish it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ParameterFact:
    """One parameter object."""

    names: tuple[str, ...]
    """Every name that leads to it, first one first."""
    identity: int
    """The `id` of the object."""
    storage: int
    """The address of its data; 0 where it has none."""
    trainable: bool
    """It requires a gradient."""
    shape: tuple[int, ...]
    """As it is on this rank."""
    dtype: str
    """As the framework prints it."""
    owned: bool | None = None
    """An optimizer steps it; None: unknown."""

    @property
    def name(self) -> str:
        """The name under which it is recorded."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model and its optimizers at one moment."""

    parameters: tuple[ParameterFact, ...] = ()
    """All of the model."""
    modes: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Module name → whether it is in training mode."""
    strays: tuple[tuple[tuple[int, ...], str], ...] = ()
    """(Shape, dtype) of tensors that an optimizer holds and the model does not."""
    foreign: tuple[str, ...] = ()
    """Parameters that a data-parallel wrapper does not reduce although it wraps the model that holds them."""
    optimizer: str = ""
    """The classes of the optimizers."""
    wrapped: str = ""
    """The class of a data-parallel wrapper."""
    hidden: tuple[str, ...] = ()
    """Parameters with a gradient in plain lists and dicts of modules, so that the model and its optimizers lack them."""
    hooked: tuple[tuple[str, str], ...] = ()
    """(Parameter or module, function) of each hook that is registered there more than once."""
    dropouts: frozenset[str] = frozenset()
    """Modules that drop with a probability above 0."""
    adapters: frozenset[str] = frozenset()
    """Parameters of active adapters on top of a base layer."""
    broadcasts: bool = False
    """A wrapper hands the buffers of one rank to the others at each forward."""
    embeddings: frozenset[str] = frozenset()
    """Weights of embeddings."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The training as a whole, at this step."""

    set_up: ModelFacts = field(default_factory=ModelFacts)
    """The model as it was set up."""
    model: ModelFacts = field(default_factory=ModelFacts)
    """The model as it is now."""
    ordinal: int = 0
    """How many steps had begun with this one."""
