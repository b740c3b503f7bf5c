"""Read a pickle as data: nothing in the file can run, and nothing that it names is imported.

A pickle is a program that may call whatever it can name. Here it runs on a machine of our own (`pickle_machine`), and a name
is only a name: containers, numbers, NumPy arrays and tensors are built by the functions of a closed table, and any other class
or function becomes an inert `Thing` that remembers its name, its arguments and its state. No list of harmless classes is
needed, because no class is ever looked up: one that is not known costs the value that it stands for and nothing else. A name
that would run code if another program loaded the file (`os.system`, `eval`) is remarked as a warning about the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainprobe.ckpt_compare.storage import remarks
from trainprobe.ckpt_compare.storage.inert_objects import (
    CALLS,
    DTYPES,
    Dropped,
    DtypeName,
    Name,
    PickledArray,
    PickledBytes,
    Stateful,
    Thing,
    checked,
    runs_code,
)
from trainprobe.ckpt_compare.storage.pickle_machine import Machine
from trainprobe.errors import FormatError

DEEPEST = 200  # containers inside containers
SHARED_LEAST, SHARED_MOST = 100_000, 8  # values that may be reached on several paths: so many, and so many times their number
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# what a value of the wrong kind makes a function of the table raise
_MISFITS = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, MemoryError)


class _Table:
    """The names of one file. tensors: further functions, given by the archive's reader (storages and tensor rebuilders)."""

    def __init__(
        self,
        where: str,
        tensors: Mapping[str, Any] | None,
        storage: Callable[[Any], Any] | None,
        unwanted: frozenset[str] = frozenset(),
    ) -> None:
        self._where, self._storage, self._unwanted = where, storage, unwanted
        self._tensors = tensors or {}
        self._warned: set[str] = set()
        self.lost = 0  # tensors that could not be built

    def find(self, module: str, name: str) -> Any:
        """Return a dtype, a storage class, or the name itself."""
        full = f"{_OLD_MODULES.get(module, module)}.{name}"
        known = self._tensors.get(full)
        if isinstance(known, str):
            return known
        if module == "torch" and name in DTYPES:
            return DtypeName(DTYPES[name])
        if known is None and full not in CALLS:
            self._look_at(full)
        return Name(full)

    def _look_at(self, full: str) -> None:
        if full not in self._warned and runs_code(full):
            self._warned.add(full)
            remarks.warn(f"{self._where} names {full}, which would run code in a program that loads the file; nothing was run")

    def call(self, function: Any, args: Sequence[Any], keywords: dict[str, Any] | None = None) -> Any:
        """Build what the table knows, and a `Thing` for all else; a call that does not work costs its value alone."""
        if not isinstance(function, Name):
            return Thing(repr(function)[:80], args, keywords)
        known = self._tensors.get(function)
        if known is None and function in ("copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor"):
            return self._reconstructed(function, args)
        if function == "builtins.getattr":
            return self._member(args)
        known = known or CALLS.get(function)
        if known is None:
            return Thing(function, args, keywords)
        try:
            return known(*args)
        except _MISFITS as error:
            self.lost += function in self._tensors
            return Thing(function, args, keywords, fault=_why(args, error))

    def _reconstructed(self, function: str, args: Sequence[Any]) -> Any:
        if not args or not isinstance(args[0], Name):
            raise FormatError("an object without a class")
        cls, rest = args[0], args[1:]
        if function == "copyreg._reconstructor":  # (class, base, state of the base)
            rest = [a for a in rest[1:] if a is not None]
        elif function == "copyreg.__newobj_ex__":
            rest = rest[0] if rest and isinstance(rest[0], tuple) else ()
        return self.call(cls, list(rest))  # pyright: ignore[reportUnknownArgumentType]

    def _member(self, args: Sequence[Any]) -> Any:
        """Stand for `getattr(SomeEnum, "MEMBER")`, as newer Pythons pickle enums."""
        owner, name = (*args, None, None)[:2]
        full = f"{owner if isinstance(owner, Name) else getattr(owner, 'name', '?')}.{name}"
        self._look_at(full)
        return Thing(str(owner), (name,)) if isinstance(owner, Name) else Thing("builtins.getattr", args)

    def build(self, target: Any, state: Any) -> None:
        """Keep an object's attributes; the attributes of a plain dict (`_metadata` of a state dict) are dropped."""
        if isinstance(target, Stateful):
            target.set_state(state)
        elif isinstance(target, Thing):
            match state:
                case (dict() | None as plain, dict() | None as slots):  # as copyreg pairs __dict__ and __slots__
                    target.state |= {**(plain or {}), **(slots or {})}
                case dict():
                    target.state |= state
                case _:
                    target.state["state"] = state
        elif not isinstance(target, (dict, list, set)):
            raise FormatError(f"attributes are set on a {type(target).__name__}")

    def makes_unchanging(self, function: Any) -> bool:
        """Whether calls of a name make objects that never change after they have got their state."""
        return isinstance(function, Name) and getattr(self._tensors.get(function), "unchanging", False)

    def never_changes(self, made: Any) -> bool:
        """Whether this is such an object."""
        return isinstance(made, Stateful) and made.unchanging

    def append(self, target: Any, items: list[Any]) -> None:
        """Keep the items of a class derived from list."""
        checked(target, Thing).state.setdefault("items", []).extend(items)

    def new_dict(self, before: Any) -> Any:
        """Return an empty dict; `before` is the key that it will belong to, where it is the value of one."""
        return Dropped() if type(before) is str and before in self._unwanted else {}

    def insert(self, target: Any, entries: list[tuple[Any, Any]]) -> None:
        """Keep the entries of a class derived from dict."""
        if not isinstance(target, Dropped):
            checked(target, Thing).state.update(entries)

    def refer(self, pid: Any) -> Any:
        """Turn a reference to a storage into a reference to bytes of the file."""
        if self._storage is None:
            raise FormatError(f"it refers to data outside of itself: {str(pid)[:80]!r}")
        return self._storage(pid)


