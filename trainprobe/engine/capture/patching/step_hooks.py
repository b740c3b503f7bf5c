"""Torch's two global hooks around optimizer steps, held once for all that listen.

Torch refuses to have a hook taken away while it walks over them, and a loop whose step ends with its update ends it in such a
hook. So torch holds one hook of each kind, and a listener leaves a list of ours at once. What torch holds goes when nobody
listens any more and no walk is under way. After a step that ended in a hook, or where another collected step follows, that is
when `settle` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Before = Callable[[Any, Any, Any], "tuple[Any, Any] | None"]
After = Callable[[Any, Any, Any], None]


class StepListener:
    """Calls `before(optimizer, args, kwargs)`, which may return other (args, kwargs), and `after(optimizer, args, kwargs)`.

    Listeners are called in the order in which they were made, until `remove`.
    """

    def __init__(self, before: Before | None = None, after: After | None = None) -> None:
        self.before = before
        self.after = after
        self.on = True
        _listeners.append(self)
        if not _handles:
            _handles[:] = [register_optimizer_step_pre_hook(_all_before), register_optimizer_step_post_hook(_all_after)]

    def remove(self, again: bool = False) -> None:
        """Be called no more; safe to call twice. again: somebody listens soon, so what torch holds stays until `settle`."""
        if self.on:
            self.on = False
            _listeners.remove(self)
        if not again:
            settle()


_listeners: list[StepListener] = []
_handles: list[Any] = []
_walks = 0  # how many walks over torch's hooks are under way


def settle() -> None:
    """Take torch's hooks off if there is no listener."""
    if not _listeners and not _walks:
        for handle in _handles:
            handle.remove()
        _handles.clear()


@_disable_dynamo
def _all_before(optimizer: Any, args: Any, kwargs: Any) -> Any:
    changed = None
    at = 0
    while at < len(_listeners):  # not over a copy: a listener may begin a step, whose own listeners hear of this update too
        listener = _listeners[at]
        at += 1
        replaced = listener.before(optimizer, args, kwargs) if listener.before is not None and listener.on else None
        if replaced is not None:
            args, kwargs = changed = replaced
    return changed


@_disable_dynamo
def _all_after(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _walks
    _walks += 1
    try:
        for listener in tuple(_listeners):
            if listener.after is not None and listener.on:
                listener.after(optimizer, args, kwargs)
    except BaseException:
        _walks -= 1
        settle()  # torch walks no further
        raise
    _walks -= 1
