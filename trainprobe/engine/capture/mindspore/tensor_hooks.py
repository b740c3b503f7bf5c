"""Hooks of this tool on tensors in PyNative mode, which a function under `ms.jit` must not see.

MindSpore compiles the hooks of the tensors that such a function is given together with it, and cannot compile those of a tool.
So it does with those of parameters, which it finds in the function itself. All are taken off while the function is compiled and
run, and put back afterwards: the gradient still arrives at the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore
from mindspore.common.api import _pynative_executor

from trainprobe.engine.capture.patching.replaced import Replaced

try:
    from mindspore.graph.api import _JitExecutor
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import _JitExecutor


_on_parameters: dict[int, TensorHook] = {}  # by the hook's id


def wait() -> None:
    """Wait for what PyNative mode has begun; raises what went wrong in it, which is the training's error."""
    _pynative_executor.sync()


class TensorHook:
    """A hook on a tensor, which calls `seen` with the gradient there."""

    def __init__(self, t: Any, seen: Callable[[Any], Any]) -> None:
        self._seen = seen
        self._handle: Any = None
        self.tensor = t
        self.put_on()

    def put_on(self) -> None:
        """Register the hook."""

        def arrives(gradient: Any) -> None:
            wait()
            self._seen(gradient)

        arrives.trainprobe_hook = self  # pyright: ignore[reportFunctionMemberAccess]
        self._handle = self.tensor.register_hook(arrives)
        if isinstance(self.tensor, mindspore.Parameter):
            _on_parameters[id(self)] = self

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        _on_parameters.pop(id(self), None)


def hooked(t: Any, seen: Callable[[Any], Any]) -> TensorHook | None:
    """Have `seen` called with the gradient at a tensor once it has been computed.

    Returns what has `remove()`; None for a tensor that has no gradient, which MindSpore refuses.
    """
    if "Float" not in str(t.dtype):
        return None
    try:
        return TensorHook(t, seen)
    except RuntimeError as refused:
        if "requires grad" not in str(refused):
            raise
        return None


def compile_without_hooks() -> Replaced:
    """Have functions under `ms.jit` see tensors without hooks of this tool, until what is returned is put back."""
    original: Any = _JitExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        taken = {id(hook): hook for t in _tensors((args, kwargs)) for hook in _hooks(t)} | _on_parameters
        for hook in taken.values():
            hook.remove()
        try:
            return original(executor, *args, **kwargs)
        finally:
            for hook in taken.values():
                hook.put_on()

    return Replaced(_JitExecutor, "__call__", call)


def _hooks(t: Any) -> list[TensorHook]:
    found = (getattr(hook, "trainprobe_hook", None) for hook in getattr(t, "hooks", list)())
    return [hook for hook in found if hook is not None]


def _tensors(x: Any) -> Iterator[Any]:
    if isinstance(x, mindspore.Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        yield from _tensors([*x.values()])
