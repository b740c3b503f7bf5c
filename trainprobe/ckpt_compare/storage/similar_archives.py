"""The small torch archives of a distributed checkpoint, of which a million are alike but for their numbers.

The general reader opens the first one of a length in a file. Another one that has the same bytes wherever that reader looked
(the zip directory, local headers, byte order, pickle) holds a tensor of the same shape and format in the same place.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import lru_cache

from trainprobe.ckpt_compare.storage.mapped import MappedArray, mapping
from trainprobe.ckpt_compare.storage.torch_zip import TorchZip

LARGEST = 1 << 16  # bytes that are held against one another; an archive with a larger pickle is opened anew
MOST = 4  # kinds of archives of one length


@dataclass(frozen=True, slots=True)
class _Kind:
    """What archives of one kind share: bytes at places counted from the first one, and their tensor in the first of them."""

    shared: tuple[tuple[int, int, bytes], ...]
    start: int
    array: MappedArray


@lru_cache(maxsize=1024)
def _kinds(_path: str, _length: int) -> list[_Kind]:
    return []


def remember(path: str, start: int, length: int, archive: TorchZip, found: object) -> None:
    """Note an archive that was read, if it is one tensor."""
    if isinstance(found, MappedArray) and found.path == path:
        held = mapping(path)
        spans = archive.looked_at()
        if sum(stop - first for first, stop in spans) <= LARGEST:
            shared = tuple((first - start, stop - start, held[first:stop]) for first, stop in spans)
            kinds = _kinds(path, length)
            kinds.append(_Kind(shared, start, found))
            del kinds[:-MOST]


def recognised(held: mmap.mmap, path: str, start: int, length: int) -> MappedArray | None:
    """Return the tensor of an archive in a mapped file that is of a kind that was read before; None for any other."""
    kinds = _kinds(path, length)
    raw = held[start : start + length] if kinds and length <= LARGEST else held
    before = 0 if raw is not held else start
    for kind in kinds:
        for first, stop, same in kind.shared:
            if raw[before + first : before + stop] != same:
                break
        else:
            array = kind.array
            return MappedArray(path, array.start - kind.start + start, array.shape, array.format, array.strides)
    return None
