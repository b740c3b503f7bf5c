"""The parts of an address: when in a run, where in a job, and where in a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["forward", "recompute", "backward", "optimizer", "save", "step"]
Kind = Literal["module", "op", "parameter", "state", "collective", "saved", "scalar", "feature"]


@dataclass(frozen=True, slots=True)
class Step:
    """When: optimizer step number, micro-batch within it (None when it belongs to the whole step), and phase."""

    number: int
    micro: int | None = None
    phase: Phase = "forward"


MOST_RANKS = 1 << 22  # of a job; more stand in files that are damaged


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the job: global rank, world size, and (index, size) on each parallel axis.

    `axes` keys are among dp, tp, pp, vpp, ep, cp, sp; an axis that is absent has size 1.
    """

    rank: int = 0
    world_size: int = 1
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True, slots=True)
class Site:
    """Address of a value inside the model.

    kind: what it belongs to. name: `layers.0.mlp` (module), `Functional.linear` (op), `layers.0.mlp.weight` (parameter),
    `loss` (scalar). call: how often this name was called before in this step. slot: which of its values, as a path:
    `input.0`, `kwargs.mask`, `output`, `parameters.weight`, `grad_output.0`, `grad_input.0`, `grad`, `exp_avg`, `value`.
    cls: class name of a module, empty otherwise.
    """

    kind: Kind
    name: str
    slot: str
    call: int = 0
    cls: str = ""
