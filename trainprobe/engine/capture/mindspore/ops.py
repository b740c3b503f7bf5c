"""Level L1 under MindSpore: every primitive that PyNative mode runs forward, whichever of its APIs called it.

`mindspore.MsDispatchMode` hands over each primitive before it runs, also those that layers call. It is entered only in
collected steps, and nothing of MindSpore is replaced. An op is called by its primitive: `Primitive.MatMul`. What is compiled
(`ms.jit`, most optimizers), and indexing, it does not hand over.

The gradient at an input is taken by a hook on the tensor, so it is that of everything that used the tensor; a note says so. The
gradient at an output is the one at the input of what took it. Primitives that differentiation itself runs are no calls of the
model, and are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore
from mindspore.common.api import _pynative_executor

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.mindspore.cells import INPUTS, is_graph_mode
from trainprobe.engine.capture.mindspore.tensor_hooks import compile_without_hooks, hooked, wait
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.requests import OpRequest
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.catalog import OpName
from trainprobe.engine.tape import SAVE, Tape

_DIFFERENTIATES: Any = type(_pynative_executor).grad.__code__  # what calls from here is backward, not the model
_NO_CALCULATION = frozenset({"Primitive.typeof"})
_Mode: Any = getattr(mindspore, "MsDispatchMode", None)  # from MindSpore 2.9 on


def ops_are_seen() -> bool:
    """Tell whether this MindSpore hands over its primitives."""
    return _Mode is not None


class PrimitiveTap(Tap):
    """See the module text. stack: the running calls of cells that enclose the ops."""

    def __init__(self, request: OpRequest, guard: Guard, stack: list[Call], stacks: Stacks | None = None) -> None:
        self.parent: str | None = None  # where calls outside every cell belong: "optimizer"
        self.asleep = False
        self.notes: dict[str, None] = {}
        self._request = request
        self._guard = guard
        self._stack = stack
        self._stacks = stacks
        self._flags: dict[str, int | None] = {}
        self._names: dict[Any, str] = {}  # a program's own function → the op that it is
        self._tape: Tape | None = None
        self._mode: Any = None
        self._compiling: Replaced | None = None
        self._handles: list[Any] = []

    def begin(self, tape: Tape) -> None:
        """Enter the mode."""
        self._tape, self.asleep, self.parent = tape, is_graph_mode(), None
        if self._mode is None:
            self._mode = _dispatch(self)
            self._mode.__enter__()
            self._compiling = compile_without_hooks()

    def pause(self) -> None:
        """Take no calls for a while."""
        self.asleep = True

    def resume(self) -> None:
        """Take calls again."""
        self.asleep = is_graph_mode()

    def end(self, again: bool = False) -> None:
        """Leave the mode, and take the hooks off tensors."""
        self._tape = None
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        if self._compiling is not None:
            self._compiling.back()
            self._compiling = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a primitive, and record it where it is one of the model."""
        if self._tape is None or self.asleep or self._guard.tripped is not None or sys._getframe(2).f_code is _DIFFERENTIATES:
            return func(*args, **kwargs)
        given = args[2] if len(args) == 3 and isinstance(args[1], str) and isinstance(args[2], tuple) else args
        return self._record(f"Primitive.{func.name}", given, kwargs, lambda: func(*args, **kwargs))

    def know(self, func: Any, name: OpName) -> None:
        """Record calls of a Python function under this name, where the plan selects it."""
        self._names[func] = name.name

    def call(self, func: Any, args: Any, kwargs: Any, otherwise: Any) -> Any:
        """Call a function that was made known as one op; what it runs is not recorded."""
        if self._tape is None or self.asleep or self._guard.tripped is not None:
            return otherwise(*args, **kwargs)
        return self._record(self._names[func], args, kwargs, lambda: otherwise(*args, **kwargs))

    def _record(self, name: str, given: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run an op, and record it if it is selected."""
        flags = self._guard.run(self._flags_of, name)
        if flags is None:
            return run()
        self.asleep = True  # what reading a tensor runs is no op of the training
        try:
            wait()
            call = self._guard.run(self._before, name, flags, given, kwargs)
            out = run()
            if call is not None:
                wait()
                self._guard.run(self._after, call, flags, out)
            return out
        finally:
            self.asleep = False

    def _flags_of(self, name: str) -> int | None:
        """Return the flags of an op that is selected, None for one that is not."""
        if name not in self._flags:
            request = name not in _NO_CALCULATION and self._request.selected(name)
            self._flags[name] = self._request.flags(name) if request else None
        return self._flags[name]

    def _before(self, name: str, flags: int, given: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        tape, request = self._tape, self._request
        assert tape is not None
        parent: Call | str | None = self._stack[-1] if self._stack else self.parent
        again = isinstance(parent, Call) and parent.phase == "recompute"
        micro = parent.micro if isinstance(parent, Call) else tape.micro
        if not request.micro(micro or 0) or (again and not request.recompute):
            return None
        phase = "recompute" if again else "forward"
        taken = self._stacks.capture(-1, 0) if self._stacks is not None else -1
        call = Call("op", name, tape.count(name, phase), phase, micro=micro, parent=parent, stack=taken)
        at = f"{name}.{call.call}.{phase}" if flags & SAVE else None
        if request.forward:
            if "input" in request.data:
                call.args = tape.tree(given, flags, at and f"{at}.input")
            if kwargs and "kwargs" in request.data:
                call.kwargs = tape.tree(kwargs, flags, at and f"{at}.kwargs")
            tape.calls.append(call)
            tape.more_known(call)
        if request.backward and self.parent is None:
            self._watch(call, flags, given)
        return call

    def _after(self, call: Call, flags: int, out: Any) -> None:
        if self._tape is not None and self._request.forward and "output" in self._request.data:
            at = f"{call.name}.{call.call}.{call.phase}.output" if flags & SAVE else None
            call.out = self._tape.tree(out, flags, at)
            self._tape.more_known(call)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _watch(self, call: Call, flags: int, given: tuple[Any, ...]) -> None:
        back = Call("op", call.name, call.call, "backward", micro=call.micro, parent=call.parent)
        for i, t in enumerate(given):
            if isinstance(t, mindspore.Tensor):
                handle = hooked(t, partial(self._guard.run, self._arrive, back, flags, i))
                if handle is not None:
                    self._handles.append(handle)

    def _arrive(self, back: Call, flags: int, i: int, gradient: Any) -> None:
        """Keep the gradient at an input once: at a parameter others arrive, of the micro-steps behind."""
        tape = self._tape
        if tape is None or (back.out is not None and i < len(back.out) and back.out[i] is not None):
            return
        if back.out is None:
            back.args, back.out = [], []
            tape.calls.append(back)
            self.notes[INPUTS] = None
        back.out += [None] * (i + 1 - len(back.out))
        at = f"{back.name}.{back.call}.backward.output.{i}" if flags & SAVE else None
        back.out[i] = tape.tree(gradient, flags, at)
        tape.more_known(back)


def _dispatch(tap: PrimitiveTap) -> Any:
    """Return a mode that hands each primitive to the tap."""

    class Dispatch(_Mode):
        def __ms_dispatch__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
            return tap.handle(func, args, kwargs or {})

    return Dispatch()
