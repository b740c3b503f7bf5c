"""Read a pickle as data: nothing in the file can run, and nothing that it names is imported.

A pickle is a program that may call whatever it can name. Here it runs on a machine of our own (`pickle_machine`), and a name
is only a name: containers, numbers, NumPy arrays and tensors are built by the functions of a closed table, and any other class
or function becomes an inert `Thing` that remembers its name, its arguments and its state. No list of harmless classes is
needed, because no class is ever looked up: one that is not known costs the value that it stands for and nothing else. A name
that would run code if another program loaded the file (`os.system`, `eval`) is remarked as a warning about the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from trainprobe.ckpt_compare.storage import remarks
from trainprobe.ckpt_compare.storage.pickle_machine import Machine, check_key
from trainprobe.errors import FormatError, UnsafeFile

T = TypeVar("T")
DEEPEST = 200  # containers inside containers
SHARED_LEAST, SHARED_MOST = 100_000, 8  # values that may be reached on several paths: so many, and so many times their number


class Name(str):
    """The full name of a class or function, `signal.Signals`; never the class or function itself."""

    __slots__ = ()


class Thing:
    """What a call of a class or function would give: its name, arguments and attributes, never its code.

    fault: why a value that should have been read is not ("" for classes that are simply not known).
    """

    __slots__ = ("args", "fault", "name", "state")

    def __init__(self, name: str, args: Sequence[Any] = (), state: Mapping[str, Any] | None = None, fault: str = "") -> None:
        self.name = name
        self.args = tuple(args)
        self.state: dict[Any, Any] = dict(state or {})
        self.fault = fault

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    def __repr__(self) -> str:
        inner = ", ".join([*(repr(a) for a in self.args), *(f"{k}={v!r}" for k, v in self.state.items())])
        return f"{self.name.rpartition('.')[2]}({inner})"


class DtypeName(str):
    """The name of a torch dtype, `float32`."""

    __slots__ = ()


# names that run code, open files or reach the network when they are called: whoever writes them into a checkpoint wants that
_RUNS_CODE = re.compile(
    r"""
    (?:os|posix|nt|posixpath|subprocess|_posixsubprocess|pty|sys|runpy|importlib|imp|code|codeop|ctypes|_ctypes|cffi|marshal)\..+
    | (?:pickle|_pickle|shelve|dill|cloudpickle|joblib|shutil|socket|_socket|ssl|http|urllib|requests|ftplib|smtplib)\..+
    | (?:webbrowser|multiprocessing|concurrent|asyncio|_asyncio|threading|_thread|tempfile|glob|fileinput|linecache)\..+
    | (?:pip|pydoc|bdb|pdb|timeit|trace|cProfile|profile|doctest|tkinter|venv|ensurepip|setuptools|distutils|site|gc|atexit)\..+
    | (?:io|_io|codecs)\.(?:open|open_code|FileIO|TextIOWrapper)  | _?pathlib\..*Path\.[a-z]\w*
    | builtins\.(?:eval|exec|execfile|compile|open|__import__|input|breakpoint|setattr|delattr|globals|locals|vars|apply|map)
    | _?operator\.(?:attrgetter|methodcaller|call)  | types\.(?:FunctionType|CodeType|LambdaType|MethodType)
    | torch\.(?:load|hub|jit|package|ops|serialization\.load|utils\.cpp_extension|_inductor|_dynamo)\b.*
    | numpy\.(?:load|fromfile|memmap|loadtxt|genfromtxt|f2py|lib\..*load|testing\..*runstring)\b.*
    | pandas\..*read_\w+ | logging\.config\..+ | yaml\..*load\w*
    """,
    re.VERBOSE,
)
_HARMLESS = re.compile(
    r"(?:http\.HTTP(?:Status|Method)|multiprocessing\.context|os\._Environ|sys\.version_info|importlib\.metadata)\b.*"
)


def runs_code(name: str) -> bool:
    """Whether calling what this name stands for could run code, touch files or open connections."""
    return _RUNS_CODE.fullmatch(name) is not None and _HARMLESS.fullmatch(name) is None


def _numpy_scalar(dtype: Any, raw: bytes | str = b"") -> Any:
    data = raw.encode("latin1") if isinstance(raw, str) else raw
    return np.frombuffer(data, _plain_dtype(dtype))[0].item()


def _plain_dtype(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, _DtypeThing):
        raise UnsafeFile("a pickled NumPy array holds objects")
    return dtype.dtype


def _numpy_dtype(code: Any, *_: Any) -> Any:
    if not isinstance(code, str) or np.dtype(code).hasobject:
        raise UnsafeFile(f"a pickled NumPy dtype {code!r} may hold objects")
    return _DtypeThing(code)


class Stateful:
    """An object that takes its attributes itself as they arrive, and holds no container that the pickle could share.

    unchanging: whether it refuses a second state, so that one object may stand for all equal ones.
    """

    __slots__ = ()
    unchanging = False

    def set_state(self, state: Any) -> None:
        """Take the attributes."""


class _Dropped:
    """A dict of which nothing is kept."""

    __slots__ = ()


class _DtypeThing(Stateful):
    """A NumPy dtype under construction: its byte order arrives afterwards."""

    __slots__ = ("dtype",)

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        if len(state) > 1 and state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray(Stateful):
    """A NumPy array inside a pickle; `value` holds it once its state has arrived."""

    __slots__ = ("value",)

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0)

    def set_state(self, state: Any) -> None:
        """Take version, shape, dtype, order and bytes, as `ndarray.__reduce__` gives them."""
        _, shape, dtype, fortran, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(data, bytes):
            raise UnsafeFile("a pickled NumPy array holds objects")
        found = np.frombuffer(data, _plain_dtype(dtype)).reshape(shape, order="F" if fortran else "C")
        self.value = found.astype(found.dtype.newbyteorder("="), copy=False)


class PickledBytes(Stateful):
    """An `io.BytesIO` inside a pickle, as layers of FP8 keep their state."""

    __slots__ = ("value",)

    def __init__(self, data: Any = b"", *_: Any) -> None:
        self.value = _checked(data, bytes)

    def set_state(self, state: Any) -> None:
        """Take content, position and attributes."""
        self.value = _checked(state[0], bytes)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding not in ("utf-8", "utf8") else encoding)


def _bytes(data: Any = b"", *encoding: Any) -> bytes:
    if isinstance(data, (list, tuple)):
        return bytes(data)  # pyright: ignore[reportUnknownArgumentType]
    return _latin1(data, *encoding) if isinstance(data, str) else _checked(data, bytes)


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise FormatError(f"a value of kind {type(value).__name__} stands where {kind.__name__} is expected")
    return value


def _plain_word(value: Any) -> str | int:
    return value if isinstance(value, int) else _checked(value, str)


def _items(value: Any = ()) -> Any:
    """Return a container that may be turned into another one."""
    if not isinstance(value, (list, tuple, set, frozenset, dict)):
        raise FormatError(f"a container is made of a {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _made_dict(entries: Any = ()) -> dict[Any, Any]:
    return {check_key(k): v for k, v in (entries.items() if isinstance(entries, dict) else _items(entries))}


def _plain_defaultdict(_factory: Any = None, entries: Any = ()) -> dict[Any, Any]:
    return _made_dict(entries)


def _number(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(value: Any = 0) -> Any:
        if not isinstance(value, (int, float, bool)) and not (isinstance(value, str) and len(value) < 100):
            raise FormatError(f"a number is made of a {type(value).__name__}")
        return kind(value)

    return make


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _made_dict,
    "collections.defaultdict": _plain_defaultdict,
    "collections.Counter": _made_dict,
    "builtins.dict": _made_dict,
    "builtins.set": lambda *a: set(map(check_key, _items(*a))),
    "builtins.frozenset": lambda *a: frozenset(map(check_key, _items(*a))),
    "builtins.list": lambda *a: list(_items(*a)),
    "builtins.tuple": lambda *a: tuple(_items(*a)),
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": lambda *a: complex(*map(_number(float), a)),
    "builtins.slice": lambda *a: slice(*a),
    "builtins.int": _number(int),
    "builtins.float": _number(float),
    "builtins.str": lambda v="": str(_checked(v, str)),
    "builtins.bool": _number(bool),
    "_codecs.encode": _latin1,
    "torch.Size": lambda *a: tuple(_items(*a)),
    "torch.device": lambda *a: ":".join(str(x) for x in map(_plain_word, a)),
    "torch.serialization._get_layout": lambda v="": str(_checked(v, str)),
    "numpy.dtype": _numpy_dtype,
    "numpy.ndarray": PickledArray,
    "numpy.core.multiarray._reconstruct": PickledArray,
    "numpy._core.multiarray._reconstruct": PickledArray,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "io.BytesIO": PickledBytes,
    "_io.BytesIO": PickledBytes,
    **{  # TorchScript's lists with the type of what they hold (torch/jit/_pickle.py): each returns its first argument
        f"torch.jit._pickle.{name}": lambda value, *_: value
        for name in ("build_intlist", "build_doublelist", "build_boollist", "build_tensorlist", "restore_type_tag")
    },
}  # fmt: skip
_DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool")},
    **{name: name for name in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")},
    **{name: name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")},
    **{"double": "float64", "float": "float32", "half": "float16", "long": "int64"},
}
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
        if module == "torch" and name in _DTYPES:
            return DtypeName(_DTYPES[name])
        if known is None and full not in _CALLS:
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
        known = known or _CALLS.get(function)
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
        _checked(target, Thing).state.setdefault("items", []).extend(items)

    def new_dict(self, before: Any) -> Any:
        """Return an empty dict; `before` is the key that it will belong to, where it is the value of one."""
        return _Dropped() if type(before) is str and before in self._unwanted else {}

    def insert(self, target: Any, entries: list[tuple[Any, Any]]) -> None:
        """Keep the entries of a class derived from dict."""
        if not isinstance(target, _Dropped):
            _checked(target, Thing).state.update(entries)

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
