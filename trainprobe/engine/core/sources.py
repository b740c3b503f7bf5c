"""Where the tensors of a parameter are: its value, its real gradient, its optimizer state, in this process.

Frameworks keep them in different places (p.grad, main_grad, flat partitions, DTensor shards). An integration brings a Source
that knows; the taps and the audit ask only Sources. A Source hands out tensors and never reads a value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

from trainprobe.engine.core.flat_parameters import FlatSlice
from trainprobe.engine.geometry.shards import Shard, ShardOf, mesh_shard

SORTS = frozenset({"value", "gradient", "state"})
GRADIENTS = frozenset({"grad", "grad_unreduced", "grad_unclipped"})


def sort_of(slot: str) -> str:
    """Return the sort of tensor that stands in a slot of a part: "value", "gradient" or "state"."""
    if slot in ("value", "main_value"):
        return "value"
    return "gradient" if slot in GRADIENTS else "state"


class Part(NamedTuple):
    """One tensor of one parameter in this process.

    name: the parameter's logical name. slot: "value", "grad" (as the optimizer sees it), "grad_unreduced", "grad_unclipped",
    "main_value" (master weight), "exp_avg", "exp_avg_sq" or whatever the optimizer calls it. scale: what the numbers must be
    divided by (a loss scale that is still in a gradient), 1 otherwise. micro: the micro-batch of an unreduced gradient, where
    those of each are kept.
    """

    name: str
    slot: str
    tensor: Any
    shard: Shard | None = None
    scale: float = 1.0
    micro: int = 0


class Source(Protocol):
    """Hands out the parts that this process holds, always in the same order on every step."""

    def parts(self, moment: str) -> Iterator[Part]:
        """Yield what can be seen at `moment`.

        "before_step": value, grad and optimizer state, gradients reduced and, where the framework lets one tell, after
        clipping; "after_step": value and optimizer state; "unreduced", "unclipped": gradients, where an integration can place
        those moments.
        """
        ...

    def scalars(self) -> Mapping[str, float]:
        """Return what the framework reports itself, lr, loss_scale, grad_norm …, as plain numbers; no device is read."""
        ...


@dataclass(slots=True)
class PlainSource:
    """A PyTorch model and optimizer as they are: p, p.grad and optimizer.state[p].

    DTensor shards are handed on as they are. Of parameters that `FullyShardedDataParallel` flattened, the slices that this
    process holds. names: id of parameter → logical name. slices: id of what the optimizer steps → those slices.
    flat: id of a flat parameter → all of its own. shard_of: returns which part of the whole a plain parameter is; None where
    every plain parameter is whole.
    others: ids of what other optimizers step, which is left out. Where optimizers step copies of another dtype, these and
    their state are reported as those of the parameters (see `masters`).
    """

    names: Mapping[int, str]
    parameters: list[Any]
    optimizers: list[Any] = field(default_factory=list[Any])
    slices: Mapping[int, list[FlatSlice]] = field(default_factory=dict[int, list[FlatSlice]])
    flat: Mapping[int, list[FlatSlice]] = field(default_factory=dict[int, list[FlatSlice]])
    others: set[int] = field(default_factory=set[int])
    shard_of: ShardOf | None = None
    _replaced: int = field(default=0, init=False, repr=False)
    _masters: tuple[Any, dict[int, Any]] = field(default=((), {}), init=False, repr=False)

    def learn(self, optimizer: Any) -> None:
        """Learn of an optimizer that steps.

        It takes the place of those that hold one of its parameters, so that neither what they leave behind nor what they alone
        held is told as the training's; but not of one that it wraps, whose groups are its own.
        """
        if any(optimizer is known for known in self.optimizers):
            return
        own, groups = _held(optimizer), set(map(id, _groups(optimizer)))

        def stays(known: Any) -> bool:
            return own.isdisjoint(_held(known)) or not groups.isdisjoint(map(id, _groups(known)))

        staying = [*filter(stays, self.optimizers)]
        self._replaced += len(staying) < len(self.optimizers)
        self.optimizers = [*staying, optimizer]

    def step_of(self, optimizer: Any) -> None:
        """Leave out, from now on, what other optimizers than this one own: they step at another moment of the same step."""
        self.others = set[int]().union(*(_held(o) for o in self.optimizers if o is not optimizer)) - _held(optimizer)

    def parts(self, moment: str, sorts: Collection[str] = SORTS) -> Iterator[Part]:
        """Yield value, grad and state of each parameter. sorts: which of these are asked for; the others are not looked for."""
        values, gradients = "value" in sorts, moment == "before_step" and "gradient" in sorts
        states, masters, shard_of = self.states() if "state" in sorts else [], self.masters(), self.shard_of
        for p in self.stepped() if values or gradients or states else ():
            name = "" if id(p) in self.slices else self.names[id(p)]  # empty for one that is flattened
            if name and values:
                yield Part(name, "value", p, mesh_shard(p) if _spread(type(p)) else shard_of and shard_of(p))
            elif values:
                yield from self._pieces(p, "value", p)
            if gradients:
                yield from self.gradients(p, "grad")
            master = masters.get(id(p))
            if master is not None and id(master) in self.others:
                continue
            if master is not None and values:
                yield self._part(p, "main_value", master)
            for state in states:
                yield from self._state_parts(p, name, state.get(id(p if master is None else master)) or {})

    def _state_parts(self, p: Any, name: str, state: Mapping[str, Any]) -> Iterator[Part]:
        for slot, tensor in state.items():
            if name and hasattr(tensor, "shape"):
                yield self._part(p, str(slot), tensor)
            elif hasattr(tensor, "shape"):
                yield from self._pieces(p, str(slot), tensor)

    def stepped(self) -> list[Any]:
        """Return the parameters that are not left to another optimizer's step."""
        return [p for p in self.parameters if id(p) not in self.others] if self.others else self.parameters

    def masters(self) -> dict[int, Any]:
        """Return the tensor that an optimizer steps in place of a parameter, by the parameter's id: its master weight.

        Known where the tensors that optimizers hold and the model does not, and the trainable parameters that none of them
        holds, are as many, and each has the shape of its counterpart in order and another dtype.
        """
        groups = [group["params"] for optimizer in self.optimizers for group in _groups(optimizer)]
        key = tuple((id(params), len(params)) for params in groups)
        if self._masters[0] != key:
            held, own = {id(t): t for params in groups for t in params}, {id(p) for p in self.parameters}
            strays = [t for number, t in held.items() if number not in own]
            left = [p for p in self.parameters if p.requires_grad and id(p) not in held]
            matched = len(strays) == len(left) and all(
                t.shape == p.shape and t.dtype != p.dtype for t, p in zip(strays, left, strict=True)
            )
            self._masters = key, {id(p): t for p, t in zip(left, strays, strict=True)} if matched else {}
        return self._masters[1]

    def states(self) -> list[dict[int, Any]]:
        """Return what each optimizer keeps, by id of the parameter: a tensor is slow as the key of a look-up."""
        return [{id(p): state for p, state in _state_of(optimizer).items()} for optimizer in self.optimizers]

    def gradients(self, p: Any, slot: str) -> Iterable[Part]:
        """Return what is in `p.grad`, under a slot; a DTensor that is a partial sum, joined by its optimizer, as unreduced."""
        gradient = p.grad
        if gradient is None:
            return ()
        return self._pieces(p, "grad_unreduced" if _spread(type(gradient)) and is_partial(gradient) else slot, gradient)

    def _pieces(self, p: Any, slot: str, tensor: Any) -> Iterable[Part]:
        slices = self.slices.get(id(p))
        if slices is None:
            return (self._part(p, slot, tensor),)
        return self._sliced(p, slot, tensor, slices)

    def _part(self, p: Any, slot: str, tensor: Any) -> Part:
        """Return a tensor of a parameter, and which part of the whole it is where it has the parameter's shape."""
        shard = self.shard_of(p) if self.shard_of and not _spread(type(tensor)) and tensor.shape == p.shape else None
        if shard is not None and slot == "grad_unreduced":
            shard = replace(shard, replicas=())
        return Part(self.names[id(p)], slot, tensor, shard)

    def _sliced(self, p: Any, slot: str, tensor: Any, slices: list[FlatSlice]) -> Iterator[Part]:
        for flat_slice in slices:
            if flat_slice.count and tensor.shape == p.shape:
                yield Part(flat_slice.name, slot, flat_slice.of(tensor), flat_slice.shard)
            elif flat_slice.count and (flat_slice.start is None or not tensor.dim()):  # kept whole, or a count of steps
                yield Part(flat_slice.name, slot, tensor)

    def scalars(self) -> Mapping[str, float]:
        """Return the learning rate of each parameter group, and which optimizer steps where it took the place of another."""
        out: dict[str, float] = {"optimizer": 1.0 + self._replaced} if self._replaced else {}
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                lr = group.get("lr")
                if isinstance(lr, float | int):
                    out["lr" if i == j == 0 else f"lr/{i}.{j}" if i else f"lr/{j}"] = float(lr)
        return out


def _state_of(optimizer: Any) -> Mapping[Any, Any]:
    """Return what an optimizer keeps of its parameters; torch's ZeroRedundancyOptimizer has it in `optim`, of its own alone."""
    return optimizer.state or getattr(getattr(optimizer, "optim", None), "state", optimizer.state)


def _groups(optimizer: Any) -> Sequence[Any]:
    return getattr(optimizer, "param_groups", ())


def _held(optimizer: Any) -> set[int]:
    """Return the ids of what an optimizer steps."""
    return {id(p) for group in _groups(optimizer) for p in group["params"]}


@cache
def _spread(kind: type) -> bool:
    """Tell whether tensors of a kind say how they are spread over processes, as DTensor does."""
    return hasattr(kind, "placements")


def is_partial(t: Any) -> bool:
    """Tell whether a tensor is a DTensor of which each rank holds a part of a sum."""
    return _spread(type(t)) and any(placement.is_partial() for placement in t.placements)
