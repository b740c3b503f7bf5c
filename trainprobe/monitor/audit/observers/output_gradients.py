"""At which places of the model's output a gradient arrives: at padding, and at a prompt that several rows share.

A hook on the node of the first call's output sees the gradient in the backward pass; places are counted there and brought to
the host with all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.capture.tails import tail
from trainprobe.monitor.audit.facts.gradients import TrainedPlaces
from trainprobe.monitor.audit.observers import Observer, left_out
from trainprobe.monitor.audit.observers.loss_inputs import stacked
from trainprobe.monitor.audit.observers.model_calls import ModelCalls

_FEWEST_SHARED = 3  # tokens with which neighbouring rows begin alike; fewer may do so by chance


class OutputGradients(Observer):
    """See the module text."""

    needs = (ModelCalls,)

    _hook: Any = None

    def forget(self) -> None:
        """Forget the last step."""
        # what the call that runs was given: an argument with its name, and others of whole numbers
        self._rows: tuple[str, Tensor, list[Tensor]] | None = None
        self._masked = False  # whether that call was given a mask
        self._seen: tuple[str, Deferred] | None = None

    def end(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._rows = None

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Learn the rows that the model is called with."""
        plain = [(name, t.detach()) for name, t in named.items() if type(t) is Tensor]
        self._masked = any("mask" in name for name, _ in plain)
        tokens = [row for row in plain if row[1].dim() == 2 and row[1].dtype in (torch.int64, torch.int32)]
        frames = [row for row in plain if row[1].dim() == 3 and row[1].is_floating_point()]
        first = None if self._hook is not None or in_a_transform() else next(iter((*tokens, *frames)), None)
        self._rows = None if first is None else (*first, [t for _, t in tokens[1:]])

    def module_returned(self, module: Any, result: Any) -> None:
        """Hook the output of the model that has a place for each of the rows'."""
        if self._rows is None or not any(module is list(unwrapped(model))[-1] for model in self._audited.models):
            return
        (name, rows, others), self._rows = self._rows, None
        if not self._masked and getattr(result, "last_hidden_state", None) is not None:
            return  # an encoder alone, which is told of no padding: what reads it reads all places, as in Stable Diffusion
        beside = [t for t in others if t.shape == rows.shape and t.device == rows.device]
        fitting = (t for t in tensors_of(result) if t.grad_fn is not None and t.shape[:2] == rows.shape[:2])
        out = next((t for t in fitting if t.device == rows.device and rows.shape[1] > 1), None)
        if out is not None:
            place, shape = out.output_nr, out.shape

            def look(gradients: tuple[Tensor | None, ...]) -> None:
                gradient = gradients[place]
                if self._seen is None and gradient is not None and gradient.shape == shape:
                    self._guard.run(lambda: attempt(self._look, name, rows, beside, gradient, otherwise=left_out))

            self._hook = out.grad_fn.register_prehook(look)  # pyright: ignore[reportOptionalMemberAccess]

    def facts(self, step_data: StepData) -> TrainedPlaces:
        """Return what was counted."""
        if self._seen is None or self._seen[1].numbers is None:
            return TrainedPlaces()
        counts = tuple(int(n) for n in self._seen[1].numbers)
        return TrainedPlaces(self._seen[0], counts[:4], counts[4:8], counts[8:])  # pyright: ignore[reportArgumentType]

    def _look(self, name: str, rows: Tensor, beside: Sequence[Tensor], gradient: Tensor) -> None:
        tape = self._audited.tape
        if tape is None or type(gradient) is not Tensor or any(map(reason_without_statistics, (rows, *beside, gradient))):
            return  # a program may have given the memory of the rows back
        with without_dispatch(), torch.no_grad():
            flat = gradient.reshape(*gradient.shape[:2], -1)
            carries = (flat.amax(2) != 0) | (flat.amin(2) != 0)
            pads = torch.stack([tail(t) for t in (rows, *beside)]).all(0)  # an encoder's rows end elsewhere than a decoder's
            counts = _at_padding(pads, carries)
            counts += _at_prompts(rows, carries) if rows.dim() == 2 else [carries.new_zeros(())] * 6
            self._seen = name, tape.defer(stacked(counts, gradient.device))


def _at_padding(pads: Tensor, carries: Tensor) -> list[Tensor]:
    """Count as `TrainedPlaces.padding`. pads, carries: bool [rows, time]."""
    inner = torch.zeros_like(pads)
    inner[:, 1:] = pads[:, 1:] & pads[:, :-1]
    both = inner.any(1) & carries.any(1)
    alone = both & ~(carries & ~inner).any(1)
    return [inner.sum(), (inner & carries).sum(), both.sum(), alone.sum()]


def _at_prompts(tokens: Tensor, carries: Tensor) -> list[Tensor]:
    """Count as `TrainedPlaces.prompts` and `prompted`. tokens: [rows, time]."""
    time = tokens.shape[1]
    equal = (tokens[1:] == tokens[:-1]).int().cumprod(1).sum(1)
    alike = (equal >= _FEWEST_SHARED) & (equal < time)
    length = torch.cat((torch.where(alike, equal, time), equal.new_full((1,), time))).amin()
    prompt = torch.arange(1, time + 1, device=tokens.device) < length
    trained = carries.any(1).sum() * prompt.sum()
    number = equal.new_full((), len(equal))
    return [alike.sum(), number, length, (equal < length).sum(), trained, (carries & prompt).sum()]
