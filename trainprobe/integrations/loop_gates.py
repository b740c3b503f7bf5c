"""What waits between two steps of a loop: it asks at each call of a module, or at a backward, whether a step begins or ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.integrations.auto_attach import called_from

# training that one of these drives is watched by its own integration
DRIVERS = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer", "deepspeed", "megatron")


def module_gates(model: Any, opens: Callable[[Any], bool]) -> list[Replaced]:
    """Ask `opens(module)` at each call of a module; it returns whether what collects may have changed. model: or None."""
    original = torch.nn.Module._call_impl

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if call.ended or torch.compiler.is_compiling() or not opens(module):  # type: ignore[attr-defined]
            return original(module, *args, **kwargs)
        return module._call_impl(*args, **kwargs)  # which by now is the probe's, where this step is collected

    gates = [Replaced(torch.nn.Module, "_call_impl", call, traced=True)]
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # `model.compile()`: its calls go there instead
        gates.append(Replaced(model, "_compiled_call_impl", _asking(model, compiled, opens)))
    return gates


def _asking(model: Any, compiled: Any, opens: Callable[[Any], bool]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not call.ended:  # type: ignore[attr-defined]
            opens(model)
        return compiled(*args, **kwargs)

    return call


def backward_gate(begins: Callable[[], None]) -> Replaced:
    """Call `begins()` before the next backward, which then runs as the step that begins there collects it."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        if backward.ended:  # type: ignore[attr-defined]
            return original(*args, **kwargs)
        outermost = torch.autograd.backward is backward
        begins()
        return (torch.autograd.backward if outermost else original)(*args, **kwargs)  # another's wrapper has run already

    return Replaced(torch.autograd, "backward", backward)


class Handle:
    """Takes a replacement off as hooks are taken off."""

    def __init__(self, replaced: Replaced) -> None:
        self.remove = replaced.back


def in_constructor() -> bool:
    """Tell whether a module is being constructed: it may call itself or a part of it, and has not all its parameters yet."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), torch.nn.Module):
            return True
        frame = frame.f_back
    return False


def driven(module: Any) -> bool:
    """Tell whether this is the forward of a framework with an integration of its own: its module, or one that it calls."""
    return type(module).__module__.startswith(DRIVERS) or called_from(DRIVERS)
