"""The calls of a dump of PyTorch and of one of MindSpore under one name each, so that they can be paired.

Operators have the names of `op_names.yaml`; those that are not there, which mostly move or reshape data, are left out. A matrix
product of MindSpore with a transposed matrix, and the bias that is added to it, are one `linear`. Parameters have the names
that torch gives them. Plain arguments are left out: they are written otherwise in each framework.

MindSpore shows the gradient at an input as that of everything that used the tensor; PyTorch shows the share of the call. They
are the same where nothing else used the tensor, which is known where ops are recorded; else the gradient is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import Any

from trainprobe.dump_compare.call_slots import with_shape
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.op_names import common_name
from trainprobe.dump_compare.pairing import CallPair, pair_calls
from trainprobe.dump_compare.parameter_states import pair_states
from trainprobe.dump_compare.renamed.mapping_files import Api
from trainprobe.engine.core.naming import TORCH_PARAMETERS, torch_parameter
from trainprobe.engine.core.records import Call, Value
from trainprobe.errors import CompareError

_OF_SEVERAL_NODES = ("linear", "matmul")  # torch records the gradients of the last autograd node of a call
SHARES = (
    "A and B are of two frameworks: gradients at inputs are compared only where ops were recorded and nothing else used the "
    "tensor, because MindSpore shows the gradient of all that used it"
)


def pair_frameworks(
    a: Side,
    b: Side,
    rename: Callable[[str], str] = str,
    apis: Sequence[Api] = (),
    *,
    mapped: bool = False,
    looked_through: tuple[Set[str], Set[str]] = (frozenset(), frozenset()),
) -> tuple[list[CallPair], list[str]]:
    """Return the calls of two dumps of different frameworks, each with its partner, and what is to be said of the rest.

    rename: is given each name of A. apis: operators that a user says belong together. Ops without a partner are counted and
    left out. mapped: whether the user names values that belong together, so that no call needs a partner by name.
    looked_through: see pair_calls.
    """
    mine, theirs = (_Named(side, _user_ops(apis, side.step_data.framework)) for side in (a, b))
    shares = mine if a.step_data.framework == "pytorch" else theirs
    pairs = pair_calls(mine.calls, theirs.calls, rename, looked_through, (mine.looks, theirs.looks))
    found = [pair for pair in pairs if (pair.a is not None and pair.b is not None) or _kind(pair) != "op"]
    alone = Counter(
        "A" if pair.b is None else "B" for pair in pairs if (pair.a is None or pair.b is None) and _kind(pair) == "op"
    )
    if not mapped and not any(pair.a is not None and pair.b is not None for pair in found):
        raise CompareError(
            f"{a.folder} is of {a.step_data.framework}, {b.folder} of {b.step_data.framework}, and no call of one has a "
            "partner in the other: record both at level L0 or mix, and name modules that differ with --rename or --mapping"
        )
    for pair in found:
        _same_layout(pair)
        _same_arguments(pair)
        _same_gradients(pair, shares.others)
        _same_shapes(pair)
    for side in (mine, theirs):
        side.name_as_recorded()
    left = {"A": mine.left_out + alone["A"], "B": theirs.left_out + alone["B"]}
    notes = [SHARES]
    if any(left.values()):
        notes.append(
            f"{left['A']} op calls of A and {left['B']} of B, most of which only move or reshape data, have no partner by name "
            "and are not compared"
        )
    return found, notes


def pair_states_of_frameworks(
    a: Side, b: Side, rename: Callable[[str], str], pairs: Sequence[CallPair]
) -> tuple[list[CallPair], list[str]]:
    """Return what both dumps hold of parameters and their optimizer, behind `pairs`, and what is to be said of the rest.

    rename: is given the name of each module of A.
    """
    states = a.step_data.states, b.step_data.states
    if not all(states):
        lacking = " nor ".join(name for name, held in zip("AB", states, strict=True) if not held)
        return [], [f"{lacking} holds nothing of parameters and optimizer beside the calls of modules"] if any(states) else []
    place = max((pair.place for pair in pairs), default=-1) + 1
    found: list[CallPair] = []
    left: Counter[str] = Counter()
    for pair in pair_states(*states, rename, place, common=torch_parameter):
        slots = [set((call.params or {}) if call is not None else ()) for call in (pair.a, pair.b)]
        left.update(slots[0] ^ slots[1])
        for call in (pair.a, pair.b):
            if call is not None:
                call.params = {slot: value for slot, value in (call.params or {}).items() if slot in slots[0] & slots[1]}
        if slots[0] & slots[1]:
            _same_layout(pair)
            found.append(pair)
    said = ", ".join(f"`{slot}` of {times}" for slot, times in left.items())
    return found, [f"of parameters, one side alone holds {said}: not compared"] if left else []


@dataclass(frozen=True, slots=True)
class _UserOp:
    """What a user says of an op: its common name, and the places of arguments and outputs that count; all where none are."""

    common: str
    args: Sequence[int] = ()
    outputs: Sequence[int] = ()


def _user_ops(apis: Sequence[Api], framework: str) -> dict[str, _UserOp]:
    """Return op as a framework's dump names it → what a user says of it."""
    side = 0 if framework == "mindspore" else 1
    return {
        (api.mindspore, api.pytorch)[side]: _UserOp(
            f"{api.mindspore} = {api.pytorch}", [pair[side] for pair in api.args], [pair[side] for pair in api.outputs]
        )
        for api in apis
    }


