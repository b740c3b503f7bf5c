"""Reads from the source of a cell what is certain about its result and its arguments, before MindSpore compiles it.

MindSpore adds up the gradients of a value in the order in which it comes upon the uses of that value, as it walks back from the
result. Tying a callback to the result of a cell keeps that order, and so the bits, where two things hold:

- the result is a new value that nothing else uses (`Flow.new`): neither an argument that is handed through, nor a value that
  the cell also uses inside. Else its uses inside and outside would become two sums.
- each argument that the callback is given is one that the result is computed from (`Flow.used`). Else MindSpore would come upon
  the uses of other values in another order.

What the source does not prove is not assumed: a function that cannot be read, an operator that is not listed here and a branch
that may be taken or not count for nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

# layers that hand their input to one operator, and return what an operator computes
_WITH_PARAMETERS = (
    *(nn.Dense, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
    nn.Embedding,
)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax)
ONE_USE = (*_WITH_PARAMETERS, *_ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d)
_LOSSES = (nn.SoftmaxCrossEntropyWithLogits, nn.CrossEntropyLoss)
# operators that return a value of their own whatever they are given, by the lower-case names of functions and primitives
_COMPUTE = frozenset(
    (
        *("matmul", "batchmatmul", "bmm", "biasadd", "bias_add", "dense", "linear", "conv2d", "softmax", "relu"),
        *("relu6", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "square", "logsoftmax"),
        *("log_softmax", "cross_entropy", "rmsnorm"),
    )
)
# operators whose result may be what they are given, as MindSpore leaves out one that changes nothing
_MAY_PASS = frozenset(
    (
        *("reshape", "view", "transpose", "permute", "swapaxes", "cast", "astype", "to", "float", "half", "squeeze"),
        *("unsqueeze", "expand_dims", "expanddims", "flatten", "contiguous", "mean", "sum", "reducemean", "reducesum"),
        *("identity", "t"),
    )
)
_ARITHMETIC = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "realdiv": ast.Div}
_ABOUT = frozenset(("shape", "rank", "dtype"))  # what looks at a value's type alone
_NO_VALUES = frozenset(("shape", "dtype", "ndim", "size"))
_HOOKS = ("_forward_pre_hook", "_forward_hook", "_backward_pre_hook", "_backward_hook", "_bprop_debug")
_LONGEST = 500  # cells of a list that a loop goes over


class _UnreadableError(Exception):
    """A function says what this module does not understand."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What is certain about a call.

    new: it returns a tensor that nothing else uses. used: the places of the arguments that the result is computed from.
    varies: the result depends on parameters, so that it is no constant.
    """

    new: bool = False
    used: frozenset[int] = frozenset()
    varies: bool = False


NOTHING_KNOWN = Flow()


@dataclass(eq=False, slots=True)
class _Value:
    """A value inside of a function. may_be: the values that it may be the same as; of unknown origin where `known` is False."""

    known: bool = False
    may_be: tuple[_Value, ...] = ()
    used: frozenset[int] = frozenset()
    varies: bool = False
    uses: int = 0
    const: Any = None  # a cell, a function or a setting that is no value of the graph
    argument: bool = False

    @property
    def new(self) -> bool:
        return self.known and self.uses == 1 and all(other.new for other in self.may_be)


def own_construct(cell: Any) -> Any:
    """Return the `construct` that a cell has of its own, also while a function of this tool stands in its place."""
    return getattr(cell.construct, "trainprobe_own", cell.construct)


@dataclass(slots=True)
class FlowReader:
    """Reads functions, each once for the object that it belongs to."""

    known: dict[tuple[int, Any], Flow] = field(default_factory=dict)

    def cell(self, cell: Any) -> Flow:
        """Return what is certain about calls of a cell."""
        if any(getattr(cell, name, None) for name in _HOOKS):
            return NOTHING_KNOWN
        kind = type(cell)
        if kind is nn.SequentialCell:
            return self._sequence(list(cell))
        if kind in ONE_USE:
            plain = getattr(cell, "activation", None) is None or type(cell.activation) in _ACTIVATIONS
            return Flow(plain, frozenset({0}), kind in _WITH_PARAMETERS)
        if kind in _LOSSES:
            return Flow(True, frozenset({0, 1}))
        if kind is nn.Dropout or "bprop" in dir(cell):
            return NOTHING_KNOWN
        return self.function(own_construct(cell))

    def _sequence(self, cells: Sequence[Any]) -> Flow:
        value = given = _Value(used=frozenset({0}), argument=True)
        for one in cells:
            value = self.called(one, [value], {})
        value.uses += 1
        return NOTHING_KNOWN if value is given else Flow(value.new, value.used, value.varies)

    def function(self, function: Any) -> Flow:
        """Return what is certain about calls of a Python function or method."""
        owner = getattr(function, "__self__", None)
        key = id(owner), getattr(function, "__func__", function)
        if key not in self.known:
            self.known[key] = NOTHING_KNOWN  # of a function that calls itself
            try:
                self.known[key] = _Body(self, function, owner).flow()
            except (_UnreadableError, OSError, TypeError, SyntaxError, ValueError, AttributeError, RecursionError):
                pass
        return self.known[key]

    def called(self, callee: Any, given: list[_Value], named: dict[str, _Value]) -> _Value:
        """Return the value of a call with arguments."""
        for value in (*given, *named.values()):
            value.uses += 1
        if isinstance(callee, nn.Cell):
            if type(callee) in (nn.Identity, nn.Dropout):
                return self.passed(given)
            return _result(self.cell(callee), _by_place(own_construct(callee), given, named), given)
        name = str(getattr(callee, "name", None) or getattr(callee, "__name__", "")).lower()
        if isinstance(callee, ops.Primitive) or str(getattr(callee, "__module__", "")).startswith("mindspore."):
            return self.operator(name, given, [*named.values()])
        if inspect.isfunction(callee) or inspect.ismethod(callee):
            return _result(self.function(callee), _by_place(callee, given, named), given)
        return _Value()

    def operator(self, name: str, given: list[_Value], more: Iterable[_Value] = ()) -> _Value:
        """Return the value of an operator of MindSpore; the uses of what it is given are counted."""
        if name in _ARITHMETIC and len(given) == 2:
            return arithmetic(_ARITHMETIC[name], given[0], given[1])
        if name in _MAY_PASS:
            return self.passed(given)
        if name in _ABOUT:
            for value in given:
                value.uses -= 1
            return _Value()
        if name in _COMPUTE:
            items = [*given, *more]
            return _Value(True, (), _union(items), any(value.varies for value in items))
        return _Value()

    def passed(self, given: list[_Value]) -> _Value:
        """Return the value of an operator whose result may be what it is given."""
        return _Value(True, (given[0],), given[0].used, given[0].varies) if given else _Value()


def _result(flow: Flow, places: dict[int, _Value] | None, given: list[_Value]) -> _Value:
    if places is None or not flow.new:
        return _Value()
    return _Value(True, (), _union(value for i, value in places.items() if i in flow.used), flow.varies)


def _by_place(function: Any, given: list[_Value], named: dict[str, _Value]) -> dict[int, _Value] | None:
    names = [*inspect.signature(function).parameters]
    if any(name not in names for name in named):
        return None
    return {**dict(enumerate(given)), **{names.index(name): value for name, value in named.items()}}


def _union(values: Iterable[_Value]) -> frozenset[int]:
    return reduce(frozenset.union, (value.used for value in values), frozenset())


def arithmetic(operation: type, left: _Value, right: _Value) -> _Value:
    """Return the value of an operation; MindSpore leaves out one with a constant that changes nothing (`x * 1`, `x + 0`)."""
    varying = [value for value in (left, right) if value.varies]
    if operation is ast.MatMult:
        return _Value(True, (), _union((left, right)), bool(varying))
    if operation in (ast.Add, ast.Sub):
        may_be = () if len(varying) == 2 else tuple(varying) or (left, right)
        return _Value(True, may_be, _union((left, right)), bool(varying))
    if operation in (ast.Mult, ast.Div):
        may_be = () if len(varying) == 2 else tuple(varying) or (left, right)
        return _Value(True, may_be, _survives(left, right), len(varying) == 2)
    return _Value(True, (left, right))


def _survives(left: _Value, right: _Value) -> frozenset[int]:
    """Return what a product is computed from whatever its factors are: one of them may be the constant 0."""
    if left.varies and right.varies:
        return _union((left, right))
    other = right if left.varies else left if right.varies else None
    return other.used if other is not None and other.argument else frozenset()


class _Body:
    """The body of one function."""

    def __init__(self, reader: FlowReader, function: Any, owner: Any) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
            raise _UnreadableError
        self._tree = tree
        self._reader = reader
        self._names = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
        arguments = tree.args
        if arguments.vararg or arguments.kwarg:
            raise _UnreadableError
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self._variables: dict[str, _Value] = {}
        if owner is not None:
            self._variables[names.pop(0)] = _Value(const=owner)
        for i, name in enumerate(names):
            self._variables[name] = _Value(used=frozenset({i}), argument=True)
        self._returned: list[_Value] = []

    def flow(self) -> Flow:
        ends = self._statements(self._tree.body)
        if not ends or not self._returned:
            return NOTHING_KNOWN
        out = self._returned
        used = reduce(frozenset.intersection, (value.used for value in out))
        return Flow(all(value.new for value in out), used, all(value.varies for value in out))

    # ---- statements: each returns whether what follows is not reached --------------------------------------------

    def _statements(self, body: Sequence[ast.stmt]) -> bool:
        return any(self._statement(one) for one in body)  # what follows a `return` is not read

    def _statement(self, one: ast.stmt) -> bool:
        match one:
            case ast.Raise():
                return True
            case ast.Return(value=value) if value is not None:
                self._returned.append(self._used(value))
                return True
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value))
            case ast.AugAssign(target=ast.Name(id=name), op=operation, value=value):
                left, right = self._variable(name), self._value(value)
                self._assign(one.target, self._arithmetic(operation, left, right))
            case ast.If(test=test, body=body, orelse=orelse):
                return self._branches(test, body, orelse)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                self._loop(target, self._value(over), body)
            case ast.Expr(value=value):
                self._value(value)
            case ast.Pass() | ast.Assert():
                pass
            case _:
                raise _UnreadableError
        return False

    def _assign(self, target: ast.expr, value: _Value) -> None:
        match target:
            case ast.Name(id=name):
                self._variables[name] = value
            case ast.Tuple(elts=items) if all(isinstance(item, ast.Name) for item in items):
                value.uses += 2
                for item in items:
                    self._assign(item, _Value())
            case _:
                raise _UnreadableError

    def _branches(self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]) -> bool:
        self._value(test)
        before = dict(self._variables)
        start = {value: value.uses for value in before.values()}
        after: list[dict[str, _Value]] = []
        tallies: list[dict[_Value, int]] = []
        for branch in (body, orelse):
            self._variables = dict(before)
            for value, uses in start.items():
                value.uses = uses
            if not self._statements(branch):
                after.append(self._variables)
            tallies.append({value: value.uses for value in start})
        if len(after) == 2:
            self._variables = _joined(after, tallies)
        elif after:
            self._variables = after[0]
        for value in start:
            value.uses = max(tally[value] for tally in tallies)
        return not after

    def _loop(self, target: ast.expr, over: _Value, body: Sequence[ast.stmt]) -> None:
        cells = list(over.const) if isinstance(over.const, nn.CellList | nn.SequentialCell | list | tuple) else None
        if any(isinstance(node, ast.Break | ast.Continue | ast.Return) for one in body for node in ast.walk(one)):
            raise _UnreadableError
        if cells is not None and len(cells) <= _LONGEST and all(isinstance(cell, nn.Cell) for cell in cells):
            for cell in cells:
                self._assign(target, _Value(const=cell))
                self._statements(body)
            return
        stored = {n.id for one in body for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
        for node in (node for one in body for node in ast.walk(one)):
            if isinstance(node, ast.Name) and node.id in self._variables:
                self._variables[node.id].uses += 2
        self._variables |= {name: _Value() for name in stored}

    # ---- expressions -------------------------------------------------------------------------------------------

    def _used(self, node: ast.expr) -> _Value:
        value = self._value(node)
        value.uses += 1
        return value

    def _variable(self, name: str) -> _Value:
        if name in self._variables:
            return self._variables[name]
        return _Value(const=self._names.get(name))

    def _arithmetic(self, operation: ast.operator, left: _Value, right: _Value) -> _Value:
        left.uses += 1
        right.uses += 1
        return arithmetic(type(operation), left, right)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name(id=name):
                return self._variable(name)
            case ast.Constant():
                return _Value()
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(self._value(inner), name)
            case ast.BinOp(left=left, op=operation, right=right):
                return self._arithmetic(operation, self._value(left), self._value(right))
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(function, args, keywords)
            case ast.Lambda() | ast.NamedExpr() | ast.Yield() | ast.Await() | ast.Starred():
                raise _UnreadableError
            case _:
                return self._parts(node)

    def _parts(self, node: ast.expr) -> _Value:
        """Count the uses of the parts of a tuple, a comparison, an index, …, of which nothing else is known."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Lambda | ast.NamedExpr):
                raise _UnreadableError
            if isinstance(inner, ast.Name) and inner.id in self._variables:
                self._variables[inner.id].uses += 2
        return _Value()

    def _attribute(self, holder: _Value, name: str) -> _Value:
        if holder.const is not None:
            found = getattr(holder.const, name, None)
            if isinstance(found, Parameter):
                return _Value(known=False, varies=True)
            return _Value(const=None if isinstance(found, Tensor) else found)
        if name not in _NO_VALUES:
            holder.uses += 2
        return _Value()

    def _call(self, function: ast.expr, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> _Value:
        star = any(isinstance(one, ast.Starred) for one in args) or any(one.arg is None for one in keywords)
        if star:
            raise _UnreadableError
        given = [self._value(one) for one in args]
        named = {str(one.arg): self._value(one.value) for one in keywords}
        if isinstance(function, ast.Attribute):
            holder = self._value(function.value)
            if holder.const is None:
                for value in (holder, *given, *named.values()):
                    value.uses += 1
                if not (holder.known or holder.argument) or not hasattr(Tensor, function.attr):
                    return _Value()  # it may be a cell of a list
                return self._reader.operator(function.attr.lower(), [holder, *given], named.values())
        callee = self._value(function)
        return self._reader.called(callee.const, given, named)


def _joined(ends: Sequence[dict[str, _Value]], tallies: Sequence[dict[_Value, int]]) -> dict[str, _Value]:
    """Return the variables after two branches; that one of two values goes on counts as a use in its own branch.

    tallies: the uses of each value that was there before, at the end of each branch.
    """
    found: dict[str, _Value] = {}
    for name in {*ends[0]} | {*ends[1]}:
        a, b = (end.get(name, _Value()) for end in ends)
        if a is b:
            found[name] = a
            continue
        for value, tally in zip((a, b), tallies, strict=True):
            if value in tally:
                tally[value] += 1
            else:
                value.uses += 1
        same = a.const is not None or b.const is not None
        found[name] = _Value() if same else _Value(True, (a, b), a.used & b.used, a.varies and b.varies)
    return found
