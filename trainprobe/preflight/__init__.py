"""Before a run: does this loss do with this model what you believe?

    trainprobe.preflight(loss, model, batch)        # loss(model, batch) returns the scalar

changes what must not matter and looks whether it matters, and changes what must matter and looks whether it does. Nothing is
trained: see docs/preflight.md. The module can be called, as `trainprobe.preflight` is both the room and its one function.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainprobe.preflight.examine import preflight as preflight
    from trainprobe.preflight.report import Report


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        from trainprobe.preflight.examine import preflight  # not before: it imports torch, and pytest imports the room

        return preflight(*args, **kwargs)

    @property
    def preflight(self) -> _Room:
        """The function of the room, which is the room."""
        return self


sys.modules[__name__].__class__ = _Room
