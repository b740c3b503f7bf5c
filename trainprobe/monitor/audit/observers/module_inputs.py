"""What some modules of the model are given: which dimension is the batch, what a mask of padding hides, how large inputs are.

Told of the calls of an audited step. Of masks and inputs there are counts and bounds, worked out where the tensors are and
brought to the host with all else; of the rest, shapes and names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.features.feature import whole
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.facts.calls import GivenInputs, InputScale, PaddingMask, SequenceInput
from trainprobe.monitor.audit.observers import Observer, left_out
from trainprobe.monitor.audit.observers.loss_inputs import stacked, tokens_and_mask
from trainprobe.monitor.audit.observers.model_calls import ModelCalls

_MASKS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask")  # True: hidden
_PLACES = {nn.MultiheadAttention: 3, nn.TransformerEncoder: 2, nn.TransformerEncoderLayer: 2}  # of a mask among the arguments
_LOOKED_AT, _WIDEST = 4, 1 << 20  # rows of an input, and elements of these, that are looked at
_SQUARE = 255.0**2


class ModuleInputs(Observer):
    """See the module text."""

    needs = (ModelCalls,)

    def forget(self) -> None:
        """Forget the last step."""
        self._padded: dict[tuple[int, ...], tuple[Tensor, int]] = {}  # shape → the last tokens of it and the one that pads
        self._called: set[tuple[int, ...]] = set()  # the first two dimensions of what the model was called with
        self._sequences: dict[str, SequenceInput] = {}
        self._masks: dict[tuple[str, str], Deferred] = {}
        self._scales: dict[str, Deferred] = {}
        self._once: dict[str, None] = {}
        self._again: dict[str, None] = {}
        self.has_one_output = False  # whether a linear layer with a single output ran in this step

    def end(self) -> None:
        """Hold no tensor."""
        self._padded = {}

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Look at what the whole model is called with."""
        if not in_a_transform():
            attempt(self._look_at_arguments, model, named, otherwise=left_out)

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at what a module of the model is called with in training."""
        if not in_a_transform():
            attempt(self._look_at_module, name, module, args, kwargs, otherwise=left_out)

    def facts(self, step_data: StepData) -> GivenInputs:
        """Return what modules were given, and those whose running statistics a forward and one in the backward pass moved."""
        masks = {key: deferred.numbers for key, deferred in self._masks.items()}
        scales = {name: deferred.numbers for name, deferred in self._scales.items()}
        return GivenInputs(
            tuple(self._sequences.values()),
            tuple(PaddingMask(*key, int(n[0]), int(n[1])) for key, n in masks.items() if n is not None),
            tuple(InputScale(name, float(n[0]), float(n[1]), int(n[2])) for name, n in scales.items() if n is not None),
            tuple(name for name in self._once if name in self._again),
        )

    # ---- single looks --------------------------------------------------------------------------------------------

    def _look_at_arguments(self, model: Any, named: Mapping[str, Any]) -> None:
        self._called |= {tuple(t.shape[:2]) for t in named.values() if type(t) is Tensor}
        for name, t in named.items():
            if (
                name not in self._scales
                and type(t) is Tensor
                and t.dtype in (torch.float32, torch.float64)
                and t.dim()
                and whole(t)
            ):
                self._look_at_scale(name, t.detach())
        pads = getattr(getattr(model, "config", None), "pad_token_id", None)
        given = dict(tokens_and_mask(named))
        tokens, mask = given.get("tokens"), given.get("mask")
        if isinstance(pads, int) and tokens is not None and mask is not None and mask.shape == tokens.shape:
            self._look_at_mask("root", "attention_mask", tokens, pads, mask == 0)

    def _look_at_module(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if isinstance(module, nn.Linear):
            self.has_one_output |= module.out_features == 1
        elif isinstance(module, _NormBase):
            if module.track_running_stats and module.running_mean is not None and module.momentum != 0:
                (self._again if torch._C._current_graph_task_id() != -1 else self._once)[name] = None
        elif isinstance(module, nn.Embedding):
            if module.padding_idx is not None and args and type(args[0]) is Tensor and args[0].dim() == 2:
                self._padded[tuple(args[0].shape)] = (args[0].detach(), module.padding_idx)
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.TransformerEncoder | nn.TransformerEncoderLayer):
            self._look_at_sequence(name, module, args, kwargs)

    def _look_at_sequence(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        first = args[0] if args else None
        if name not in self._sequences and hasattr(module, "batch_first") and type(first) is Tensor and first.dim() == 3:
            shape = tuple(first.shape)
            how = bool(module.batch_first), shape[:2] in self._called
            self._sequences[name] = SequenceInput(name, type(module).__name__, shape, *how)
        for argument, mask in _masks(module, args, kwargs):
            tokens, pads = self._padded.get(tuple(mask.shape), (None, 0))
            if tokens is not None and tokens.device == mask.device:
                self._look_at_mask(name, argument, tokens, pads, mask)

    def _look_at_mask(self, name: str, argument: str, tokens: Tensor, pads: int, hidden: Tensor) -> None:
        """Count the rows that have padding and other tokens, and those of them that are hidden the wrong way round."""
        tape = self._audited.tape
        if tape is None or (name, argument) in self._masks or tokens.device != hidden.device:
            return
        with without_dispatch(), torch.no_grad():
            padding = tokens == pads
            mixed = padding.any(1) & ~padding.all(1)
            inverted = mixed & (hidden == ~padding).all(1)
            self._masks[name, argument] = tape.defer(stacked((mixed.sum(), inverted.sum()), hidden.device))

    def _look_at_scale(self, name: str, t: Tensor) -> None:
        if self._audited.tape is None:
            return
        with without_dispatch(), torch.no_grad():
            seen = t.narrow(0, 0, min(_LOOKED_AT, t.shape[0]))
            if seen.numel() > _WIDEST:
                return
            parts = seen.double() if t.device.type in ("cpu", "cuda") else seen
            parts = parts * _SQUARE
            low, high = torch.aminmax(parts)
            off = torch.maximum((parts - parts.round()).abs().amax(), -low)
            between = ((parts > 0.5) & (parts < high - 0.5)).sum()
            self._scales[name] = self._audited.tape.defer(stacked((high / _SQUARE, off, between), t.device))


def _masks(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the masks of padding that a module of torch is given as booleans."""
    named = {name: kwargs[name] for name in _MASKS if name in kwargs}
    place = next((at for kind, at in _PLACES.items() if isinstance(module, kind)), len(args))
    if len(args) > place:
        named["key_padding_mask"] = args[place]
    return ((name, t.detach()) for name, t in named.items() if type(t) is Tensor and t.dtype == torch.bool and t.dim() == 2)
