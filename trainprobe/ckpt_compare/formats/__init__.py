"""Checkpoint formats: each file here is one, recognised by looking and never by asking.

A format module holds

    def sniff(path: Path) -> bool            whether the file or folder looks like this format; reads a few bytes at most
    def open(path: Path) -> Checkpoint       its logical tensors, with every number still in the files

and nothing else needs an edit. Formats from other packages come in through the entry point group
`trainprobe.checkpoint_formats`.
"""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast
from zipfile import is_zipfile

from trainprobe.ckpt_compare.foreign_files import refuse
from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.storage import remarks, torch_archive
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.engine.storage.safe_files import open_to_read
from trainprobe.errors import FormatError, ProbeError, did_you_mean


class Format(Protocol):
    """What a format module offers."""

    def sniff(self, path: Path) -> bool:
        """Whether the file or folder looks like this format."""
        ...

    def open(self, path: Path) -> Checkpoint:
        """Read the checkpoint's structure; numbers stay in the files."""
        ...


def names() -> list[str]:
    """Return the names of all formats, in the order in which they are asked."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__)) + sorted(e.name for e in _foreign())


@cache
def _foreign() -> tuple[EntryPoint, ...]:
    """Return the formats of other packages; looked up once, as it reads the metadata of every package that is installed."""
    return tuple(entry_points(group="trainprobe.checkpoint_formats"))


def get(name: str) -> Format:
    """Return the format called `name`; raise FormatError when there is none."""
    for entry in _foreign():
        if entry.name == name:
            return cast("Format", entry.load())
    if name not in names():
        raise FormatError(
            f"there is no checkpoint format {name!r}{did_you_mean(name, names())}; known are {', '.join(names())}"
        )
    return cast("Format", importlib.import_module(f"{__name__}.{name}"))


def recognise(path: Path) -> str:
    """Return the name of the first format that knows the file or folder; raise FormatError when none does."""
    if not path.exists():
        raise FormatError(f"{path} does not exist")
    if not path.is_dir() and not path.is_file():
        raise FormatError(f"{path} is neither a file nor a folder, but a pipe, a socket or a device: name a checkpoint")
    for name in names():
        if get(name).sniff(path):
            return name
    refuse(path)
    what = (
        f"a folder with {', '.join(sorted(p.name for p in path.iterdir())[:6]) or 'nothing in it'}"
        if path.is_dir()
        else _what(path)
    )
    inner = next((p for p in sorted(path.iterdir()) if p.is_file() and _known(p)), None) if path.is_dir() else None
    way = "Point to the folder of one iteration" if inner is None else f"{inner.name} in it is one: name that file"
    raise FormatError(f"{path} ({what}) is no checkpoint in a known format: {', '.join(names())}. {way}")


def _known(path: Path) -> bool:
    return any(get(name).sniff(path) for name in names())


def _what(file: Path) -> str:
    """Return in words what a file that no format knows is."""
    if not file.stat().st_size:
        return "an empty file"
    with open_to_read(file) as content:
        zipped = content.read(4) == b"PK\x03\x04"
    return (
        "a file that begins as torch.save writes it and has no end: truncated, copy it again"
        if zipped and not is_zipfile(file)
        else "a file"
    )


def _blame(path: Path, error: Exception) -> str:
    """Say whether the files are damaged or the reader does not know what is in them, as far as checksums can tell."""
    said = f"{type(error).__name__}: {error}"
    if torch_archive.intact(path):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"its pickles are as torch.save wrote them, so it is this reader that does not know what stands in them ({said} in "
            f"{Path(frame.filename).name}, line {frame.lineno}); please report it with that line"
        )
    return f"it may be damaged ({said})"


# what a damaged or hostile file makes a reader raise, beside FormatError
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError, OSError)


@uncollected()
def open_checkpoint(path: Path | str, name: str | None = None) -> Checkpoint:
    """Open a checkpoint in whatever format it is (or in the one given by name); raise FormatError where that cannot be done."""
    path = Path(path)
    with remarks.collected() as made:
        try:
            name = name or recognise(path)
            found = get(name).open(path)
        except ProbeError:
            raise
        except _DAMAGED as error:
            raise FormatError(f"{path} cannot be read{f' as {name}' if name else ''}: {_blame(path, error)}") from error
    return replace(
        found, problems=(*found.problems, *made.problems), warnings=tuple(dict.fromkeys([*found.warnings, *made.warnings]))
    )
