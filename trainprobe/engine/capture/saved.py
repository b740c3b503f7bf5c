"""Level debug: only what the user hands to `save`, nested structures and gradients included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from trainprobe.engine.capture import Tap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.tape import SAVE, Tape


class SavedTap(Tap):
    """Records values by the name the user gives; the same name in one step is counted.

    hook: has a function called with the gradient at a tensor, and returns what has `remove()`, or None where there will be
    none. quiet: returns a context in which looking at a tensor runs no code of its class.
    """

    def __init__(
        self,
        flags: int,
        guard: Guard,
        hook: Callable[[Any, Callable[[Any], None]], Any],
        quiet: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._flags = flags
        self._guard = guard
        self._hook = hook
        self._quiet = quiet
        self._tape: Tape | None = None
        self._handles: list[Any] = []
        self._gradients: dict[tuple[str, int], Call] = {}

    def begin(self, tape: Tape) -> None:
        """Take values from now on."""
        self._tape = tape

    def end(self, again: bool = False) -> None:
        """Stop, and let go of gradient hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._gradients.clear()
        self._tape = None

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record `value` (tensor, number, text, or nested list, tuple, dict) and, if asked, gradients of its tensors."""
        tape = self._tape
        if tape is None:
            return
        with self._quiet():
            number = tape.count(name, "save")
            call = tape.call("saved", name, number, "save")
            call.args = tape.tree(value, self._flags, f"{name}.{number}.debug" if self._flags & SAVE else None)
            tape.more_known(call)
            if save_backward:
                self._watch(value, name, number, [])

    def _watch(self, value: Any, name: str, number: int, path: list[str | int]) -> None:
        assert self._tape is not None
        if self._tape.library.is_tensor(value):
            handle = self._hook(value, partial(self._gradient, name, number, tuple(path)))
            if handle is not None:
                self._handles.append(handle)
        elif isinstance(value, dict):
            for k, v in value.items():
                self._watch(v, name, number, [*path, str(k)])
        elif isinstance(value, list | tuple):
            for i, v in enumerate(value):
                self._watch(v, name, number, [*path, i])

    def _gradient(self, name: str, number: int, path: tuple[str | int, ...], gradient: Any) -> None:
        self._guard.run(self._record, name, number, path, gradient)

    def _record(self, name: str, number: int, path: tuple[str | int, ...], gradient: Any) -> None:
        """Record the gradient at the tensor that stands at `path` in a saved value."""
        tape = self._tape
        if tape is None or gradient is None:
            return
        call = self._gradients.get((name, number))
        if call is None:
            call = self._gradients[name, number] = tape.call("saved", name, number, "backward")
        dotted = "".join(f".{p}" for p in path)
        with self._quiet():
            value = tape.tree(gradient, self._flags, f"{name}_grad.{number}.debug{dotted}" if self._flags & SAVE else None)
            _put(call, path, value)
            tape.more_known(call)


def _put(call: Call, path: tuple[str | int, ...], value: Value) -> None:
    """Place a gradient where its tensor stood in the saved structure; the places between are lists and dicts as there."""
    if not path:
        call.args = value
        return
    here: Any = call.args
    if here is None:
        here = call.args = [] if isinstance(path[0], int) else {}
    for part, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(part, int):
            while len(here) <= part:
                here.append(None)
        elif part not in here:
            here[part] = None
        if following is None:
            here[part] = value
            return
        if here[part] is None:
            here[part] = [] if isinstance(following, int) else {}
        here = here[part]
