"""Values, gradients and optimizer state of each parameter around MindSpore's optimizer.

A call of the optimizer shows the gradients in its arguments. In graph mode it is not called from Python; parameters and moments
are then read as the step begins and ends, and gradients are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np

from trainprobe.engine.arrays.mindspore_library import HostArray, host_array, without_data
from trainprobe.engine.capture import StatesTap
from trainprobe.engine.capture.mindspore.cells import is_graph_mode, parameters_of
from trainprobe.engine.capture.requests import StatesRequest
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import Shard, ShardOf
from trainprobe.engine.tape import Tape

# what optimizers of MindSpore and MindFormers call their state → what everybody else does
STANDARD = {
    **dict.fromkeys(("moment1", "moments1", "exp_avg"), "exp_avg"),
    **dict.fromkeys(("moment2", "moments2", "exp_avg_sq"), "exp_avg_sq"),
    **dict.fromkeys(("moments", "momentum_buf"), "momentum_buffer"),
}


def states_of(optimizer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (parameter's name, standard slot, tensor) of what an optimizer keeps for its parameters.

    A state is a ParameterTuple on the optimizer, other than its parameters: one member for each, of its shape or with its name
    in it (`<something>.<parameter>`; a cell that is put around the model later gives its parameters other names), or members
    for some of them, which names alone tell.
    """
    parameters = list(optimizer.parameters)
    known = {str(p.name) for p in parameters}
    for key, members in vars(optimizer).items():
        if not isinstance(members, mindspore.ParameterTuple):
            continue
        all_of_them = len(members) == len(parameters)
        for i, member in enumerate(members):
            name = str(member.name).partition(".")[2]
            if all_of_them and (member.name.endswith(f".{parameters[i].name}") or _same_shapes(members, parameters)):
                name = str(parameters[i].name)
            if name in known and member.name not in known:
                yield name, _slot(optimizer, str(key)), member


def _slot(optimizer: Any, key: str) -> str:
    """Return the standard name of a state: `accum` of SGD is its momentum, that of Adagrad a sum of squares."""
    momentum = key == "accum" and any(cls.__name__ == "SGD" for cls in type(optimizer).__mro__)
    return "momentum_buffer" if momentum else STANDARD.get(key, key)


def _same_shapes(members: Sequence[Any], parameters: Sequence[Any]) -> bool:
    return all(member.shape == p.shape for member, p in zip(members, parameters, strict=True))


def learning_rates(optimizer: Any) -> dict[str, float]:
    """Return the rates that the next call of an optimizer uses: `lr`, and `lr/1` … of further groups."""
    return {"lr" if i == 0 else f"lr/{i}": rate for i, rate in enumerate(dict.fromkeys(rates_of(optimizer)))}


def rates_of(optimizer: Any) -> list[float]:
    """Return the rate that the next call of an optimizer uses: one for all its parameters, or one for each of them.

    A schedule that is computed by cells is asked in PyNative mode only, and else nothing returned; asking compiles nothing and
    draws nothing.
    """
    if isinstance(getattr(optimizer, "param_groups", None), list):
        return [_number(group["lr"]) for group in optimizer.param_groups for _ in group["params"]]
    dynamic = getattr(optimizer, "dynamic_lr", False)
    if dynamic and is_graph_mode():
        return []
    found = optimizer.get_lr() if dynamic else optimizer.learning_rate
    several = isinstance(found, tuple | list) and not isinstance(found, mindspore.Tensor)
    return [_number(rate) for rate in found] if several else [_number(found)]


def _number(x: Any) -> float:
    return float(np.asarray(x.asnumpy()).reshape(-1)[0]) if isinstance(x, mindspore.Tensor) else float(x)


