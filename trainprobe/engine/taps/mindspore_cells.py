"""What goes in and out of each MindSpore cell, and the gradients at its outputs, in PyNative mode.

While a step is collected, `mindspore.nn.Cell.__call__` is replaced for the class. No hook is put on a cell: it would be parsed
and compiled with the cell. The gradient at an output is taken by a hook on the tensor, which leaves with the tensor; it is the
whole gradient that arrives there. What MindSpore compiles, it does not call from Python: those cells are seen from outside
only, and a note says so.

MindSpore raises errors of its kernels later, at whatever waits for them next. Before this tap reads a value it waits in the
training's own place, so that such an error is raised in the training and not inside the tool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore
from mindspore.common.api import _pynative_executor
from mindspore.nn import Cell

from trainprobe.engine.guard import Guard
from trainprobe.engine.naming import ROOT
from trainprobe.engine.records import Call
from trainprobe.engine.tape import SAVE, Tape
from trainprobe.engine.taps.replaced import Replaced
from trainprobe.engine.wanted import ModulesWanted

COMPILED = (
    "MindSpore compiles this model into a graph (GRAPH_MODE, or ms.jit), and Python sees nothing inside one: inputs and "
    "outputs of cells, their gradients and the gradients of parameters are not recorded; parameters, optimizer state and what "
    "the framework reports are. To see the rest, run with mindspore.set_context(mode=mindspore.PYNATIVE_MODE) and the "
    "environment variable MS_JIT=0"
)


RECOMPUTING = "_recompute_cell"  # the name under which a cell that is recomputed holds what does it


def is_graph_mode() -> bool:
    """Tell whether a cell that is called now is compiled as a whole."""
    import os

    return mindspore.get_context("mode") == mindspore.GRAPH_MODE and os.environ.get("MS_JIT") != "0"


def wait() -> None:
    """Wait for what PyNative mode has begun; raises what went wrong in it, which is the training's error."""
    _pynative_executor.sync()


@dataclass(frozen=True, slots=True)
class CellInfo:
    """A cell of the model as it is recorded."""

    name: str
    cls: str
    parameters: tuple[tuple[str, Any], ...]
    flags: int
    selected: bool
    repeats: bool  # a cell around it, or itself, is recomputed in backward


