"""Arithmetic outside of the model's modules that makes [N, N] of [N] and [N, 1]: each number meets each other one.

The operators of a tensor are replaced while a step is audited. What the program made a column on purpose, as `x[:, None]` or
`x.view(-1, 1)`, is a view of another tensor and is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from trainprobe.engine.arrays.without_dispatch import in_a_transform
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.observers import StepReplacing
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.observers.module_inputs import ModuleInputs
from trainprobe.monitor.audit.relations.outer_products import OuterOperation, OuterOperations

_OPERATORS = {"__sub__": "-", "__mul__": "*", "__add__": "+", "__truediv__": "/"}
_MOST = 8


class OuterProducts(StepReplacing):
    """See the module text."""

    needs = (ModelCalls, ModuleInputs)

    def forget(self) -> None:
        """Forget the last step."""
        self._seen: list[OuterOperation] = []

    def replaced(self) -> Iterator[Replaced]:
        """Look at the operations of a step."""
        for name, sign in _OPERATORS.items():
            yield Replaced(Tensor, name, self._watched(getattr(Tensor, name), sign), traced=True)

    def facts(self, step_data: StepData) -> OuterOperations:
        """Return what was seen, in a step in which a layer with a single output ran."""
        seen, self._seen = self._seen, []
        return OuterOperations(tuple(seen) if self._audited.of(ModuleInputs).has_one_output else ())

    def _is_busy(self) -> bool:
        """Tell whether the model, or the audit itself, is running now."""
        return self._audited.asleep or self._audited.of(ModelCalls).within > 0

    def _watched(self, original: Any, sign: str) -> Any:
        def operator(a: Any, b: Any) -> Any:
            out = original(a, b)
            if type(b) is Tensor and type(a) is Tensor and not operator.ended:  # type: ignore[attr-defined]
                with DisableTorchFunction():  # modes of the program see nothing of this
                    dims = a.dim(), b.dim()
                    if dims in ((1, 2), (2, 1)):
                        self._guard.run(self._consider, *((a, b) if dims == (1, 2) else (b, a)), sign, sys._getframe(1))
            return out

        return operator

    def _consider(self, row: Tensor, column: Tensor, sign: str, frame: Any) -> None:
        attempt(self._look, row, column, sign, frame, otherwise=lambda _: None)  # some, as nested ones, have no shape

    def _look(self, row: Tensor, column: Tensor, sign: str, frame: Any) -> None:
        n = row.shape[0]
        if n < 2 or tuple(column.shape) != (n, 1) or len(self._seen) == _MOST or self._is_busy():
            return
        plain = row.is_floating_point() and column.is_floating_point() and not column._is_view()
        if plain and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not in_a_transform():
            path = Path(frame.f_code.co_filename)
            self._seen.append(OuterOperation(sign, n, f"{path.name} line {frame.f_lineno}"))
