"""Copies of the model that follow its weights: moving averages, target networks and teachers that are modules.

A copy is a module outside of the watched models, of the class of one of them, whose parameters have the same names, shapes and
numbers when it is found. A sample of its elements is read as an audited step begins and as it ends, in one transfer each.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.relations.followers import Followed, FollowedTensor, FollowerSteps

SAMPLE = 256  # elements of a tensor
_SEARCHES = 3  # audited steps at which copies are searched for: one that is made later begins as no copy of today's weights
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Elements and version counters of the parameters of a module, name → each."""

    numbers: Mapping[str, np.ndarray]
    versions: Mapping[str, int]


class Followers(Observer):
    """See the module text."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._pairs: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []  # a copy, and the model
        self._searches = 0
        self._begun: list[tuple[_Sampled, _Sampled]] = []
        self._seen: list[Followed] = []

    def begin(self) -> None:
        """Search for copies, and read those that are known."""
        self._seen = []
        if self._searches < _SEARCHES:
            self._searches += 1
            self._search()
        self._pairs = [pair for pair in self._pairs if pair[0]() is not None and pair[1]() is not None]
        self._begun = [(_sampled(copy()), _sampled(model())) for copy, model in self._pairs] if not in_a_transform() else []

    def end(self) -> None:
        """Read them again."""
        begun, self._begun = self._begun, []
        for (copy, model), (copy_before, model_before) in zip(self._pairs, begun, strict=False):
            now, followed = copy(), model()
            if now is not None and followed is not None and all(p.grad is None for p in now.parameters()):
                self._seen.append(_followed(copy_before, _sampled(now), model_before, _sampled(followed), now))

    def facts(self, step_data: StepData) -> FollowerSteps:
        """Return how each copy moved in this step."""
        return FollowerSteps(tuple(self._seen))

    def _search(self) -> None:
        models = [list(unwrapped(model))[-1] for model in self._audited.models]
        inside = {id(module) for model in self._audited.models for module in model.modules()}
        known = {id(copy()) for copy, _ in self._pairs}
        kinds = {type(model): model for model in models if _parameters(model)}
        for module in _modules_of(kinds):
            if id(module) not in inside and id(module) not in known and _is_copy(module, kinds[type(module)]):
                self._pairs.append((weakref.ref(module), weakref.ref(kinds[type(module)])))


def _modules_of(kinds: Mapping[type, Any]) -> Iterator[Any]:
    """Yield the living objects of exactly these classes. Their own `__class__` is not asked: a proxy may answer by an error."""
    return (one for one in gc.get_objects() if type(one) in kinds) if kinds else iter(())


def _parameters(module: Any) -> dict[str, Any]:
    """Return the parameters of a module; none where one is not a plain tensor with memory of its own."""
    found = dict(module.named_parameters())
    plain = all(type(p) in _PLAIN and p.is_floating_point() and not (p.is_meta or p.is_inference()) for p in found.values())
    return found if plain else {}


def _is_copy(module: Any, model: Any) -> bool:
    mine, its = _parameters(module), _parameters(model)
    if not mine or {name: p.shape for name, p in mine.items()} != {name: p.shape for name, p in its.items()}:
        return False
    if any(p is its[name] for name, p in mine.items()):
        return False
    a, b = _sampled(module).numbers, {name: p.to(mine[name].dtype) for name, p in _samples(its).items()}
    return all(np.array_equal(a[name], _host([b[name]])[0]) for name in a)


def _samples(parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return elements of each parameter at even distances."""
    with without_dispatch(), torch.no_grad():
        return {name: p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLE)][:SAMPLE] for name, p in parameters.items()}


def _host(samples: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """Return samples as float64 arrays, after one transfer."""
    each = list(samples)
    with without_dispatch(), torch.no_grad():
        joined = torch.cat([s.to(torch.float32) if s.dtype != torch.float64 else s for s in each]).cpu().double().numpy()
    return np.split(joined, np.cumsum([s.numel() for s in each])[:-1])


def _sampled(module: Any) -> _Sampled:
    parameters = _parameters(module)
    if not parameters:
        return _Sampled({}, {})
    samples = _samples(parameters)
    return _Sampled(
        dict(zip(samples, _host(samples.values()), strict=True)), {name: p._version for name, p in parameters.items()}
    )


def _followed(before: _Sampled, after: _Sampled, old: _Sampled, new: _Sampled, copy: Any) -> Followed:
    """Return how the copy moved, measured against the weights before or after the update, whichever explain it better."""
    tried = [_against(before, after, weights) for weights in (new, old)]
    best = min(tried, key=lambda tensors: sum(t.residual for t in tensors if t.moved))
    dtype = str(next(iter(_parameters(copy).values())).dtype).removeprefix("torch.") if before.numbers else ""
    return Followed(type(copy).__name__, dtype, tuple(best))


def _against(before: _Sampled, after: _Sampled, weights: _Sampled) -> list[FollowedTensor]:
    found: list[FollowedTensor] = []
    for name, was in before.numbers.items():
        if name not in after.numbers or name not in weights.numbers:
            continue
        moved, gap = after.numbers[name] - was, weights.numbers[name] - was
        size = float(gap @ gap)
        rate = float(moved @ gap) / size if size else 0.0
        off = moved - rate * gap
        length = float(moved @ moved)
        found.append(
            FollowedTensor(
                name,
                rate,
                float(np.sqrt(off @ off / length)) if length else 0.0,
                moved=float(np.mean(moved != 0)),
                away=float(np.mean(gap != 0)),
                written=after.versions[name] != before.versions[name],
            )
        )
    return found
