"""What the loss functions of a step are given: how many targets count, where they stand in the model's input, what an input is.

The functions of torch that compute losses are replaced while a step is audited, beneath `torch.nn.functional`: loss modules,
functions of `torch.nn.functional` and those that were imported from there all end here. The program's call comes first; what is
looked at then are counts and bounds, worked out where the tensors are, out of sight of the program's modes, and brought to the
host with all else. Calls under `no_grad` (metrics), in a backward pass (recomputation), under a transform of `torch.func`,
and of tensors that are not plain are left out. Of calls whose result has no gradient, only its size is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.monitor.audit.capture.class_shares import class_shares
from trainprobe.monitor.audit.facts.calls import LossCall, LossCalls
from trainprobe.monitor.audit.observers import StepReplacing
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts
from trainprobe.monitor.audit.observers.model_calls import ModelCalls

SHIFTS = (-1, 0, 1, 2)
_INPUTS = ("decoder_input_ids", "input_ids", "tokens", "input_tokens", "idx")
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_OF_CLASSES = {"cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss"}
_OF_NUMBERS = {name: name for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")}
_OF_PROBABILITIES = {"binary_cross_entropy": "binary_cross_entropy"}
_ELSEWHERE = {name: name for name in ("binary_cross_entropy_with_logits", "kl_div", "ctc_loss")}
_DIFFERENCES = frozenset(_OF_NUMBERS) | {"kl_div"}  # 0 where input and target are the same
_LOOKED_AT = 16  # entries of each dimension but that of the classes that are looked at for the form of an input
_SHORTEST = 4  # tokens; shorter rows would match by chance
_FEWEST = 16  # targets of a regression; fewer may be equal to something by chance
_LARGEST = 1 << 20  # elements of what targets are searched for in
_MOST = 64  # calls of a step that are looked at


class LossInputs(StepReplacing):
    """See the module text."""

    needs = (ModelCalls, BackwardStarts)

    def forget(self) -> None:
        """Forget the last step."""
        self._given: Mapping[str, Tensor] = {}
        self._numbers: Mapping[str, Tensor] = {}  # arguments of the model that are no whole numbers
        self._arguments = 0  # tensors that the model was called with last
        self._looked_up: dict[str, Tensor] = {}  # embedding → the indices that it was called with last
        self._seen: list[tuple[LossCall, tuple[str, ...], Deferred]] = []
        self._ungraded: list[tuple[LossCall, tuple[str, ...], Deferred]] = []

    def replaced(self) -> Iterator[Replaced]:
        """Look at the calls of a step."""
        nn: Any = getattr(torch._C, "_nn")  # noqa: B009
        for owner, kinds in ((nn, _OF_CLASSES | _OF_NUMBERS | _OF_PROBABILITIES), (torch, _ELSEWHERE)):
            for name, kind in kinds.items():
                if hasattr(owner, name):
                    yield Replaced(owner, name, self._watched(getattr(owner, name), kind), traced=True)

    def end(self) -> None:
        """Put the functions back, and hold no tensor."""
        super().end()
        self._given, self._numbers, self._looked_up = {}, {}, {}

    def model_called(self, model: Any, named: Mapping[str, Any]) -> None:
        """Learn the "tokens" and the "mask" that the model is called with."""
        self._given, self._looked_up = dict(tokens_and_mask(named)), {}
        self._arguments = sum(type(t) is Tensor for t in named.values())
        plain = {name: t.detach() for name, t in named.items() if type(t) is Tensor and t.is_floating_point()}
        self._numbers = {name: t for name, t in plain.items() if 0 < t.numel() <= _LARGEST}

    def module_called(self, name: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Learn the indices that an embedding looks up."""
        if isinstance(module, torch.nn.Embedding) and args and type(args[0]) is Tensor and args[0].dim() == 2:
            self._looked_up.pop(name, None)
            self._looked_up[name] = args[0].detach()

    def facts(self, step_data: StepData) -> LossCalls:
        """Return the calls of the step, and apart from them those whose result has no gradient."""
        seen, ungraded, self._seen, self._ungraded = self._seen, self._ungraded, [], []
        return LossCalls(_read(seen), _read(ungraded))

    def _watched(self, original: Any, kind: str) -> Any:
        def loss_function(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if not loss_function.ended and not torch.compiler.is_compiling() and self._counts(out, args):  # type: ignore[attr-defined]
                look = self._look if out.requires_grad else self._look_at_result
                self._guard.run(lambda: attempt(look, kind, args, kwargs, out, otherwise=lambda _: None))  # unreadable
            return out

        return loss_function

    def _counts(self, out: Any, args: Sequence[Any]) -> bool:
        """Tell whether a call is one of the training, of plain tensors that can be looked at."""
        return (
            self._audited.tape is not None
            and not self._audited.asleep
            and len(self._seen) + len(self._ungraded) < _MOST
            and len(args) >= 2
            and all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta" for t in (out, *args[:2]))
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
            and not in_a_transform()
            and not (out.is_cuda and torch.cuda.is_current_stream_capturing())
        )

    def _look(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        tape = self._audited.tape
        assert tape is not None
        x, y = args[0].detach(), args[1].detach()
        reduction = _reduction(kind, args, kwargs)
        with without_dispatch(), torch.no_grad():
            found = {"value": out.detach() if out.numel() == 1 else x.new_full((), float("nan"), dtype=torch.float32)}
            found |= _about(kind, x, y, args, kwargs, _readable(self._given))
            found |= _copied(kind, y, args, _readable(self._numbers), _readable(self._looked_up))
            found |= {"arguments": x.new_full((), self._arguments, dtype=torch.float32)}
            shares = _shares(kind, x, y, args)
            numbers = torch.cat((stacked(found.values(), x.device), *shares))
        rows = self._given["tokens"].shape[0] if "tokens" in self._given else 0
        shapes, smoothing = (_shape(x), _shape(y)), float(args[5]) if kind == "cross_entropy" and len(args) > 5 else 0.0
        call = LossCall(kind, reduction, self._audited.of(BackwardStarts).count, y.numel(), shapes, rows, smoothing=smoothing)
        self._seen.append((call, tuple(found), tape.defer(numbers)))

    def _look_at_result(self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Keep how large the result is that no gradient flows through, and whether the target varies."""
        tape = self._audited.tape
        if tape is None or kind not in _DIFFERENCES or not args[1].numel() or args[1].is_complex():
            return
        x, y = args[0], args[1]
        with without_dispatch(), torch.no_grad():
            numbers = stacked((out.abs().amax(), *torch.aminmax(y)), out.device)
        call = LossCall(
            kind, _reduction(kind, args, kwargs), self._audited.of(BackwardStarts).count, y.numel(), (_shape(x), _shape(y))
        )
        self._ungraded.append((call, ("apart", "target_low", "target_high"), tape.defer(numbers)))


def _readable(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those whose memory is still there: the program may have given it back since the model was called."""
    return {name: t for name, t in given.items() if not reason_without_statistics(t)}


def stacked(numbers: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return single numbers as one tensor, to be carried to the host: float64 where the device has it."""
    return torch.stack([number.reshape(()).to(device=device, dtype=wide_on(device)) for number in numbers])


def wide_on(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, otherwise float32."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def _read(seen: Sequence[tuple[LossCall, tuple[str, ...], Deferred]]) -> tuple[LossCall, ...]:
    return tuple(_with_numbers(call, names, deferred) for call, names, deferred in seen if deferred.numbers is not None)


def _with_numbers(call: LossCall, names: tuple[str, ...], deferred: Deferred) -> LossCall:
    assert deferred.numbers is not None
    numbers, classes = deferred.numbers[: len(names)], deferred.numbers[len(names) :]
    return replace(call, numbers=dict(zip(names, map(float, numbers), strict=True)), classes=tuple(map(float, classes)))


def _reduction(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if kind in ("cross_entropy", "nll_loss") and args[2] is not None:
        return "weighted"
    place = 3 if kind in ("cross_entropy", "nll_loss", "binary_cross_entropy") else 2
    place = {"binary_cross_entropy_with_logits": 4, "ctc_loss": 5}.get(kind, place)
    return _REDUCTIONS.get(args[place] if len(args) > place else kwargs.get("reduction", 1), "none")


def _about(
    kind: str, x: Tensor, y: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what is to be known of a call, as small tensors."""
    if kind in ("cross_entropy", "nll_loss"):
        classes = not y.is_floating_point()
        about = _form(x) if x.dim() >= 1 and x.numel() else {}
        if classes and x.dim() == 2 and x.shape[0] == x.shape[1] == y.numel() and x.numel():
            about |= _diagonal(x, y)
        if not classes:
            return about
        own = y.new_full((), _ignored(args) if 0 <= _ignored(args) < x.shape[1 if x.dim() > 1 else 0] else -1)
        return about | {"ignored_class": own} | _targets(y, _ignored(args), given)
    if kind in _OF_NUMBERS or not x.numel() or not y.numel():
        return {}
    if kind == "ctc_loss":
        blank = int(args[4]) if len(args) > 4 else 0
        return _bounds(x, "input") | _transcripts(y, args[2], args[3], blank, x.device)
    return _bounds(x, "input") | ({} if kwargs.get("log_target") else _bounds(y, "target"))


def _shares(kind: str, x: Tensor, y: Tensor, args: Sequence[Any]) -> Sequence[Tensor]:
    """Return what is counted of each class, if the targets are indices of classes, in the dtype of `stacked`."""
    if kind not in ("cross_entropy", "nll_loss") or y.is_floating_point():
        return ()
    shares = class_shares(x, y, _ignored(args), logarithms=kind == "nll_loss")
    return () if shares is None else (shares.to(wide_on(x.device)),)


def _ignored(args: Sequence[Any]) -> int:
    return int(args[4]) if len(args) > 4 else -100


def _bounds(t: Tensor, what: str) -> dict[str, Tensor]:
    low, high = torch.aminmax(t)
    return {f"{what}_low": low, f"{what}_high": high}


def _form(x: Tensor) -> dict[str, Tensor]:
    """Return bounds of an input [N, C, …] or [C], and how far the sums over its classes are from 1, of its first entries."""
    classes = 1 if x.dim() > 1 else 0
    for d in range(x.dim()):
        x = x if d == classes else x.narrow(d, 0, min(_LOOKED_AT, x.shape[d]))
    off = (x.sum(classes, dtype=torch.float32) - 1).abs().amax()
    return _bounds(x, "input") | {"off_one": off}


def _diagonal(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return what an input [N, N] says of each row and the entry of the same number."""
    own = x.diagonal()
    on_it = (y == torch.arange(y.numel(), device=y.device)).sum()
    return _bounds(own, "self") | {"self_below": (x.amax(1) - own).amax(), "self_targets": on_it}


def _transcripts(y: Tensor, lengths: Any, of_targets: Any, blank: int, device: torch.device) -> dict[str, Tensor]:
    """Return how many transcripts are longer than what they are read from, and how many letters are the blank.

    y: letters [N, S], or [sum of lengths]. lengths: of either, [N], or sequences of ints.
    """
    have, need = ((n if isinstance(n, Tensor) else torch.tensor(n)).to(device) for n in (lengths, of_targets))
    found = {"too_long": (need > have).sum(), "valid": need.new_full((), need.numel())}
    if y.device == device and need.dim() == 1:
        spoken = torch.arange(y.shape[-1], device=device) < (need[:, None] if y.dim() == 2 else need.sum())
        found |= {"blanks": ((y == blank) & spoken).sum()}
    return found


def _copied(
    kind: str, y: Tensor, args: Sequence[Any], numbers: Mapping[str, Tensor], looked_up: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tell in which argument, and in which of its columns, the targets of a regression stand, or all classes in an embedding's.

    "copy of NAME": 1 where an argument of the model has the same numbers at the same places. "column of NAME": the first column
    of an argument [N, F] that has them, -1 where none has. "looked up by NAME": of the last of several embeddings with indices
    of the targets' shape, how many valid targets stand at the same place.
    """
    found: dict[str, Tensor] = {}
    if kind in _OF_NUMBERS and _FEWEST <= y.numel() <= _LARGEST:
        varies = y.amin() < y.amax()
        for name, t in numbers.items():
            if t.device != y.device or t.dtype != y.dtype:
                continue
            if t.shape == y.shape:
                found[f"copy of {name}"] = (t == y).all() & varies
            elif t.dim() == 2 and t.shape[0] == y.numel() and t.shape[1] > 1:
                same = (t == y.reshape(-1, 1)).all(0) & varies
                found[f"column of {name}"] = torch.where(same.any(), same.int().argmax(), -1)
    elif kind in _OF_CLASSES.values() and not y.is_floating_point():
        fitting = {name: t for name, t in looked_up.items() if t.numel() == y.numel() and t.device == y.device}
        if len(fitting) > 1 and next(iter(fitting.values())).shape[1] >= _SHORTEST:
            name, last = list(fitting.items())[-1]
            found[f"looked up by {name}"] = ((last.reshape(-1) == y.reshape(-1)) & (y.reshape(-1) != _ignored(args))).sum()
    return found


def _targets(y: Tensor, ignored: int, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Count targets that are not ignored, and those that equal the model's input so many places further."""
    counts = y != ignored
    found = {"valid": counts.sum()}
    if y.dim() == 1 and y.numel():
        found |= _bounds(y, "class")
    tokens, mask = given.get("tokens"), given.get("mask")
    if tokens is None or tokens.device != y.device:
        return found
    if mask is not None and (mask.shape != tokens.shape or mask.device != y.device or not tokens.numel()):
        mask = None
    found |= {} if mask is None else _padding(tokens, mask)
    for dim, rows in _laid_out(y, tokens):
        for shift in SHIFTS:
            at, shifted = _shifted_pairs(rows, tokens, dim, shift)
            there = at != ignored
            found[f"pairs {dim} {shift}"] = there.sum()
            found[f"equal {dim} {shift}"] = (there & (at == shifted)).sum()
            if shift == 0:
                other, most = there & (at != shifted), torch.iinfo(shifted.dtype).max
                found |= {
                    f"bare {dim}": (~there.any(dim)).sum(),
                    f"rows {dim}": there.new_full((), there.shape[1 - dim], dtype=torch.long),
                }
                found |= {f"hidden_low {dim}": shifted.masked_fill(~other, most).amin()}
                found |= {f"hidden_high {dim}": shifted.masked_fill(~other, -1).amax()}
            if mask is not None:
                seen = _shifted_pairs(rows, mask, dim, shift)[1] != 0
                found[f"masked {dim} {shift}"] = (there & ~seen).sum()
                if shift == 1:
                    ends = seen & (shifted == found["pad_high"])
                    found |= {f"ends {dim}": ends.sum(), f"ended {dim}": (ends & there).sum()}
    return found


def _padding(tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the bounds of the tokens at which the mask is 0; the lower is above the other where there is none."""
    most = torch.iinfo(tokens.dtype).max
    seen = mask != 0
    return {"pad_low": tokens.masked_fill(seen, most).amin(), "pad_high": tokens.masked_fill(seen, -1).amax()}


def _laid_out(y: Tensor, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the targets as rows like those of tokens [a, b], or shorter by one, along each dimension that may be time."""
    for dim in (1, 0):
        whole = list(tokens.shape)
        shorter = [n - (d == dim) for d, n in enumerate(whole)]
        shape = next((shape for shape in (whole, shorter) if shape[0] * shape[1] == y.numel()), None)
        if shape is not None and shape[dim] >= _SHORTEST and (y.dim() == 1 or list(y.shape) == shape):
            yield dim, y.reshape(shape)


def _shifted_pairs(rows: Tensor, tokens: Tensor, dim: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return targets, and the tokens that stand `shift` places further, where there are some."""
    first = max(0, -shift)
    count = max(0, min(rows.shape[dim] - first, tokens.shape[dim] - first - shift))
    return rows.narrow(dim, first, count), tokens.narrow(dim, first + shift, count)


def _shape(t: Tensor) -> tuple[int, ...]:
    """Return the shape that a tensor had before it was expanded."""
    return tuple(1 if t.stride(d) == 0 else n for d, n in enumerate(t.shape))


def tokens_and_mask(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the "tokens" among the arguments of a model, and the "mask" of attention that belongs to them."""
    plain = {name: t for name, t in named.items() if type(t) is Tensor and t.dim() == 2}
    whole = [t for t in plain.values() if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool]
    tokens = next((plain[name] for name in _INPUTS if name in plain), whole[0] if whole else None)
    if tokens is None or tokens.is_floating_point():
        return
    yield "tokens", tokens.detach()
    mask = plain.get("decoder_attention_mask" if "decoder_input_ids" in plain else "attention_mask")
    if mask is not None:
        yield "mask", mask.detach()
