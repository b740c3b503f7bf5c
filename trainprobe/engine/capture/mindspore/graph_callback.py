"""Calls Python from inside a graph that MindSpore has compiled: `ops.Custom` of the type "pyfunc", which runs on a CPU only.

`construct` of a cell is replaced before it is compiled by one that hands each tensor to such an operator and passes it on. The
first operator of a call returns the number of the call; the others, and those that are called with gradients, are given it, so
that all are known to belong together.

MindSpore may not know that the forward operators do something. It puts operators with a side effect, and the calls of cells
that hold one, into a chain in the order of the program, and it adds up the gradients of a tensor that is used several times in
the order in which the uses depend on each other: the chain would change the order of the sum, and so its last bits.
"side_effect_hidden", as MindSpore says of operators that draw random numbers, keeps two of them from being taken for one, and
orders nothing.

So that MindSpore keeps an operator, a value has to depend on what it returns (`ops.depend`). That value becomes another one,
whose uses are added up on their own. The operators of a call are therefore tied to its result, where the source of the cell
proves that the result is a new value that nothing else uses, and that it is computed from the arguments that are looked at
(`value_flow`). The gradient at a result is taken at the same place. What is not proven is left out unless the plan asks for
all. Gradients at inputs are not taken, nor at results that are not proven to be new: they would be the share of one cell, where
PyNative mode shows the sum of all that use a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import mindspore
import numpy as np
from mindspore import nn, ops

from trainprobe.engine.arrays.mindspore_library import HostArray
from trainprobe.engine.capture.mindspore.value_flow import FlowReader, own_construct

Seen = Callable[[str, int, int, HostArray], None]  # part, place in it, number of the cell's call since it is watched, tensor

ALONE = -1  # the place of an output that is the only one, and that no tuple holds
UNKNOWN = -1  # number of a call
_NOTHING = np.zeros(1, np.int32)
_STOP, _DEPEND, _ZEROS, _ITEM = ops.StopGradient(), ops.Depend(), ops.ZerosLike(), ops.Primitive("TupleGetItem")
_MOST = 8  # arguments or results of a cell that are looked at where their number is not written in `construct`
_DIFFERENTIABLE = (mindspore.float16, mindspore.float32, mindspore.float64, mindspore.bfloat16)
_NAMES = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXT = {name: str(getattr(mindspore, name)) for name in (*_NAMES, "complex64", "complex128")} | {"bool": str(mindspore.bool_)}


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
        return gradient, _ZEROS(number)


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


@dataclass(frozen=True, slots=True)
class RecordedParts:
    """What is recorded of the calls of a cell: which of its arguments by position, and whether the result."""

    inputs: frozenset[int]
    result: bool
    arguments: int


class GraphCallbacks:
    """The callbacks that stand in the cells of a model, for whoever listens to them.

    everything: also what could change the last bits of the training. backward: gradients are recorded too. recomputed: parts of
    the model run again in the backward pass. The last two are set before `cell`.
    """

    def __init__(self, everything: bool = False) -> None:
        self.everything = everything
        self.recomputed = False
        self.backward = False
        self._reader = FlowReader()
        self._listeners: dict[int, list[Seen]] = {}
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def parts(self, cell: Any) -> RecordedParts:
        """Return which parts of a cell's calls are recorded: see the module text."""
        positional = _positional(own_construct(cell))
        if self.everything:
            return RecordedParts(frozenset(range(positional)), True, positional)
        flow = self._reader.cell(cell)
        drops = type(cell) is nn.Dropout and cell.p > 0
        return RecordedParts(frozenset({0}) if drops else flow.used if flow.new else frozenset(), flow.new or drops, positional)

    def cell(self, cell: Any, seen: Seen) -> None:
        """Have the parts of each call of a cell told: "input", "output", and "grad_output" going backward."""
        back, parts = _Inserted if self.recomputed else _Passed, self.parts(cell)
        if self.everything:
            new = self.backward and self._reader.cell(cell).new
            self._watch(cell, seen, lambda tell: _watch_all(cell, tell, new, back))
        elif parts.result:
            self._watch(cell, seen, lambda tell: _watch_cell(cell, tell, self.backward, back, parts))

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


