"""Whether the second moments with which an optimizer begins go with its gradients, parameter by parameter.

Once in a run, before the first update that is seen: correlations over samples, one small matrix for each shape.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.observers import Audited, Observer, left_out
from trainprobe.monitor.audit.relations.moments_exchanged import FirstMoments

_SAMPLE, _FEWEST, _MOST = 1024, 64, 32  # elements of a parameter, at least and at most, and parameters of a shape
_STATE = "exp_avg_sq"


class FirstMomentsWatch(Observer):
    """See the module text."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._done: set[int] = set()  # ids of the optimizers that were looked at

    def forget(self) -> None:
        """Forget the last step."""
        self._seen: list[tuple[list[str], Deferred]] = []

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """Look at an optimizer before the first update that is seen."""
        if id(optimizer) not in self._done and not in_a_transform():
            self._done.add(id(optimizer))
            attempt(self._look, tape, optimizer, otherwise=left_out)

    def facts(self, step_data: StepData) -> FirstMoments:
        """Return the correlations of each two parameters of one shape."""
        found: list[tuple[str, str, float, float, float, float]] = []
        for names, deferred in self._seen:
            if deferred.numbers is not None:
                fit = deferred.numbers.reshape(len(names), len(names)).tolist()
                pairs = combinations(range(len(names)), 2)
                found += [(names[i], names[j], fit[i][i], fit[i][j], fit[j][j], fit[j][i]) for i, j in pairs]
        return FirstMoments(tuple(found))

    def _look(self, tape: Tape, optimizer: Any) -> None:
        names, by_shape = self._audited.names(), dict[Any, list[tuple[str, Tensor, Tensor]]]()
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in names):
            moments = optimizer.state.get(p, {}).get(_STATE)
            if p.numel() >= _FEWEST and _is_plain(moments, p) and _is_plain(p.grad, p):
                by_shape.setdefault((p.shape, p.device), []).append((names[id(p)], moments, p.grad))
        with without_dispatch(), torch.no_grad():
            for those in by_shape.values():
                if len(those) > 1:
                    moments = torch.stack([_sample(moment) for _, moment, _ in those[:_MOST]])
                    gradients = torch.stack([_sample(gradient) for *_, gradient in those[:_MOST]])
                    fits = _correlations(moments, gradients.square()).reshape(-1)
                    self._seen.append(([name for name, *_ in those[:_MOST]], tape.defer(fits)))


def _is_plain(t: Any, p: Tensor) -> bool:
    return type(t) is Tensor and t.shape == p.shape and t.device == p.device and not reason_without_statistics(t)


def _sample(t: Tensor) -> Tensor:
    return t.detach().reshape(-1)[:: max(1, t.numel() // _SAMPLE)][:_SAMPLE].float()


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Return [rows of a, rows of b]: the correlations of the logarithms, over elements where both are above 0.

    0 where that is less than half of the elements, or one of them does not vary.
    """
    both = (a > 0)[:, None] & (b > 0)[None]  # [n, n, elements]
    logs = [both * t.clamp(min=1e-38).log() for t in (a[:, None], b[None])]
    count = both.sum(2, keepdim=True).clamp(min=1)
    x, y = (both * (t - t.sum(2, keepdim=True) / count) for t in logs)
    found = (x * y).sum(2) / (x.square().sum(2) * y.square().sum(2)).sqrt()
    return torch.where(2 * both.sum(2) > a.shape[1], found.nan_to_num(0.0), 0.0)
