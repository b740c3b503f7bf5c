"""What a pickle may make here: plain values, NumPy arrays, and inert objects that remember what they would have been.

`CALLS` is the closed table of functions that build something. Nothing that a pickle names is imported or called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from trainprobe.ckpt_compare.storage.pickle_keys import check_key
from trainprobe.errors import FormatError, UnsafeFile

T = TypeVar("T")


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


class Dropped:
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
        self.value = checked(data, bytes)

    def set_state(self, state: Any) -> None:
        """Take content, position and attributes."""
        self.value = checked(state[0], bytes)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding not in ("utf-8", "utf8") else encoding)


def _bytes(data: Any = b"", *encoding: Any) -> bytes:
    if isinstance(data, (list, tuple)):
        return bytes(data)  # pyright: ignore[reportUnknownArgumentType]
    return _latin1(data, *encoding) if isinstance(data, str) else checked(data, bytes)


def checked(value: Any, kind: type[T]) -> T:
    """Return a value of a kind; raise FormatError for any other."""
    if not isinstance(value, kind):
        raise FormatError(f"a value of kind {type(value).__name__} stands where {kind.__name__} is expected")
    return value


def _plain_word(value: Any) -> str | int:
    return value if isinstance(value, int) else checked(value, str)


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


# full name → what builds that which a call of it would give
CALLS: dict[str, Callable[..., Any]] = {
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
    "builtins.str": lambda v="": str(checked(v, str)),
    "builtins.bool": _number(bool),
    "_codecs.encode": _latin1,
    "torch.Size": lambda *a: tuple(_items(*a)),
    "torch.device": lambda *a: ":".join(str(x) for x in map(_plain_word, a)),
    "torch.serialization._get_layout": lambda v="": str(checked(v, str)),
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
# name in `torch` → name of the dtype
DTYPES = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool")},
    **{name: name for name in ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")},
    **{name: name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")},
    **{"double": "float64", "float": "float32", "half": "float16", "long": "int64"},
}
