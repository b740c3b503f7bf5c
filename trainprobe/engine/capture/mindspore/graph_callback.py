"""Calls Python from inside a graph that MindSpore has compiled: `ops.Custom` of the type "pyfunc", which runs on a CPU only.

`construct` of a cell is replaced before it is compiled by one that hands each tensor to such an operator and passes it on. The
first operator of a call returns the number of the call; the others, and those that are called with gradients, are given it, so
that all are known to belong together.

MindSpore may not know that the forward operators do something. It puts operators with a side effect, and the calls of cells
that hold one, into a chain in the order of the program, and it adds up the gradients of a tensor that is used several times in
the order in which the uses depend on each other: the chain would change the order of the sum, and so its last bits. The
operators are therefore tied to the tensors of their call alone (`ops.depend`); "side_effect_hidden", as
MindSpore says of operators that draw random numbers, keeps two of them from being taken for one.

Where a cell uses an input several times, and others use that tensor too, MindSpore adds up all uses in one sum, as long as
nobody takes the part of the cell; an operator that is called with that part splits the sum. The gradient at an input is
therefore looked at in cells that are known to use their input once (`uses_its_input_once`): there is no such part. For the same
reason the gradient at a result is not looked at where the result is an input (`returns_an_input`) or one of several. Not
solved: an operator at the input of each of two cells that use one tensor more than once changes the sum too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops

from trainprobe.engine.arrays.mindspore_library import HostArray

Seen = Callable[[str, int, int, HostArray], None]  # part, place in it, number of the cell's call since it is watched, tensor

ALONE = -1  # the place of an output that is the only one, and that no tuple holds
UNKNOWN = -1  # number of a call
_NOTHING = np.zeros(1, np.int32)
_MOST = 8  # arguments or results of a cell that are looked at where their number is not written in `construct`
_DIFFERENTIABLE = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)
_NAMES = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXT = {name: str(getattr(mindspore, name)) for name in (*_NAMES, "complex64", "complex128")} | {"bool": str(mindspore.bool_)}


# cells that hand their input to one operator
_ONE_USE = (
    *(nn.Dense, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm),
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Dropout, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten),
)


def uses_its_input_once(cell: Any) -> bool:
    """Tell whether a cell is known to use its input at one place alone: the gradient there is no sum."""
    if type(cell) is nn.SequentialCell:
        return len(cell) > 0 and uses_its_input_once(cell[0])
    return type(cell) in _ONE_USE


def returns_an_input(cell: Any) -> bool:
    """Tell whether a cell may return an argument as it is: a line of its `construct` does, or it is an empty container."""
    if type(cell) is nn.SequentialCell:
        return len(cell) == 0 or returns_an_input(cell[-1])
    if type(cell) is nn.Dropout and cell.p > 0:
        return False  # it does so in an evaluation, where nothing asks for gradients
    code = [*dis.get_instructions(cell.construct)]
    given = {*inspect.signature(cell.construct).parameters} - {one.argval for one in code if one.opname == "STORE_FAST"}
    return any(
        now.opname == "LOAD_FAST" and then.opname == "RETURN_VALUE" and now.argval in given for now, then in pairwise(code)
    )


def callbacks_work() -> bool:
    """Tell whether graphs of this process can call Python."""
    return mindspore.get_context("device_target") == "CPU"


def _operator(run: Callable[..., Any], dtypes: list[Any], inputs: int, effect: str) -> Any:
    """Return an operator that calls `run` with arrays; `dtypes` gets the dtype of the first, as MindSpore compiles it.

    It cannot be differentiated: give it `ops.stop_gradient(x)`. No input may be empty. effect: "side_effect_io" or "…_hidden".
    """

    def dtype(given: Any, *others: Any) -> Any:
        dtypes.append(mindspore.dtype_to_nptype(getattr(given, "element_type", lambda: given)()))
        return mindspore.int32

    shape: Any = (lambda _: (1,)) if inputs == 1 else (lambda _, __: (1,))
    operator = ops.Custom(run, out_shape=shape, out_dtype=dtype, func_type="pyfunc")
    operator.add_prim_attr(effect, True)
    operator.recompute(False)
    return operator


def _forward(part: str, i: int, seen: Seen, numbers: Iterator[int]) -> Any:
    """Return an operator that tells of a tensor of the call with a number; it returns the number, a new one for UNKNOWN."""
    dtypes: list[Any] = []

    def run(data: Any, number: Any) -> Any:
        n = int(number[0])
        n = next(numbers) if n == UNKNOWN else n
        seen(part, i, n, _array(data, dtypes))
        return np.full(1, n, np.int32)

    return _operator(run, dtypes, 2, "side_effect_hidden")


def array_callback(tell: Callable[[HostArray], None]) -> Any:
    """Return an operator that hands a tensor to Python where it stands in the program, in a graph or outside of one."""
    dtypes: list[Any] = []

    def run(data: Any) -> Any:
        tell(_array(data, dtypes))
        return _NOTHING

    return _operator(run, dtypes, 1, "side_effect_io")


class _Passed(nn.Cell):  # pyright: ignore[reportUntypedBaseClass]
    """Passes a tensor on. The gradient that arrives there is told, with the number that the forward operator returned."""

    def __init__(self, part: str, i: int, seen: Seen) -> None:
        super().__init__()
        dtypes: list[Any] = []

        def run(data: Any, number: Any) -> Any:
            seen(part, i, int(number[0]), _array(data, dtypes))
            return _NOTHING

        self.tell = _operator(run, dtypes, 2, "side_effect_io")

    def construct(self, x: Any, number: Any) -> Any:
        return x

    def bprop(self, x: Any, number: Any, out: Any, gradient: Any) -> Any:
        self.tell(gradient, number)
        return gradient, ops.zeros_like(number)


@mindspore.jit_class  # pyright: ignore[reportUntypedClassDecorator]
class _Inserted:
    """Does the same in a model that is recomputed in part, for which MindSpore compiles no `_Passed`: the number is UNKNOWN."""

    def __init__(self, part: str, i: int, seen: Seen) -> None:
        tell = array_callback(lambda array: seen(part, i, UNKNOWN, array))

        def passed(gradient: Any) -> Any:
            tell(gradient)
            return gradient

        self.insert = ops.InsertGradientOf(passed)
        self.tell = tell

    def __call__(self, x: Any, number: Any) -> Any:
        return self.insert(x)


def _array(data: Any, dtypes: list[Any]) -> HostArray:
    array = np.asarray(data, None if isinstance(data, np.ndarray) else dtypes[-1])  # MindSpore hands over scalars as numbers
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
    own, numbers = cell.construct, count()
    most = _positional(own)
    forward = partial(_forward, numbers=numbers)
    fresh = backward and not returns_an_input(cell)
    look_in = _looking(
        _several(forward, "input", most, seen), _several(back, "grad_input", most, seen), backward and uses_its_input_once(cell)
    )
    tell_out, back_out = (_several(make, f"{name}output", _MOST, seen) for make, name in ((forward, ""), (back, "grad_")))
    look_out, look_several = (_looking(tell_out, back_out, gradients) for gradients in (fresh, False))
    look_alone = _looking([forward("output", ALONE, seen)], [back("grad_output", ALONE, seen)], fresh)
    unknown = mindspore.Tensor([UNKNOWN], mindspore.int32)

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, number = look_in(args, unknown)
        out = own(*given, **kwargs)
        if isinstance(out, tuple):
            tensors = 0
            for item in out:
                if ops.is_tensor(item):
                    tensors += 1
            found, number = look_several(out, number) if tensors > 1 else look_out(out, number)
            return tuple(found)
        found, number = look_alone((out,), number)
        return found[0]

    return _replaced(cell, construct)


def _looking(tell: list[Any], back: list[Any], backward: bool) -> Any:
    """Return what has each of some items told by the operator of its place: items, number → items to go on with, number.

    It is compiled as part of a graph. number: of the call, UNKNOWN before the first operator.
    """
    most = len(tell)

    def look(items: Any, number: Any) -> Any:
        found = []
        for i, item in enumerate(items):
            if i < most and ops.is_tensor(item) and 0 not in item.shape:
                number = tell[i](ops.stop_gradient(item), ops.stop_gradient(number))
                item = ops.depend(item, number)
                if backward and item.dtype in _DIFFERENTIABLE:
                    item = back[i](item, number)
            found.append(item)
        return found, number

    return look


def _watch_optimizer(optimizer: Any, seen: Seen) -> Callable[[], None]:
    own = optimizer.construct
    tell = [array_callback(partial(seen, "gradient", i, UNKNOWN)) for i in range(len(optimizer.parameters))]

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
