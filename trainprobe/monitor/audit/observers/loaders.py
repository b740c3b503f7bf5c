"""How many batches the loaders with several workers have handed out, as they count them themselves."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import dataloader

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.relations.distinct_data import HandedOut


class LoaderWatch(Observer):
    """Learns of each such loader as an epoch of it begins, between `start` and `stop`."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._running: list[weakref.ref[Any]] = []
        self._replaced: Replaced | None = None
        self._handed_out = (0, 0)

    def start(self) -> None:
        """Begin to look."""
        if self._replaced is not None:
            return
        kind: Any = dataloader._MultiProcessingDataLoaderIter  # pyright: ignore[reportPrivateUsage]
        original = kind.__init__

        def begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
            original(iterator, *args, **kwargs)
            if not begin.ended:  # type: ignore[attr-defined]
                self._guard.run(self._begins, iterator)

        self._replaced = Replaced(kind, "__init__", begin)

    def stop(self) -> None:
        """Put the original back."""
        if self._replaced is not None:
            self._replaced.back()
            self._replaced = None

    def end(self) -> None:
        """Count what was handed out until now."""
        alive = [it for it in (ref() for ref in self._running) if it is not None]
        self._running = [weakref.ref(it) for it in alive]
        several = [it for it in alive if int(getattr(it, "_num_workers", 0)) > 1]
        handed_out = sum(int(getattr(it, "_num_yielded", 0)) for it in several)
        self._handed_out = handed_out, several[-1]._num_workers if several else 0

    def facts(self, step_data: StepData) -> HandedOut:
        """Return the batches that were handed out in the epochs that run now, and how many workers the last loader has."""
        return HandedOut(*self._handed_out)

    def _begins(self, iterator: Any) -> None:
        self._running = [ref for ref in self._running if ref() is not None]
        self._running.append(weakref.ref(iterator))
