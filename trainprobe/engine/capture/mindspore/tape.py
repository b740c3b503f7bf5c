"""The tape of a step of a MindSpore training: its tensors do not say `requires_grad`, and each is brought to the host first."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.arrays.mindspore_library import HostArray
from trainprobe.engine.core.records import Value
from trainprobe.engine.tape import Tape


class HostTape(Tape):
    """A tape that looks at each place anew (see engine.arrays.mindspore_library)."""

    def _special(self, t: Any, flags: int) -> Value:
        inner, kind, _, note = self.library.special(t)
        if isinstance(inner, HostArray):
            value = self._reduce(inner, flags, inner)
            value.type = kind
            return value
        return Value(-1, str(t.dtype), tuple(t.shape), type=kind, note=note)
