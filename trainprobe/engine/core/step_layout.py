"""The layout of a step: all that its calls say apart from their numbers. Steps of a training mostly have the same.

What the monitor and the writers make of a layout is made once for the steps that share it. This is the only place where
anything about a step is remembered for the steps that follow.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from trainprobe.compiled import native
from trainprobe.engine.core.records import Call, Opaque, StepData, Value

T = TypeVar("T")
KEPT = 16  # layouts; a training has one for each set of programs that want a step


class StepLayout:
    """Stands for all steps with the same calls, and keeps what is worked out of them."""

    __slots__ = ("_derived",)

    def __init__(self) -> None:
        self._derived: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def derived(self, owner: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned when this owner asked first; it is kept for as long as the owner lives."""
        found = self._derived.get(owner)
        if found is None:
            found = self._derived[owner] = make()
        return found


_known: dict[bytes, StepLayout] = {}


def layout_of(step_data: StepData) -> StepLayout:
    """Return the layout of a collected step: the same object for collected steps that differ in nothing but their numbers.

    The names of features and scalars belong to it as the calls do.
    """
    found: StepLayout | None = step_data.layout
    if found is None:
        key = _structure_key(step_data)
        found = _known.get(key)
        if found is None:
            if len(_known) >= KEPT:
                _known.pop(next(iter(_known)), None)
            found = _known[key] = StepLayout()
        step_data.layout = found
    return found


def _structure_key(step_data: StepData) -> bytes:
    """Return a fingerprint of all that the calls say, 64 bytes; numbers that stand in rows are no part of it."""
    features = [(f.name, f.slot, f.call, f.micro, f.numbers.size, f.edges is None) for f in step_data.features]
    about = features, list(step_data.scalars), [list(stack) for stack in step_data.stacks]
    if native is not None:
        return hashlib.blake2b(native.structure(step_data.calls) + repr(about).encode(errors="surrogatepass")).digest()
    structure = _Structure(step_data)
    whole = structure.calls, structure.values(), about
    try:
        told = marshal.dumps(whole, _WITHOUT_REFERENCES)
    except ValueError:  # a class of the program's own, such as a kind of text
        told = repr(whole).encode(errors="backslashreplace")
    return hashlib.blake2b(told).digest()


_WITHOUT_REFERENCES = 2  # the version of the format in which equal things are equal bytes, whoever else holds them


_head_of_value = attrgetter("type", "dtype", "shape", "device", "requires_grad")
_rest_of_value = attrgetter("note", "tensor", "extra")
_NO_REST = (None, None, None)
_about_call = attrgetter("kind", "name", "call", "phase", "cls")
_rest_of_call = attrgetter("micro", "stack", "node")


class _Structure:
    """The calls of a step as plain tuples, lists and dicts, whose bytes tell them apart; a tuple of one numbers a value."""

    def __init__(self, step_data: StepData) -> None:
        self._heads: dict[tuple[Any, ...], int] = {}  # few differ: each is written once
        self._head_of: list[int] = []
        self._rows: list[int] = []
        self._rests: dict[int, tuple[Any, ...]] = {}
        self._numbers: dict[int, tuple[int]] = {}
        self._places = {id(call): i for i, call in enumerate(step_data.calls)}
        self.calls = [self._call(call) for call in step_data.calls]

    def values(self) -> tuple[Any, ...]:
        """Return what is known of the values, in the order of their numbers."""
        return repr(list(self._heads)), self._head_of, self._rows, repr(self._rests)

    def _call(self, call: Call) -> tuple[Any, ...]:
        trees = [self._tree(tree) for tree in (call.args, call.kwargs, call.out, call.params)]
        return _about_call(call), _rest_of_call(call), self._parent(call.parent), trees

    def _parent(self, parent: Call | str | None) -> Any:
        if parent is None or isinstance(parent, str):
            return parent
        place = self._places.get(id(parent))
        return _about_call(parent) if place is None else place

    def _tree(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is Value:
            return self._numbers.get(id(tree)) or self._number(tree)
        if kind is list:
            return [self._tree(item) for item in tree]
        if kind is dict:
            return {key: self._tree(item) for key, item in tree.items()}
        return (kind.__name__, repr(tree)) if kind is Opaque else tree

    def _number(self, value: Value) -> tuple[int]:
        number = self._numbers[id(value)] = (len(self._rows),)
        self._rows.append(value.row)
        self._head_of.append(self._heads.setdefault(_head_of_value(value), len(self._heads)))
        rest = _rest_of_value(value)
        if rest != _NO_REST:
            self._rests[number[0]] = rest
        return number
