"""The calls of a model in one step, with what is needed to make them and their backward passes again.

A backward pass needs the gradients that reach the model's outputs from outside of it. A model that computes its own loss
returns the loss and the logits that it was made of. The gradient that reaches the logits is the loss's own, and comes again by
itself where the loss is given its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id
from torch.utils import _pytree as pytree

from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.held_calls import autocast_now
from trainprobe.engine.state_guard import put_random_states, random_states

_AsTheProgram = torch._C._EnableTorchFunction  # torch's calls go the way that they go in the program, not that of the tool's


@dataclass(slots=True)
class Outputs:
    """The outputs of one call of a model, while gradients arrive at them."""

    wanted: Callable[[int], bool]
    """Tells whether gradients are wanted of a backward pass, given its number."""
    arrived: dict[int, dict[int, Any]] = field(default_factory=dict[int, dict[int, Any]])
    """Backward pass → place of an output → the gradient that came from outside of the model."""
    not_again: str = ""
    """Why the backward pass cannot be made again; empty where it can."""
    _inside: dict[tuple[int, int], list[Any]] = field(default_factory=dict[tuple[int, int], list[Any]])

    def listen(self, outputs: Sequence[Any]) -> None:
        """Listen to what arrives at outputs that the model has just returned, before the program computes with them."""
        nodes = {(t.grad_fn, t.output_nr): i for i, t in reversed([*enumerate(outputs)]) if t.grad_fn is not None}
        for node, place, i in self._inside_edges(nodes):
            node.register_hook(partial(self._handed_on, i, place))
        for (node, place), i in nodes.items():
            node.register_prehook(partial(self._arrives, i, place))

    def _handed_on(self, i: int, place: int, made: Sequence[Any], given: Sequence[Any]) -> None:
        if made[place] is not None and self.wanted(_current_graph_task_id()):
            with torch.no_grad(), DisableTorchFunction():
                self._inside.setdefault((_current_graph_task_id(), i), []).append(made[place].detach().clone())

    def _arrives(self, i: int, place: int, gradients: Sequence[Any]) -> None:
        number, gradient = _current_graph_task_id(), gradients[place]
        if gradient is None or not self.wanted(number):
            return
        inside = self._inside.pop((number, i), [])
        with torch.no_grad(), DisableTorchFunction():
            if not inside:
                self.arrived.setdefault(number, {})[i] = gradient.detach().clone()
            elif not torch.equal(gradient.nan_to_num(), reduce(torch.add, inside).nan_to_num()):
                self.not_again = "an output of the model is used by another one and by the program"

    def _inside_edges(self, nodes: dict[tuple[Any, int], int]) -> Iterator[tuple[Any, int, int]]:
        """Yield (node, place of its result, output) of each operator's backward that hands a gradient on to an output.

        nodes: (node, its result) → output.
        """
        waiting = list({node: None for node, _ in nodes})
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            if "CheckpointFunction" in node.name():
                self.not_again = (
                    "activations are checkpointed with use_reentrant=True, which refuses gradients of chosen tensors"
                )
            for place, (following, result) in enumerate(node.next_functions):
                if (following, result) in nodes:
                    yield node, place, nodes[following, result]
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)


@dataclass(slots=True)
class ModelCall:
    """One call of a model: what it began with, and its outputs."""

    module: Any
    args: Any
    kwargs: Any
    random: tuple[Any, ...]
    """The states of all default generators before it."""
    autocast: list[tuple[str, str]]
    """Device and dtype of each autocast that was in force."""
    outputs: Outputs

    def again(self) -> list[Any]:
        """Make the call once more and return the tensors that it returns."""
        put_random_states(self.random)
        with _AsTheProgram(), torch.enable_grad(), ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
            args, kwargs = pytree.tree_map(_copied, (self.args, self.kwargs))
            return tensors_of(self.module(*args, **kwargs))


class ModelCalls:
    """The calls of a step, and the backward passes that reached them, in their order."""

    def __init__(self) -> None:
        self.over = False
        self._order: list[ModelCall | int] = []  # an int is the number of a backward pass

    def take(self, module: Any, args: Any, kwargs: Any) -> ModelCall:
        """Remember a call that is about to be made."""
        with torch.no_grad(), DisableTorchFunction():
            args, kwargs = pytree.tree_map(_copied, (args, kwargs))
        call = ModelCall(module, args, kwargs, random_states(), autocast_now(tensors_of((args, kwargs))), Outputs(self._passes))
        self._order.append(call)
        return call

    def _passes(self, number: int) -> bool:
        if not self.over and number not in self._order:
            self._order.append(number)
        return not self.over

    @property
    def passes(self) -> list[int]:
        """The numbers of the backward passes."""
        return [event for event in self._order if isinstance(event, int)]

    @property
    def not_again(self) -> str:
        """Why the backward passes cannot be made again; empty where they can."""
        return next(
            (call.outputs.not_again for call in self._order if isinstance(call, ModelCall) and call.outputs.not_again), ""
        )

    def again(self, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
        """Make all calls and backward passes once more; yield (name, gradient) of each parameter in each pass.

        names: of parameters, by their ids.
        """
        results: list[tuple[Outputs, list[Any]]] = []
        modules = {event.module: None for event in self._order if isinstance(event, ModelCall)}
        parameters = list({p: None for m in modules for p in m.parameters() if p.requires_grad and p.is_leaf})
        later = self.passes
        for event in self._order:
            if isinstance(event, ModelCall):
                results.append((event.outputs, event.again()))
                continue
            del later[0]
            reached = [(made[i], g) for outputs, made in results for i, g in outputs.arrived.get(event, {}).items()]
            results = [(outputs, made) for outputs, made in results if not outputs.arrived.keys().isdisjoint(later)]
            with _AsTheProgram():
                gradients = torch.autograd.grad(
                    [t for t, _ in reached], parameters, [g for _, g in reached], retain_graph=bool(results), allow_unused=True
                )
            named: Any = zip((names.get(id(p), "") for p in parameters), gradients, strict=True)
            yield from ((name, gradient) for name, gradient in named if gradient is not None)


def _copied(x: Any) -> Any:
    """Return a tensor of its own with the same bits, and anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)
