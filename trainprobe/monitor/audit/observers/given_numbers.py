"""The numbers that the model is called with: whether they change, which tokens come, and whether whole numbers were rounded.

Of the first call of a step: what is counted is worked out where the tensors are, and brought to the host with all else. The
methods of `Tensor` that make another dtype of whole numbers are replaced while a step is audited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.tails import tail
from trainprobe.monitor.audit.capture.values import checksum_of
from trainprobe.monitor.audit.facts.calls import Argument, GivenNumbers, Narrowed
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.loss_inputs import stacked, wide_on
from trainprobe.monitor.audit.observers.model_calls import ModelCalls

_FEWEST, _LARGEST, _MOST = 16, 1 << 16, 16  # elements of what is looked at, and how many tensors of a step
_MOST_TOKENS = 1 << 16  # different ones, that are counted
_WHOLE = (torch.int16, torch.int32, torch.int64)
_SHORT = {torch.bfloat16: 256.0, torch.float16: 2048.0}  # whole numbers up to these are held exactly
_METHODS = ("to", "bfloat16", "half", "type", "type_as")


class GivenNumbersWatch(Observer):
    """See the module text."""

    needs = (ModelCalls,)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._tape: Tape | None = None
        self._replaced: list[Replaced] = []
        self._arguments: dict[str, tuple[Tensor, tuple[int, ...], Value, Deferred | None]] = {}
        self._narrowed: list[tuple[str, int, Deferred]] = []
        self._tokens: Deferred | None = None

    def begin(self) -> None:
        """Look at the first call of a step, and at what is made of whole numbers."""
        self._tape, self._arguments, self._narrowed, self._tokens = self._audited.tape, {}, [], None
        if not self._replaced:
            kind: Any = Tensor
            self._replaced = [Replaced(kind, name, self._converting(getattr(kind, name)), traced=True) for name in _METHODS]

    def end(self) -> None:
        """Put the methods back."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced, self._tape = [], None

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Look at the arguments of the first call."""
        if not self._arguments and not in_a_transform():
            for name, t in list(named.items())[:_MOST]:
                if type(t) is Tensor and not t.is_complex():
                    attempt(self._look, name, t.detach(), otherwise=_left_out)

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens that the first embedding is given, where they are an argument of the model."""
        if self._tokens is None and isinstance(module, nn.Embedding) and args and module.num_embeddings <= _MOST_TOKENS:
            given = next((t for t, *_ in self._arguments.values() if _is_same(t, args[0])), None)
            if given is not None and given.dim() == 2 and given.shape[1] > 1:
                attempt(self._count, given, module.num_embeddings, otherwise=_left_out)

    def facts(self, step_data: StepData) -> GivenNumbers:
        """Return what the model was called with, and what whole numbers lost."""
        arguments = tuple(
            Argument(name, shape, checksum_of(step_data, value), *_numbers(deferred))
            for name, (_, shape, value, deferred) in self._arguments.items()
        )
        self._arguments = {}
        narrowed = tuple(
            Narrowed(dtype, count, int(deferred.numbers[0]), float(deferred.numbers[1]))
            for dtype, count, deferred in self._narrowed
            if deferred.numbers is not None
        )
        tokens = None if self._tokens is None else self._tokens.numbers
        return GivenNumbers(arguments, narrowed, np.zeros(0, np.float32) if tokens is None else tokens)

    def _look(self, name: str, t: Tensor) -> None:
        assert self._tape is not None
        numbers = None
        with without_dispatch(), torch.no_grad():
            value = self._tape.value(t, STATS | CHECKSUM)
            if _FEWEST <= t.numel() <= _LARGEST and t.dtype != torch.bool:
                numbers = self._tape.defer(stacked(_counts(t), t.device))
        self._arguments[name] = t, tuple(t.shape), value, numbers

    def _count(self, tokens: Tensor, kinds: int) -> None:
        assert self._tape is not None
        with without_dispatch(), torch.no_grad():
            ids = tokens.long().masked_fill(tail(tokens), kinds).clamp(0, kinds).reshape(-1)
            counts = torch.zeros(kinds + 1, dtype=torch.float32, device=ids.device)
            self._tokens = self._tape.defer(counts.scatter_add_(0, ids, counts.new_ones(()).expand_as(ids))[:kinds])

    def _converting(self, original: Any) -> Any:
        def convert(t: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(t, *args, **kwargs)
            if not convert.ended and type(t) is Tensor and t.dtype in _WHOLE and not torch.compiler.is_compiling():  # type: ignore[attr-defined]
                self._guard.run(lambda: attempt(self._compare, t, result, otherwise=_left_out))
            return result

        return convert

    def _compare(self, t: Tensor, result: Tensor) -> None:
        if (
            self._tape is None
            or self._audited.asleep
            or result.dtype not in _SHORT
            or not _FEWEST <= t.numel() <= _LARGEST
            or len(self._narrowed) >= _MOST
            or in_a_transform()
        ):
            return
        with without_dispatch(), torch.no_grad():
            lost = result.to(wide_on(result.device)) != t.to(result.device, wide_on(result.device))
            numbers = self._tape.defer(stacked((lost.sum(), t.abs().amax()), result.device))
        self._narrowed.append((str(result.dtype).removeprefix("torch."), t.numel(), numbers))


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


def _left_out(_: Exception) -> None:
    """Leave out what cannot be looked at."""
