"""Copies of the model that follow its weights, and not its buffers.

A copy is a module in evaluation mode of the class of a watched model, with parameters and buffers of the same names, that is
called in an evaluation or an audited step. Version counters tell what was written in place between two such calls; no number
is read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import in_training
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.stale_copies import StaleCopies

_STATISTICS = ("running_mean", "running_var")
_Mark = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _CalledCopy:
    """A copy when it was called last: mark of its weights, marks of its statistics, and those of the model's."""

    copy: weakref.ref[Any]
    weights: int
    mine: Mapping[str, _Mark]
    its: Mapping[str, _Mark]


class Copies(Observer):
    """Finds running statistics of copies that stand still while their weights and the model's statistics move."""

    needs = (ModelCalls,)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._models: dict[type, Any] = {}
        self._seen: dict[int, _CalledCopy] = {}
        self._stale: dict[int, tuple[str, ...]] = {}  # id of a copy → what stood still when it was called last

    def start(self) -> None:
        """Learn the models, without their wrappers."""
        models = [list(unwrapped(model))[-1] for model in self._audited.models]
        self._models = {type(model): model for model in models if any(True for _ in _statistics(model))}

    def other_called(self, module: Any) -> None:
        """See a module that is called and is no watched model itself."""
        model = self._models.get(type(module))
        if model is None or module is model or in_training(module) or any(p.is_inference() for p in module.parameters()):
            return
        known = self._seen.get(id(module))
        if known is None and not _is_copy(module, model):
            return
        now = _CalledCopy(weakref.ref(module), _writes(module), dict(_statistics(module)), dict(_statistics(model)))
        if known is not None and known.copy() is module and known.weights != now.weights:
            self._stale[id(module)] = tuple(name for name in now.mine if _stood(known, now, name))
        self._seen[id(module)] = now

    def facts(self, step_data: StepData) -> StaleCopies:
        """Return the statistics that stood still when a copy was called last."""
        return StaleCopies(tuple(dict.fromkeys(name for names in self._stale.values() for name in names)))


def _stood(known: _CalledCopy, now: _CalledCopy, name: str) -> bool:
    return known.mine.get(name) == now.mine[name] and known.its.get(name) != now.its.get(name)


def _is_copy(module: Any, model: Any) -> bool:
    return _names(module) == _names(model)


def _names(module: Any) -> list[tuple[str, Any]]:
    return [(name, t.shape) for named in (module.named_parameters(), module.named_buffers()) for name, t in named]


def _writes(module: Any) -> int:
    return sum(int(p._version) for p in module.parameters())


def _statistics(module: Any) -> Iterable[tuple[str, _Mark]]:
    """Yield a mark of each running statistic: after a forward in training it is left only in the batch counter next to it."""
    buffers = {name: b for name, b in module.named_buffers() if not b.is_inference()}
    for name in (name for name in buffers if name.endswith(_STATISTICS)):
        counter = buffers.get(f"{name.rpartition('.')[0]}.num_batches_tracked".removeprefix("."))
        yield name, (id(buffers[name]), int(buffers[name]._version), 0 if counter is None else int(counter._version))