@dataclass
class _Named:
    """Calls of one side by common names.

    user_ops: what a user says of ops. calls: copies. left_out: how many op calls have no common name. others: id of a backward
    copy → the inputs whose tensors other calls were given too.
    """

    side: Side
    user_ops: Mapping[str, _UserOp] = field(default_factory=dict[str, _UserOp])
    calls: list[Call] = field(default_factory=list[Call])
    left_out: int = 0
    others: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    _recorded: list[tuple[Call, str, int]] = field(default_factory=list[tuple[Call, str, int]])
    _copies: dict[int, Call] = field(default_factory=dict[int, Call])
    _numbers: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict[tuple[str, int], tuple[str, int]])
    _counts: Counter[str] = field(default_factory=Counter[str])
    _products: dict[tuple[str, int], Call] = field(default_factory=dict[tuple[str, int], Call])  # of MindSpore, forward
    _biases: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict[tuple[str, int], tuple[str, int]])
    _forwards: dict[tuple[str, int], Call] = field(default_factory=dict[tuple[str, int], Call])  # of modules
    _last: tuple[tuple[str, int], Call] | None = None  # the product that a bias may be added to
    _bias: tuple[tuple[str, int], list[Any]] | None = None  # of which product, and the gradient at its bias

    def __post_init__(self) -> None:
        self._once = _used_once(self.side)
        for call in self.side.step_data.calls:
            if call.kind == "op":
                self._op(call)
            else:
                self._keep(call, self._plain(call))

    def looks(self, call: Call) -> tuple[Hashable, Hashable]:
        """Return how large what an op is given is, alone and with what it gives: what tells it from others of its shapes.

        An op that gives what it is given (`x * 1`, within a loss that is one op elsewhere) is told by its result alone.
        """
        if call.kind != "op":
            return None, None
        given, results = ([self._size(value) for value in side or () if value is not None] for side in (call.args, call.out))
        rough = [tuple(f"{size[0]:.2e}" for size in side) for side in (given, results)]
        return (object() if results and results[0] in given else rough[0]), (rough[0], rough[1])

    def _size(self, value: Value) -> tuple[float, ...]:
        numbers = self.side.numbers(value)
        return tuple(numbers.get(name, 0.0) for name in ("norm", "max", "min"))

    def name_as_recorded(self) -> None:
        """Give the copies the names and numbers that the dump has."""
        for call, name, number in self._recorded:
            call.name, call.call = name, number

    def _keep(self, call: Call, made: Call) -> Call:
        if isinstance(call.parent, Call):
            made.parent = self._copies.get(id(call.parent), call.parent)
        self._copies[id(call)] = made
        self.calls.append(made)
        self._recorded.append((made, call.name, call.call))
        return made

    def _plain(self, call: Call) -> Call:
        made = copy(call)
        made.params = {TORCH_PARAMETERS.get(name, name): value for name, value in (call.params or {}).items()} or None
        made.kwargs = None
        if call.kind == "module" and call.phase == "backward":
            made.args, made.out = _tensors(call.args), _tensors(call.out, gaps=True)
            forward = self._forwards.get((call.name, call.call))
            self._note_others(made, forward.args if forward is not None else [])
        elif call.kind == "module":
            made.args, made.out = [*_tensors(call.args), *_tensors(call.kwargs)], _tensors(call.out)
            self._forwards[call.name, call.call] = made
        return made

    def _op(self, call: Call) -> None:
        key = call.name, call.call
        if call.phase == "backward":
            self._op_backward(call, key)
        elif call.name == "Primitive.BiasAdd" and self._last is not None:
            self._add_bias(call, key)
        elif (common := self._common(call.name)) is None or isinstance(call.parent, str):
            self.left_out += 1
            self._last = self._last if call.name == "Primitive.Reshape" else None
        else:
            self._op_forward(call, key, common)

    def _op_forward(self, call: Call, key: tuple[str, int], common: str) -> None:
        made = copy(call)
        made.args, made.kwargs = [*_tensors(call.args), *_tensors(call.kwargs)], None
        made.out = _tensors(call.out)[:1]
        if call.name in self.user_ops:
            self._take_user_op(made, call, self.user_ops[call.name])
        if common == "embedding" and len(made.args) > 1 and "int" not in made.args[0].dtype.lower():
            made.args = [made.args[1], made.args[0], *made.args[2:]]
        self._last = None
        if call.name == "Primitive.MatMul" and list(call.args or ())[2:4] == [False, True]:
            common, self._last = "linear", (key, made)
        self._keep(call, made)
        made.name, made.call = common, self._counts[common]
        self._counts[common] += 1
        self._numbers[key] = made.name, made.call
        self._products[key] = made

    def _common(self, name: str) -> str | None:
        return self.user_ops[name].common if name in self.user_ops else common_name(name)

    def _take_user_op(self, made: Call, call: Call, op: _UserOp) -> None:
        """Take the arguments and outputs of an op that a user names, in that order."""
        given = [*(call.args or ()), *(call.kwargs or {}).values()]
        results = call.out if isinstance(call.out, list | tuple) else [call.out]
        made.args = _tensors([given[i] for i in op.args if i < len(given)] if op.args else given)
        made.out = _tensors([results[i] for i in op.outputs if i < len(results)] if op.outputs else results)

    def _add_bias(self, call: Call, key: tuple[str, int]) -> None:
        """Make a product and the bias that is added to it one linear."""
        assert self._last is not None
        product, made = self._last
        made.args = [*made.args, *_tensors(call.args)[1:]]
        made.out = _tensors(call.out)[:1]
        self._biases[key] = product
        self._last = None

    def _op_backward(self, call: Call, key: tuple[str, int]) -> None:
        gradients = _tensors(call.out, gaps=True)
        if key in self._biases:  # the gradient at the bias comes before that at the product's inputs
            self._bias = self._biases[key], gradients[1:2]
            return
        if key not in self._numbers:
            self.left_out += 1
            return
        if self._bias is not None and self._bias[0] == key:
            gradients = [*gradients[:2], *self._bias[1]]
        given = self._products[key].args
        made = copy(call)
        made.args, made.kwargs, made.params = None, None, None
        made.out = gradients
        self._note_others(made, given)
        self._keep(call, made)
        made.name, made.call = self._numbers[key]

    def _note_others(self, made: Call, given: Sequence[Value]) -> None:
        """Keep at which inputs the gradient is not that of this call alone."""
        alone = {i for i, value in enumerate(given) if _look(self.side, value) in self._once}
        self.others[id(made)] = set(range(len(made.out or ()))) - alone