class CellStateTap(StatesTap):
    """Hands parameters, gradients and optimizer state to the tape at "before_step" and "after_step".

    more: flags of the tape that every tensor gets in any case; the optimizer's own count of steps is then the slot
    `step` of its parameters. names: id of parameter → name, as the model is now. optimizers: those of the training as of now.
    shard_of: returns which part of the whole a parameter is; None where each is whole.
    """

    def __init__(
        self, request: StatesRequest, names: Callable[[], Mapping[int, str]], optimizers: Callable[[], Sequence[Any]]
    ) -> None:
        self.names, self.optimizers = names, optimizers
        self._request = request
        self._named: Mapping[int, str] = {}
        self._taken: frozenset[str] = frozenset()
        self._models: list[Any] = []
        self.more = 0
        self.shard_of: ShardOf | None = None
        self._shards: dict[str, Shard] | None = None  # name → the part of the whole that this process holds
        self._tape: Tape | None = None
        self._calls: dict[tuple[str, str], Call] = {}
        self._before: dict[str, HostArray] = {}
        self._parameters: list[Any] = []
        self._collected = -1

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember whose parameters to look at."""
        self._models = chunks_of(model)
        self._list()

    def _list(self) -> None:
        self._named = self.names()
        self._taken = frozenset(self._named.values())
        self._parameters = [p for _, p in parameters_of(self._models).values()]
        self._shards = None

    def begin(self, tape: Tape) -> None:
        """Take moments from now on."""
        if self._named is not self.names():  # the model has other parameters than before
            self._list()
        if self._shards is None:
            shards = {self._named[id(p)]: self.shard_of(p) for p in self._parameters} if self.shard_of else {}
            self._shards = {name: shard for name, shard in shards.items() if shard is not None}
        self._tape = tape
        self._calls.clear()
        self._before.clear()
        self._collected += 1

    def end(self, again: bool = False) -> None:
        """Take no more moments."""
        self._tape = None
        self._calls.clear()
        self._before.clear()

    def moment(self, name: str, chosen: Sequence[Any], gradients: Any = ()) -> None:
        """Look at parameters and state of the `chosen` optimizers, and at the gradients that one alone is handed."""
        if self._tape is None:
            return
        for part in self._parts(chosen, gradients):
            request, sort = self._flags(part.slot)
            slot = f"{part.slot}_after" if name == "after_step" else part.slot
            if part.slot == "value":
                self._update(name, part)
            flags = (request(part.name) if self._collected % self._request.every.get(sort, 1) == 0 else 0) | self.more
            if flags:
                self._see(name, part.name, slot, self._tape.tree(part.tensor, flags))
        if self.more:
            self._count(name, chosen)
        if name == "before_step":
            for optimizer in chosen:
                for key, rate in learning_rates(optimizer).items():
                    self._tape.note_once(key, rate)

    def unclipped(self, optimizers: Sequence[Any], gradients: Any) -> None:
        """Look at the gradients of one optimizer, which are about to be clipped."""
        if self._tape is None or len(optimizers) != 1 or not isinstance(gradients, tuple | list):
            return
        due = self._collected % self._request.every.get("gradient", 1) == 0
        for name, gradient in self._gradients(optimizers[0], gradients):
            flags = (self._request.gradient(name) if due else 0) | self.more
            if flags:
                self._see("unclipped", name, "grad_unclipped", self._tape.tree(gradient, flags))

    def _count(self, moment: str, optimizers: Sequence[Any]) -> None:
        assert self._tape is not None
        for optimizer in optimizers:
            counter = getattr(optimizer, "global_step", None)
            if isinstance(counter, mindspore.Tensor):
                steps = self._tape.value(counter, self.more)
                for name in self._names_in(optimizer).values():
                    self._see(moment, name, "step_after" if moment == "after_step" else "step", steps)

    def _parts(self, optimizers: Sequence[Any], gradients: Any) -> Iterator[Part]:
        others = {id(p) for o in self.optimizers() if not any(o is c for c in optimizers) for p in o.parameters}
        for p in self._parameters:
            if id(p) not in others:
                yield Part(self._named[id(p)], "value", p)
        if gradients and len(optimizers) == 1:
            for name, gradient in self._gradients(optimizers[0], gradients):
                yield Part(name, "grad", gradient)
        for optimizer in optimizers:
            names = self._names_in(optimizer)
            for name, slot, tensor in states_of(optimizer):
                if name in names:
                    yield Part(names[name], slot, tensor)

    def _gradients(self, optimizer: Any, gradients: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        names = self._names_in(optimizer)
        for p, gradient in zip(optimizer.parameters, gradients, strict=False):
            if gradient is not None and p.name in names:
                yield names[p.name], gradient

    def _names_in(self, optimizer: Any) -> dict[str, str]:
        """Return MindSpore's name → the recorded one, of an optimizer's parameters.

        One that the model does not hold is left out where the name is that of another, by which it was replaced.
        """
        found: dict[str, str] = {}
        for p in optimizer.parameters:
            name = self._named.get(id(p if p.inited_param is None else p.inited_param))
            if name is not None or p.name not in self._taken:
                found[str(p.name)] = str(p.name) if name is None else name
        return found

    def _flags(self, slot: str) -> tuple[Callable[[str], int], str]:
        if slot == "value":
            return self._request.value, "value"
        return (self._request.gradient, "gradient") if slot == "grad" else (self._request.state, "state")

    def _update(self, moment: str, part: Part) -> None:
        """Record value after the step minus value before it, in float32 for bfloat16 and else in the tensor's own dtype."""
        flags = self._request.update(part.name)
        if not flags or self._collected % self._request.every.get("update", 1) or without_data(part.tensor):
            return
        assert self._tape is not None
        now = host_array(part.tensor)
        if moment == "before_step":
            self._before[part.name] = HostArray(now.dtype, now.shape, now.requires_grad, now.data.copy())
            return
        before = self._before.pop(part.name, None)
        if before is not None:
            wide = now.data.dtype.kind == "V"
            change = _float32(now.data) - _float32(before.data) if wide else now.data - before.data
            seen = HostArray("Float32" if wide else now.dtype, now.shape, False, np.asarray(change))
            self._see(moment, part.name, "update", self._tape.tree(seen, flags))

    def _see(self, moment: str, name: str, slot: str, value: Any) -> None:
        assert self._tape is not None
        call = self._calls.get((moment, name))
        if call is None:
            call = self._calls[moment, name] = self._tape.call("state", name, 0, "optimizer", parent="optimizer")
            call.node = moment
            call.params = {}
        shard = (self._shards or {}).get(name)
        if shard is not None and tuple(value.shape) == shard.shape:
            value.extra = {**(value.extra or {}), "shard": shard.described()}
        call.params[slot] = value
        self._tape.more_known(call)


def _float32(bits: Any) -> Any:
    """Return bfloat16 elements as float32."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
