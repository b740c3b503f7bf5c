"""Terms of a loss that come from `torch.autograd.grad` without `create_graph`, and so are constants.

While a step is audited, `torch.autograd.grad` is replaced. Only once it was asked for a gradient by something that is no
parameter, without a graph, are the functions replaced of which penalties are made, until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainprobe.engine.capture.graph import parameters_behind
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.cut_off import CutOff, flat
from trainprobe.monitor.audit.observers import Audited, StepReplacing
from trainprobe.monitor.audit.relations.gradient_terms import ConstantTerm

_SHAPES = ("view", "reshape", "flatten", "squeeze", "contiguous", "float")
_NUMBERS = ("norm", "pow", "square", "sqrt", "abs", "mean", "sum", "neg", "mul", "div")
_SIGNS = ("__mul__", "__rmul__", "__truediv__", "__pow__", "__neg__")
_JOINING = ("__add__", "__radd__", "__sub__", "__rsub__", "__iadd__", "add", "sub", "add_")
_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_FUNCTIONS = ("norm", "pow", "square", "sqrt", "abs", "mean", "sum", "neg", "mul", "div", "relu")
_MADE_OF = (
    *((Tensor, name) for name in (*_SHAPES, *_NUMBERS, *_SIGNS)),
    *((torch, name) for name in _FUNCTIONS),
    *((functional, name) for name in _LOSSES),
    *((torch.linalg, name) for name in ("norm", "vector_norm")),
)
_ADDED_BY = (*((Tensor, name) for name in _JOINING), (torch, "add"), (torch, "sub"))


class GradientTerms(StepReplacing):
    """See the module text."""

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._cut = CutOff(guard)

    def forget(self) -> None:
        """Forget the last step."""
        self._behind = ""  # a parameter on which what was differentiated depends
        self._used = False

    def replaced(self) -> Iterator[Replaced]:
        """Look at what is differentiated in a step."""
        yield Replaced(torch.autograd, "grad", self._watched(torch.autograd.grad), traced=True)

    def end(self) -> None:
        """Put everything back."""
        self._cut.forget()
        super().end()

    def facts(self, step_data: StepData) -> ConstantTerm:
        """Return a parameter that what was differentiated depends on, where a loss has it as a constant; otherwise nothing."""
        return ConstantTerm(self._behind if self._used else "")

    def _watched(self, original: Any) -> Any:
        @wraps(original)  # ops are named by it
        def grad(*args: Any, **kwargs: Any) -> Any:
            watch = not grad.ended and torch.is_grad_enabled() and not torch.compiler.is_compiling()  # type: ignore[attr-defined]
            outputs, inputs = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("outputs", "inputs")))
            behind = self._guard.run(self._behind_of, outputs, inputs) if watch else ""
            result = original(*args, **kwargs)
            if behind:
                self._guard.run(self._look, behind, result)
            return result

        return grad

    def _behind_of(self, outputs: Any, inputs: Any) -> str:
        """Return a parameter that the outputs depend on, unless the gradient of parameters is asked for."""
        names = self._audited.names()
        if any(isinstance(t, torch.nn.Parameter) or id(t) in names for t in flat(inputs)):
            return ""
        return next((name for t in flat(outputs) for name in parameters_behind(t, names)), "")

    def _look(self, behind: str, result: Any) -> None:
        found = [t for t in flat(result) if not t.requires_grad]
        if not found:
            return
        if not self._behind:
            self._behind = behind
            self._cut.listen(_MADE_OF, lambda args, result: self._cut.add([result]))
            self._cut.listen(_ADDED_BY, self._added)
        self._cut.add(found)

    def _added(self, args: Any, result: Tensor) -> None:
        self._used |= result.requires_grad and result.numel() == 1
        self._cut.add([result])
