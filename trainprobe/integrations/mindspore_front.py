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
from typing import Any, ClassVar

import mindspore
from mindspore import mint, nn, ops
from mindspore.train import Callback

from trainprobe.engine.capture.mindspore.calls import KnownCalls
from trainprobe.engine.capture.mindspore.cells import is_graph_mode
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.log_lines import say
from trainprobe.errors import UsageError
from trainprobe.integrations.mindspore_probe import MindSporeProbe
from trainprobe.integrations.python_seed import DROPOUT_STAYS, seed_python
from trainprobe.run import precision_debugger

# functions and cells that let everything pass once dropout is taken out, and primitives that are then made to keep everything
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((ops, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    (mint.nn.functional, "dropout"),
)
_CELLS: tuple[Any, ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout)
_PRIMITIVES = ("Dropout", "Dropout2D", "Dropout3D")
_reported: set[str] = set()


class MsgConst:
    """The text of the error that a verb of a debugger raises before one is made."""

    NOT_CREATED_INSTANCE: ClassVar[str] = precision_debugger.NO_DEBUGGER


class PrecisionDebugger(precision_debugger.PrecisionDebugger):
    """The classic front with a probe of MindSpore; see `trainprobe.run.precision_debugger.PrecisionDebugger`."""

    @classmethod
    def _probe_kind(cls) -> type[MindSporeProbe]:
        return MindSporeProbe

    @classmethod
    def monitor(cls, model: Any) -> None:
        """Raise UsageError: a probe that knows the model and the optimizer watches gradients."""
        raise UsageError(
            "monitor(optimizer): under MindSpore the monitor watches from the first step on: "
            "`with trainprobe.watch(net, optimizer, plan='config.json') as probe:` in a loop that is written out, "
            "callbacks=[ProbeCallback('config.json')] of trainprobe.integrations.mindformers for a Model"
        )

    @classmethod
    def module_dump(cls, module: Any, module_name: str) -> None:
        """Raise UsageError: a plan says which cells are recorded."""
        raise UsageError(
            f"module_dump({module_name!r}): under MindSpore a plan says which cells are recorded: level L0 and "
            f"`modules: [{module_name}]`, with the cell's name within the model"
        )

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


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool | None = None) -> None:
    """Seed Python, NumPy and MindSpore.

    seed: a whole number from 0 to 2^32 - 1. mode: also choose deterministic kernels. rm_dropout: from now on dropout of
    mindspore.nn, ops and mint lets everything pass; where it is not given nothing is changed, and a line says so once. Call it
    before the model is made. Raises UsageError for a seed outside that range.
    """
    seed_python(seed)
    mindspore.set_seed(seed)
    if mode:
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        mindspore.set_deterministic(True)
    if rm_dropout is None and not _reported:
        _reported.add("rm_dropout")
        say(DROPOUT_STAYS)
    if rm_dropout:
        _remove_dropout()


def _remove_dropout() -> None:
    for module, name in _FUNCTIONS:
        setattr(module, name, _pass_on)
    for cell in _CELLS:
        cell.construct = _nothing_dropped
    for name in _PRIMITIVES:
        kept = _keeping_everything(getattr(ops.operations, name))
        setattr(ops, name, kept)
        setattr(ops.operations, name, kept)


def _pass_on(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input


def _nothing_dropped(self: Any, x: Any) -> Any:
    return x


def _keeping_everything(primitive: Any) -> Any:
    """Return the primitive with a probability of 1 to keep, whatever it is asked for. It takes the name of what it replaces."""

    def init(self: Any, keep_prob: float = 0.5, *args: Any, **kwargs: Any) -> None:
        primitive.__init__(self, 1.0, *args, **kwargs)

    return type(primitive.__name__, (primitive,), {"__init__": init})