class CellTap:
    """See the module text. `parameter_names`: id of parameter → the name that MindSpore itself gives it."""

    def __init__(self, wanted: ModulesWanted, guard: Guard) -> None:
        self.wanted = wanted
        self.known: dict[int, CellInfo] = {}
        self.parameter_names: dict[int, str] = {}
        self.notes: dict[str, None] = {}
        self._guard = guard
        self._stack: list[Call] = []
        self._tape: Tape | None = None
        self._original: Replaced | None = None
        self._handles: list[Any] = []
        self._forwards: dict[str, int] = {}  # name → calls of this step
        self._recomputed: dict[str, int] = {}
        self._called = 0
        self._paused = False

    # ---- life --------------------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Name the cells and parameters of a model, or of a list of models."""
        self.known.clear()
        self.parameter_names.clear()
        for cell_of in list(model) if isinstance(model, list | tuple) else [model]:
            for p in cell_of.get_parameters():
                self.parameter_names.setdefault(id(p), p.name)
            named = list(cell_of.cells_and_names())
            repeated = [raw.removesuffix(f".{RECOMPUTING}") for raw, _ in named if raw.endswith(f".{RECOMPUTING}")]
            for raw, cell in named:
                if RECOMPUTING in raw.split("."):
                    continue  # what MindSpore puts around a cell: the same names with and without it
                name = raw or ROOT
                own = tuple((n, p) for n, p in cell._params.items() if p is not None and self.wanted.parameter(p.name))
                wanted = self.wanted
                again = any(f"{name}.".startswith(f"{outer}.") for outer in repeated)
                self.known.setdefault(
                    id(cell), CellInfo(name, type(cell).__name__, own, wanted.flags(name), wanted.selected(name), again)
                )

    def begin(self, tape: Tape) -> None:
        """Replace `Cell.__call__`."""
        self._tape = tape
        self._stack.clear()
        self._forwards.clear()
        self._recomputed.clear()
        self._called, self._paused = 0, False
        if self._original is not None:
            return
        original: Any = Cell.__call__
        known, run = self.known, self._run

        def call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            info = known.get(id(cell))
            if info is None or call.ended:  # type: ignore[attr-defined]
                return original(cell, *args, **kwargs)
            return run(info, original, cell, args, kwargs)

        self._original = Replaced(Cell, "__call__", call)

    def pause(self) -> None:
        """Take no forward calls for a while."""
        self._paused = True

    def resume(self) -> None:
        """Take forward calls again."""
        self._paused = False

    def end(self, again: bool = False) -> None:
        """Put `Cell.__call__` back, and take the hooks off tensors; with `again` the call stays in place, asleep."""
        if self._tape is not None and self._called <= 1 < len(self.known):
            self.notes[COMPILED] = None
        if not again and self._original is not None:
            self._original.back()
            self._original = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._tape = None

    # ---- a call ------------------------------------------------------------------------------------------------

    def _run(self, info: CellInfo, original: Any, cell: Any, args: Any, kwargs: Any) -> Any:
        if self._tape is None or self._paused or self._guard.tripped is not None or is_graph_mode():
            return original(cell, *args, **kwargs)
        wait()
        depth = len(self._stack)
        call = self._guard.run(self._enter, info, args, kwargs)
        try:
            out = original(cell, *args, **kwargs)
            if call is not None:
                wait()
                self._guard.run(self._leave, info, call, out)
            return out
        finally:
            del self._stack[depth:]

    def _enter(self, info: CellInfo, args: Any, kwargs: Any) -> Call:
        tape, wanted = self._tape, self.wanted
        assert tape is not None
        self._called += 1
        parent = self._stack[-1] if self._stack else None
        again = info.repeats and (parent.phase == "recompute" if parent is not None else info.name in self._forwards)
        if parent is None and not again:
            tape.forward_begins(info.name)
        phase = "recompute" if again else "forward"
        call = Call("module", info.name, self._number(info.name, again), phase, cls=info.cls, micro=tape.micro, parent=parent)
        if info.selected and wanted.micro(tape.micro) and (wanted.recompute or not again):
            at = self._path(info, call)
            if wanted.forward:
                if "input" in wanted.data:
                    call.args = tape.tree(args, info.flags, at and f"{at}.input")
                if kwargs and "kwargs" in wanted.data:
                    call.kwargs = tape.tree(kwargs, info.flags, at and f"{at}.kwargs")
                if info.parameters and "parameters" in wanted.data:
                    call.params = {n: tape.tree(p, info.flags, at and f"{at}.parameters.{n}") for n, p in info.parameters}
            tape.calls.append(call)
        self._stack.append(call)
        return call

    def _number(self, name: str, again: bool) -> int:
        """Number a call. A recomputed one has the number of the latest forward not recomputed yet: backward is reverse."""
        if again:
            number = self._recomputed[name] = max(self._recomputed.get(name, self._forwards.get(name, 0)) - 1, 0)
            return number
        number = self._forwards.get(name, 0)
        self._forwards[name] = number + 1
        return number

    def _leave(self, info: CellInfo, call: Call, out: Any) -> None:
        tape, wanted = self._tape, self.wanted
        if tape is None or not info.selected or not wanted.micro(call.micro or 0):
            return
        if wanted.forward and "output" in wanted.data and (wanted.recompute or call.phase != "recompute"):
            at = self._path(info, call)
            call.out = tape.tree(out, info.flags, at and f"{at}.output")
        if wanted.backward and "output" in wanted.data:
            back = Call("module", info.name, call.call, "backward", cls=info.cls, micro=call.micro, parent=call.parent)
            tensors = [out] if isinstance(out, mindspore.Tensor) else list(out) if isinstance(out, tuple | list) else []
            for i, t in enumerate(tensors):
                if isinstance(t, mindspore.Tensor) and "Float" in str(t.dtype):
                    self._watch(info, back, i, t)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _watch(self, info: CellInfo, back: Call, i: int, t: Any) -> None:
        """Take the gradient at output i when it arrives; a tensor that needs none is refused by MindSpore and left alone."""
        arrive = partial(self._arrive, info, back, i)

        def seen(gradient: Any) -> None:
            wait()
            self._guard.run(arrive, gradient)

        try:
            self._handles.append(t.register_hook(seen))
        except RuntimeError as refused:
            if "requires grad" not in str(refused):
                raise

    def _arrive(self, info: CellInfo, back: Call, i: int, gradient: Any) -> None:
        tape = self._tape
        if tape is None:
            return
        if back.args is None:
            back.args = []
            tape.calls.append(back)
        back.args += [None] * (i + 1 - len(back.args))
        at = self._path(info, back)
        back.args[i] = tape.tree(gradient, info.flags, at and f"{at}.input.{i}")

    def _path(self, info: CellInfo, call: Call) -> str | None:
        return f"Cell.{info.name}.{info.cls}.{call.phase}.{call.call}" if info.flags & SAVE else None
