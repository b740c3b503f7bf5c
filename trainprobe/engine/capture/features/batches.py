"""What the model is called with: a fingerprint of each micro-batch, and the number of tokens.

`torch.nn.Module._call_impl` is replaced while a step is collected. Tokens are counted as the elements of the first tensor of
whole numbers (`input_ids`, `tokens` or the first one there is) among the arguments of a call in training.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import chunks_of, in_training
from trainprobe.engine.core.position import AFTER_FORWARD, Position
from trainprobe.engine.tape import Tape

_IDS = ("input_ids", "tokens", "input_tokens")


class BatchTap(Tap):
    """See the module text. The model is what was opened, inside wrappers or with them: the outermost call counts."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._roots: set[int] = set()
        self._tape: Tape | None = None
        self._running = False
        self.position: Position | None = None  # notified when forward passes begin and end
        self._forwards: Counter[int] = Counter()  # id of a model → forward passes of this step
        self._replaced: Replaced | None = None

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Learn which modules are the model."""
        self._roots = set()
        for chunk in chunks_of(model):
            self._roots.add(id(chunk))
            while hasattr(chunk, "module") and isinstance(chunk.module, torch.nn.Module):
                chunk = chunk.module
                self._roots.add(id(chunk))

    def begin(self, tape: Tape) -> None:
        """Look at the calls of a step."""
        self._tape = tape
        self._running = False
        self._forwards.clear()
        self.resume()

    def pause(self) -> None:
        """Take no calls for a while."""
        if self._replaced is not None:
            self._replaced.back()

    def resume(self) -> None:
        """Take calls again."""
        if self._replaced is None or not self._replaced.wake():
            self._replaced = Replaced(torch.nn.Module, "_call_impl", self._watched(torch.nn.Module._call_impl), traced=True)

    def end(self, again: bool = False) -> None:
        """Put the call back."""
        self.pause()
        self._replaced = None
        self._tape = None

    def _watched(self, original: Any) -> Any:
        roots = self._roots

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in roots or call.ended or self._running or torch.compiler.is_compiling():  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            self._running = True
            try:
                trains = torch.is_grad_enabled() and in_training(module) and _current_graph_task_id() == -1
                if trains:
                    self._guard.run(self._take, args, kwargs)
                    self._record(module)
                out = original(module, *args, **kwargs)
                if trains and self.position is not None:
                    self.position.is_in(AFTER_FORWARD)
                return out
            finally:
                self._running = False

        return call

    def _record(self, module: Any) -> None:
        if self.position is not None and self._tape is not None:
            micro = self._tape.micro if self._tape.micro_given else self._forwards[id(module)]
            self._forwards[id(module)] += 1
            self.position.forward(micro)

    def _take(self, args: Any, kwargs: Any) -> None:
        tape = self._tape
        if tape is None:
            return
        with DisableTorchFunction():
            tensors = tensors_of((args, kwargs))
            tape.batch(tensors)
            named = [kwargs[name] for name in _IDS if isinstance(kwargs.get(name), torch.Tensor)]
            whole = [
                t for t in (*named, *tensors) if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool
            ]
            if whole:
                tape.note("tokens", tape.scalars.get("tokens", 0.0) + whole[0].numel())
