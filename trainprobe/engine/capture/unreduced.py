"""Gradients of parameters before they are joined over the ranks: what backward hands to each parameter's accumulator.

Data parallelism reduces behind the accumulator, so its pre-hook sees this process's own gradient. The flat parameters of
`FullyShardedDataParallel` get a hook on the tensor, which makes no accumulator (see `engine/core/flat_parameters.py`).
Parameters that are DTensors have no such moment in autograd; nothing is recorded of them here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C import _current_graph_task_id

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.gradients import edge_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.flat_parameters import handles_of, is_flattened
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.naming import chunks_of, in_training
from trainprobe.engine.tape import Tape


class UnreducedTap(Tap):
    """Calls `arrives(parameter, gradient)` for each gradient of a backward, before it is added to `parameter.grad`.

    due: whether to look at all in this step. per_micro: count the micro-batches of a step by the model's forwards, or by the
    backward passes where compiled code hides those, unless somebody else tells them. paused: gradients that arrive now are not
    part of the training.
    """

    def __init__(
        self, guard: Guard, arrives: Callable[[Any, Any], None], due: Callable[[], bool], per_micro: bool = False
    ) -> None:
        self._guard = guard
        self._arrives = arrives
        self._due = due
        self._per_micro = per_micro
        self._forwards = 0
        self._backwards = 0
        self._backward = -1  # the one that runs
        self._calls: Replaced | None = None
        self._tape: Tape | None = None
        self.paused = False
        self._models: list[Any] = []
        self._hooked: list[tuple[Any, Any]] = []  # accumulators are held, because a parameter holds its own only weakly

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember whose parameters to watch."""
        self._models = chunks_of(model)

    def begin(self, tape: Tape) -> None:
        """Hook the accumulators."""
        self.paused = False
        if not self._due():
            return
        if self._per_micro:
            self._tape, self._forwards, self._backwards, self._backward = tape, 0, 0, -1
            original = torch.nn.Module._call_impl
            self._calls = Replaced(torch.nn.Module, "_call_impl", self._counted(original, self._models[0]), traced=True)
        for handle in handles_of(self._models):
            flat = handle.flat_param
            if flat.requires_grad:
                self._hooked.append((flat, flat.register_hook(partial(self._arrived, flat))))
        for p in parameters_in(self._models):
            edge = edge_of(p) if p.is_leaf and not is_flattened(p) else None
            if edge is not None:
                self._hooked.append((edge[0], edge[0].register_prehook(partial(self._hook, p))))

    def end(self, again: bool = False) -> None:
        """Remove the hooks."""
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()
        if self._calls is not None:
            self._calls.back()
        self._calls = self._tape = None

    def _counted(self, original: Any, model: Any) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is model and not (call.ended or torch.compiler.is_compiling()):  # type: ignore[attr-defined]
                self._guard.run(self._forward, module)
            return original(module, *args, **kwargs)

        return call

    def _forward(self, model: Any) -> None:
        tape = self._tape
        if tape is None or tape.micro_given or not (in_training(model) and torch.is_grad_enabled()):
            return
        if _current_graph_task_id() == -1:  # else it is computed again in a backward
            tape.micro = self._forwards
            self._forwards += 1

    def _hook(self, p: Any, gradients: Any) -> None:
        self._arrived(p, gradients[0])

    def _arrived(self, p: Any, gradient: Any) -> None:
        if gradient is not None and not self.paused:
            if self._tape is not None and not self._forwards:
                self._count_backward(self._tape)
            self._guard.run(self._arrives, p, gradient)

    def _count_backward(self, tape: Tape) -> None:
        backward = _current_graph_task_id()
        if backward != self._backward and not tape.micro_given:
            self._backward, tape.micro = backward, self._backwards
            self._backwards += 1
