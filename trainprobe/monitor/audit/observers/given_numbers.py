"""The numbers that the model is called with: whether they change, which tokens come, and whether whole numbers were rounded.

Of the first call of a step: what is counted is worked out where the tensors are, and brought to the host with all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.monitor.audit.capture.tails import tail
from trainprobe.monitor.audit.capture.values import checksum_of
from trainprobe.monitor.audit.facts.calls import Argument, GivenNumbers
from trainprobe.monitor.audit.observers import Observer, left_out
from trainprobe.monitor.audit.observers.loss_inputs import stacked
from trainprobe.monitor.audit.observers.model_calls import ModelCalls

_FEWEST, _LARGEST, _MOST = 16, 1 << 16, 16  # elements of what is looked at, and how many tensors of a call
_MOST_TOKENS = 1 << 16  # different ones, that are counted
_SHORT = {torch.bfloat16: 256.0, torch.float16: 2048.0}  # whole numbers up to these are held exactly


class GivenNumbersWatch(Observer):
    """See the module text."""

    needs = (ModelCalls,)

    def forget(self) -> None:
        """Forget the last step."""
        self._arguments: dict[str, tuple[Tensor, tuple[int, ...], Value, Deferred | None]] = {}
        self._tokens: Deferred | None = None

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Look at the arguments of the first call."""
        if not self._arguments and not in_a_transform():
            for name, t in list(named.items())[:_MOST]:
                if type(t) is Tensor and not t.is_complex():
                    attempt(self._look, name, t.detach(), otherwise=left_out)

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens that the first embedding is given, where they are an argument of the model."""
        if self._tokens is None and isinstance(module, nn.Embedding) and args and module.num_embeddings <= _MOST_TOKENS:
            given = next((t for t, *_ in self._arguments.values() if _is_same(t, args[0])), None)
            if given is not None and given.dim() == 2 and given.shape[1] > 1 and not reason_without_statistics(given):
                attempt(self._count, given, module.num_embeddings, otherwise=left_out)

    def facts(self, step_data: StepData) -> GivenNumbers:
        """Return what the model was called with."""
        arguments = tuple(
            Argument(name, shape, checksum_of(step_data, value), *_numbers(deferred))
            for name, (_, shape, value, deferred) in self._arguments.items()
        )
        self._arguments = {}
        tokens = None if self._tokens is None else self._tokens.numbers
        return GivenNumbers(arguments, np.zeros(0, np.float32) if tokens is None else tokens)

    def _look(self, name: str, t: Tensor) -> None:
        tape, numbers = self._audited.tape, None
        assert tape is not None
        with without_dispatch(), torch.no_grad():
            value = tape.value(t, STATS | CHECKSUM)
            if value.row >= 0 and _FEWEST <= t.numel() <= _LARGEST and t.dtype != torch.bool:
                numbers = tape.defer(stacked(_counts(t), t.device))
        self._arguments[name] = t, tuple(t.shape), value, numbers

    def _count(self, tokens: Tensor, kinds: int) -> None:
        assert self._audited.tape is not None
        with without_dispatch(), torch.no_grad():
            ids = tokens.long().masked_fill(tail(tokens), kinds).clamp(0, kinds).reshape(-1)
            counts = torch.zeros(kinds + 1, dtype=torch.float32, device=ids.device)
            self._tokens = self._audited.tape.defer(counts.scatter_add_(0, ids, counts.new_ones(()).expand_as(ids))[:kinds])


def _counts(t: Tensor) -> list[Tensor]:
    """Return: 1 where elements are not in order; 1 where all are whole numbers; for each short dtype, how many are larger than
    it holds exactly, and how many of these, and of the others, are odd.
    """
    flat = t.reshape(-1)
    whole = t.new_ones((), dtype=torch.bool) if not t.is_floating_point() else (flat == flat.round()).all()
    found = [(flat[1:] < flat[:-1]).any(), whole]
    size, odd = flat.abs(), flat.remainder(2) == 1
    for most in _SHORT.values():
        above = size > most
        found += [above.sum(), (above & odd).sum(), (~above & odd).sum()]
    return found


def _numbers(deferred: Deferred | None) -> tuple[bool, Mapping[str, tuple[int, int, int]]]:
    """Return whether an argument is in no order, and what was counted of whole numbers, by short dtype."""
    if deferred is None or deferred.numbers is None:
        return False, {}
    unordered, whole, *counts = (int(n) for n in deferred.numbers)
    names = [str(dtype).removeprefix("torch.") for dtype in _SHORT]
    found = {name: (counts[3 * i], counts[3 * i + 1], counts[3 * i + 2]) for i, name in enumerate(names)}
    return bool(unordered), found if whole else {}


def _is_same(t: Tensor, other: Any) -> bool:
    return type(other) is Tensor and other.dtype == t.dtype and other.shape == t.shape and other.data_ptr() == t.data_ptr()
