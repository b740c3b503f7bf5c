"""Where the op tap's torch-function mode stands among those of the program, on the thread that asks."""

from __future__ import annotations

from typing import Any

from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.utils._device import DeviceContext


def is_on(mode: Any) -> bool:
    """Tell whether torch hands calls on this thread to a mode."""
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))


def put_on(mode: Any) -> None:
    """Put a mode beneath those of the program, so that each of these takes off its own when its `with` ends.

    Only the mode of `torch.set_default_device` and `with torch.device` has to stand lowest.
    """
    above = [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())]
    if above and isinstance(above[-1], DeviceContext):
        _push_on_torch_function_stack(above.pop())
    for other in (mode, *reversed(above)):
        _push_on_torch_function_stack(other)


def take_off(mode: Any) -> bool:
    """Take a mode off from wherever it stands; False where it is not on this thread's stack (torch may hold it back)."""
    if not is_on(mode):
        return False
    above: list[Any] = []
    while (top := _pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_on_torch_function_stack(other)
    return True
