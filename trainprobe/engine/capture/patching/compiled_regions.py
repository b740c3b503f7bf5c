"""Compiled code runs, and is compiled, exactly as it would without the tool.

Dynamo guards what it compiles with the torch-function modes and the methods that it met, and traces through them. So whatever
the tool has put where compiled code would meet it steps aside while a compiled function or module runs. What happens inside is
not seen; what goes into and comes out of a compiled module is.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, Protocol


class Suspendable(Protocol):
    """What compiled code would meet: a replaced function, a mode."""

    def suspend(self) -> bool:
        """Go away for a while; False where there is nothing that could be taken away."""
        ...

    def restore(self) -> None:
        """Stand again where `suspend` left."""
        ...


def register(thing: Suspendable) -> None:
    """Have a thing step aside from compiled code, on the thread that calls this and those of its backward."""
    if _ours is None:
        _begin()
    _things[thing] = None


def forget(thing: Suspendable) -> None:
    """End that, because the thing is gone."""
    _things.pop(thing, None)
    if not _things and _entered is None:
        _end()


_things: dict[Suspendable, None] = {}  # oldest first
_away: list[Suspendable] = []
_entered: Any = None  # the frame of Dynamo's wrapper whose call is running
_thread = 0
_ours: Any = None


def _begin() -> None:
    """Replace the function with which Dynamo's wrappers begin and end a call (torch 2.13 and 2.4 name it differently)."""
    global _thread, _ours
    _thread = get_ident()
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # loaded by the first optimizer, or torch.compile
    if dynamo is not None:
        name = "_maybe_set_eval_frame" if hasattr(dynamo, "_maybe_set_eval_frame") else "set_eval_frame"
        _ours = _setting(dynamo, name, getattr(dynamo, name))
        setattr(dynamo, name, _ours)


def _end() -> None:
    global _ours
    ours, _ours = _ours, None
    if ours is not None and getattr(ours.owner, ours.name) is ours:
        setattr(ours.owner, ours.name, ours.below)


def _setting(owner: Any, name: str, original: Any) -> Any:
    def set_callback(callback: Any) -> Any:
        wrapper = sys._getframe(1)
        if wrapper is _entered:
            before = original(callback)
            _leave()
            return before
        if callback is not None and _entered is None:
            _enter(wrapper)
        return original(callback)  # from here on Dynamo may read every frame: nothing of ours follows

    function: Any = set_callback
    function.owner, function.name, function.below = owner, name, original
    return function


def _enter(wrapper: Any) -> None:
    global _entered
    if wrapper.f_code.co_name == "__enter__":  # a `with` of Dynamo's own ends in another frame
        return
    if get_ident() != _thread and sys.modules["torch"]._C._current_graph_task_id() == -1:
        return
    _entered = wrapper
    _away[:] = [thing for thing in reversed(_things) if thing.suspend()]


def _leave() -> None:
    global _entered
    _entered = None
    while _away:
        _away.pop().restore()
    if not _things:
        _end()
