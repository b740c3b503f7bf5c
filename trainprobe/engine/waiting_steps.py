"""The collected steps that have ended and are not with the writer yet."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trainprobe.engine.core.guard import Part, simply
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.sent_step import SentStep

Prepare = Sequence[tuple[str, Callable[[StepData], object]]]
MOST_ON_THEIR_WAY = 4  # steps; of more, the oldest is waited for: by then the device is as many steps behind


class WaitingStep(NamedTuple):
    """A collected step whose numbers come from a device.

    looks: whether calls of the model should be in it. prepare: what programs do with it first, each with its part. told:
    what `tell` was given of it, and is given until the next step begins.
    """

    number: int
    sent: SentStep
    looks: bool
    prepare: Prepare
    told: dict[str, float]


class WaitingSteps:
    """The life of a collected step from its end to the writer, oldest step first.

        on its way    its numbers come from the device; `settle` goes on with it once they are there
        prepared      they are on the host, and each program has corrected what was recorded
        judged        `judge` has returned what was found in it
        kept          it may be told more numbers until the next step begins; only where `settle` says so
        handed over   `submit` gave it to the writer, and `act` did what was found asks for

    A fork has none of the steps of its parent. Who waits for the writer may be on any thread.
    """

    def __init__(
        self,
        judge: Callable[[WaitingStep, StepData], Sequence[Finding]],
        submit: Callable[[StepData], None],
        act: Callable[[Sequence[Finding]], None],
        part: Part,
    ) -> None:
        self._judge, self._submit, self._act, self._part = judge, submit, act, part
        self._on_their_way: deque[WaitingStep] = deque()
        self._kept: StepData | None = None
        self._told: dict[str, float] | None = None  # of the last step that was collected, as long as more can be added
        self._settling = threading.RLock()
        self._process = os.getpid()

    def __bool__(self) -> bool:
        """Tell whether any step waits."""
        return bool(self._on_their_way or self._kept)

    def begins(self) -> None:
        """A step begins: what is told from now on is of this one."""
        self._told = {}

    def tell(self, name: str, number: float) -> bool:
        """Keep a number of the last step; False where that step has been handed over."""
        if self._told is None:
            return False
        self._told[name] = number
        return True

    def add(self, number: int, sent: SentStep, looks: bool, prepare: Prepare) -> None:
        """A collected step has ended, and its tape has sent its numbers."""
        self._on_their_way.append(WaitingStep(number, sent, looks, prepare, {} if self._told is None else self._told))

    def settle(self, wait: bool = False, keep: int | None = None) -> StepData | None:
        """Judge and hand over the steps whose numbers have come; return the last one, if none is left behind it.

        wait: for all; otherwise MOST_ON_THEIR_WAY may stay. keep: the step that is judged, and handed over later. Raises what
        `act` raises.
        """
        if os.getpid() != self._process:
            self._on_their_way.clear()
            self._kept = None
        step_data: StepData | None = None
        with self._settling:
            self._hand_over_kept()
            while self._on_their_way:
                first = self._on_their_way[0]
                if not (wait or len(self._on_their_way) > MOST_ON_THEIR_WAY or first.sent.arrived()):
                    return None
                self._on_their_way.popleft()
                step_data = self._received(first, first.number == keep)
        return step_data

    def unjudged(self) -> Iterator[StepData]:
        """Hand over the step that is kept, and yield the others: a fault disables the tool, and nothing is judged."""
        self._hand_over_kept()
        while self._on_their_way and os.getpid() == self._process:
            yield self._prepared(self._on_their_way.popleft(), simply)

    def _received(self, step: WaitingStep, keep: bool) -> StepData:
        step_data = self._prepared(step, self._part)
        found = self._judge(step, step_data)
        if keep:
            self._kept, self._told = step_data, step.told
        else:
            self._submit(step_data)
        self._act(found)
        return step_data

    def _prepared(self, step: WaitingStep, part: Part) -> StepData:
        step_data = step.sent.receive()
        if step.told:
            step_data.change(scalars={**step_data.scalars, **step.told})
        if step.told is self._told:
            self._told = None
        for name, call in step.prepare:
            part(name, call, step_data)
        return step_data

    def _hand_over_kept(self) -> None:
        step_data, self._kept = self._kept, None
        if step_data is not None:
            if self._told:
                step_data.change(scalars={**step_data.scalars, **self._told})
            self._told = None
            self._submit(step_data)
