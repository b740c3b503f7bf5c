"""Torch's two global hooks around optimizer steps, held once for all that listen.

Torch refuses to have a hook taken away while it walks over them, and a loop whose step ends with its update ends it in such a
hook. So torch holds one hook of each kind, and a listener leaves a list of ours at once. What torch holds goes when nobody
listens any more and no walk is under way. After a step that ended in a hook, or where another collected step follows, that is
when `settle` is called.

Nobody hears of an update that only makes the state of a fresh optimizer (`makes_state`). A framework whose update goes on
behind that of torch's optimizer says where it begins and ends (`GatheredUpdate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainprobe.engine.capture.gradients import sequence_number

Before = Callable[[Any, Any, Any], "tuple[Any, Any] | None"]
After = Callable[[Any, Any, Any], None]


class StepListener:
    """Calls `before(optimizer, args, kwargs)`, which may return other (args, kwargs), and `after(optimizer, args, kwargs)`.

    Listeners are called in the order in which they were made, until `remove`. gathered: every `GatheredUpdate` is heard, too.
    """

    def __init__(self, before: Before | None = None, after: After | None = None, gathered: bool = False) -> None:
        self.before = before
        self.after = after
        self.gathered = gathered
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


class GatheredUpdate:
    """An update whose weights a framework gathers from the ranks that made them: around it, in a `with`, listeners hear of it.

    param_groups: the weights as each rank holds them then, in the form of an optimizer's.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.param_groups = [{"params": [*parameters]}]

    def __enter__(self) -> None:
        for listener in tuple(_listeners):
            if listener.gathered and listener.before is not None:
                listener.before(self, (), {})

    def __exit__(self, *_: Any) -> None:
        for listener in tuple(_listeners):
            if listener.gathered and listener.after is not None:
                listener.after(self, (), {})


_listeners: list[StepListener] = []
_handles: list[Any] = []
_walks = 0  # how many walks over torch's hooks are under way
_graphs = 0  # nodes of autograd that this thread had made at the last update
_unheard: set[int] = set()  # ids of the optimizers whose updates that nobody hears of are under way
_left_out: set[int] = set()  # ids of the optimizers whose last update was left out


def leave_out(optimizer: Any) -> None:
    """Leave out the update that has begun: without gradients, an optimizer of torch writes nothing and counts no step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
    _left_out.add(id(optimizer))


def is_left_out(optimizer: Any) -> bool:
    """Tell whether the update that is under way, or was the last, was left out."""
    return id(optimizer) in _left_out


def settle() -> None:
    """Take torch's hooks off if there is no listener."""
    if not _listeners and not _walks:
        for handle in _handles:
            handle.remove()
        _handles.clear()


def makes_state(optimizer: Any) -> bool:
    """Tell whether an update trains nothing: no backward before it, no state yet, and every rate and every gradient is 0.

    `torch.distributed.checkpoint` makes such a one, under `no_grad`, so that there is state to load into. That no backward came
    before it is told by what is the same on all ranks, as the shards of one may have gradients of 0: no graph was made since
    the last update, or gradients are disabled.
    """
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups if "lr" in group]
    if getattr(optimizer, "state", True) or not rates or not all(map(_is_zero, rates)):
        return False
    if torch.is_grad_enabled() and sequence_number() != _graphs:
        return False
    with torch.no_grad(), DisableTorchFunction():
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return bool(gradients) and not any(bool(getattr(g, "_local_tensor", g).any()) for g in gradients)


def _is_zero(rate: Any) -> bool:
    return (isinstance(rate, float | int) or (isinstance(rate, torch.Tensor) and rate.is_cpu)) and float(rate) == 0


@_disable_dynamo
def _all_before(optimizer: Any, args: Any, kwargs: Any) -> Any:
    _left_out.discard(id(optimizer))
    if makes_state(optimizer):
        _unheard.add(id(optimizer))
        return None
    _unheard.discard(id(optimizer))
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
    global _walks, _graphs
    if id(optimizer) in _unheard:
        _unheard.discard(id(optimizer))
        return
    _walks, _graphs = _walks + 1, sequence_number()
    try:
        for listener in tuple(_listeners):
            if listener.after is not None and listener.on:
                listener.after(optimizer, args, kwargs)
    except BaseException:
        _walks -= 1
        settle()  # torch walks no further
        raise
    _walks -= 1
