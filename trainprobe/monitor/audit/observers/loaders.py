"""How many batches the loaders with several workers have handed out, as they count them themselves, and how often any began."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import dataloader

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Audited, RunReplacing
from trainprobe.monitor.audit.relations.distinct_data import HandedOut


class LoaderWatch(RunReplacing):
    """Learns of each such loader as an epoch of it begins, between `start` and `stop`."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._running: list[weakref.ref[Any]] = []
        self._begun = 0
        self._handed_out = (0, 0)

    def replaced(self) -> Iterator[Replaced]:
        """Look at each beginning of an epoch."""
        kinds: tuple[Any, ...] = (dataloader._MultiProcessingDataLoaderIter, dataloader._SingleProcessDataLoaderIter)  # pyright: ignore[reportPrivateUsage]
        return (Replaced(kind, "__init__", self._beginning(kind.__init__)) for kind in kinds)

    def _beginning(self, original: Any) -> Any:
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            original(iterator, loader, *args, **kwargs)
            if not begin.ended:  # type: ignore[attr-defined]
                self._guard.run(self._begins, iterator, loader)

        return begin

    def end(self) -> None:
        """Count what was handed out until now."""
        alive = [it for it in (ref() for ref in self._running) if it is not None]
        self._running = [weakref.ref(it) for it in alive]
        several = [it for it in alive if int(getattr(it, "_num_workers", 0)) > 1]
        handed_out = sum(int(getattr(it, "_num_yielded", 0)) for it in several)
        self._handed_out = handed_out, several[-1]._num_workers if several else 0

    def facts(self, step_data: StepData) -> HandedOut:
        """Return the batches that were handed out in the epochs that run now, and how many workers the last loader has."""
        return HandedOut(*self._handed_out, self._begun)

    def _begins(self, iterator: Any, loader: Any) -> None:
        self._begun += attempt(len, loader, otherwise=lambda _: 0) > 1
        if int(getattr(iterator, "_num_workers", 0)) < 2:
            return
        self._running = [ref for ref in self._running if ref() is not None]
        self._running.append(weakref.ref(iterator))
