"""What scripts import from `msprobe.mindspore`: the classic front on MindSpore cells, its callback, and `seed_all`.

In PyNative mode. A step of a loop that is written out:

    debugger = PrecisionDebugger("config.json")
    debugger.start(net)
    loss, gradients = value_and_grad(x, labels); optimizer(gradients)
    debugger.stop()
    debugger.step()

With the high-level `Model`, `Model.train(..., callbacks=[MsprobeStep(debugger)])` calls these.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Any

import mindspore
from mindspore import nn
from mindspore.train import Callback

from trainprobe import debugger
from trainprobe.engine.capture.mindspore.calls import KnownCalls
from trainprobe.engine.capture.mindspore.cells import is_graph_mode
from trainprobe.engine.core.guard import Guard
from trainprobe.integrations.mindspore_probe import MindSporeProbe
from trainprobe.integrations.python_seed import seed_python

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")


class PrecisionDebugger(debugger.PrecisionDebugger):
    """The classic front with a probe of MindSpore; see `trainprobe.debugger.PrecisionDebugger`."""

    @classmethod
    def _probe_kind(cls) -> type[MindSporeProbe]:
        return MindSporeProbe

    def _token_range(self, model: Any, first: int, last: int) -> Any:
        if is_graph_mode():
            self._say("start(token_range=): in graph mode every forward of the model is recorded")
            return None
        return CellTokenRange(model, first, last, self.probe.resume, self.probe.pause, self.probe.guard)


class CellTokenRange:
    """Counts the calls of a cell from 0 on; `resume` is called before the first of the range and `pause` behind the last."""

    def __init__(
        self, model: Any, first: int, last: int, resume: Callable[[], None], pause: Callable[[], None], guard: Guard
    ) -> None:
        numbers = count()

        def before(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = next(numbers)
            if number == first:
                resume()
            elif number == last + 1:
                pause()

        self._calls = KnownCalls(guard, before)
        self._calls.know([model])
        self._calls.begin()
        if first:
            pause()

    def close(self) -> None:
        """Count no more."""
        self._calls.end()


class MsprobeStep(Callback):  # pyright: ignore[reportUntypedBaseClass]
    """Calls `start`, `stop` and `step` of a debugger in the training of a `Model`."""

    def __init__(self, debugger: Any) -> None:
        super().__init__()
        self.debugger = debugger

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin collecting, of the model where the debugger was given none."""
        self.debugger.start(run_context.original_args().network if self.debugger.instance()._given is None else None)

    def on_train_step_end(self, run_context: Any) -> None:
        """Write what was collected."""
        self.debugger.stop()
        self.debugger.step()


class MsprobeInitStep(Callback):  # pyright: ignore[reportUntypedBaseClass]
    """Numbers the steps of the debugger on from the steps that a `Model` has done."""

    def on_train_begin(self, run_context: Any) -> None:
        """Take the number of the step that the training begins with."""
        PrecisionDebugger.set_init_step(int(run_context.original_args().cur_step_num))


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed Python, NumPy and MindSpore.

    seed: a whole number from 0 to 2^32 - 1. mode: also choose deterministic kernels. rm_dropout: from now on the dropout cells
    of mindspore.nn let everything pass. Call it before the model is made. Raises UsageError for a seed outside that range.
    """
    seed_python(seed)
    mindspore.set_seed(seed)
    if mode:
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        mindspore.set_deterministic(True)
    for name in _DROPOUTS if rm_dropout else ():
        getattr(nn, name).construct = _nothing_dropped


def _nothing_dropped(self: Any, x: Any) -> Any:
    return x
