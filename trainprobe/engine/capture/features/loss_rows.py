"""Which row of a batch has the largest loss: of each cross-entropy that a step differentiates, worked out from its own numbers.

    loss_row            the row with the largest loss, counted from 0
    loss_row_loss       its loss, summed over its targets
    loss_row_median     the median of all rows
    loss_row_share      its share of the loss of all rows
    loss_row_gradient   its share of Σ |∂loss/∂logits| (of a target with probability p that is 2 (1 - p))
    loss_row_of         how many rows there are
    loss_row_tokens     some of the tokens [k] that the model was called with in that row, where the plan asks for them

The loss of a target is -log p, read from the log-probabilities that torch keeps for the backward pass, or else worked out again
from the logits. Class weights and label smoothing are left out, and targets that are ignored count 0. Rows are those of the
first tensor [rows, places, …] that the model is called with, batch first; targets that do not lie like them are left out.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainprobe.engine.arrays.without_dispatch import in_a_transform
from trainprobe.engine.capture.features.feature import QuietFeature, Surroundings, tensors_of, whole, without_autograd
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.naming import ROOT

TOKENS = "loss_row_tokens"
SLOTS = ("loss_row", "loss_row_loss", "loss_row_median", "loss_row_share", "loss_row_gradient", "loss_row_of")
_UNSEEN = (
    "loss rows were asked for and no cross-entropy of class indices was seen: compiled regions and kernels outside of torch "
    "hide it"
)


class LossRows(QuietFeature):
    """See the module text."""

    def __init__(self, around: Surroundings, *, every: int = 1, tokens: int = 0) -> None:
        super().__init__(around, every=every)
        self._guard, self._wanted = around.guard, tokens
        self._tokens: Tensor | None = None  # [rows, places] that the model was called with last, where they are wanted
        self._replaced: list[Replaced] = []
        self._shape = torch.Size()  # of the first tensor that the model was called with last
        self._seen = False
        self.rows: list[tuple[int, Tensor]] = []  # of each loss of this step: its rows, and [2 · rows + k] as `largest_row`
        self._nn: Any = getattr(torch._C, "_nn")  # noqa: B009

    def wants(self, name: str, module: Any) -> bool:
        """Look at calls of the model."""
        return name in ("", ROOT)

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Learn how many rows the model is called with."""
        tensors = tensors_of((args, kwargs))
        self._shape = next((t.shape for t in tensors if t.dim()), torch.Size())
        whole_numbers = (t.detach() for t in tensors if t.dim() == 2 and not t.is_floating_point() and whole(t))
        self._tokens = next(whole_numbers, None) if self._wanted else None

    def sleep(self, asleep: bool) -> None:
        """Take the functions away, or put them in place."""
        if asleep:
            for replaced in self._replaced:
                replaced.back()
            self._replaced = []
        elif not self._replaced:
            for name in ("cross_entropy_loss", "nll_loss_nd"):  # others replace them too: what is there now is called
                self._replaced.append(Replaced(self._nn, name, self._watched(name, getattr(self._nn, name)), traced=True))

    def end(self) -> None:
        """Put everything back; say it when nothing was seen."""
        self.sleep(True)
        if not self._seen:
            self.notes[_UNSEEN] = None
        self._seen, self._shape, self._tokens, self.rows = False, torch.Size(), None, []
        super().end()

    def _watched(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if not function.ended and not torch.compiler.is_compiling() and _is_of_training(out, args):  # type: ignore[attr-defined]
                self._guard.run(attempt, self._look, name, args, out, otherwise=lambda _: None)
            return out

        return function

    def _look(self, name: str, args: Any, out: Tensor) -> None:
        if self._tape is None:
            return
        self._seen = True
        x, y = args[0].detach(), args[1]
        n = _rows(y.shape, self._shape)
        if not n:
            self.notes[f"loss rows leave out targets {list(y.shape)} that lie unlike the input {list(self._shape)}"] = None
            return
        with without_autograd():
            losses = _losses(x, y, int(args[4]) if len(args) > 4 else -100, out.grad_fn, name == "nll_loss_nd")
            moved = losses.neg().expm1().neg()  # 1 - p
            numbers = torch.stack((losses.reshape(n, -1).sum(1), moved.reshape(n, -1).sum(1)))
            tokens = self._tokens if self._tokens is not None and len(self._tokens) == n else None
            if tokens is not None:
                around = _around(losses.reshape(n, -1), numbers[0].argmax(), tokens, self._wanted)
                numbers = torch.cat((numbers.reshape(-1), around.to(numbers)))
            self.rows.append((n, numbers))
            self._tape.feature(ROOT, SLOTS if tokens is None else (*SLOTS, TOKENS), numbers, partial(largest_row, n))


def _around(losses: Tensor, row: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Return at most so many tokens [k] of a row, around the place of its largest loss. No number comes to the host."""
    at, places = losses.index_select(0, row.view(1)).argmax(), tokens.shape[1]
    most = min(most, places)
    start = (at - most // 2).clamp(0, places - most)
    return tokens.index_select(0, row.view(1))[0].index_select(0, start + torch.arange(most, device=tokens.device))


def _rows(targets: torch.Size, given: torch.Size) -> int:
    """Return how many rows the targets have: as many as the input [rows, places, …], like it or a place shorter; else 0."""
    if len(targets) > 1 or not given:
        return targets[0] if len(targets) > 1 else 0
    rows, places = given[0], given[1] if len(given) > 1 else 1
    return rows if targets.numel() in (rows, rows * places, rows * (places - 1)) else 0


def _is_of_training(out: Any, args: Any) -> bool:
    """Tell whether a call is one of plain tensors and class indices, with a gradient, and no second run in a backward pass."""
    return (
        type(out) is Tensor
        and out.requires_grad
        and len(args) >= 2
        and all(whole(t) for t in args[:2])
        and not args[1].is_floating_point()
        and args[0].dim() > 1
        and torch._C._current_graph_task_id() == -1
        and not in_a_transform()
        and not (out.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _losses(x: Tensor, y: Tensor, ignored: int, node: Any, logarithms: bool) -> Tensor:
    """Return -log p of each target, float32 or float64 [targets], 0 for ignored ones. logarithms: x holds log p already."""
    there = y != ignored
    at = torch.where(there, y, 0).long().unsqueeze(1)
    kept = x if logarithms else _kept(node)
    if kept is not None and kept.shape == x.shape:
        losses = -kept.gather(1, at)
    else:
        wide = x if x.dtype == torch.float64 else x.float()
        losses = wide.logsumexp(1, keepdim=True) - wide.gather(1, at)
    losses = losses.squeeze(1)
    return torch.where(there, losses if losses.dtype == torch.float64 else losses.float(), 0).reshape(-1)


def _kept(node: Any) -> Tensor | None:
    """Return the log-probabilities that a backward pass keeps; None where a hook of the program keeps them."""
    hooks: Any = getattr(torch._C, "_autograd")  # noqa: B009
    kept = None if hooks._top_saved_tensors_default_hooks(True) else getattr(node, "_saved_self", None)
    return kept.detach() if type(kept) is Tensor else None


def largest_row(rows: int, numbers: Any) -> list[tuple[None, Any]]:
    """Return the number of each slot. numbers: [2 · rows + k], losses, what they are in the gradient, and tokens."""
    flat = numbers.reshape(-1).astype(np.float64)
    losses, moved, tokens = np.split(flat, (rows, 2 * rows))
    row = int(np.argmax(losses))  # the first NaN, where there is one
    shares = (float(each[row] / total) if (total := each.sum()) else 0.0 for each in (losses, moved))
    found = (row, losses[row], np.median(losses), *shares, losses.size)
    return [*((None, np.array([float(number)])) for number in found), *([(None, tokens)] if tokens.size else [])]