def _used_once(side: Side) -> frozenset[Hashable]:
    """Return the looks of tensors that one op alone was given, of those that calculate."""
    seen: Counter[Hashable] = Counter()
    for call in side.step_data.calls:
        if call.kind == "op" and call.phase == "forward" and common_name(call.name) is not None:
            seen.update({_look(side, value) for value in _tensors(call.args)})
    return frozenset(look for look, times in seen.items() if times == 1)


def _look(side: Side, value: Value) -> Hashable:
    """Return what tells a tensor from others, whatever its shape: its numbers to five digits."""
    numbers = side.numbers(value)
    return tuple(f"{numbers.get(name, 0.0):.4e}" for name in ("max", "min", "norm"))


def _tensors(tree: Any, gaps: bool = False) -> list[Any]:
    """Return the tensors in a tree, in order. gaps: None where something else stands."""

    def walk(x: Any) -> Iterator[Any]:
        if isinstance(x, Value):
            yield x
        elif isinstance(x, dict):
            for inner in x.values():  # pyright: ignore[reportUnknownVariableType]
                yield from walk(inner)
        elif isinstance(x, list | tuple):
            for inner in x:  # pyright: ignore[reportUnknownVariableType]
                yield from walk(inner)
        elif gaps:
            yield None

    return list(walk(tree)) if tree is not None else []


