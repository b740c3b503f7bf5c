"""Modes under which a step runs: without dropout, with another order of sums, without autocast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from trainprobe.engine.state_guard import bits_of

_DROPOUTS = frozenset(
    """dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout feature_alpha_dropout_ native_dropout""".split()  # noqa: SIM905
)
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_LOSSES_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}  # place of dropout_p


class Quiet(TorchFunctionMode):
    """Turns dropout off and counts what is called. names: function → calls. made: elements of all results.

    ignore_index: that of the last loss of classes; None where none was called. wide: whether casts to float32 go to float64.
    """

    def __init__(self, dropout: bool = False, wide: bool = False) -> None:
        super().__init__()
        self.dropout, self.wide = dropout, wide
        self.names: Counter[str] = Counter()
        self.made = 0
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.ignore_index: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        self.names[name] += 1
        if not self.dropout:
            if name in _DROPOUTS:
                return (args[0], torch.ones_like(args[0])) if name == "native_dropout" else args[0] if args else named["input"]
            if name in _RECURRENT:
                args = tuple(0.0 if type(a) is float else a for a in args)
            if name in _ATTENTION:
                args, named = _without_dropout(args, named, _ATTENTION[name])
        if name in _LOSSES_OF_CLASSES:
            self.ignore_index = args[4] if len(args) > 4 else named.get("ignore_index", -100)
        if self.wide:
            func = torch.Tensor.double if name == "float" else func
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            named = {key: torch.float64 if a is torch.float32 else a for key, a in named.items()}
        out = func(*args, **named)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.dtypes.setdefault(name, set()).add(out.dtype)
            self.made += out.numel()
        return out


def _without_dropout(args: Any, named: dict[str, Any], place: int) -> tuple[Any, dict[str, Any]]:
    if len(args) > place:
        return (*args[:place], 0.0, *args[place + 1 :]), named
    return args, {**named, "dropout_p": 0.0} if "dropout_p" in named else named


class Reordered(TorchDispatchMode):
    """Adds the terms of products and sums from the last to the first; the results are those of the same arithmetic."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in args):
            return func(*args, **(kwargs or {}))  # a sparse matrix cannot be turned
        if func in (aten.mm.default, aten.bmm.default):
            args = (args[0].flip(-1), args[1].flip(-2), *args[2:])
        elif func in (aten.addmm.default, aten.baddbmm.default):
            args = (args[0], args[1].flip(-1), args[2].flip(-2), *args[3:])
        elif func in (aten.sum.dim_IntList, aten.mean.dim) and args[1]:
            args = (args[0].flip(args[1]), *args[1:])
        elif func in (aten.sum.default, aten.mean.default):
            args = (args[0].flip(tuple(range(args[0].dim()))), *args[1:])
        elif func is aten.convolution.default and args[8] == 1 and not args[6]:
            args = (args[0].flip(1), args[1].flip(1), *args[2:])
        return func(*args, **(kwargs or {}))


class Traced(TorchDispatchMode):
    """Keeps what each operator returned. seen: (operator, sum of the bits of its results), in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor) and x.layout == torch.strided]
        self.seen.append((str(func), sum(int(bits_of(x).sum(dtype=torch.int64)) for x in results)))
        return out


@contextmanager
def without_autocast() -> Generator[None]:
    """Let no autocast begin within the block."""
    enter = torch.autocast.__enter__

    def enter_disabled(self: Any) -> Any:
        self._enabled = False
        return enter(self)

    torch.autocast.__enter__ = enter_disabled
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.autocast.__enter__ = enter


ROUNDING = frozenset({"round", "round_", "sign", "floor", "ceil", "argmin", "sgn", "heaviside", "trunc"})
RANDOM = frozenset(
    """rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ multinomial poisson
    uniform_ exponential_ random_ log_normal_ geometric_ cauchy_""".split()  # noqa: SIM905
)
REDUCTIONS = frozenset(
    "LogSoftmax Softmax NllLoss Logsumexp Exp Log Sum Mean MseLoss BinaryCrossEntropyWithLogits".split()  # noqa: SIM905
)
