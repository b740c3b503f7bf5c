"""A tensor of pairs of float64, for which torch's own differentiation and its composite operators work.

What it is used for is written in run.py. A step that has no rule here raises NotImplementedError with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainprobe.op_check.double_double import convolutions, elimination, resampling, rules, special
from trainprobe.op_check.double_double.arithmetic import Pair, Tensor

_REGISTER_RULES = (convolutions, elimination, resampling, special)
_DISABLED: Any = torch._C._disabled_torch_function_impl


class DoubleDouble(Tensor):
    """Numbers high + low, where high is the sum rounded to float64."""

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls: type[DoubleDouble], high: Tensor, low: Tensor) -> DoubleDouble:
        """Take the pair; both parts are brought to the same order in memory, as views of one are views of the other."""
        high, low = torch.broadcast_tensors(high, low) if high.shape != low.shape else (high, low)
        if high.stride() != low.stride():
            high, low = high.contiguous(), low.contiguous()
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, high.shape, strides=high.stride(), storage_offset=high.storage_offset(), dtype=torch.float64
        )
        made.high, made.low = high, low
        return made

    __torch_function__ = _DISABLED

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DoubleDouble({self.high}, {self.low})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one step of torch by the rule for it, else by the steps that torch says it is made of."""
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in rules.MOVES:
            return cls.of(_moved(func, name, args, kwargs))
        rule = rules.RULES.get(name)
        if rule is not None:
            return cls.of(rule(func, *_pairs(args), **_pairs(kwargs)))
        inner = rules.RULES.get(name[:-1]) if name.endswith("_") else None
        if inner is None and name.endswith("_") and name[:-1] in rules.MOVES:
            inner = _written
        if inner is not None and isinstance(args[0], DoubleDouble):
            found = inner(func, *_pairs(args), **_pairs(kwargs))
            args[0].high.copy_(found[0])
            args[0].low.copy_(found[1])
            return args[0]
        return _by_parts(func, args, kwargs)

    @classmethod
    def of(cls, found: Any) -> Any:
        """Return pairs among results as tensors."""
        if isinstance(found, rules.Numbers):
            return cls(found[0], found[1])
        return tree_map(cls.of, found) if isinstance(found, (list, tuple)) else found


def _pairs(tree: Any) -> Any:
    return tree_map(lambda x: rules.Numbers((x.high, x.low)) if isinstance(x, DoubleDouble) else x, tree)


def _written(func: Any, *args: Any, **kwargs: Any) -> Pair:
    raise NotImplementedError(func.overloadpacket.__name__)


def _moved(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Move both parts alike; what is filled in is a number of float64, and its low part 0."""

    def high(x: Any) -> Any:
        return x.high if isinstance(x, DoubleDouble) else x

    def low(x: Any) -> Any:
        if isinstance(x, DoubleDouble):
            return x.low
        return torch.zeros_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    filled = rules.MOVES[name]
    if "reduce" in kwargs:
        raise NotImplementedError(f"{name} with reduce")
    lows = tree_map(low, list(args))
    if filled is not None:
        lows[filled:] = [0.0 if isinstance(x, (int, float)) else x for x in lows[filled:]]
    firsts = func(*tree_map(high, list(args)), **tree_map(high, dict(kwargs)))
    seconds = func(*lows, **{k: 0.0 if k in ("value", "fill_value") else v for k, v in tree_map(low, dict(kwargs)).items()})
    if isinstance(firsts, Tensor):
        return rules.Numbers((firsts, seconds))
    return [rules.Numbers(pair) for pair in zip(firsts, seconds, strict=True)]


def _by_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a step as torch composes it of others."""
    made = func.decompose(*args, **kwargs)
    if made is not NotImplemented:
        return made
    from torch._decomp import decomposition_table

    parts: Callable[..., Any] | None = decomposition_table.get(func)
    if parts is None or func.overloadpacket.__name__ in rules.NOT_BY_PARTS:
        raise NotImplementedError(func.overloadpacket.__name__)
    return parts(*args, **kwargs)
