"""Services are sent to on a thread of their own: one that does not answer holds up neither the run log nor a step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.service_clients import MOST, THREAD, FewNumbers

WAITING = 256  # steps and findings that may wait
CLOSE_SECONDS = 30.0  # that the end of a training waits for a service


class Service(Protocol):
    """What a client is asked, on the thread alone; it may wait for a network, and raise."""

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step, by their tags."""
        ...

    def tell(self, finding: Finding) -> None:
        """Send a finding."""
        ...

    def end(self) -> None:
        """End the run of the service."""
        ...


class ServiceSink:
    """The sink of a service. A step for which there is no room is dropped: `write` raises, and the writer counts and tells it.

    A step that the client refuses is told the same way, at the next one. All faults are ConnectionErrors: none ends a training.
    """

    def __init__(self, name: str, service: Service, most: int = MOST) -> None:
        self._name, self._service = name, service
        self._late: list[Finding] = []
        self._few = FewNumbers(name, most)
        self._waiting: queue.Queue[tuple[Any, ...] | None] = queue.Queue(WAITING)
        self._refused: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    def write(self, step_data: StepData) -> None:
        """Hand over the numbers of a step. Raises ConnectionError where the service takes too few."""
        self._put(self._service.send, step_data.step, self._few.of(step_data))

    def findings(self, findings: Sequence[Finding]) -> None:
        """Hand over findings. Raises ConnectionError where the service takes too few."""
        for finding in findings:
            self._put(self._service.tell, finding)

    def _put(self, *call: Any) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            raise ConnectionError(f"{WAITING} steps and findings wait for the service already") from None
        if not self._refused.empty():
            raise ConnectionError(fault_text(self._refused.get()))

    def warnings_made(self) -> Sequence[Finding]:
        """Return what the sink leaves out, and what was not sent in the end."""
        late, self._late = self._late, []
        return [*self._few.warnings_made(), *late]

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            attempt(*call, otherwise=self._refused.put)
        attempt(self._service.end, otherwise=self._refused.put)

    def close(self) -> None:
        """Wait a bounded time until all is sent and the run ended; `warnings_made` says what was not sent."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + CLOSE_SECONDS
        more = 1  # the call that is under way
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
            more = 0  # in its place the end is counted
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            left = self._waiting.qsize() + more
            self._tell(f"did not end within {CLOSE_SECONDS:g} s: {left} steps and findings got no answer")
        elif not self._refused.empty():
            calls = counted(self._refused.qsize(), "call")
            self._tell(f"failed at {calls} more, at the first with {fault_text(self._refused.get())}")

    def _tell(self, what: str) -> None:
        self._late.append(Finding("writer", "error", f"the client of {self._name!r} {what}; the run log holds all"))