def _why(args: Sequence[Any], error: Exception) -> str:
    """Say why a value could not be built: what it depends on, or what went wrong."""
    unknown = next((a for a in args if isinstance(a, Thing)), None)
    if unknown is None:
        return f"cannot be read: {error or type(error).__name__}"
    harm = ", which would run code: it is refused" if runs_code(unknown.name) else ", which is not known here"
    return f"depends on {unknown.name}{harm}"


def children(value: Any) -> Iterator[Any]:
    """Yield what a container holds; nothing for a plain value or an array."""
    if isinstance(value, dict):
        yield from value.keys()  # pyright: ignore[reportUnknownVariableType]
        yield from value.values()  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, Thing):
        yield value.args
        yield value.state


_CONTAINERS = (dict, list, tuple, set, frozenset, Thing)


def check_shape(value: Any) -> None:
    """Raise FormatError for data that no walk could get through: in itself, too deep, or shared more than it is large.

    Sixty lists that each hold the one before twice are 2⁶⁰ paths.
    """
    sizes: dict[int, int] = {}  # id of a container → values on all paths below it, 0 while it is being looked at
    depths: dict[int, int] = {}
    pending = [(value, iter([c for c in children(value) if isinstance(c, _CONTAINERS)]))]
    sizes[id(value)] = own = 0
    while pending:
        one, rest = pending[-1]
        child = next(rest, None)
        if child is not None:
            known = sizes.get(id(child))
            if known == 0:
                raise FormatError("its data contains itself")
            if known is None:
                sizes[id(child)] = 0
                pending.append((child, iter([c for c in children(child) if isinstance(c, _CONTAINERS)])))
            if len(pending) > DEEPEST:
                raise FormatError(f"its data is nested more than {DEEPEST} levels deep")
            continue
        pending.pop()
        held = list(children(one))
        inside = [id(c) for c in held if isinstance(c, _CONTAINERS)]
        own += 1 + len(held)
        sizes[id(one)] = 1 + len(held) + sum(sizes[i] for i in inside)
        depths[id(one)] = 1 + max((depths[i] for i in inside), default=0)
    if depths[id(value)] > DEEPEST:
        raise FormatError(f"its data is nested more than {DEEPEST} levels deep")
    if sizes[id(value)] > SHARED_LEAST + SHARED_MOST * own:
        raise FormatError(f"its data is {own:,} values that are reached on {sizes[id(value)]:.3g} paths")


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) for everything in nested dicts, lists, tuples and Things with attributes, depth first."""
    if isinstance(value, Thing) and value.state and not value.fault:
        for at, made in leaves(list(value.args), path):
            if hasattr(made, "load"):  # an array that it was made of
                yield at, made
        value = value.state
    if isinstance(value, Mapping):
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(inner, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from leaves(inner, (*path, str(i)))
    else:
        yield path, value.value if isinstance(value, (PickledArray, PickledBytes)) else value


# what a damaged stream makes the machine raise
_DAMAGED = (*_MISFITS, EOFError, RecursionError)


def read_pickle(
    data: Any,
    where: str,
    tensors: Mapping[str, Any] | None = None,
    storage: Callable[[Any], Any] | None = None,
    unwanted: frozenset[str] = frozenset(),
) -> Any:
    """Return one pickled object as data. Raises FormatError for a damaged or hostile stream.

    data: bytes or a mapped file. tensors: further names, and what a call of each gives. unwanted: keys whose dicts are dropped.
    """
    table = _Table(where, tensors, storage, unwanted)
    return _run(Machine(data, table, alone=True), table, where)


def read_pickle_at(
    data: Any,
    at: int,
    where: str,
    tensors: Mapping[str, Any] | None = None,
    storage: Callable[[Any], Any] | None = None,
) -> tuple[Any, int]:
    """Return the object whose pickle begins at byte `at`, and the first byte behind it."""
    table = _Table(where, tensors, storage)
    machine = Machine(data, table, at)
    return _run(machine, table, where), machine.at


def _run(machine: Machine, table: _Table, where: str) -> Any:
    try:
        found = machine.run()
        check_shape(found)
        for path, leaf in leaves(found) if table.lost else ():
            if isinstance(leaf, Thing) and leaf.fault:
                remarks.fault(f"{where}: {'.'.join(path)}", leaf.fault)
    except _DAMAGED as error:
        said = str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
        raise FormatError(f"{where} holds a pickle that cannot be read: {said}") from error
    return found
