"""Level L0: buffers of modules that a step has changed, such as running statistics, rotary caches and scales.

They stand among the parameters of the module's last forward call of the step, with the values that they have at the update
and, where they change after it, when the step ends (of values that are saved, the first). A buffer has changed when it is
another tensor or its version counter has moved. Kernels of torch's norms move none: the running statistics of a norm that ran
in training have changed. Any other write that moves no counter is not seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.nn.modules.batchnorm import _NormBase

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.torch_modules import PARAMETERS, ModuleInfo, ModuleTap
from trainprobe.engine.core.records import Call
from trainprobe.engine.tape import SAVE, Tape

_RUNNING = ("running_mean", "running_var")
_Versions = dict[str, tuple[Any, int]]  # short name → buffer and its version


class BufferTap(Tap):
    """See the module text. modules: the tap that records the calls."""

    def __init__(self, modules: ModuleTap) -> None:
        self._modules = modules
        self._tape: Tape | None = None
        self._names: Any = None  # what the tap knew when `_holders` was made
        self._holders: list[tuple[Any, ModuleInfo]] = []
        self._before: list[tuple[Any, ModuleInfo, _Versions]] = []
        self._recorded: dict[str, Call] = {}  # name of a module → the call whose buffers were looked at

    def begin(self, tape: Tape) -> None:
        """Take the versions of all buffers."""
        request = self._modules.request
        if not request.forward or PARAMETERS not in request.data:
            return
        self._tape = tape
        names = self._modules.names()
        if names is not self._names:
            self._names, self._holders = names, list(self._modules.with_buffers())
        self._recorded.clear()
        self._take_versions()

    def _take_versions(self) -> None:
        self._before = [(module, info, _versions(module)) for module, info in self._holders]

    def look(self) -> None:
        """Record the buffers that have changed since the step began, or since the last look."""
        tape = self._tape
        if tape is None or not self._before:
            return
        last = {call.name: call for call in tape.calls if call.kind == "module" and call.phase == "forward"}
        with torch.no_grad(), DisableTorchFunction():
            for module, info, was in self._before:
                call = last.get(info.name)
                if call is not None:
                    ran = self._recorded.get(info.name) is not call
                    self._recorded[info.name] = call
                    _add(tape, call, info, _changed(module, was, ran))
        self._take_versions()

    def end(self, again: bool = False) -> None:
        """Look once more, and let go."""
        self.look()
        self._tape = None
        self._before = []
        self._recorded.clear()


def _add(tape: Tape, call: Call, info: ModuleInfo, found: list[tuple[str, Any]]) -> None:
    known = call.params or {}
    for short, t in found:
        if info.flags & SAVE and short in known:
            continue
        at = f"Module.{info.name}.{info.cls}.forward.{call.call}.parameters.{short}" if info.flags & SAVE else None
        call.params = {**(call.params or {}), short: tape.tree(t, info.flags, at)}
    if found:
        tape.more_known(call)


def _versions(module: Any) -> _Versions:
    with DisableTorchFunction():
        return {short: (t, 0 if t.is_inference() else t._version) for short, t in module._buffers.items() if t is not None}


def _changed(module: Any, was: _Versions, ran: bool) -> list[tuple[str, Any]]:
    """Return short name and buffer of those that have changed; ran: the module was called since the versions were taken."""
    updated = _RUNNING if ran and isinstance(module, _NormBase) and module.training else ()
    found: list[tuple[str, Any]] = []
    for short, (t, version) in _versions(module).items():
        before, old = was.get(short, (None, 0))
        if short in updated or before is not t or old != version:
            found.append((short, t))
    return found
