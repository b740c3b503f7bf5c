"""Copies of the model that follow its weights: moving averages, target networks and teachers that are modules.

A copy is a module outside of the watched models, of the class of one of them, whose parameters have the same names, shapes and
numbers when it is found. A sample of elements is read as an audited step begins and as it ends; one transfer brings all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.live_objects import instances_of
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.capture.set_up import drops
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.followers import Followed, FollowedTensor, FollowerSteps

SAMPLE = 256  # elements of a tensor
_SEARCHES = 3  # audited steps at which copies are searched for: one that is made later begins as no copy of today's weights
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Elements of the parameters of a module, one behind the other on its device, with each one's name, count and version.

    dtype: of the first parameter.
    """

    elements: torch.Tensor
    dtype: str
    counts: Mapping[str, int]
    versions: Mapping[str, int]


@dataclass(slots=True)
class _Pair:
    """A copy and the model that it may follow. kind: their class. begun, ended: samples of both in this step."""

    kind: str
    copy: weakref.ref[Any]
    model: weakref.ref[Any]
    is_copy: bool = False
    begun: tuple[_Sample, _Sample] | None = None
    ended: tuple[_Sample, _Sample] | None = None


class Followers(Observer):
    """See the module text."""

    needs = (ModelCalls,)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._pairs: list[_Pair] = []
        self._searches = 0
        self._other: weakref.WeakSet[Any] = weakref.WeakSet()  # modules of the model's class that are no copies

    def begin(self) -> None:
        """Search for copies, and read those that are known."""
        if self._searches < _SEARCHES:
            self._searches += 1
            self._search()
        self._pairs = [pair for pair in self._pairs if pair.copy() is not None and pair.model() is not None]
        for pair in self._pairs:
            pair.begun, pair.ended = _sampled(pair), None

    def end(self) -> None:
        """Read them again, but for those that have a gradient of their own."""
        for pair in self._pairs:
            copy = pair.copy()
            if pair.begun is not None and copy is not None and all(p.grad is None for p in copy.parameters()):
                pair.ended = _sampled(pair)

    def facts(self, step_data: StepData) -> FollowerSteps:
        """Return how each copy moved in this step; one transfer brings all that was read."""
        read = [sample for pair in self._pairs for both in (pair.begun, pair.ended) for sample in both or ()]
        numbers = iter(_host(read))
        seen: list[Followed] = []
        for pair in list(self._pairs):
            begun = [next(numbers), next(numbers)] if pair.begun else []
            ended = [next(numbers), next(numbers)] if pair.ended else []
            if begun and not pair.is_copy:
                pair.is_copy = all(np.array_equal(begun[0][name], begun[1][name]) for name in begun[0])
                if not pair.is_copy:
                    self._pairs.remove(pair)
                    if (module := pair.copy()) is not None:
                        self._other.add(module)
                    continue
            if pair.begun and pair.ended:
                seen.append(replace(_followed(pair, begun, ended), dropped=self._dropped(pair.copy())))
            pair.begun = pair.ended = None
        return FollowerSteps(tuple(seen))

    def _dropped(self, copy: Any) -> bool:
        """Tell whether a copy ran in training mode without gradients, and a dropout in it."""
        called = self._audited.of(ModelCalls).called
        return called.get(id(copy)) is False and any(drops(m) and id(m) in called for m in copy.modules())

    def _search(self) -> None:
        models = [list(unwrapped(model))[-1] for model in self._audited.models]
        inside = {id(module) for model in self._audited.models for module in model.modules()}
        known = inside | {id(pair.copy()) for pair in self._pairs}
        kinds = {type(model): model for model in models if _parameters(model)}
        for module in instances_of(kinds):
            model = kinds[type(module)]
            if id(module) not in known and module not in self._other and _are_alike(module, model):
                self._pairs.append(_Pair(type(module).__name__, weakref.ref(module), weakref.ref(model)))


def _parameters(module: Any) -> dict[str, Any]:
    """Return the parameters of a module; none where one is not a plain tensor with memory of its own."""
    found = dict(module.named_parameters())
    plain = all(type(p) in _PLAIN and p.is_floating_point() and not (p.is_meta or p.is_inference()) for p in found.values())
    return found if plain else {}


def _are_alike(module: Any, model: Any) -> bool:
    """Tell whether two modules have parameters of the same names and shapes on one device, and share none."""
    mine, its = _parameters(module), _parameters(model)
    if not mine or mine.keys() != its.keys() or len({p.device for p in (*mine.values(), *its.values())}) > 1:
        return False
    return all(p.shape == its[name].shape and p is not its[name] for name, p in mine.items())


def _sampled(pair: _Pair) -> tuple[_Sample, _Sample] | None:
    """Return elements of both at even distances, the model's rounded to the dtype of the copy; None where there are none."""
    copy, model = pair.copy(), pair.model()  # held: a copy that nobody holds may go at any moment
    if copy is None or model is None or in_a_transform():
        return None
    mine, its = _parameters(copy), _parameters(model)
    if not mine or mine.keys() != its.keys():
        return None
    return _sample(mine, mine), _sample(its, mine)


def _sample(parameters: Mapping[str, Any], as_in: Mapping[str, Any]) -> _Sample:
    with without_dispatch(), torch.no_grad():
        taken = {n: p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLE)][:SAMPLE] for n, p in parameters.items()}
        rounded = [taken[name].to(as_in[name].dtype).to(torch.float64) for name in as_in]
        counts = {name: taken[name].numel() for name in as_in}
        dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        return _Sample(torch.cat(rounded), dtype, counts, {name: p._version for name, p in parameters.items()})


def _host(samples: Sequence[_Sample]) -> Iterator[dict[str, np.ndarray]]:
    """Yield each sample as arrays by name, after one transfer."""
    if not samples:
        return
    with without_dispatch(), torch.no_grad():
        numbers = torch.cat([sample.elements for sample in samples]).cpu().numpy()
    at = 0
    for sample in samples:
        found: dict[str, np.ndarray] = {}
        for name, count in sample.counts.items():
            found[name] = numbers[at : at + count]
            at += count
        yield found


def _followed(pair: _Pair, begun: Sequence[dict[str, np.ndarray]], ended: Sequence[dict[str, np.ndarray]]) -> Followed:
    """Return how the copy moved, measured against the weights before or after the update, whichever explain it better."""
    assert pair.begun is not None and pair.ended is not None
    before, after = pair.begun[0].versions, pair.ended[0].versions
    written = {name: after[name] != before[name] for name in before}
    tried = [_against(begun[0], ended[0], weights[1], written) for weights in (ended, begun)]
    best = min(tried, key=lambda tensors: sum(t.residual for t in tensors if t.moved))
    return Followed(pair.kind, pair.begun[0].dtype, tuple(best))


def _against(
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
    written: Mapping[str, bool],
) -> list[FollowedTensor]:
    found: list[FollowedTensor] = []
    for name, was in before.items():
        moved, gap = after[name] - was, weights[name] - was
        size, length = float(gap @ gap), float(moved @ moved)
        rate = float(moved @ gap) / size if size else 0.0
        off = moved - rate * gap
        residual = float(np.sqrt(off @ off / length)) if length else 0.0
        shares = float(np.mean(moved != 0)), float(np.mean(gap != 0))
        found.append(FollowedTensor(name, rate, residual, *shares, written[name]))
    return found