def _same_layout(pair: CallPair) -> None:
    """Let a matrix that one framework keeps transposed have the shape of the other: its statistics are then compared."""
    if pair.a is None or pair.b is None or not pair.a.params or not pair.b.params:
        return
    for name, mine in pair.a.params.items():
        theirs = pair.b.params.get(name)
        if isinstance(mine, Value) and isinstance(theirs, Value) and len(mine.shape) == 2:
            shape = tuple(mine.shape)
            if shape != tuple(theirs.shape) and shape == tuple(theirs.shape)[::-1]:
                pair.b.params[name] = with_shape(theirs, shape)


def _same_arguments(pair: CallPair) -> None:
    """Leave out tensors that an op of one framework alone is given: numbers of the other, such as an epsilon."""
    if pair.a is None or pair.b is None or pair.a.kind != "op" or pair.a.phase == "backward":
        return
    longer, other = sorted((pair.a, pair.b), key=lambda call: -len(call.args or ()))
    wanted, kept = Counter(map(_count, other.args or ())), list[Value]()
    for value in longer.args or ():
        if wanted[_count(value)] > 0:
            wanted[_count(value)] -= 1
            kept.append(value)
    if len(kept) == len(other.args or ()):
        longer.args = kept


def _same_gradients(pair: CallPair, others: dict[int, set[int]]) -> None:
    """Leave out gradients at inputs that are not the same thing in both frameworks."""
    if pair.a is None or pair.b is None or pair.a.phase != "backward" or pair.a.kind not in ("module", "op"):
        return
    left = others.get(id(pair.a), others.get(id(pair.b), set()))
    both = list(zip(pair.a.out or (), pair.b.out or (), strict=False))
    if pair.a.name in _OF_SEVERAL_NODES and pair.a.kind == "op":
        both = []
    kept = [None if i in left or x is None or y is None or _count(x) != _count(y) else (x, y) for i, (x, y) in enumerate(both)]
    pair.a.out, pair.b.out = ([None if item is None else item[side] for item in kept] for side in (0, 1))


def _same_shapes(pair: CallPair) -> None:
    """Let tensors of an op that one framework flattens have the shapes of the other: their statistics are then compared."""
    if pair.a is None or pair.b is None or pair.a.kind != "op":
        return
    for side in ("args", "out"):
        mine, theirs = getattr(pair.a, side) or [], getattr(pair.b, side) or []
        for i, (x, y) in enumerate(zip(mine, theirs, strict=False)):
            if x is not None and y is not None and tuple(x.shape) != tuple(y.shape) and _count(x) == _count(y):
                theirs[i] = with_shape(y, tuple(x.shape))


def _count(value: Value) -> int:
    return prod(value.shape)


def _kind(pair: CallPair) -> str:
    call: Any = pair.a or pair.b
    return call.kind
