"""The tool's own work on tensors, apart from whatever the program has switched on."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.utils import _python_dispatch

_C: Any = torch._C
_NOTHING = nullcontext()


def in_a_transform() -> bool:
    """Tell whether a transform of `torch.func` is running, so that tensors stand for others."""
    return _C._functorch.peek_interpreter_stack() is not None


def without_dispatch(*, within_transforms: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which no mode, tensor class, trace or transform of the program sees what is computed.

    A transform of `torch.func` would also refuse that rows are written, a fake mode would give no numbers, and what is made in
    inference mode could not be written later. within_transforms: for what transforms have wrapped, which means nothing outside.
    """
    modes, tracing, inference = _C._len_torch_dispatch_stack(), _C._get_tracing_state(), torch.is_inference_mode_enabled()
    transforms = not within_transforms and in_a_transform()
    if not (modes or inference or transforms) and tracing is None:
        return DisableTorchFunction()
    return _without_modes(bool(modes), inference, transforms, tracing)


@contextmanager
def _without_modes(modes: bool, inference: bool, transforms: bool, tracing: Any) -> Generator[None]:
    without_modes = _python_dispatch._disable_current_modes() if modes else _NOTHING  # pyright: ignore[reportPrivateUsage]
    ordinary = torch.inference_mode(False) if inference else _NOTHING
    with DisableTorchFunction(), _outside_transforms() if transforms else _NOTHING, without_modes, ordinary:
        if tracing is None:  # where torch forbids traces, even this cannot be said again
            yield
            return
        _C._set_tracing_state(None)
        try:
            yield
        finally:
            _C._set_tracing_state(tracing)


def _outside_transforms() -> AbstractContextManager[Any]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
