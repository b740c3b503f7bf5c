"""Copies of the model outside of it, and the running statistics that such a copy does not follow.

A copy is a module of the class of a watched model with parameters of the same names and shapes, or a list or dict of tensors of
these shapes in the same order, or under the same names: averages are kept so. Copies are searched for as the first audited
steps begin, and a module that is called in evaluation mode is looked at then. Of statistics, version counters tell what was
written in place between two calls; no number is read.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.live_objects import containers_of, instances_of
from trainprobe.engine.core.naming import in_training
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.observers import Audited, Observer, left_out
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.stale_copies import StaleCopies

_SEARCHES = 3  # audited steps at which copies are searched for: one that is made later begins as no copy of today's weights
_STATISTICS = ("running_mean", "running_var")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HELD_HERE = 2  # references to a container that nothing but this module holds, as `sys.getrefcount` counts
_Mark = tuple[int, int, int]


class Copy:
    """What may be a copy of a model. It is kept alive no longer than to the next look. kind: what it is, for a reader."""

    def __init__(self, copy: Any, model: Any, names: Iterable[str]) -> None:
        self.kind = type(copy).__name__ if isinstance(copy, torch.nn.Module) else f"tensors in a {type(copy).__name__}"
        self._names = tuple(names)
        self._model = weakref.ref(model)
        self._module: weakref.ref[Any] | None = None
        self._tensors: list[Any] | dict[Any, Any] | None = None
        if isinstance(copy, torch.nn.Module):
            self._module = weakref.ref(copy)
        else:
            self._tensors = copy

    @property
    def module(self) -> Any:
        """The copy where it is a module that there still is, else None."""
        return self._module() if self._module else None

    def release(self, always: bool = False) -> None:
        """Let go of tensors that nothing else holds, or of all."""
        if self._tensors is not None and (always or sys.getrefcount(self._tensors) <= _HELD_HERE):
            self._tensors = None

    def both(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return name → tensor of the copy, and of the model; None where one of them is gone, or is no plain copy any more."""
        return attempt(self._both, otherwise=left_out)

    def _both(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        model, module = self._model(), self.module
        if model is None or (module is None and self._tensors is None):
            return None
        mine = _parameters(module) if module is not None else _held(self._tensors or [], self._names)
        its = {name: p for name, p in _parameters(model).items() if name in self._names}
        return (mine, its) if are_alike(mine, its) else None

    def is_one(self, other: Any, of: Any = None) -> bool:
        """Tell whether this is that object. of: and a copy of that model."""
        return (other is self.module or other is self._tensors) and (of is None or of is self._model())

    def is_beside(self, other: Copy) -> bool:
        """Tell whether another one is the same object, held against another model."""
        return other is not self and self.is_one(other.module if other.module is not None else other._tensors)


@dataclass(frozen=True, slots=True)
class _CalledCopy:
    """A copy when it was called last: mark of its weights, marks of its statistics, and those of the model's."""

    copy: weakref.ref[Any]
    weights: int
    mine: Mapping[str, _Mark]
    its: Mapping[str, _Mark]


class Copies(Observer):
    """Searches for copies; finds running statistics that stand still while their weights and the model's statistics move."""

    needs = (ModelCalls,)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self.found: list[Copy] = []
        self._searches = 0
        self._models: dict[type, list[Any]] = {}
        self._seen: dict[int, _CalledCopy] = {}
        self._stale: dict[int, tuple[str, ...]] = {}  # id of a copy → what stood still when it was called last

    def start(self) -> None:
        """Learn the models, without their wrappers."""
        self._models = {}
        for model in self._audited.models:
            inner = list(unwrapped(model))[-1]
            self._models.setdefault(type(inner), []).append(inner)

    def begin(self) -> None:
        """Search for copies, and let go of those that are gone."""
        for copy in self.found:
            copy.release()
        if self._searches < _SEARCHES and self._models:
            self._searches += 1
            self._search()

    def other_called(self, module: Any) -> None:
        """See a module that is called and is no watched model itself."""
        models = self._models.get(type(module), [])
        if len(models) != 1 or in_training(module) or any(p.is_inference() for p in module.parameters()):
            return
        model = models[0]
        if module is model:
            return
        known = self._seen.get(id(module))
        named = [dict(one.named_parameters()) for one in (module, model)]
        if not any(True for _ in _statistics(model)) or (known is None and not are_alike(*named)):
            return
        now = _CalledCopy(weakref.ref(module), _writes(module), dict(_statistics(module)), dict(_statistics(model)))
        if known is not None and known.copy() is module and known.weights != now.weights:
            self._stale[id(module)] = tuple(name for name in now.mine if _stood(known, now, name))
        self._seen[id(module)] = now

    def stop(self) -> None:
        """Hold no tensor."""
        self.found.clear()

    def facts(self, step_data: StepData) -> StaleCopies:
        """Return the statistics that stood still when a copy was called last."""
        return StaleCopies(tuple(dict.fromkeys(name for names in self._stale.values() for name in names)))

    def _search(self) -> None:
        inside = {id(module) for model in self._audited.models for module in model.modules()}
        others: list[Any] = []
        for one in instances_of((*self._models, torch.Tensor)):
            if type(one) is torch.Tensor:
                others.append(one)
            elif id(one) not in inside:
                for model in self._models[type(one)]:
                    self._add(one, model, _parameters(model))
        optimizers = self._audited.optimizers
        states = (state for optimizer in optimizers for _, state in getattr(optimizer, "state", {}).items())  # Megatron's too
        ours = {id(value) for state in states if isinstance(state, dict) for value in state.values()}
        models = [model for alike in self._models.values() for model in alike]
        ours |= {id(p.grad) for model in models for p in model.parameters() if p.is_leaf and p.grad is not None}
        tensors = tuple(one for one in others if id(one) not in ours)
        del others  # a list that holds them too
        for model in models:
            parameters = _parameters(model)
            for container in containers_of(_like_the_largest(tensors, parameters)):
                trained = {name: p for name, p in parameters.items() if p.requires_grad}
                for form in (parameters, trained):
                    if attempt(self._add, container, model, form, otherwise=left_out):
                        break

    def _add(self, copy: Any, model: Any, parameters: Mapping[str, Any]) -> bool:
        """Add what has the form of a copy of these parameters of a model, once; tell whether it has."""
        mine = _parameters(copy) if isinstance(copy, torch.nn.Module) else _held(copy, tuple(parameters))
        alike = are_alike(mine, parameters)
        if alike and not any(known.is_one(copy, model) for known in self.found):
            self.found.append(Copy(copy, model, parameters))
        return alike


def are_alike(mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """Tell whether tensors have the names and shapes of others on one device, and share none with them."""
    if not mine or mine.keys() != its.keys() or len({p.device for p in (*mine.values(), *its.values())}) > 1:
        return False
    return all(p.shape == its[name].shape and p is not its[name] for name, p in mine.items())


def _like_the_largest(tensors: Iterable[Any], parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the tensors that could be copies of the largest parameter: of its shape and device, and with their own memory."""
    largest = max((p for p in parameters.values() if p.requires_grad), key=lambda p: p.numel(), default=None)
    if largest is None:
        return ()
    return tuple(one for one in tensors if attempt(_could_be_copy, one, largest, otherwise=left_out))


def _could_be_copy(one: Any, p: Any) -> bool:
    return _is_plain(one) and are_alike({"": one}, {"": p}) and one.data_ptr() != p.data_ptr()


def _parameters(module: Any) -> dict[str, Any]:
    """Return the parameters of a module; none where one is not a plain tensor with memory of its own."""
    found = dict(module.named_parameters())
    return found if all(map(_is_plain, found.values())) else {}


def _held(container: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the tensors of a list or dict by the names of parameters, which a dict may have or be in the order of."""
    if isinstance(container, dict) and all(name in container for name in names):
        found = {name: container[name] for name in names}
    else:
        values = list(container.values() if isinstance(container, dict) else container)
        values = [one for one in values if isinstance(one, torch.Tensor) and one.dim() and one.is_floating_point()]
        found = dict(zip(names, values, strict=True)) if len(values) == len(names) else {}
    return found if all(map(_is_plain, found.values())) else {}


def _is_plain(p: Any) -> bool:
    """Tell whether this is a tensor with memory of its own that no graph made. A view may refuse to tell its `grad_fn`."""
    plain = type(p) in _PLAIN and p.layout is torch.strided and p.is_floating_point()
    return plain and not (p.is_meta or p.is_inference() or (type(p) is torch.Tensor and p.requires_grad))


def _stood(known: _CalledCopy, now: _CalledCopy, name: str) -> bool:
    return known.mine.get(name) == now.mine[name] and known.its.get(name) != now.its.get(name)


def _writes(module: Any) -> int:
    return sum(int(p._version) for p in module.parameters())


def _statistics(module: Any) -> Iterable[tuple[str, _Mark]]:
    """Yield a mark of each running statistic: after a forward in training it is left only in the batch counter next to it."""
    buffers = {name: b for name, b in module.named_buffers() if not b.is_inference()}
    for name in (name for name in buffers if name.endswith(_STATISTICS)):
        counter = buffers.get(f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix("."))
        yield name, (id(buffers[name]), int(buffers[name]._version), 0 if counter is None else int(counter._version))
