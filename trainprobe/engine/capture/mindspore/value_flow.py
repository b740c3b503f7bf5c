"""Reads from the source of a cell what is certain about its result and its arguments, before MindSpore compiles it.

MindSpore adds up the gradients of a value in the order in which it comes upon the uses of that value, as it walks back from the
result. Tying a callback to the result of a cell keeps that order, and so the bits, where two things hold:

- the result is a new value that nothing else uses (`Flow.new`): neither an argument that is handed through, nor a value that
  the cell also uses inside. Else its uses inside and outside would become two sums.
- each argument that the callback is given is one that the result is computed from (`Flow.used`). Else MindSpore would come upon
  the uses of other values in another order.

So a function is read once from top to bottom: `values` says what each operator makes, and the uses of each value are counted.
What the source does not prove is not assumed: a function that cannot be read, and a branch that may be taken or not, count for
nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from trainprobe.engine.capture.mindspore.values import ABOUT, UNKNOWN, Value, arithmetic, either, operated, passed, places

# layers that hand their input to one operator, and return what an operator computes
_WITH_PARAMETERS = (
    *(nn.Dense, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
    nn.Embedding,
)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax)
_ONE_USE = (*_WITH_PARAMETERS, *_ACTIVATIONS, nn.MaxPool2d, nn.AvgPool2d)
_LOSSES = (nn.SoftmaxCrossEntropyWithLogits, nn.CrossEntropyLoss)
_NO_VALUES = frozenset(("shape", "dtype", "ndim", "size"))
_HOOKS = ("_forward_pre_hook", "_forward_hook", "_backward_pre_hook", "_backward_hook", "_bprop_debug")
_LONGEST = 500  # cells of a list that a loop goes over
_UNREADABLE = (ast.Lambda, ast.NamedExpr, ast.Yield, ast.Await, ast.Starred)


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


def own_construct(cell: Any) -> Any:
    """Return the `construct` that a cell has of its own, also while a function of this tool stands in its place."""
    return getattr(cell.construct, "trainprobe_own", cell.construct)


@dataclass(slots=True)
class FlowReader:
    """Reads cells and functions, each function once for the object that it belongs to."""

    known: dict[tuple[int, Any], Flow] = field(default_factory=dict)

    def cell(self, cell: Any) -> Flow:
        """Return what is certain about calls of a cell."""
        kind = type(cell)
        if any(getattr(cell, name, None) for name in _HOOKS):
            return NOTHING_KNOWN
        if kind is nn.SequentialCell:
            return _Calls(self).one_after_another(list(cell))
        if kind in _ONE_USE:
            plain = getattr(cell, "activation", None) is None or type(cell.activation) in _ACTIVATIONS
            return Flow(plain, frozenset({0}), kind in _WITH_PARAMETERS)
        if kind in _LOSSES:
            return Flow(True, frozenset({0, 1}))
        if kind is nn.Dropout or "bprop" in dir(cell):
            return NOTHING_KNOWN
        return self.function(own_construct(cell))

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


class _Calls:
    """Counts the uses of values as they are handed on, on the way through a function that is being read."""

    def __init__(self, reader: FlowReader) -> None:
        self._reader = reader
        self._uses: Counter[Value] = Counter()

    def _new(self, value: Value) -> bool:
        """Tell whether a value is a new one that is used once."""
        return value.known and self._uses[value] == 1 and all(map(self._new, value.may_be))

    def _escapes(self, value: Value) -> None:
        """Count a use of which nothing is known: there may be more than one."""
        self._uses[value] += 2

    def one_after_another(self, cells: Sequence[Any]) -> Flow:
        """Return what is certain about cells of which each gets the result of the one before."""
        value = given = Value(used=frozenset({0}), argument=True)
        for cell in cells:
            value = self._called(cell, [value], {})
        self._uses[value] += 1
        return NOTHING_KNOWN if value is given else Flow(self._new(value), value.used, value.varies)

    def _called(self, callee: Any, given: list[Value], named: Mapping[str, Value]) -> Value:
        """Return the value of a call with arguments."""
        is_cell = isinstance(callee, nn.Cell)
        if not is_cell and (
            isinstance(callee, ops.Primitive) or str(getattr(callee, "__module__", "")).startswith("mindspore.")
        ):
            return self._operated(str(getattr(callee, "name", None) or getattr(callee, "__name__", "")), given, named)
        self._uses.update([*given, *named.values()])
        if is_cell and type(callee) in (nn.Identity, nn.Dropout):
            return passed(given)
        if is_cell:
            flow, signature = self._reader.cell(callee), inspect.signature(own_construct(callee))
        elif inspect.isfunction(callee) or inspect.ismethod(callee):
            flow, signature = self._reader.function(callee), inspect.signature(callee)
        else:
            return UNKNOWN
        names = [*signature.parameters]
        if not flow.new or any(name not in names for name in named):
            return UNKNOWN
        at = {**dict(enumerate(given)), **{names.index(name): value for name, value in named.items()}}
        return Value(True, used=places(value for i, value in at.items() if i in flow.used), varies=flow.varies)

    def _operated(self, name: str, given: list[Value], named: Mapping[str, Value]) -> Value:
        if name.lower() not in ABOUT:
            self._uses.update([*given, *named.values()])
        return operated(name.lower(), given, named.values())


class _Body(_Calls):
    """The body of one function."""

    def __init__(self, reader: FlowReader, function: Any, owner: Any) -> None:
        super().__init__(reader)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or tree.args.vararg or tree.args.kwarg:
            raise _UnreadableError
        self._own_body = tree.body
        self._around = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
        names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs)]
        self._variables = {names.pop(0): Value(const=owner)} if owner is not None else {}
        self._variables |= {name: Value(used=frozenset({i}), argument=True) for i, name in enumerate(names)}
        self._returned: list[Value] = []

    def flow(self) -> Flow:
        """Return what is certain about calls of the function."""
        out = self._returned
        if not self._statements(self._own_body) or not out:
            return NOTHING_KNOWN
        used = frozenset.intersection(*(value.used for value in out))
        return Flow(all(map(self._new, out)), used, all(value.varies for value in out))

    # ---- statements: each returns whether what follows is not reached --------------------------------------------

    def _statements(self, body: Sequence[ast.stmt]) -> bool:
        return any(self._statement(one) for one in body)  # what follows a `return` is not read

    def _statement(self, one: ast.stmt) -> bool:
        match one:
            case ast.Raise():
                return True
            case ast.Return(value=value) if value is not None:
                self._returned.append(self._value(value))
                self._uses[self._returned[-1]] += 1
                return True
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value))
            case ast.AugAssign(target=ast.Name() as target, op=operation, value=value):
                self._assign(target, self._value(ast.BinOp(ast.Name(target.id, ast.Load()), operation, value)))
            case ast.If(test=test, body=body, orelse=orelse):
                self._value(test)
                return self._branches(body, orelse)
            case ast.For(target=target, iter=over, body=body, orelse=[]):
                self._loop(target, self._value(over), body)
            case ast.Expr(value=value):
                self._value(value)
            case ast.Pass() | ast.Assert():
                pass
            case _:
                raise _UnreadableError
        return False

    def _assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self._variables[name] = value
            case ast.Tuple(elts=items) if all(isinstance(item, ast.Name) for item in items):
                self._escapes(value)
                for item in items:
                    self._assign(item, UNKNOWN)
            case _:
                raise _UnreadableError

    def _branches(self, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt]) -> bool:
        """Read both branches from the same state; of each value, the branch that uses it more often counts."""
        before, uses = self._variables, self._uses
        counted: list[Counter[Value]] = []
        reached: list[dict[str, Value]] = []  # what variables are where a branch goes on
        for branch in (body, orelse):
            self._variables, self._uses = dict(before), Counter(uses)
            if not self._statements(branch):
                reached.append(self._variables)
            counted.append(self._uses)
        if len(reached) == 2:
            self._variables = {}
            for name in {*reached[0], *reached[1]}:
                a, b = (variables.get(name, UNKNOWN) for variables in reached)
                self._variables[name] = a if a is b else either(a, b)
                if a is not b:  # each goes on from its own branch, which is a use
                    counted[0][a] += 1
                    counted[1][b] += 1
        elif reached:
            self._variables = reached[0]
        self._uses = counted[0] | counted[1]
        return not reached

    def _loop(self, target: ast.expr, over: Value, body: Sequence[ast.stmt]) -> None:
        inside = [node for one in body for node in ast.walk(one)]
        if any(isinstance(node, ast.Break | ast.Continue | ast.Return) for node in inside):
            raise _UnreadableError
        cells = list(over.const) if isinstance(over.const, nn.CellList | nn.SequentialCell | list | tuple) else None
        if cells is not None and len(cells) <= _LONGEST and all(isinstance(cell, nn.Cell) for cell in cells):
            for cell in cells:
                self._assign(target, Value(const=cell))
                self._statements(body)
            return
        self._parts(inside)
        names = [node for node in (*inside, *ast.walk(target)) if isinstance(node, ast.Name)]
        self._variables |= {node.id: UNKNOWN for node in names if isinstance(node.ctx, ast.Store)}

    # ---- expressions -------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return self._variables[name] if name in self._variables else Value(const=self._around.get(name))
            case ast.Constant():
                return UNKNOWN
            case ast.Attribute(value=inner, attr=name):
                return self._attribute(self._value(inner), name)
            case ast.BinOp(left=left, op=operation, right=right):
                both = self._value(left), self._value(right)
                self._uses.update(both)
                return arithmetic(type(operation), *both)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(function, args, keywords)
            case _:
                nodes = [*ast.walk(node)]
                if isinstance(node, _UNREADABLE) or any(isinstance(inner, ast.Lambda | ast.NamedExpr) for inner in nodes):
                    raise _UnreadableError
                return self._parts(nodes)

    def _parts(self, nodes: Sequence[ast.AST]) -> Value:
        """Count the uses of the parts of a tuple, a comparison, an index, a loop, …, of which nothing else is known."""
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in self._variables:
                self._escapes(self._variables[node.id])
        return UNKNOWN

    def _attribute(self, holder: Value, name: str) -> Value:
        if holder.const is None:
            if name not in _NO_VALUES:
                self._escapes(holder)
            return UNKNOWN
        found = getattr(holder.const, name, None)
        if isinstance(found, Parameter):
            return Value(varies=True)
        return Value(const=None if isinstance(found, Tensor) else found)

    def _call(self, function: ast.expr, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> Value:
        if any(isinstance(one, ast.Starred) for one in args) or any(one.arg is None for one in keywords):
            raise _UnreadableError
        given = [self._value(one) for one in args]
        named = {str(one.arg): self._value(one.value) for one in keywords}
        holder = self._value(function.value) if isinstance(function, ast.Attribute) else None
        if isinstance(function, ast.Attribute) and holder is not None and holder.const is None:
            if (holder.known or holder.argument) and hasattr(Tensor, function.attr):
                return self._operated(function.attr, [holder, *given], named)
            self._uses.update([holder, *given, *named.values()])
            return UNKNOWN  # it may be a cell of a list
        return self._called(self._value(function).const, given, named)