def _watch_cell(
    cell: Any, seen: Seen, backward: bool, back: Callable[[str, int, Seen], Any], parts: RecordedParts
) -> Callable[[], None]:
    """Put callbacks into a cell, tied to its result alone; return what takes them out.

    MindSpore parses the function that takes the place of `construct`: what is in it must be what a graph can hold.
    """
    own, numbers = cell.construct, count()
    look_in = _no_input
    for i in sorted(parts.inputs):
        look_in = _input_after(look_in, i, _forward("input", i, seen, numbers))
    tell_out, back_out = _forward("output", ALONE, seen, numbers), back("grad_output", ALONE, seen)
    told, told_back = _Told(), _Told(True)
    unknown = mindspore.Tensor([UNKNOWN], mindspore.int32)

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = look_in(args, unknown)
        out = own(*args, **kwargs)
        if told(out):
            number = tell_out(_STOP(out), number)
            out = _DEPEND(out, number)
        return out

    def with_gradient(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = look_in(args, unknown)
        out = own(*args, **kwargs)
        if told(out):
            number = tell_out(_STOP(out), number)
            out = _DEPEND(out, number)
        if told_back(out):
            out = back_out(out, number)
        return out

    chosen = with_gradient if backward else construct

    def training_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen(self, *args, **kwargs) if self.training else own(*args, **kwargs)

    return _replaced(cell, training_only if type(cell) is nn.Dropout else chosen)  # dropout returns its argument else


class _Told(ops.PrimitiveWithInfer):  # pyright: ignore[reportUntypedBaseClass]
    """Decides while MindSpore compiles whether a value is a tensor that an operator can be given: none that is empty.

    gradient: and whether it can have a gradient.
    """

    @ops.prim_attr_register
    def __init__(self, gradient: bool = False) -> None:
        super().__init__("ToldBack" if gradient else "Told")
        self.set_const_prim(True)
        self.back = gradient

    def __infer__(self, x: Any) -> Any:
        told = _is_filled(x["dtype"], x["shape"]) and (not self.back or x["dtype"].element_type() in _DIFFERENTIABLE)
        return {"shape": None, "dtype": None, "value": told}


class _ToldAt(ops.PrimitiveWithInfer):  # pyright: ignore[reportUntypedBaseClass]
    """Decides the same of one place in a tuple, which may be shorter."""

    @ops.prim_attr_register
    def __init__(self, place: int) -> None:
        super().__init__("ToldAt")
        self.set_const_prim(True)
        self.at = place

    def __infer__(self, items: Any) -> Any:
        there = self.at < len(items["shape"]) and _is_filled(items["dtype"][self.at], items["shape"][self.at])
        return {"shape": None, "dtype": None, "value": there}


def _is_filled(dtype: Any, shape: Any) -> bool:
    return isinstance(dtype, mindspore.TensorType) and 0 not in shape


def _no_input(args: Any, number: Any) -> Any:
    return number


def _input_after(look_before: Any, i: int, tell: Any) -> Any:
    """Return what has an argument told after others were: arguments, number of the call → its number."""
    told = _ToldAt(i)

    def look(args: Any, number: Any) -> Any:
        number = look_before(args, number)
        if told(args):
            number = tell(_STOP(_ITEM(args, i)), number)
        return number

    return look


def _watch_all(cell: Any, seen: Seen, backward: bool, back: Callable[[str, int, Seen], Any]) -> Callable[[], None]:
    """Put callbacks at all arguments and results of a cell, tied to each of them; return what takes them out."""
    own, numbers = cell.construct, count()
    forward = partial(_forward, numbers=numbers)
    most = _positional(own)
    look_in = _looking(_several(forward, "input", most, seen), [], False)
    look_out = _looking(_several(forward, "output", _MOST, seen), [], False)
    look_alone = _looking([forward("output", ALONE, seen)], [back("grad_output", ALONE, seen)], backward)
    unknown = mindspore.Tensor([UNKNOWN], mindspore.int32)

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, number = look_in(args, unknown)
        out = own(*given, **kwargs)
        if isinstance(out, tuple):
            found, number = look_out(out, number)
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
    construct.trainprobe_own = own_construct(cell)
    cell.construct = construct.__get__(cell, type(cell))

    def back() -> None:
        if before is None:
            del cell.construct
        else:
            cell.construct = before

    return back
