"""How much larger the terms of a sum are than the sum itself: where they cancel, the result is made of rounding.

The gradient of the key bias of attention, or of a convolution's bias before batch norm, is zero in mathematics. What a run
finds instead are the roundings of the terms, which no other run repeats. So a result is held against the norm of its terms,
√Σt², which bounds the rounding of their sum in any order (as a random walk, Higham 2002, §4.2), and never against its own
norm alone. Norms of the terms follow from norms and shapes of what the call is given, elements taken as independent:

    sum, mean             the input itself (divided by the count for a mean)
    add, sub, lerp        the larger operand
    matmul, convolution   √(n·K)·rms(a)·rms(b) for n results of K products each
    bias, broadcast       in a backward, what is smaller than the gradient of the output is a sum over it
    norms, softmax        in a backward, a projection of the gradient of the output
    parameters of modules the same with the gradients of outputs of their module, or, unless they were recorded, with the
                          gradients of the module's other parameters: an element of one is about as large as of another
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from trainprobe.dump_compare.call_slots import named_values
from trainprobe.dump_compare.dump_side import Side
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import owner, slots

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "bilinear", "conv")
_DIFFERENCES = ("add", "sub", "rsub", "lerp", "_foreach_add", "_foreach_sub", "_foreach_lerp", "index_add", "scatter_add")
_SUMS = ("sum", "mean", "nansum", "nanmean", "cumsum", "logcumsumexp")
_PROJECTIONS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "normalize")
_ATTENTION = "scaled_dot_product_attention"


class Terms:
    """The norms of terms in one side's calls. Raises nothing: what is not known is no cancellation."""

    def __init__(self, calls: Iterable[Call], side: Side) -> None:
        self._side = side
        self._forward: dict[tuple[str, str], dict[int, Call]] = defaultdict(dict)  # in two steps, as there may be 100,000
        self._backward: dict[str, list[Call]] = defaultdict(list)
        self._states: dict[str, list[Call]] = defaultdict(list)  # by the module whose parameters they are about
        for call in calls:
            if call.kind == "state":
                self._states[owner(call)].append(call)
            elif call.phase == "backward" and call.kind == "module":
                self._backward[call.name].append(call)
            elif call.phase == "forward" and call.kind in ("module", "op"):
                self._forward[call.kind, call.name][call.call] = call

    def of(self, call: Call, slot: str) -> tuple[float, float]:
        """Return the norm of the terms that were summed to get the value at `slot`, and of the value; 0 where not known."""
        names, values = named_values(call)
        if slot not in names:
            return 0.0, 0.0
        result = values[names.index(slot)]
        return self._summed(call, slot, result, names, values), self._norm(result)

    def _summed(self, call: Call, slot: str, result: Value, names: tuple[str, ...], values: Sequence[Value]) -> float:
        if call.kind in ("parameter", "state"):
            return self._of_parameter(call, slot, result)
        if call.phase == "backward":
            given = [values[i] for i in _gradients_among(names)]
            forward = self._forward[call.kind, call.name].get(call.call)
            return self._of_gradient(kind_of(call), given, _given(forward), result)
        return self._of_result(kind_of(call), [values[i] for i in _given_among(names)], result)

    def _of_result(self, kind: str, given: Sequence[Value], result: Value) -> float:
        way = _sort_of(kind)
        if way == "product":
            return self._product(given[:2], result) if len(given) >= 2 else 0.0
        if way == "sum":
            largest = max(map(self._norm, given), default=0.0)
            return largest * _size(result) / max(1, _size(given[0])) if kind.endswith("mean") and given else largest
        if way == "difference":
            return max((self._spread(value) for value in given), default=0.0) * math.sqrt(_size(result))
        return 0.0

    def _of_gradient(self, kind: str, gradients: Sequence[Value], given: Sequence[Value], result: Value) -> float:
        whole = max(gradients, key=_size, default=None)
        if whole is None:
            return 0.0
        if kind.startswith(_PRODUCTS) and len(result.shape) > 1:
            others = _others(given, result)
            return self._product((whole, others[0]), result) if others else 0.0
        if kind.startswith(_ATTENTION):
            spreads = [self._spread(value) for value in given[:3]]
            return self._norm(whole) * max(1.0, math.prod(sorted(spreads)[-2:]))
        if _size(result) < _size(whole) or kind.startswith(_PROJECTIONS):
            return self._norm(whole)
        return 0.0

    def _of_parameter(self, call: Call, slot: str, result: Value) -> float:
        found = 0.0
        for backward in self._backward.get(owner(call), ()):
            gradients = [value for at, value in slots(backward) if at.startswith("grad_output")]
            given = _given(self._forward["module", backward.name].get(backward.call))
            kind = kind_of(backward)
            terms = self._of_gradient(kind, gradients, given, result)
            found = math.hypot(found, terms or (max(map(self._norm, gradients), default=0.0) if "embedding" in kind else 0.0))
        if found:
            return found
        others = (
            [value for other in self._states[owner(call)] if other is not call for at, value in slots(other) if at == slot]
            if call.kind == "state"
            else [value for at, value in slots(call) if at != slot]
        )
        return max(map(self._spread, others), default=0.0) * math.sqrt(_size(result))

    def _product(self, operands: Iterable[Value], result: Value) -> float:
        a, b = operands
        size = max(1, _size(result))
        products = math.sqrt(max(1.0, _size(a) * _size(b) / size))
        return math.sqrt(size * products) * self._spread(a) * self._spread(b)

    def _norm(self, value: Value) -> float:
        norm = self._side.norm(value)
        return norm if math.isfinite(norm) else 0.0

    def _spread(self, value: Value) -> float:
        """Return the root mean square of a value's elements."""
        return self._norm(value) / math.sqrt(max(1, _size(value)))


