"""The operator calls of one rank and step of a dump, with what it holds of each."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainprobe.engine.core.records import NOT_WRITTEN, Call, Opaque, StepData, Value
from trainprobe.engine.core.step_data import AFTER, GENERATOR, WRITTEN, entry_name, leaves, numbers_of_rows
from trainprobe.engine.storage.dumps import TensorStore, read
from trainprobe.errors import FormatError, UnsafeFile
from trainprobe.op_check.cases import Case, NotChecked, Tensor, laid, strides_of
from trainprobe.op_check.execution import random_input
from trainprobe.op_check.functions import api

_COMPLEX_LEAVES: dict[str, Callable[[Any], Any]] = {
    "torch.device": lambda v: "cpu",
    "torch.Size": lambda v: list(v),
    "ellipsis": lambda v: Ellipsis,
    "torch._C.Generator": lambda v: None,  # its state is recorded beside the call
    "complex": complex,
}


@dataclass(slots=True)
class Unit:
    """One direction of one operator call, as the dump has it. entry: its name there. module: path, or stage outside of modules.

    gradient: of a backward, what reached it and what it handed on. of_inputs: these are the gradients of the call's
    arguments, which the module around it recorded, in order.
    """

    entry: str
    module: str
    call: Call
    direction: str = "forward"
    gradients: Sequence[Any] = ()
    results: Sequence[Any] = ()
    of_inputs: bool = False

    @property
    def handles_tensors(self) -> bool:
        """Return whether a tensor is among what the call was given, wrote and gave."""
        call = self.call
        return any(True for _ in leaves([call.args, call.kwargs, call.out, (call.params or {}).get(WRITTEN)], ""))


class Store(Protocol):
    """The stored values of one rank and step."""

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a value as a NumPy array, bfloat16 and float8 widened to float32. Raises FormatError for what is missing."""
        ...


