"""Statistics of a module's input that are summed over the ranks without a gradient.

While a step is audited, the method of process groups that reduces is replaced. What is counted goes to the host with all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.cut_off import flat
from trainprobe.monitor.audit.observers import StepReplacing, left_out
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.reduced_statistics import ReducedStatistics

_LARGEST, _MOST, _EQUAL = 1 << 14, 16, 1e-5  # elements of what is summed, calls in a step, and the tolerance


class ReducedStatisticsWatch(StepReplacing):
    """See the module text."""

    needs = (ModelCalls,)

    def forget(self) -> None:
        """Forget the last step."""
        self._running: list[tuple[Any, str, list[Tensor]]] = []  # modules, their names and inputs that have a gradient
        self._seen: list[tuple[str, Deferred]] = []

    def replaced(self) -> Iterator[Replaced]:
        """Look at what is summed in a step."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            kind: Any = dist.ProcessGroup
            yield Replaced(kind, "allreduce", self._reducing(kind.allreduce))

    def end(self) -> None:
        """Put the method back, and hold no tensor."""
        super().end()
        self._running = []

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn what a module is given."""
        if self.replaces:
            given = [t for t in args if type(t) is Tensor and t.requires_grad and t.dim() > 1 and t.is_floating_point()]
            self._running.append((module, name, given))

    def module_returned(self, module: Any, result: Any) -> None:
        """It runs no more."""
        while self._running and self._running.pop()[0] is not module:
            pass

    def facts(self, step_data: StepData) -> ReducedStatistics:
        """Return the first module that summed statistics of its input."""
        found = (name for name, row in self._seen if row.numbers is not None and float(row.numbers.min()) <= _EQUAL)
        return ReducedStatistics(next(found, ""))

    def _reducing(self, original: Any) -> Any:
        def reduce(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not reduce.ended and self._running and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
                self._guard.run(lambda: attempt(self._look, args[0] if args else None, otherwise=left_out))
            return original(group, *args, **kwargs)

        return reduce

    def _look(self, tensors: Any) -> None:
        module, name, given = self._running[-1]
        tape = self._audited.tape
        if tape is None or len(self._seen) >= _MOST or in_a_transform() or any(True for _ in module.buffers(recurse=False)):
            return
        for t in flat(tensors):
            plain = type(t) is Tensor and not t.requires_grad and t.is_floating_point() and t.numel() <= _LARGEST
            fitting = [x for x in given if x.device == t.device and not reason_without_statistics(x)] if plain else []
            with without_dispatch(), torch.no_grad():
                off = [distance for x in fitting for distance in _distances(t.detach(), x.detach())]
                if off:
                    self._seen.append((name, tape.defer(torch.stack(off))))


def _distances(t: Tensor, x: Tensor) -> list[Tensor]:
    """Return how far parts of `t` are from mean and sum of `x` over all dimensions but the second or the last, at least.

    Relative to the largest element of these, as float32 [].
    """
    found: list[Tensor] = []
    for dim in {1, x.dim() - 1}:
        size = x.shape[dim]
        if size > 1 and t.numel() % size == 0:
            total = x.movedim(dim, -1).reshape(-1, size).sum(0)
            for wanted in (total / (x.numel() // size), total):
                off = (t.reshape(-1, size) - wanted).abs().amax(1).amin()
                found.append((off / wanted.abs().amax().clamp(min=1e-30)).float())
    return found
