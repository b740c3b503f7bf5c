"""A program's own Python function recorded as an op: `PrecisionDebugger.register_custom_api(module, "function", "Prefix")`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from trainprobe.engine.plan.catalog import OpName
from trainprobe.errors import UsageError


class Ops(Protocol):
    """A tap of operators."""

    def know(self, func: Any, name: OpName) -> None:
        """Record calls of a function under this name, where the plan selects it."""
        ...

    def call(self, func: Any, args: Any, kwargs: Any, otherwise: Any) -> Any:
        """Call a function that was made known as an op; where no calls are taken, call `otherwise` instead."""
        ...


class CustomFunctions:
    """Functions that stand in place of a program's own while they are registered, and hand each call to the op tap.

    What runs inside such a function is not recorded by itself: the function is the op.
    """

    def __init__(self, ops: Ops | None) -> None:
        self._ops = ops
        self._originals: dict[tuple[int, str], Callable[..., Any]] = {}

    def register(self, module: Any, name: str, prefix: str | None = None) -> None:
        """Record calls of `module.name` as `prefix.name`; prefix: by default the module's name. Raises UsageError."""
        original = getattr(module, name, None)
        if not callable(original):
            raise UsageError(f"register_custom_api: {_name_of(module)} has no function {name!r}")
        if self._ops is None or (id(module), name) in self._originals:
            return
        ops, op = self._ops, OpName(f"{prefix or _name_of(module)}.{name}", unwritten=False, written=0, movement=False)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ops.call(call, args, kwargs, original)  # the tap calls this again, and takes no calls then

        ops.know(call, op)
        self._originals[id(module), name] = original
        setattr(module, name, call)

    def restore(self, module: Any, name: str) -> None:
        """Put the program's own function back."""
        original = self._originals.pop((id(module), name), None)
        if original is not None:
            setattr(module, name, original)


def _name_of(module: Any) -> str:
    return getattr(module, "__name__", None) or type(module).__name__
