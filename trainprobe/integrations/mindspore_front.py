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
from typing import Any

import mindspore
from mindspore import nn
from mindspore.train import Callback

from trainprobe import debugger
from trainprobe.integrations.mindspore_probe import MindSporeProbe
from trainprobe.integrations.python_seed import seed_python

_DROPOUTS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")


class PrecisionDebugger(debugger.PrecisionDebugger):
    """The classic front with a probe of MindSpore; see `trainprobe.debugger.PrecisionDebugger`."""

    @classmethod
    def _probe_kind(cls) -> type[MindSporeProbe]:
        return MindSporeProbe

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Begin collecting, if this step is selected.

        model: a cell or a list of cells. token_range: not used, which is printed.
        """
        if token_range is not None:
            cls.instance()._say("start(token_range=): under MindSpore every forward of the model is recorded")
        super().start(model, None, rank_id, scheduled_tokens)

    @classmethod
    def register_custom_api(cls, module: Any, api_name: str, api_prefix: str | None = None) -> None:
        """Say, once, that a function is not recorded as one op under MindSpore; the primitives that it calls are."""
        cls.instance()._say(f"register_custom_api({api_name!r}): under MindSpore the primitives that it calls are recorded")

    @classmethod
    def restore_custom_api(cls, module: Any, api_name: str) -> None:
        """Do nothing: no function was replaced."""


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
