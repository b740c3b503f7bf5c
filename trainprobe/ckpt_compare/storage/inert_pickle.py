"""Read a pickle as data: nothing in the file can run, and nothing it names is imported.

A pickle is a program for a small stack machine that may call whatever it can name. Here every name it asks for is looked up in
a closed table: containers become plain containers, tensors become references to bytes, and classes that are known to be mere
data (argparse namespaces, framework enums, …) become an inert `Thing` that only remembers what it was given. Any other name is
refused with `UnsafeFile` before anything is built. This is the rule of torch's `weights_only`, without needing torch.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from trainprobe.errors import FormatError, UnsafeFile


class _Closed(type):
    """A metaclass under which a class cannot be changed: a pickle may hold classes, and must not touch them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafeFile(f"a pickle tried to set {name!r} on the class {cls.__name__}")


class Thing(metaclass=_Closed):
    """An object of a class known to hold only data: its class name, constructor arguments and attributes, never its code."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Thing:
        made = object.__new__(cls)
        made.args = args
        made.state = dict(kwargs)
        return made

    @property
    def name(self) -> str:
        """Full name of the class that this stands in for."""
        return type(self).__name__

    def __setstate__(self, state: Any) -> None:
        match state:
            case (dict() | None as plain, dict() | None as slots):  # as copyreg pairs __dict__ and __slots__
                self.state = {**(plain or {}), **(slots or {})}
            case dict():
                self.state = dict(state)
            case _:
                self.state = {"state": state}

    def __getitem__(self, key: str) -> Any:
        return self.state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state[key] = value

    def append(self, item: Any) -> None:
        """Take a list item (classes derived from list)."""
        self.state.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        """Take several list items."""
        self.state.setdefault("items", []).extend(items)

    def __repr__(self) -> str:
        inner = ", ".join([*(repr(a) for a in self.args), *(f"{k}={v!r}" for k, v in self.state.items())])
        return f"{self.name.rpartition('.')[2]}({inner})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and (self.name, self.args, self.state) == (other.name, other.args, other.state)

    def __hash__(self) -> int:
        return hash((self.name, repr(self.args), repr(self.state)))


def stand_in(full_name: str) -> type[Thing]:
    """Return an inert class to stand where the class `full_name` would stand."""
    return _Closed(full_name, (Thing,), {"__slots__": ()})


class PlainDict(dict[Any, Any]):
    """A dict that takes the extra attributes of pickled dict classes and drops them (`_metadata` of a state dict)."""

    def __setstate__(self, state: Any) -> None:
        """Drop the attributes."""


# Classes that are data and nothing else, in the frameworks whose checkpoints we read. A new one is a line here.
HARMLESS = re.compile(
    r"""
    argparse\.Namespace
    | types\.SimpleNamespace
    | pathlib\.(Pure)?(Posix|Windows)?Path(\._local)?   | pathlib\._local\.(Pure)?(Posix|Windows)?Path
    | datetime\.(datetime|timedelta|date)
    | torch\.(Size|device|layout|memory_format|Generator)
    | torch\.(optim|distributed)\..*(State|Metadata|Index|Property|Properties|Placement|Mesh|Shard|Replicate|Partial)\w*
    | torch\.distributed\.checkpoint\.(metadata|planner)\.\w+
    | torch\.distributed\.checkpoint\.filesystem\.\w+
    | torch\.distributed\.tensor\.placement_types\.\w+
    | torch\.distributed\._tensor\.placement_types\.\w+
    | torch\.distributed\._shard\.\w+(\.\w+)*
    | torch\.distributed\.(tensor\.)?(device_mesh|_dtensor_spec)\.\w+
    | megatron\.core\.(enums|transformer\.enums|optimizer\.optimizer_config|rerun_state_machine|optimizer_param_scheduler)\.\w+
    | megatron\.core\.transformer\.(transformer_config|cuda_graphs)\.\w+
    | megatron\.core\.dist_checkpointing\.(mapping|core|dict_utils)\.\w+
    | megatron\.(model|training|legacy)\.(enums|\w+\.enums)\.\w+
    | deepspeed\.runtime\.(fp16\.loss_scaler|zero\.config|precision_config|config)\.\w+
    | deepspeed\.utils\.tensor_fragment\.\w+
    | deepspeed\.runtime\.zero\.(offload_config|partition_parameters)\.(ZeroParamStatus|Offload\w+)
    | deepspeed\.checkpoint\.\w+\.\w+
    | transformers\.(trainer_utils|training_args|trainer_pt_utils|integrations\.\w+|utils\.generic)\.\w+
    | accelerate\.(state|utils\.dataclasses)\.\w+
    | lightning\.fabric\.utilities\.data\.AttributeDict | pytorch_lightning\.utilities\.parsing\.AttributeDict
    | lightning\.pytorch\.utilities\.parsing\.AttributeDict | lightning_fabric\.utilities\.data\.AttributeDict
    | omegaconf\.(dictconfig\.DictConfig|listconfig\.ListConfig|base\.\w+|nodes\.\w+) | typing\.Any
    """,
    re.VERBOSE,
)
_DTYPES = {
    "float64": "float64", "double": "float64", "float32": "float32", "float": "float32", "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz", "float8_e8m0fnu": "float8_e8m0fnu", "int64": "int64", "long": "int64",
    "int32": "int32",
    "int16": "int16", "int8": "int8", "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    "bool": "bool",
    "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip


class DtypeName(str):
    """The name of a torch dtype, `float32`."""

    __slots__ = ()


def _numpy_scalar(dtype: np.dtype[Any], raw: bytes | str = b"") -> Any:
    data = raw.encode("latin1") if isinstance(raw, str) else raw
    return np.frombuffer(data, dtype)[0].item()


def _numpy_dtype(code: Any, *_: Any) -> Any:
    if not isinstance(code, str) or np.dtype(code).hasobject:
        raise UnsafeFile(f"a pickled NumPy dtype {code!r} may hold objects")
    return _DtypeThing(code)


class _DtypeThing:
    """A NumPy dtype under construction: its byte order arrives afterwards."""

    __slots__ = ("dtype",)

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if len(state) > 1 and state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    """A NumPy array inside a pickle; `value` holds it once its state has arrived."""

    __slots__ = ("value",)

    def __init__(self, *_: Any) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        if not isinstance(dtype, _DtypeThing) or not isinstance(data, bytes):
            raise UnsafeFile("a pickled NumPy array holds objects")
        self.value = np.frombuffer(data, dtype.dtype).reshape(shape, order="F" if fortran else "C")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1" if encoding not in ("utf-8", "utf8") else encoding)


def _tuple(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items)


def _made_dict(*args: Any) -> dict[Any, Any]:
    return PlainDict(*args)


def _plain_defaultdict(*_: Any) -> dict[Any, Any]:
    return PlainDict()


def _inert(cls: Any) -> type[Thing]:
    if not (isinstance(cls, _Closed) and issubclass(cls, Thing)):
        raise UnsafeFile(f"a pickle tried to build or look into {cls!r}")
    return cls


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    _inert(cls)
    return cls() if state is None else cls(state)


def _newobj(cls: Any, *args: Any) -> Any:
    return _inert(cls)(*args)


def _attribute(*args: Any) -> Any:
    """Stand for `getattr(SomeEnum, "MEMBER")`, as enums of the standard library are pickled: only on an inert class."""
    owner, name = args
    if not isinstance(name, str):
        raise UnsafeFile(f"a pickle wanted getattr({owner!r}, {name!r})")
    return _inert(owner)(name)


class _Frozen:
    """Lets a plain function be called from a pickle, and nothing else be done with it."""

    __slots__ = ("_call", "_name")

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafeFile(f"a pickle tried to set {name!r} on {self._name}")


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _made_dict,
    "collections.defaultdict": _plain_defaultdict,
    "collections.Counter": _made_dict,
    "builtins.dict": _made_dict,
    "builtins.set": lambda *a: set(*a),
    "builtins.frozenset": lambda *a: frozenset(*a),
    "builtins.list": lambda *a: list(*a),
    "builtins.tuple": _tuple,
    "builtins.bytearray": lambda *a: bytes(_latin1(*a) if a and isinstance(a[0], str) else bytes(*a)),
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.str": str,
    "builtins.bool": bool,
    "builtins.getattr": _attribute,
    "_codecs.encode": _latin1,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _newobj,
    "torch.Size": _tuple,
    "torch.device": lambda *a: ":".join(str(x) for x in a),
    "torch.serialization._get_layout": str,
    "numpy.dtype": _numpy_dtype,
    "numpy.ndarray": PickledArray,
    "numpy.core.multiarray._reconstruct": PickledArray,
    "numpy._core.multiarray._reconstruct": PickledArray,
    "numpy.core.multiarray.scalar": lambda d, *a: _numpy_scalar(d.dtype, *a),
    "numpy._core.multiarray.scalar": lambda d, *a: _numpy_scalar(d.dtype, *a),
    "io.BytesIO": lambda *a: bytes(*a),
    "_io.BytesIO": lambda *a: bytes(*a),
}  # fmt: skip
_TABLE: Mapping[str, _Frozen] = {name: _Frozen(name, call) for name, call in _CALLS.items()}
_OBJECT = _Frozen("builtins.object", lambda: None)


class DataUnpickler(pickle.Unpickler):
    """An unpickler that can only build data.

    tensors: further names it may call, given by the archive reader (storages and tensor rebuilders). where: the file, for
    messages.
    """

    def __init__(
        self,
        file: BinaryIO,
        where: str,
        tensors: Mapping[str, Any] | None = None,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="latin1")
        self._where = where
        self._tensors = tensors or {}
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up in the closed table; never import it."""
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}"
        if full in self._tensors:
            return self._tensors[full]
        if full in _TABLE:
            return _TABLE[full]
        if full == "builtins.object":
            return _OBJECT
        if module == "torch" and name in _DTYPES:
            return DtypeName(_DTYPES[name])
        if HARMLESS.fullmatch(full):
            return stand_in(full)
        raise UnsafeFile(
            f"{self._where} is refused: loading it would import {full}, which is not known to be plain data. If you trust it, "
            "load it with the framework that wrote it and save the tensors alone (safetensors, or a dict of tensors)"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Turn a reference to a storage into a reference to bytes of the file."""
        if self._storage is None:
            raise FormatError(f"{self._where} refers to data outside of its pickle: {str(pid)[:80]!r}")
        return self._storage(pid)


# what a damaged stream makes the pickle machine raise
_DAMAGED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
)


def read_pickle(
    data: bytes | BinaryIO, where: str, tensors: Mapping[str, Any] | None = None, storage: Callable[[Any], Any] | None = None
) -> Any:
    """Return one pickled object as data. Raises UnsafeFile for a name outside the table, FormatError for a damaged stream."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    try:
        return DataUnpickler(file, where, tensors, storage).load()
    except FormatError:
        raise
    except _DAMAGED as error:
        raise FormatError(f"{where} holds a pickle that cannot be read: {type(error).__name__}: {error}") from error
