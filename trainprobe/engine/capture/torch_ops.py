"""Level L1: every torch call, forward and backward, whichever way it was imported.

A torch-function mode sees each call of torch.*, torch.nn.functional, Tensor methods and operators, and registered custom
ops, on the thread that trains, while a step is collected. The gradients of an op are those of the autograd node that it
made, read by a hook on that node.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.native_torch import learned
from trainprobe.engine.capture.patching.compiled_regions import forget, register
from trainprobe.engine.capture.patching.function_modes import is_on, put_on, take_off
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.random_state import generator_state
from trainprobe.engine.capture.repeated_ops import RepeatedOps
from trainprobe.engine.capture.requests import OpRequest
from trainprobe.engine.capture.torch_modules import ModuleTap
from trainprobe.engine.capture.unwritten_memory import Spec, UnwrittenMemory
from trainprobe.engine.compiled import recording
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.catalog import OpName, op_name
from trainprobe.engine.tape import Tape

_Request = tuple[OpName, int]
# What is written through the memory that these hand out leaves no trace in the tensor's version counter.
_HAND_OUT_MEMORY: tuple[Any, ...] = (torch.Tensor.data.__get__, torch.Tensor.numpy)  # pyright: ignore[reportAttributeAccessIssue]


class OpTap(Tap):
    """See the module text. modules: the module tap whose running calls enclose the ops, if there is one."""

    def __init__(
        self,
        request: OpRequest,
        guard: Guard,
        stacks: Stacks | None,
        modules: ModuleTap | None = None,
    ) -> None:
        self._plan = request
        self._guard = guard
        self._stacks = stacks
        self._inside: list[Call] = modules.stack if modules is not None else []
        self._module_code = modules.code if modules is not None else 0
        self._names: dict[Any, _Request | None] = {}
        self._tape: Tape | None = None
        self._mode: _Mode | None = None
        self._on = False
        self._engine: Replaced | None = None
        self._question: Replaced | None = None
        self._repeated = RepeatedOps()
        self._parent: str | None = None
        self._unwritten = UnwrittenMemory()
        self._specs: dict[Any, Spec | None] = {}  # what `request_for` returns, as the compiled watch reads it
        self._watch: Any = self._recorder(request)

    def _recorder(self, request: OpRequest) -> Any:
        """Return what records calls and their gradients, in compiled code (`native/ops.c`)."""
        return learned(recording).OpWatch(
            names=self._specs,
            learn=self._learn,
            fault=self._guard.take,
            repeats=self._repeated.number,
            micro=request.micro,
            stacks=self._stacks,
            inside=self._inside,
            stop=self._module_code,
            generator=generator_state,
            memory=self._unwritten,
            forward=request.forward,
            backward=request.backward,
            inputs="input" in request.data,
            kwargs="kwargs" in request.data,
            outputs="output" in request.data,
            recompute=request.recompute,
        )

    def _learn(self, func: Any) -> Spec | None:
        found = self._guard.run(self.request_for, func)
        if func in _HAND_OUT_MEMORY:
            return None
        spec = None
        if found is not None:
            name, flags = found
            about = name.movement, name.overwritten, name.filled_later
            spec = (name.name, flags, name.written, name.unwritten, name.random, *about)
        self._specs[func] = spec
        return spec

    def look_after(self) -> None:
        """From the next step on keep the arguments that a call changes and does not say it writes.

        On the host those are kept whose fingerprint has changed, so the plan has to ask for fingerprints; of other devices
        all are kept.
        """
        self._watch.looks_after = 1

    @property
    def parent(self) -> str | None:
        """Where calls outside every module belong: "optimizer", "clip_grad"."""
        return self._parent

    @parent.setter
    def parent(self, parent: str | None) -> None:
        self._parent = parent
        self._watch.parent = parent

    def call(self, func: Any, args: Any, kwargs: Any, otherwise: Any) -> Any:
        """Call `func`, a function that was made known, as an op; where no calls are taken, call `otherwise` instead."""
        mode = self._mode
        if not self._on or mode is None or not take_off(mode):
            return otherwise(*args, **kwargs)
        try:
            return mode.__torch_function__(func, (), args, kwargs)  # unseen by the program's modes, which stay on
        finally:
            put_on(mode)

    def know(self, func: Any, name: OpName) -> None:
        """Record a callable that is not torch's under this name, where the plan selects it."""
        self._names[func] = (name, self._plan.flags(name.name)) if self._plan.selected(name.name) else None

    def begin(self, tape: Tape) -> None:
        """Put the mode on, and have it put on in backward passes."""
        if self._mode is not None:
            take_off(self._mode)  # where a fault ended a step inside a torch call, torch put the mode back after that
        self._tape = tape
        self._repeated.begin(tape)
        self._unwritten.begin(tape)
        self._watch.begin(tape, tape.native, tape.calls)
        self._mode = _Mode(self._watch)
        autograd: Any = torch.autograd
        self._engine = Replaced(autograd, "_engine_run_backward", self._with_mode(autograd._engine_run_backward))
        asked = self._without_mode(torch.overrides.has_torch_function)
        self._question = Replaced(torch.overrides, "has_torch_function", asked, traced=True)
        register(self)
        self.switch(True)

    def switch(self, on: bool) -> None:
        """Take no calls for a while, or take them again."""
        if self._mode is not None and on != self._on:
            self._on = on
            put_on(self._mode) if on else take_off(self._mode)

    def suspend(self) -> bool:
        """Take the mode away from compiled code; False where it is not on."""
        return self._mode is not None and take_off(self._mode)

    def restore(self) -> None:
        """Put the mode on again."""
        if self._mode is not None and self._on:
            put_on(self._mode)

    def _with_mode(self, original: Any) -> Any:
        """Return the run of autograd's engine with the mode on, so that forwards run again inside it are seen.

        Torch takes a mode off while it handles `Tensor.backward`, and what that calls would be unseen.
        """

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            mode = self._mode
            if run_backward.ended or not self._on or mode is None or is_on(mode):  # type: ignore[attr-defined]
                return original(*args, **kwargs)
            put_on(mode)
            try:
                return original(*args, **kwargs)
            finally:
                take_off(mode)

        return run_backward

    def _without_mode(self, original: Any) -> Any:
        """Return the question whether anybody overrides a torch function, which modules of torch answer without our mode.

        Attention and the transformer's layers take another way in eval, with other bits, where the answer is yes.
        """

        def has_torch_function(arguments: Any) -> bool:
            mode = self._mode
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if has_torch_function.ended or not asker.startswith("torch.nn.modules.") or mode is None:  # type: ignore[attr-defined]
                return original(arguments)
            if not take_off(mode):
                return original(arguments)
            try:
                return original(arguments)
            finally:
                put_on(mode)

        return has_torch_function

    def pause(self) -> None:
        """Take no forward calls for a while."""
        self.switch(False)

    def resume(self) -> None:
        """Take forward calls again."""
        self.switch(True)

    def end(self, again: bool = False) -> None:
        """Take the mode off and let go of the hooks on autograd nodes.

        Inside a torch call, where a fault of the tool ends the step, torch itself has taken the mode off for that
        long and will put it back: it stays, asleep, until the next `end` or `begin`.
        """
        self._tape = None
        self._repeated.end()
        self._unwritten.end()
        forget(self)
        for replaced in (self._engine, self._question):
            if replaced is not None:
                replaced.back()
        self._engine = self._question = None
        self._watch.end()
        self._on = False
        if self._mode is None:
            return
        take_off(self._mode)
        if not self._mode.handling():
            self._mode.__dict__.pop("__torch_function__", None)
            self._mode = None

    # ---- one call ----------------------------------------------------------------------------------------------

    def request_for(self, func: Any) -> _Request | None:
        """Return name and flags of a callable that is to be recorded, None for one that is not; remembered for ever.

        What hands out a tensor's memory is not remembered but comes here each time, and has all tensors looked at anew from
        there on: the program may keep the memory, and write to it between any two calls.
        """
        try:
            return self._names[func]
        except KeyError:
            name = op_name(func)
        if func in _HAND_OUT_MEMORY:
            if self._tape is not None:
                self._tape.distrust()
            return None
        found = None
        if name is not None and self._plan.selected(name.name) and name.in_scope(self._plan.scope):
            found = (name, self._plan.flags(name.name))
        self._names[func] = found
        return found


class _Mode(TorchFunctionMode):
    """Hands each torch call to the compiled watch; torch itself takes the mode off while it runs."""

    def __init__(self, watch: Any) -> None:
        super().__init__()
        self._watch = watch
        self.__torch_function__ = MethodType(watch.handle, self)  # found before the class's own

    def handling(self) -> bool:
        """Tell whether a torch call is running that this mode was handed."""
        return self._watch.depth > 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass a call on, once the watch has been let go."""
        return func(*args, **kwargs) if kwargs else func(*args)
