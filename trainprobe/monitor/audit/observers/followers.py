"""Copies of the model that follow its weights: moving averages, target networks and teachers.

A copy is one that the observer `copies` has found, with the numbers of the model when it is first read. A sample of elements is
read as an audited step begins and as it ends; one transfer brings all. What happens between two audited steps that follow each
other is known by both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.set_up import drops
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.copies import Copies, Copy
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.followers import Followed, FollowedTensor, FollowerSteps, is_led

SAMPLE = 256  # elements of a tensor
_Arrays = dict[str, np.ndarray]


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
    """A copy and what is known of it. number: among those that were found.

    is_copy: it had the model's numbers when it was first read. others: it had those of another model. was, now: the numbers of
    `begun` and `ended` on the host. begun, ended: samples of both in this step. last: the copy's
    own numbers at the end of the audited step before, with its sample, and the number of that step.
    """

    copy: Copy
    number: int
    is_copy: bool = False
    others: bool = False
    was: list[_Arrays] = field(default_factory=list[_Arrays])
    now: list[_Arrays] = field(default_factory=list[_Arrays])
    begun: tuple[_Sample, _Sample] | None = None
    ended: tuple[_Sample, _Sample] | None = None
    last: tuple[int, _Sample, _Arrays] | None = None


class Followers(Observer):
    """See the module text."""

    needs = (ModelCalls, Copies)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._pairs: list[_Pair] = []
        self._known = 0  # how many of those that were found are among the pairs, or were

    def begin(self) -> None:
        """Read the copies that there are."""
        found = self._audited.of(Copies).found
        self._pairs += [_Pair(copy, number) for number, copy in enumerate(found) if number >= self._known]
        self._known = len(found)
        for pair in self._pairs:
            pair.begun, pair.ended = _sampled(pair.copy), None

    def end(self) -> None:
        """Read them again, but for those that have a gradient of their own."""
        for pair in self._pairs:
            both = pair.copy.both() if pair.begun is not None else None
            if both is not None and all(p.grad is None for p in both[0].values()):
                pair.ended = _sampled(pair.copy)

    def facts(self, step_data: StepData) -> FollowerSteps:
        """Return how each copy moved in this step, or since the step before; one transfer brings all that was read."""
        read = [sample for pair in self._pairs for both in (pair.begun, pair.ended) for sample in both or ()]
        numbers = iter(_host(read))
        for pair in self._pairs:
            pair.was = [next(numbers), next(numbers)] if pair.begun else []
            pair.now = [next(numbers), next(numbers)] if pair.ended else []
        self._know_copies()
        seen = [self._moved(pair) for pair in self._pairs if pair.is_copy and pair.was and pair.now]
        for pair in self._pairs:
            pair.begun = pair.ended = None
        return FollowerSteps(tuple(seen))

    def _know_copies(self) -> None:
        """Keep what had the numbers of its model when it was first read, and what such a copy may follow in its place."""
        for pair in (pair for pair in self._pairs if pair.was and not pair.others):
            pair.is_copy |= all(np.array_equal(pair.was[0][name], pair.was[1][name]) for name in pair.was[0])
        for pair in list(self._pairs):
            beside = [other for other in self._pairs if other.copy.is_beside(pair.copy)]
            pair.others = not pair.is_copy and any(other.is_copy for other in beside)
            if pair.was and not pair.is_copy and not pair.others:
                self._pairs.remove(pair)
                if not beside:
                    pair.copy.release(always=True)

    def _moved(self, pair: _Pair) -> Followed:
        assert pair.begun is not None and pair.ended is not None
        ordinal, (was, weights_before), (now, weights) = self._audited.run.ordinal, pair.was, pair.now
        beside = [p for p in self._pairs if p.others and p.was and p.now and p.copy.is_beside(pair.copy)]
        at, others = (was, now), [arrays for other in beside for arrays in (other.now[1], other.was[1])]
        steps = _followed(pair, [pair.begun[0], pair.ended[0]], *at, (weights, weights_before))
        if pair.last and pair.last[0] == ordinal - 1 and not any(t.moved or t.written for t in steps.tensors):
            at, others = (pair.last[2], was), [other.was[1] for other in beside]
            steps = _followed(pair, [pair.last[1], pair.begun[0]], *at, (weights_before,))
        pair.last = ordinal, pair.ended[0], now
        led = any(is_led(_against(*at, arrays, {})) for arrays in others) and not is_led(steps.tensors)
        return replace(steps, dropped=self._dropped(pair.copy.module), by_another=led)

    def stop(self) -> None:
        """Hold no copy."""
        self._pairs.clear()

    def _dropped(self, copy: Any) -> bool:
        """Tell whether a copy ran in training mode without gradients, and a dropout in it."""
        called = self._audited.of(ModelCalls).called
        return called.get(id(copy)) is False and any(drops(m) and id(m) in called for m in copy.modules())


def _sampled(copy: Copy) -> tuple[_Sample, _Sample] | None:
    """Return elements of both at even distances, the model's rounded to the dtype of the copy; None where there are none."""
    both = None if in_a_transform() else copy.both()  # held: a copy that nobody holds may go at any moment
    return None if both is None else (_sample(both[0], both[0]), _sample(both[1], both[0]))


def _sample(parameters: Mapping[str, Any], as_in: Mapping[str, Any]) -> _Sample:
    with without_dispatch(), torch.no_grad():
        taken = {n: p.detach().reshape(-1)[:: max(1, p.numel() // SAMPLE)][:SAMPLE] for n, p in parameters.items()}
        rounded = [taken[name].to(as_in[name].dtype).to(torch.float64) for name in as_in]
        counts = {name: taken[name].numel() for name in as_in}
        dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
        return _Sample(torch.cat(rounded), dtype, counts, {name: p._version for name, p in parameters.items()})


def _host(samples: Sequence[_Sample]) -> Iterator[_Arrays]:
    """Yield each sample as arrays by name, after one transfer."""
    if not samples:
        return
    with without_dispatch(), torch.no_grad():
        numbers = torch.cat([sample.elements for sample in samples]).cpu().numpy()
    at = 0
    for sample in samples:
        found: _Arrays = {}
        for name, count in sample.counts.items():
            found[name] = numbers[at : at + count]
            at += count
        yield found


def _followed(pair: _Pair, samples: Sequence[_Sample], was: _Arrays, now: _Arrays, weights: Sequence[_Arrays]) -> Followed:
    """Return how the copy moved from one sample to the next, measured against the weights that explain it best."""
    before, after = (sample.versions for sample in samples)
    written = {name: after.get(name) != before[name] for name in before}
    tried = [_against(was, now, each, written) for each in weights]
    best = min(tried, key=lambda tensors: sum(t.residual for t in tensors if t.moved))
    return Followed(pair.copy.kind, samples[0].dtype, tuple(best), number=pair.number)


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
        found.append(FollowedTensor(name, rate, residual, *shares, written.get(name, False)))
    return found
