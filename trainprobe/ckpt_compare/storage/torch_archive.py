"""Files written by torch.save, read without torch: the tensors stay in the file and are mapped when they are asked for.

Two layouts: the zip archive (since torch 1.6; each storage is an uncompressed member) and the older stream of pickles followed
by raw storages. The pickle inside is read as data (see inert_pickle). A tensor that cannot be read costs that tensor alone.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.pieces import Point
from trainprobe.ckpt_compare.storage.inert_objects import DtypeName, Thing
from trainprobe.ckpt_compare.storage.inert_pickle import leaves as leaves
from trainprobe.ckpt_compare.storage.inert_pickle import read_pickle, read_pickle_at
from trainprobe.ckpt_compare.storage.mapped import MappedArray, extent, mapping
from trainprobe.ckpt_compare.storage.similar_archives import recognised, remember
from trainprobe.ckpt_compare.storage.torch_zip import Places, TorchZip
from trainprobe.engine.compare.number_formats import number_format
from trainprobe.engine.storage.safe_files import open_to_read
from trainprobe.errors import FormatError

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}  # fmt: skip


LARGEST_REPEAT = 1 << 28  # bytes of a tensor that shows the elements of its storage more than once
_DAMAGED_ZIP = (zipfile.BadZipFile, KeyError, EOFError, struct.error, OSError, ValueError, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one storage in the file; dtype is that of its typed class."""

    path: str
    key: str
    dtype: str
    places: Places


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A DTensor inside a torch.save file: this rank's part, its place unknown to the file alone."""

    local: Any


def _tensor(
    storage: Any,
    offset: int,
    size: Point,
    stride: Point,
    _grad: Any = None,
    _hooks: Any = None,
    view: Any = None,
    *_: Any,
    dtype: str | None = None,
) -> MappedArray:
    """Return where a tensor lies. view: what torch computes whenever the tensor is read, which its bytes do not show."""
    if not isinstance(storage, Storage):
        raise FormatError("its numbers are in a pickle inside the pickle: write it with torch.save")
    if isinstance(view, Mapping) and (view.get("conj") or view.get("neg")):
        raise FormatError("is a view that torch conjugates or negates when it is read: save `x.resolve_conj().resolve_neg()`")
    fmt = number_format(dtype or storage.dtype)
    place = storage.places.get(storage.key)
    if place is None:
        raise FormatError(f"{storage.path} lacks the data of storage {storage.key}: the file is truncated, copy it again")
    shape, stride = extent(size), extent(stride)
    first, held = place
    start = offset * fmt.itemsize
    array = MappedArray(storage.path, first + start, shape, fmt, None if _row_major(shape, stride) else stride)
    if start < 0 or start + array.span > held:
        raise FormatError(f"its shape {list(shape)} {fmt.name} reaches to byte {start + array.span} of a storage of {held}")
    if array.strides is not None and math.prod(shape) * fmt.itemsize > max(held, LARGEST_REPEAT):
        raise FormatError(f"its shape {list(shape)} {fmt.name} repeats the elements of a storage of {held} bytes")
    return array


def _tensor_v3(
    storage: Any, offset: int, size: Point, stride: Point, grad: bool, hooks: Any, dtype: Any, view: Any = None, *_: Any
) -> MappedArray:
    return _tensor(storage, offset, size, stride, grad, hooks, view, dtype=str(dtype))


def _npu_tensor(storage: Any, offset: int, size: Point, stride: Point, *_: Any) -> MappedArray:
    """Return a tensor of an Ascend device: torch_npu stores a copy on the host, and the format that it had on the device."""
    return _tensor(storage, offset, size, stride)


def _row_major(shape: Point, stride: Point) -> bool:
    expected = 1
    for n, s in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _wrapper_subclass(cls: Any, *_args: Any) -> Any:
    raise FormatError(f"tensor subclass {cls} is stored as a wrapper that cannot be read as numbers")


def _from_type(function: Any, type_: Any, args: Any, state: Any) -> Any:
    """Return a tensor of a subclass; one that only wraps others, as quantized tensors do, is what it wraps."""
    inner = state[0] if isinstance(state, tuple) and state else state  # pyright: ignore[reportUnknownVariableType]
    if function == "torch._utils._rebuild_wrapper_subclass" and isinstance(inner, dict):
        return Thing(str(type_), (), inner)  # pyright: ignore[reportUnknownArgumentType]
    if function not in _REBUILD:
        raise FormatError(f"depends on {function}, which is not known here")
    return _REBUILD[function](*args)


def _dtensor(*args: Any) -> Any:
    return ShardedTensor(args[0])


_STORAGE_NAMES: dict[str, Any] = {
    **{f"torch.{name}": DtypeName(f"storage:{dtype}") for name, dtype in _STORAGES.items()},
    "torch.storage.UntypedStorage": DtypeName("storage:uint8"),
    "torch.storage.TypedStorage": DtypeName("storage:uint8"),
}
_REBUILD: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch_npu.utils.storage._rebuild_npu_tensor": _npu_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch.distributed.tensor._api._rebuild_dtensor": _dtensor,
    "torch._utils._rebuild_device_tensor_from_numpy": lambda data, *_: data,
    **_STORAGE_NAMES,
}


def is_torch_file(path: str) -> bool:
    """Whether the file looks as if torch.save had written it."""
    if not Path(path).is_file():
        return False
    try:
        with open_to_read(Path(path)) as file:
            head = file.read(20)
        if head[:4] == b"PK\x03\x04":
            return bool(_archive(path).pickled)
    except (FormatError, *_DAMAGED_ZIP):
        return False
    return head[:1] == b"\x80" and _LEGACY_MAGIC.to_bytes(10, "little") in head