def _size(value: Value) -> int:
    return _product_of(value.shape)


_product_of = lru_cache(maxsize=4096)(math.prod)


def kind_of(call: Call) -> str:
    """Return what a call does, by the name of the op or of the module's class: `linear`, `conv2d`, `batchnorm2d`."""
    return _kind_of_op(call.name) if call.kind == "op" else _kind_of_module(call.cls)


@lru_cache(maxsize=4096)
def _kind_of_op(name: str) -> str:
    return name.rpartition(".")[2].strip("_") if "foreach" not in name else name.rpartition(".")[2]


@lru_cache(maxsize=4096)
def _kind_of_module(cls: str) -> str:
    name = cls.lower()
    return next((norm for norm in _PROJECTIONS if norm.replace("_", "") in name), name)


@lru_cache(maxsize=4096)
def _sort_of(kind: str) -> str:
    """Return what kind of sum an op's result is: a product, a sum, a difference, or "" for none."""
    sorts = (("product", _PRODUCTS), ("sum", _SUMS), ("difference", _DIFFERENCES))
    return next((sort for sort, names in sorts if kind.startswith(names)), "")


def _given(call: Call | None) -> list[Value]:
    """Return the tensors that a forward was given, its weights included."""
    if call is None:
        return []
    names, values = named_values(call)
    return [values[i] for i in _given_among(names)]


@lru_cache(maxsize=4096)
def _given_among(names: tuple[str, ...]) -> list[int]:
    return [i for i, name in enumerate(names) if name.startswith(("input", "kwargs", "parameters"))]


@lru_cache(maxsize=4096)
def _gradients_among(names: tuple[str, ...]) -> list[int]:
    return [i for i, name in enumerate(names) if name.startswith("grad_output")]


def _others(given: Sequence[Value], result: Value) -> list[Value]:
    """Return the operands of a product without biases and without the one whose gradient is asked for."""
    operands = [value for value in given if len(value.shape) > 1]
    same = next((i for i, value in enumerate(operands) if _size(value) == _size(result)), None)
    return operands if same is None else operands[:same] + operands[same + 1 :]


def cancelled(pairs: Iterable[tuple[Call, str, Terms]]) -> float:
    """Return how many times larger the terms of a result are than the result; 1 where nothing cancels or nothing is known.

    pairs: the call, slot and norms of either side. The smaller of both sides' terms and the larger of both results count, so
    that a result which is zero on one side alone is no cancellation.
    """
    summed, result = math.inf, 0.0
    for call, slot, terms in pairs:
        of_side, norm = terms.of(call, slot)
        summed, result = min(summed, of_side), max(result, norm)
        if summed <= result:
            return 1.0
    return summed / result if result > 0 else 1.0
