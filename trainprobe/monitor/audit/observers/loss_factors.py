"""By which plain numbers a loss was multiplied or divided last, before its backward pass: read off the autograd graph."""

from __future__ import annotations

from typing import Any

import torch

from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.gradients import LossScale, LossScales
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts

_MOST = 8  # factors, so that a long chain costs nothing
_SUMS = ("Add", "Sub", "Sum", "Stack", "Cat")


class LossFactors(Observer):
    """Looks where each backward pass begins."""

    needs = (BackwardStarts,)
    essential = True

    def forget(self) -> None:
        """Forget the last step."""
        self._scaled: list[LossScale] = []

    def backward_begins(self, root: Any) -> None:
        """Read the factors of the loss."""
        self._scaled.append(scaled_from(root))

    def facts(self, step_data: StepData) -> LossScales:
        """Return the factors of each backward pass."""
        return LossScales(tuple(self._scaled))


def scaled_from(root: Any) -> LossScale:
    """Return the factors of a loss, the last one first. One that lies on an accelerator is not read and ends them."""
    node, factors = getattr(root, "grad_fn", None), list[float]()
    while node is not None and len(factors) < _MOST:
        factor, inner = _factor(node)
        if factor is None:
            break
        factors.append(factor)
        node = inner
    return LossScale(tuple(factors), node is not None and node.name().startswith(_SUMS))


def _factor(node: Any) -> tuple[float | None, Any]:
    """Return the constant that a node multiplies by and the node beneath it; None of any other node."""
    kind = node.name()
    if kind not in ("MulBackward0", "DivBackward0"):
        return None, None
    beneath = [inner for inner, _ in node.next_functions if inner is not None]
    constant = node._saved_other
    if len(beneath) != 1 or not _is_plain_number(constant) or (kind == "DivBackward0" and node.next_functions[0][0] is None):
        return None, None
    value = float(constant)
    return (value if kind == "MulBackward0" else 1 / value if value else None), beneath[0]


def _is_plain_number(constant: Any) -> bool:
    """Tell whether a saved operand is one number that the host holds."""
    return type(constant) is torch.Tensor and constant.numel() == 1 and constant.device.type == "cpu"
