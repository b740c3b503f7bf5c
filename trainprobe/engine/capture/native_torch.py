"""What the compiled parts need of torch, handed to them before they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id, _len_torch_function_stack

from trainprobe.engine.capture.gradients import sequence_number


def learned(native: Any) -> Any:
    """Return the compiled parts once they know what to ask."""
    native.learn_torch(
        _current_graph_task_id,
        sequence_number,
        torch.Tensor,
        _len_torch_function_stack,
        DisableTorchFunction,
        vars(torch.compiler),
    )
    return native
