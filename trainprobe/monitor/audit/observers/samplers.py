"""Epochs of `DistributedSampler` that repeat the order of the previous epoch, because `set_epoch` was not called."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Audited, RunReplacing
from trainprobe.monitor.audit.relations.distinct_data import RepeatedEpochs


class SamplerWatch(RunReplacing):
    """Looks at each beginning of an epoch between `start` and `stop`."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._epochs: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of a sampler → the epoch that it gave last
        self._repeated = 0

    def replaced(self) -> Iterator[Replaced]:
        """Look at each beginning of an epoch."""
        original: Any = DistributedSampler.__iter__

        def begin(sampler: Any) -> Any:
            if not begin.ended:  # type: ignore[attr-defined]
                self._guard.run(self._begins, sampler)
            return original(sampler)

        yield Replaced(DistributedSampler, "__iter__", begin)

    def facts(self, step_data: StepData) -> RepeatedEpochs:
        """Return how many epochs since the last step that was taken had the order of the one before."""
        repeated, self._repeated = self._repeated, 0
        return RepeatedEpochs(repeated)

    def _begins(self, sampler: Any) -> None:
        known, epoch = self._epochs.get(id(sampler)), int(getattr(sampler, "epoch", 0))
        if known is not None and known[0]() is sampler and known[1] == epoch and getattr(sampler, "shuffle", False):
            self._repeated += 1
        self._epochs[id(sampler)] = (weakref.ref(sampler), epoch)
