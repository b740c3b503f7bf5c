"""The nouns that every tap, statistic, writer and rule shares.

A collected step of one rank leaves the device once and becomes a `StepData`: the calls that were seen, the distinct values
they refer to, and one row of partial sums a value. A `StepData` is columnar, because building thousands of small objects
inside a training step would cost more than reducing the tensors; iterate over `StepData.records()` for one immutable
`Record` a value and place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compiled import native
from trainprobe.engine.core.findings import Finding as Finding
from trainprobe.engine.core.places import MOST_RANKS as MOST_RANKS
from trainprobe.engine.core.places import Kind, Phase, Place, Site, Step


@dataclass(frozen=True, slots=True)
class Record:
    """One number row: where, when, what, and its statistics.

    values: statistic name (max, min, mean, norm, std, nan, inf, zero, …) to float; `checksum` is an int (64 bits).
    tensor: key of the saved tensor in the step's tensor file, or None. note: why statistics are absent, or None.
    """

    step: Step
    place: Place
    site: Site
    dtype: str
    shape: tuple[int, ...]
    values: Mapping[str, float | int]
    tensor: str | None = None
    note: str | None = None


class Value:
    """A distinct tensor value that was looked at once; its numbers stand in row `row` of the step's partials."""

    __slots__ = ("device", "dtype", "extra", "note", "requires_grad", "row", "shape", "tensor", "type")

    def __init__(
        self,
        row: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        type: str = "torch.Tensor",
        device: str = "cpu",
        requires_grad: bool | None = None,
        note: str | None = None,
        tensor: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.row = row  # index into StepData.partials, -1 when nothing could be reduced (then `note` says why)
        self.type = type  # full class name as existing tools write it
        self.dtype = dtype  # "torch.float32", "Float32" (mindspore)
        self.shape = shape  # -1 for the ragged dimension of a jagged tensor
        self.device = device
        self.requires_grad = requires_grad
        self.note = note
        self.tensor = tensor
        self.extra = extra  # DTensor placements and mesh, and the like

    def with_note(self, note: str | None) -> Value:
        """Return the same value with a note of its own; other places that refer to it keep theirs."""
        twin = copy(self)
        twin.note = note
        return twin


def logical_shape(value: Value) -> tuple[int, ...]:
    """Return the shape of the tensor of which this rank holds a shard; a value's own shape where it holds the whole."""
    shard = (value.extra or {}).get("shard")
    return tuple(shard["whole"]) if shard else value.shape


TOLD = "told/"  # begins the names of scalars that the script gave to another tool
NOT_WRITTEN = "not written yet"  # note of memory that a call is handed to be written, or that nobody has written


@dataclass(frozen=True, slots=True)
class ToBeWritten:
    """Stands in a tree of arguments for a tensor whose memory is no value yet."""

    tensor: Any


class Call:
    """One forward or backward of a module or op, or one group of parameter values.

    Kind "parameter": the gradients that reached a module's own parameters, `params` {short name: Value}. Kind
    "state": what belongs to one parameter around the optimizer step, `name` its full name, `params` {"value" | "grad"
    | "exp_avg" | …: Value}.

    The trees `args`, `kwargs`, `out`, `params` hold `Value`s, plain scalars (int, float, bool, str, None), `Opaque`
    leaves, and nested lists and dicts of them. A backward call has its gradients of outputs in `args` and its
    gradients of inputs in `out`.
    """

    __slots__ = ("args", "call", "cls", "kind", "kwargs", "micro", "name", "node", "out", "params", "parent", "phase", "stack")

    def __init__(
        self,
        kind: Kind,
        name: str,
        call: int,
        phase: Phase,
        *,
        cls: str = "",
        micro: int | None = None,
        parent: Call | str | None = None,
        stack: int = -1,
    ) -> None:
        self.kind: Kind = kind
        self.name = name
        self.call = call
        self.phase: Phase = phase
        self.cls = cls
        self.micro = micro
        self.parent = parent  # enclosing call, or "optimizer" / "clip_grad"
        self.stack = stack  # index into StepData.stacks
        self.args: Any = None
        self.kwargs: Any = None
        self.out: Any = None
        self.params: Any = None
        self.node: str | None = None  # autograd node whose gradients these are, for a backward op


if not TYPE_CHECKING and native is not None:  # thousands a step, which the garbage collector does not track
    Value, Call = native.Value, native.Call


@dataclass(frozen=True, slots=True)
class Opaque:
    """A leaf that is neither tensor nor plain scalar, as existing tools write it: `{"type": type, "value": value, …}`."""

    type: str
    value: Any
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Feature:
    """Something worked out from tensors on their device, such as the entropy of attention: a few numbers, or counts per bin.

    name: module or parameter. slot: what it is, `attention_entropy`, or with the value it was taken of, `dead_units.output`.
    call: how often this was worked out before in the step. numbers: float64 [k]; of more than one, each is a series of its
    own, `attention_entropy.3`. edges: of counts per bin, the bins' edges [k + 1]; else None.
    """

    name: str
    slot: str
    call: int
    micro: int | None
    numbers: npt.NDArray[np.float64]
    edges: npt.NDArray[np.float64] | None = None

    def each(self) -> Iterator[tuple[str, float]]:
        """Yield (slot, number) of each number; nothing of counts per bin."""
        if self.edges is None:
            single = self.numbers.size == 1
            for i, number in enumerate(self.numbers.tolist()):
                yield self.slot if single else f"{self.slot}.{i}", number


@dataclass(slots=True)
class StepData:
    """All that one rank saw in one collected step, on the host.

    partials: float64 [rows, len(PARTIALS)] (see engine.stats.partials). checksums: uint64 [rows] or None; 0 where none was
    asked for, and of no elements.
    tensors: tensor key → host array-like, only when the sinks must write them themselves.
    scalars: name → float, from `note` (loss, lr, grad_norm …). notes: what could not be seen and why, each once.
    features: what was worked out from tensors. batches: fingerprint of what the model was called with, a number a call.
    shares: row → the share of a shard in the fingerprint of the whole tensor (see engine.stats.checksum).
    """

    step: int
    place: Place
    framework: str
    level: str
    task: str
    calls: list[Call]
    values: Sequence[Value]
    partials: npt.NDArray[np.float64]
    checksums: npt.NDArray[np.uint64] | None = None
    statistics: tuple[str, ...] = ("max", "min", "mean", "norm")
    crc32: Mapping[int, str] | None = None
    histograms: Mapping[int, Any] | None = None  # row → (edges, counts)
    quantiles: Mapping[int, Any] | None = None  # row → values at the plan's levels
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    stacks: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    programs: Sequence[str] = ("dump",)  # those that asked for this step, by name
    dumped: bool = True  # whether one of them asked for what the plan's level and task record, and not others alone
    complete: bool = True
    features: Sequence[Feature] = ()
    batches: Sequence[int] = ()
    shares: Mapping[int, int] = field(default_factory=dict[int, int])
    layout: Any = field(default=None, init=False, repr=False, compare=False)  # see engine/core/step_layout.py

    def change(self, *, calls: list[Call] | None = None, scalars: Mapping[str, float] | None = None) -> None:
        """Take other calls or scalars from now on. The layout follows from them, and may have been asked for already."""
        self.calls = self.calls if calls is None else calls
        self.scalars = self.scalars if scalars is None else scalars
        self.layout = None

    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """Finish the partials: statistic name → array [rows], computed once a collected step and vectorised."""
        from trainprobe.engine.stats import finish

        return finish(self.partials, self.statistics)

    def records(self) -> Iterator[Record]:
        """Yield a Record for each value at each place it was seen, in execution order."""
        from trainprobe.engine.core.step_data import iterate_records

        return iterate_records(self)