def mentions(path: str, word: bytes) -> bool:
    """Whether the pickle of a torch file holds this text; far quicker than reading the pickle."""
    if mapping(path)[:4] != b"PK\x03\x04":
        return mapping(path).find(word) >= 0
    try:
        archive = _archive(path)
        return archive.holds(archive.pickled, word)
    except (FormatError, *_DAMAGED_ZIP):
        return False


def intact(path: Path, most: int = 64) -> bool:
    """Whether a file, or each of the torch files in a folder (at most `most`), has the checksum that torch.save wrote.

    False, too, where there is none to tell it by: the layout before torch 1.6 and the pickles of others have no checksum.
    """
    found = (
        [path] if path.is_file() else [p for p in islice(path.rglob("*"), 1000) if p.suffix in (".pt", ".pth", ".bin", ".ckpt")]
    )
    try:
        archives = [_archive(str(file)) for file in found[:most]]
        return bool([archive.read(archive.pickled) for archive in archives])
    except (FormatError, *_DAMAGED_ZIP):
        return False


def load(path: str) -> Any:
    """Return what torch.save wrote, with `MappedArray`s for tensors. Raises FormatError or UnsafeFile."""
    held = mapping(path)
    if held[:4] == b"PK\x03\x04":
        return _zip_load(path, 0, len(held))
    if held[:1] == b"\x80":
        return _legacy_load(path)
    raise FormatError(f"{path} was not written by torch.save: it begins with {bytes(held[:8])!r}")


def load_part(path: str, start: int, length: int) -> Any:
    """Return what torch.save wrote into bytes start … start+length of a larger file (distributed checkpoints)."""
    held = mapping(path)
    if start + length > len(held):
        raise FormatError(f"{path} is truncated: it ends at byte {len(held)}, an item reaches to byte {start + length}")
    return recognised(held, path, start, length) or _zip_load(path, start, length)


def _archive(path: str) -> TorchZip:
    return TorchZip(path, 0, len(mapping(path)))


def _zip_load(path: str, start: int, length: int) -> Any:
    try:
        archive = TorchZip(path, start, length)
        places = archive.places()
        data = archive.read(archive.pickled)
    except FormatError as error:
        raise FormatError(f"{path} is damaged, truncated, or was not written by torch.save: {error}") from error
    except _DAMAGED_ZIP as error:
        raise FormatError(f"{path} is damaged or truncated ({error}): copy it again") from error
    found = read_pickle(data, path, _REBUILD, _storage_finder(path, places))
    remember(path, start, length, archive, found)
    return found


def _storage_finder(path: str, places: Places) -> Callable[[Any], Storage]:
    def find(pid: Any) -> Storage:
        kind, cls, key = pid[0], str(pid[1]), str(pid[2])
        if kind != "storage":
            raise FormatError(f"{path} refers to an unknown kind of data, {kind!r}")
        place, told = places.get(key), pid[4] if len(pid) > 4 else None
        known = isinstance(pid[1], DtypeName)  # else no tensor of it is read
        if (
            known
            and place is not None
            and isinstance(told, int)
            and told * number_format(cls.removeprefix("storage:")).itemsize != place[1]
        ):
            raise FormatError(
                f"{path} is damaged: storage {key} is said to have {told} elements of {cls}, and has {place[1]} bytes"
            )
        return Storage(path, key, cls.removeprefix("storage:"), places)

    return find


def _legacy_load(path: str) -> Any:
    """Read the layout before torch 1.6.

    Magic, protocol, system info, the object, storage keys, then count and bytes of each storage.
    """
    held = mapping(path)
    magic, at = read_pickle_at(held, 0, path)
    if magic != _LEGACY_MAGIC:
        raise FormatError(f"{path} is a bare pickle and no torch file")
    _, at = read_pickle_at(held, at, path)
    system, at = read_pickle_at(held, at, path)
    if not isinstance(system, dict) or not system.get("little_endian", True):  # pyright: ignore
        raise FormatError(f"{path} holds big-endian numbers: save it again on a little-endian machine")
    places = Places()  # filled below: the storages lie behind the object
    dtypes: dict[str, str] = {}
    finder = _storage_finder(path, places)

    def note(pid: Any) -> None:
        dtypes[str(pid[2])] = finder(pid).dtype

    # first pass: which storages there are; the tensors are built in the second, when their places are known
    _, end = read_pickle_at(held, at, path, {name: _nothing for name in _REBUILD if "_rebuild" in name} | _STORAGE_NAMES, note)
    keys, end = read_pickle_at(held, end, path)
    if not isinstance(keys, (list, tuple)) or any(str(key) not in dtypes for key in keys):  # pyright: ignore
        raise FormatError(f"{path} is damaged: its list of storages does not fit its tensors")
    _legacy_places(places, path, end, [(str(key), dtypes[str(key)]) for key in keys])  # pyright: ignore
    return read_pickle_at(held, at, path, _REBUILD, finder)[0]


def _nothing(*_: Any) -> None:
    return None


def _legacy_places(places: Places, path: str, start: int, storages: list[tuple[str, str]]) -> None:
    """Note where the storages behind the object lie: a count of elements and the elements, one after the other."""
    held = mapping(path)
    for key, dtype in storages:
        if start + 8 > len(held):
            raise FormatError(f"{path} is truncated before storage {key}: copy it again")
        (count,) = struct.unpack("<q", held[start : start + 8])
        if count < 0:
            raise FormatError(f"{path} is damaged: storage {key} has {count} elements")
        size = count * number_format(dtype).itemsize
        places.add(key, start + 8, size)
        start += 8 + size
