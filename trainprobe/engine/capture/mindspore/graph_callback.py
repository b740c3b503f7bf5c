"""Calls Python from inside a graph that MindSpore has compiled: `ops.Custom` of the type "pyfunc", which runs on a CPU only.

`construct` of a cell is replaced before it is compiled by one that hands each tensor to such an operator and passes it on. The
operator has a side effect as MindSpore sees it, so that it runs where it stands in the program. It returns the number of the
call; the operator that is called with the gradient is given that too, so that both are known to belong together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops

from trainprobe.engine.arrays.mindspore_library import HostArray

Seen = Callable[[str, int, int, HostArray], None]  # part, place in it, number of the call since the graph was made, tensor

ALONE = -1  # the place of an output that is the only one, and that no tuple holds
UNKNOWN = -1  # number of a call
_NOTHING = np.zeros(1, np.int32)
_MOST = 8  # arguments or results of a cell that are looked at where their number is not written in `construct`
_DIFFERENTIABLE = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)
_NAMES = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXT = {name: str(getattr(mindspore, name)) for name in (*_NAMES, "complex64", "complex128")} | {"bool": str(mindspore.bool_)}


def callbacks_work() -> bool:
    """Tell whether graphs of this process can call Python."""
    return mindspore.get_context("device_target") == "CPU"


def _operator(run: Callable[..., Any], told: list[Any], inputs: int) -> Any:
    """Return an operator that calls `run` with arrays; `told` gets the dtype of the first, as MindSpore compiles it.

    It cannot be differentiated: give it `ops.stop_gradient(x)`. No input may be empty.
    """

    def dtype(given: Any, *others: Any) -> Any:
        told.append(mindspore.dtype_to_nptype(getattr(given, "element_type", lambda: given)()))
        return mindspore.int32

    shape: Any = (lambda _: (1,)) if inputs == 1 else (lambda _, __: (1,))
    operator = ops.Custom(run, out_shape=shape, out_dtype=dtype, func_type="pyfunc")
    operator.add_prim_attr("side_effect_io", True)
    return operator


def _forward(part: str, i: int, seen: Seen) -> Any:
    """Return an operator that tells of a tensor, and returns how often it did before."""
    told: list[Any] = []
    number = count()

    def run(data: Any) -> Any:
        n = next(number)
        seen(part, i, n, _array(data, told))
        return np.full(1, n, np.int32)

    return _operator(run, told, 1)


def array_callback(tell: Callable[[HostArray], None]) -> Any:
    """Return an operator that hands a tensor to Python when it runs, in a graph or outside of one."""
    return _forward("", 0, lambda part, i, number, array: tell(array))


class _Passed(nn.Cell):  # pyright: ignore[reportUntypedBaseClass]
    """Passes a tensor on. The gradient that arrives there is told, with the number that the forward operator returned."""

    def __init__(self, part: str, i: int, seen: Seen) -> None:
        super().__init__()
        told: list[Any] = []

        def run(data: Any, number: Any) -> Any:
            seen(part, i, int(number[0]), _array(data, told))
            return _NOTHING

        self.tell = _operator(run, told, 2)

    def construct(self, x: Any, number: Any) -> Any:
        return x

    def bprop(self, x: Any, number: Any, out: Any, gradient: Any) -> Any:
        self.tell(gradient, number)
        return gradient, ops.zeros_like(number)


@mindspore.jit_class  # pyright: ignore[reportUntypedClassDecorator]
class _Inserted:
    """Does the same in a model that is recomputed in part, for which MindSpore compiles no `_Passed`: the number is UNKNOWN."""

    def __init__(self, part: str, i: int, seen: Seen) -> None:
        tell = _forward(part, i, lambda part, i, number, array: seen(part, i, UNKNOWN, array))

        def passed(gradient: Any) -> Any:
            tell(gradient)
            return gradient

        self.insert = ops.InsertGradientOf(passed)
        self.tell = tell

    def __call__(self, x: Any, number: Any) -> Any:
        return self.insert(x)


def _array(data: Any, told: list[Any]) -> HostArray:
    array = np.asarray(data, None if isinstance(data, np.ndarray) else told[-1])  # MindSpore hands over scalars as numbers
    return HostArray(_TEXT.get(array.dtype.name, array.dtype.name), array.shape, None, array)


class GraphCallbacks:
    """The callbacks that stand in the cells of a model, for whoever listens to them.

    backward: gradients are told too. recomputed: parts of the model run again in the backward pass. Both are set before `cell`.
    """

    def __init__(self) -> None:
        self.recomputed = False
        self.backward = False
        self._listeners: dict[int, list[Seen]] = {}
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def cell(self, cell: Any, seen: Seen) -> None:
        """Have the parts of each call of a cell told: "input", "output", and "grad_output", "grad_input" going backward."""
        back = _Inserted if self.recomputed else _Passed
        self._watch(cell, seen, lambda tell: _watch_cell(cell, tell, self.backward, back))

    def optimizer(self, optimizer: Any, seen: Seen) -> None:
        """Have the gradients told that an optimizer is handed, as the part "gradient"."""
        self._watch(optimizer, seen, lambda tell: _watch_optimizer(optimizer, tell))

    def _watch(self, cell: Any, seen: Seen, insert: Callable[[Seen], Callable[[], None]]) -> None:
        listeners = self._listeners.setdefault(id(cell), [])
        listeners.append(seen)
        if len(listeners) == 1:
            self._undo.append(insert(lambda *told: _tell(listeners, *told)))

    def remove(self) -> None:
        """Give the cells their own functions back; a graph that is compiled keeps the callbacks, which tell nobody then."""
        for listeners in self._listeners.values():
            listeners.clear()
        self._listeners = {}
        while self._undo:
            self._undo.pop()()


def _tell(listeners: list[Seen], part: str, i: int, number: int, array: HostArray) -> None:
    for seen in listeners:
        seen(part, i, number, array)


def _watch_cell(cell: Any, seen: Seen, backward: bool, back: Callable[[str, int, Seen], Any]) -> Callable[[], None]:
    """Put callbacks into a cell; return what takes them out.

    MindSpore parses the function that takes the place of `construct`: what is in it must be what a graph can hold.
    """
    own = cell.construct
    most = _positional(own)
    look_in = _looking(_several(_forward, "input", most, seen), _several(back, "grad_input", most, seen), backward)
    look_out = _looking(_several(_forward, "output", _MOST, seen), _several(back, "grad_output", _MOST, seen), backward)
    look_alone = _looking([_forward("output", ALONE, seen)], [back("grad_output", ALONE, seen)], backward)
    keep = _operator(lambda numbers: _NOTHING, [], 1)

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, numbers = look_in(args, 0)
        out = own(*given, **kwargs)
        if isinstance(out, tuple):
            found, numbers = look_out(out, numbers)
            out = tuple(found)
        else:
            found, numbers = look_alone((out,), numbers)
            out = found[0]
        if ops.is_tensor(numbers):
            keep(numbers)  # a statement of its own: MindSpore leaves out what nobody takes, side effects or not
        return out

    return _replaced(cell, construct)


def _looking(tell: list[Any], back: list[Any], backward: bool) -> Any:
    """Return what has each of some items told by the operator of its place: items, numbers → items to go on with, numbers.

    It is compiled as part of a graph. numbers: the sum of what the operators return, which keeps them in the program.
    """
    most = len(tell)

    def look(items: Any, numbers: Any) -> Any:
        found = []
        for i, item in enumerate(items):
            if i < most and ops.is_tensor(item) and 0 not in item.shape:
                number = tell[i](ops.stop_gradient(item))
                numbers = numbers + number
                if backward and item.dtype in _DIFFERENTIABLE:
                    item = back[i](item, number)
            found.append(item)
        return found, numbers

    return look


def _watch_optimizer(optimizer: Any, seen: Seen) -> Callable[[], None]:
    own = optimizer.construct
    tell = _several(_forward, "gradient", len(optimizer.parameters), seen)

    def construct(self: Any, gradients: Any, *rest: Any) -> Any:
        for i, item in enumerate(gradients):
            if ops.is_tensor(item) and 0 not in item.shape:
                tell[i](item)
        return own(gradients, *rest)

    return _replaced(optimizer, construct)


def _positional(construct: Any) -> int:
    kinds = [p.kind for p in inspect.signature(construct).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return _MOST
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _several(make: Callable[[str, int, Seen], Any], part: str, count: int, seen: Seen) -> list[Any]:
    return [make(part, i, seen) for i in range(count)]


def _replaced(cell: Any, construct: Any) -> Callable[[], None]:
    """Put a function in the place of a cell's `construct`; return what puts back what was there."""
    before = vars(cell).get("construct")
    cell.construct = construct.__get__(cell, type(cell))

    def back() -> None:
        if before is None:
            del cell.construct
        else:
            cell.construct = before

    return back
