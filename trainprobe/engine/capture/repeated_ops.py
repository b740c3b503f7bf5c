"""Which forward a torch call in a backward pass repeats, where activation checkpointing runs a forward again."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from trainprobe.engine.core.records import Call
from trainprobe.engine.tape import Tape

# Files whose frames on the stack, during backward, mean that a forward is being run again.
_RECOMPUTING = ("torch/utils/checkpoint.py", "activation_checkpointing/checkpointing.py", "tensor_parallel/random.py")


class RepeatedOps:
    """Numbers recomputed calls as their forwards: the next call of this name inside the same call of the same module."""

    def __init__(self) -> None:
        self._tape: Tape | None = None
        self._known = 0  # calls of the tape that are in `_forwards`
        self._forwards: dict[tuple[str, int, str], deque[int]] = {}  # module, its call, op → calls not repeated yet

    def begin(self, tape: Tape) -> None:
        """Forget the step before."""
        self._tape, self._known = tape, 0
        self._forwards.clear()

    def end(self) -> None:
        """Let go of the step."""
        self._tape = None
        self._forwards.clear()

    def number(self, name: str, parent: Call | str | None) -> int | None:
        """Return the number of the forward that a call repeats, -1 where that is unknown, None where it repeats none.

        Outside modules nothing tells which forward a recomputed call belongs to; it then is a call of its own.
        """
        if not isinstance(parent, Call):
            return -1 if _recomputing() else None
        if parent.phase != "recompute" or self._tape is None:
            return None
        calls = self._tape.calls
        for call in calls[self._known :]:
            if call.kind == "op" and call.phase == "forward" and isinstance(call.parent, Call):
                self._forwards.setdefault((call.parent.name, call.parent.call, call.name), deque()).append(call.call)
        self._known = len(calls)
        left = self._forwards.get((parent.name, parent.call, name))
        return left.popleft() if left else -1


def _recomputing() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_RECOMPUTING):
            return True
        frame = frame.f_back
    return False
