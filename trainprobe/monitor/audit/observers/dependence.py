"""On which inputs early outputs of the model depend: one more backward pass, at two steps of a run.

It goes over the graph of the first call with rows of whole numbers, as the model returns: see `engine.capture.dependence`.
A model that keeps its activations elsewhere, or runs them again, is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.dependence import Edge, attentions, equal_places, graph_of, looked_up, reach
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.observers import Audited, Observer, left_out
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.dependence import OutputDependence, Reached

_LOOKS = 2  # of a run: at the first step a layer of zeros may hide what is behind it
_SHORT = {"bfloat16": 256, "float16": 2048}  # places up to these have different numbers
_C: Any = torch._C
_saving: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


class DependenceWatch(Observer):
    """See the module text."""

    needs = (ModelCalls,)
    only_when_due = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._tape: Tape | None = None
        self._looks = 0
        self._rows: tuple[str, tuple[int, ...]] | None = None  # the argument of whole numbers of the call that runs
        self._given: list[tuple[Any, list[Any]]] = []  # the modules that run, and the nodes of what each was given
        self._returned: list[tuple[str, Edge, list[Any]]] = []
        self._seen: tuple[OutputDependence, list[Reached], Deferred] | None = None

    def begin(self) -> None:
        """Look at the first call of a step."""
        self._tape = self._audited.tape if self._looks < _LOOKS and self._audited.plain and _saving is not None else None
        self._seen = None
        self._forget()

    def end(self) -> None:
        """Hold no graph."""
        self._tape = None
        self._forget()

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Learn the rows that the model is called with."""
        self._forget()
        if self._tape is not None and self._seen is None and not in_a_transform():
            tokens = [(n, t) for n, t in named.items() if type(t) is Tensor and t.dtype in (torch.int64, torch.int32)]
            self._rows = next(((n, tuple(t.shape)) for n, t in tokens if t.dim() == 2 and t.shape[1] > 1), None)

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn what a module is given."""
        if self._rows is None:
            return
        if _saving(False) is not None:  # activations are kept elsewhere, or are computed again
            self._forget()
            return
        self._given.append((module, [t.grad_fn for t in args if type(t) is Tensor]))

    def module_returned(self, module: Any, result: Any) -> None:
        """Learn what a module returned, and look once it is the model."""
        given: list[Any] = []
        while self._given and (known := self._given.pop()):
            if known[0] is module:
                given = known[1]
                break
        if self._rows is None:
            return
        fitting = [t for t in tensors_of(result) if type(t) is Tensor and t.grad_fn and t.shape[:2] == self._rows[1]]
        if any(module is list(unwrapped(model))[-1] for model in self._audited.models):
            if fitting:
                attempt(self._look, fitting[0], otherwise=left_out)
            self._forget()
        elif fitting and not isinstance(module, _ConvNd):  # whose second dimension is no time
            edge = fitting[0].grad_fn, fitting[0].output_nr
            self._returned.append((self._audited.of(ModelCalls).names.get(id(module), ""), edge, given))

    def facts(self, step_data: StepData) -> OutputDependence:
        """Return how far the gradient of early outputs reached."""
        if self._seen is None or self._seen[2].numbers is None:
            return OutputDependence()
        fact, reached, numbers = self._seen[0], self._seen[1], self._seen[2].numbers.tolist()
        at = len(reached) * 4
        given, shares, conditions, *equal = (int(n) for n in numbers[at:])
        seen = [
            replace(one, all=numbers[i], later=numbers[i + 1], others=numbers[i + 2], last=int(numbers[i + 3]))
            for one, i in zip(reached, range(0, at, 4), strict=True)
        ]
        return replace(
            fact,
            causal=fact.causal + given + max(shares, conditions),
            inputs=tuple(one for one in seen if not one.name),
            outputs=tuple(one for one in seen if one.name),
            equal=dict(zip(_SHORT, zip(equal[::3], equal[1::3], equal[2::3], strict=True), strict=False)),
        )

    def _look(self, out: Tensor) -> None:
        assert self._tape is not None and self._rows is not None
        name, shape = self._rows
        nodes = graph_of(out)
        inputs = looked_up(nodes, shape)
        if not inputs:
            return
        self._looks += 1
        behind = {edge: (owner, self._after(edge)) for owner, edge, _ in reversed(self._returned)}
        found = reach(out, nodes, inputs, list(behind))
        reached = [(Reached(), found[edge]) for edge in inputs if edge in found]
        reached += [(Reached(behind[e][0], after=behind[e][1]), found[e]) for e in reversed(behind) if e in found]
        count, told, *masks = attentions(nodes, shape[1])
        with without_dispatch(), torch.no_grad():
            sums = [torch.stack(triangular).sum().float() if triangular else out.new_zeros(()).float() for triangular in masks]
            sums += [count.float() for count in equal_places(nodes, shape[1], tuple(_SHORT.values()))]
            numbers = torch.cat([*(row for _, row in reached), torch.stack(sums)])
        fact = OutputDependence(name, shape[1], count, told)
        self._seen = fact, [one for one, _ in reached], self._tape.defer(numbers)

    def _after(self, edge: Edge) -> str:
        """Return the module that was first given what this edge brought."""
        return next((name for name, _, given in self._returned if any(node is edge[0] for node in given)), "")

    def _forget(self) -> None:
        self._rows, self._given, self._returned = None, [], []