class RecordedRank:
    """One rank and step: `step_data` with the values in `store`. folder: where it was read from, None while it is in memory."""

    def __init__(self, step_data: StepData, store: Store, folder: Path | None = None) -> None:
        self.folder = folder
        self.step_data = step_data
        self._store = store
        self._fingerprints: dict[str, str] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}  # those of the call that is looked at

    def recognise(self, alike: Callable[[str | None, str | None], bool]) -> None:
        """Have what an argument still is after a call be the value that it was before it, as the calls that follow see it.

        alike: tells whether two stored values have the same bits.
        """
        for call in self.step_data.calls:
            beside = call.params if isinstance(call.params, dict) else {}
            for before, after in (beside.get(AFTER) or {}).values():
                if alike(before.tensor, after.tensor):
                    after.tensor = before.tensor

    @classmethod
    def read(cls, folder: Path) -> RecordedRank:
        """Read a rank's folder of a dump. Raises FormatError where it cannot be read."""
        return cls(read(folder), TensorStore(folder), folder)

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        return numbers_of_rows(self.step_data)

    @property
    def has_tensors(self) -> bool:
        """Return whether the dump stores values, and not statistics alone."""
        return self.step_data.task == "tensor" or any(value.tensor is not None for value in self.step_data.values)

    def units(self) -> Iterator[Unit]:
        """Yield all operator calls in order of execution: each forward, and each backward with its forward."""
        ops = [c for c in self.step_data.calls if c.kind == "op"]
        ops.sort(key=_with_gradient)  # the last of a name and number is the one that the backward belongs to
        forwards = {(c.name, c.call, c.micro or 0): c for c in ops if c.phase != "backward"}
        around = _only_ops(self.step_data.calls)
        for call in self.step_data.calls:
            if call.kind == "op" and call.phase in ("forward", "optimizer"):
                yield Unit(self._entry(call), module_of(call), call)
            elif call.kind == "op" and call.phase == "backward":
                forward = forwards.get((call.name, call.call, call.micro or 0), call)
                given, handed = _listed(call.args), _listed(call.out)
                yield Unit(self._entry(call), module_of(forward), forward, "backward", given, handed)
        yield from self._of_modules(around)

    def _entry(self, call: Call) -> str:
        return entry_name(call, self.step_data.framework)

    def _of_modules(self, around: dict[int, Call]) -> Iterator[Unit]:
        """Yield the backwards of modules that are one operator: they show the gradients of weights too."""
        modules = {(c.name, c.call, c.phase): c for c in self.step_data.calls if c.kind == "module"}
        parameters = {c.name: c for c in self.step_data.calls if c.kind == "parameter"}
        called = Counter(c.name for c in self.step_data.calls if c.kind == "module" and c.phase == "forward")
        passed = Counter(c.name for c in self.step_data.calls if c.kind == "parameter")  # backward passes through a module
        given = {
            (c.name, c.call): len(_listed(c.args)) for c in self.step_data.calls if c.kind == "op" and c.phase == "backward"
        }
        used = Counter(v.tensor for c in around.values() for _, v in leaves([c.args, c.kwargs], "") if v.tensor is not None)
        for module in [c for c in modules.values() if c.phase == "forward" and id(c) in around]:
            op = around[id(module)]
            backward = modules.get((module.name, module.call, "backward"))
            if backward is None:
                continue
            by_key: dict[str, Any] = {}
            for value, gradient in zip(_listed(module.args), _listed(backward.out), strict=False):
                if isinstance(value, Value) and isinstance(gradient, Value) and gradient.note is None and value.tensor:
                    by_key[value.tensor] = gradient
            own = parameters.get(module.name)
            twice = given.get((op.name, op.call), 0) > len(_listed(op.out))  # a gradient was differentiated
            if own is not None and called[module.name] == passed[module.name] == 1 and not twice:
                for short, value in (module.params or {}).items():
                    if isinstance(value, Value) and value.tensor and used[value.tensor] == 1:
                        by_key[value.tensor] = (own.params or {}).get(short)
            arguments = [value for _, value in leaves([op.args, op.kwargs], "")]
            results = [by_key.get(value.tensor) if value.tensor else None for value in arguments]
            if any(isinstance(r, Value) for r in results):
                yield Unit(self._entry(backward), module.name, op, "backward", _listed(backward.args), results, True)

    def case(self, unit: Unit) -> Case:
        """Load what a unit was given and gave. Raises NotChecked where the dump lacks an argument."""
        call = unit.call
        if call.phase == "backward":
            raise NotChecked("its forward is not recorded: outside of modules a dump leaves out what is recomputed")
        args, kwargs = self._tree(call.args), self._tree(call.kwargs) or {}
        beside = call.params if isinstance(call.params, dict) else {}
        if api(call.name) in ("getitem", "setitem"):
            args[1] = tuple(args[1]) if isinstance(args[1], list) else args[1]
        given = [value for _, value in leaves([call.args, call.kwargs], "")]
        backward = unit.direction == "backward"
        told = not any(_flat(call.out)) or _with_gradient(call) == 2  # else it ran once more, as reentrant checkpointing does
        gave = _flat(call.out)
        return Case(
            call.name,
            tuple(args) if isinstance(args, list) else (args,) if args is not None else (),
            kwargs,
            [self._tensor_or_none(v) for v in gave],
            [self._tensor_or_none(v) for v in unit.gradients] if backward else None,
            [self._tensor_or_none(v) for v in unit.results] if backward else (),
            [value.requires_grad is not False or not told for value in given],
            unit.of_inputs,
            written={
                place: [t for v in _flat(tree) if (t := self._tensor_or_none(v)) is not None]
                for place, tree in (beside.get(WRITTEN) or {}).items()
            },
            generator=self._tensor_or_none(beside.get(GENERATOR)),
            overwritten={} if backward else self._overwritten(beside.get(AFTER) or {}),
            unwritten=bool(gave) and all(value.note == NOT_WRITTEN for value in gave),
        )

    def _overwritten(self, looked_at_twice: dict[str, list[Value]]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the arguments whose bits are others after the call, of those that were looked at before and after it."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for place, (before, after) in looked_at_twice.items():
            try:
                a, b = (self._tensor_or_none(value) for value in (before, after))
            except NotChecked:  # there was no room for it
                continue
            if a is not None and b is not None and before.tensor != after.tensor:
                found[place] = a, b
        return found

    def devices(self, unit: Unit) -> Iterator[str]:
        """Yield the devices of the tensors that a call was given."""
        yield from (value.device for _, value in leaves([unit.call.args, unit.call.kwargs], "") if value.device)

    def made_case(self, unit: Unit) -> Case:
        """Return a call with made inputs that keep shape, dtype, layout and range of a dump of statistics; no outputs yet."""
        self._maker: Callable[[Value], Tensor] | None = lambda value: random_input(value, self._range(value))
        try:
            return self.case(unit)
        finally:
            self._maker = None

    _maker = None

    def _range(self, value: Value) -> tuple[float, float]:
        if value.row < 0:
            raise NotChecked("the dump holds neither its arguments nor their range")
        least, most = (self._columns[name][value.row] if name in self._columns else None for name in ("min", "max"))
        if least is None or most is None:
            raise NotChecked("the dump holds neither its arguments nor their range")
        return float(least), float(most)

    def key(self, unit: Unit) -> tuple[str, str]:
        """Return (what the call is given, what it gave) as fingerprints; of equal calls both are equal."""
        call = unit.call
        beside = call.params or {}
        gave = list(unit.results) if unit.direction == "backward" else [call.out, beside.get(WRITTEN), beside.get(AFTER)]
        return self._given(unit, self._fingerprint), repr(self._printed(gave, self._fingerprint))

    def knows_inputs(self, unit: Unit) -> bool:
        """Return whether every value that a call is given was looked at; sparse ones, for one, are not."""
        given = [unit.call.args, unit.call.kwargs, list(unit.gradients)]
        known = (value.tensor is not None or value.row >= 0 or value.note == NOT_WRITTEN for _, value in leaves(given, ""))
        return all(known)

    def sketch(self, unit: Unit) -> str:
        """Return a part of what the call is given, which is quick to take and equal in calls that are given the same."""
        self._arrays.clear()
        return self._given(unit, self._sample)

    def same(self, a: Value, b: Value) -> bool:
        """Return whether two recorded values have the same shape and bits."""
        if (a.dtype, a.shape) != (b.dtype, b.shape) or a.tensor is None or b.tensor is None:
            return False
        return self._sample(a) == self._sample(b) and self._fingerprint(a) == self._fingerprint(b)

    def _array(self, name: str) -> npt.NDArray[Any]:
        if name not in self._arrays:
            self._arrays[name] = np.asarray(self._store.array(name))  # widened, a single number is no array
        return self._arrays[name]

    def _given(self, unit: Unit, of: Callable[[Value], str]) -> str:
        call = unit.call
        tree = [call.args, call.kwargs, list(unit.gradients), (call.params or {}).get(GENERATOR)]
        return repr((call.name, unit.direction, unit.of_inputs, self._printed(tree, of)))

    def _printed(self, tree: Any, of: Callable[[Value], str]) -> Any:
        if isinstance(tree, Value):
            return (tree.dtype, tree.shape, of(tree))
        if isinstance(tree, list):
            return [self._printed(item, of) for item in tree]
        if isinstance(tree, dict):
            return {key: self._printed(item, of) for key, item in tree.items()}
        return tree

    def _sample(self, value: Value) -> str:
        """Return some bytes of a value: its first, and those in the middle."""
        if value.tensor is None:
            return f"row {value.row}"
        try:
            flat = self._array(value.tensor).reshape(-1)
        except UnsafeFile:
            raise
        except FormatError:
            return f"unread {value.tensor}"
        return flat[:8].tobytes().hex() + flat[flat.size // 2 : flat.size // 2 + 8].tobytes().hex()

    def _fingerprint(self, value: Value) -> str:
        if value.tensor is None:
            return f"row {value.row}"
        if value.tensor not in self._fingerprints:
            digest = hashlib.blake2b(digest_size=16)
            try:
                digest.update(np.ascontiguousarray(self._array(value.tensor)).data)
            except UnsafeFile:
                raise
            except FormatError:
                return f"unread {value.tensor}"
            self._fingerprints[value.tensor] = digest.hexdigest()
        return self._fingerprints[value.tensor]

    def _tree(self, tree: Any) -> Any:
        if isinstance(tree, Value):
            return self._tensor(tree)
        if isinstance(tree, list):
            return [self._tree(item) for item in tree]
        if isinstance(tree, dict):
            return {key: self._tree(item) for key, item in tree.items()}
        return _plain(tree) if isinstance(tree, Opaque) else tree

    def _tensor_or_none(self, value: Any) -> Tensor | None:
        return (
            self._tensor(value) if isinstance(value, Value) and (value.tensor is not None or self._maker is not None) else None
        )

    def _tensor(self, value: Value) -> Tensor:
        if value.note == NOT_WRITTEN:  # whatever it holds: the call writes there
            return random_input(value, (0.0, 0.0))
        tensor, strides = (self._maker or self._stored)(value), strides_of(value)
        return tensor if strides is None else laid(tensor, strides)

    def _stored(self, value: Value) -> Tensor:
        if value.tensor is None:
            raise NotChecked(
                f"the dump does not hold the values of an argument: {value.note or 'a plan with `task: tensor` records them'}"
            )
        if value.extra and "placements" in value.extra:
            raise NotChecked("an argument is sharded over ranks")
        try:
            array = self._array(value.tensor)
        except UnsafeFile:
            raise
        except FormatError as error:
            raise NotChecked(str(error)) from None
        dtype = getattr(torch, value.dtype.rpartition(".")[2].lower(), None)
        if not isinstance(dtype, torch.dtype) or array.shape != tuple(value.shape):
            raise NotChecked(
                f"an argument of dtype {value.dtype} and shape {[*value.shape]} is stored as {array.dtype} {[*array.shape]}"
            )
        return _shared(array).to(dtype)


def _shared(array: npt.NDArray[Any]) -> Tensor:
    """Return an array as a tensor in the same memory: nobody writes to what was recorded."""
    if array.dtype.byteorder == ">" or not array.flags.c_contiguous:
        array = np.array(array)
    if torch.is_warn_always_enabled():
        return _unheard(array)
    _have_warned()
    return torch.from_numpy(array)


@cache
def _have_warned() -> None:
    """Have torch say unheard, once in a process, that an array is not to be written to: filters cost more than it does."""
    _unheard(np.frombuffer(b"\0", np.uint8))


def _unheard(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _plain(leaf: Opaque) -> Any:
    """Return what a leaf without numbers was in the call. Raises NotChecked where the dump does not say."""
    if leaf.type == "torch.dtype":
        return getattr(torch, str(leaf.value).rpartition(".")[2])
    if leaf.type == "slice" and isinstance(leaf.value, list) and all(x is None or isinstance(x, int) for x in leaf.value):
        return slice(*leaf.value)
    if leaf.type == "torch.memory_format":
        return getattr(torch, str((leaf.extra or {}).get("format")).rpartition(".")[2], torch.preserve_format)
    if leaf.type in _COMPLEX_LEAVES:
        return _COMPLEX_LEAVES[leaf.type](leaf.value)
    raise NotChecked(f"the dump does not hold an argument of type {leaf.type}")


def _listed(tree: Any) -> list[Any]:
    return tree if isinstance(tree, list) else [] if tree is None else [tree]


def _flat(tree: Any) -> list[Value]:
    return [value for _, value in leaves(tree, "")]


def module_of(call: Call) -> str:
    """Return the path of the module that a call ran in, or the stage outside of modules; empty where neither is known."""
    parent = call.parent
    while isinstance(parent, Call) and parent.kind != "module":
        parent = parent.parent
    return parent.name if isinstance(parent, Call) else parent or ""


def _with_gradient(call: Call) -> int:
    """Return 2 where a result requires a gradient, else 1 for a call that was run again, as checkpointing does, and 0."""
    if any(value.requires_grad is not False for value in _flat(call.out)):
        return 2
    return 1 if call.phase == "recompute" else 0


def _only_ops(calls: Sequence[Call]) -> dict[int, Call]:
    """Return, for each module call that is one operator and nothing else, that operator's call."""
    inside: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        if call.kind in ("op", "module") and call.phase == "forward" and isinstance(call.parent, Call):
            inside[id(call.parent)].append(call)
    found: dict[int, Call] = {}
    for module in (c for c in calls if c.kind == "module" and c.phase == "forward"):
        children = inside[id(module)]
        if len(children) == 1 and children[0].kind == "op":
            ours, theirs = _flat(module.out), _flat(children[0].out)
            if ours and theirs and ours[0].tensor is not None and ours[0].tensor == theirs[0].tensor:
                found[id(module)] = children[0]
    return found
