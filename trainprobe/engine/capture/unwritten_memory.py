"""Memory that a call is handed to be written: what it holds before is no value, and has a note instead of numbers.

That is what `out=` names, and what `torch.empty` and its kin hand out, or a storage that grows (FSDP2's parameters), until
something is known to write there. Calls that only move memory, or are about to write it, show such a note. A call that
computes with it, and a module that is given it, shows what it holds: a kernel that takes addresses writes without a trace,
and where nobody has written, what is computed of it is wrong. Storages are held weakly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import ToBeWritten
from trainprobe.engine.tape import Tape

Spec = tuple[str, int, int, bool, bool, bool, int, int]  # name and flags of a call, and what OpName says of it
_WRITTEN, _HANDS_OUT, _MOVES, _OVERWRITTEN, _LATER = 2, 3, 5, 6, 7  # places in it
_MOST = 1024  # storages that are known at once
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Taken:
    """A storage that nothing is known to have written. left: bytes of it. version: of its tensors; None: not asked yet."""

    __slots__ = ("left", "storage", "version")

    def __init__(self, storage: torch.UntypedStorage, version: int | None) -> None:
        self.storage, self.left, self.version = StorageWeakRef(storage), storage.nbytes(), version


class UnwrittenMemory:
    """See the module text. taken: by the address of a storage; while there is none, the compiled watch only asks of `out=`."""

    def __init__(self) -> None:
        self.taken: dict[int, _Taken] = {}
        self._tape: Tape | None = None
        self._resize: Replaced | None = None

    def begin(self, tape: Tape) -> None:
        """Learn of storages that grow, and have collectives tell what they have written."""
        self._tape = tape
        tape.written = self._forget
        self._resize = Replaced(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_), traced=True)

    def end(self) -> None:
        """Let go of everything."""
        if self._resize is not None:
            self._resize.back()
        self._tape = self._resize = None
        self.taken.clear()

    def given(self, spec: Spec, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments of a call as they are to be recorded."""
        if kwargs and kwargs.get("out") is not None:
            kwargs = {**kwargs, "out": _marked(kwargs["out"])}
        if spec[_LATER]:
            args = tuple(_marked(x) if _has(spec[_LATER], i) else x for i, x in enumerate(args))
        if not self.taken:
            return args, kwargs
        moves, overwritten = spec[_MOVES], spec[_OVERWRITTEN]
        shown = tuple(self._shown(x) if moves or _has(overwritten, i) else self._used(x) for i, x in enumerate(args))
        for name, x in (kwargs or {}).items():
            if name != "out" and not moves:
                self._used(x)
        return shown, kwargs

    def result(self, spec: Spec, args: tuple[Any, ...], kwargs: Any, out: Any) -> Any:
        """Return the results of a call as they are to be recorded: those of one that returns nothing are what it wrote."""
        into = (kwargs or {}).get("out")
        for t in _tensors(into):
            if self._tape is not None:
                self._tape.touched(t)  # FSDP2 puts the version counter back
            self._wrote(t, t)
        if spec[_HANDS_OUT]:
            for t in _tensors(out if not spec[0].endswith("resize_") else None):
                self._take(t.untyped_storage(), _version(t))
            return out
        if into is not None and (out is None or out == ()):
            return into
        if spec[_LATER] and isinstance(out, (tuple, list)):
            return tuple(_marked(x) if _has(spec[_LATER], i) else x for i, x in enumerate(out))
        if not self.taken:
            return out
        sets = args[2] if spec[0].endswith("__setitem__") and len(args) > 2 else None
        for i, x in enumerate(args) if spec[_WRITTEN] else ():
            for t in _tensors(x) if _has(spec[_WRITTEN], i) else ():
                self._wrote(t, sets if isinstance(sets, torch.Tensor) else t)
        return self._shown(out) if spec[_MOVES] and not spec[_WRITTEN] else out

    def _resizing(self, original: Any) -> Any:
        def resize_(storage: Any, *args: Any, **kwargs: Any) -> Any:
            before = storage.nbytes()
            result = original(storage, *args, **kwargs)
            if not resize_.ended and before == 0 < storage.nbytes():  # type: ignore[attr-defined]
                self._take(storage, None)
            return result

        return resize_

    def _take(self, storage: torch.UntypedStorage, version: int | None) -> None:
        if len(self.taken) >= _MOST:
            for at in [at for at, each in self.taken.items() if each.storage.expired()]:
                del self.taken[at]
        if self._tape is not None and storage.nbytes() and len(self.taken) < _MOST:
            self.taken[storage._cdata] = _Taken(storage, version)

    def _known(self, t: torch.Tensor) -> _Taken | None:
        """Return the storage of a tensor if nothing is known to have written it."""
        found = self.taken.get(t.untyped_storage()._cdata) if self.taken else None
        if found is None:
            return None
        version = _version(t)
        if found.version is None:
            found.version = version
        if found.version == version and not found.storage.expired():
            return found
        self._forget(t)
        return None

    def _forget(self, t: Any) -> None:
        if type(t) in _PLAIN and self.taken:
            self.taken.pop(t.untyped_storage()._cdata, None)

    def _wrote(self, t: torch.Tensor, what: torch.Tensor) -> None:
        """Note that a call has written to a tensor as much as another one holds."""
        found = self.taken.get(t.untyped_storage()._cdata) if self.taken else None
        if found is not None:
            found.left -= what.numel() * t.element_size()
            found.version = _version(t)
            if found.left <= 0:
                self._forget(t)

    def _shown(self, x: Any) -> Any:
        if type(x) in _PLAIN:
            return x if self._known(x) is None else ToBeWritten(x)
        return type(x)(map(self._shown, x)) if type(x) in (tuple, list) else x

    def _used(self, x: Any) -> Any:
        for t in _tensors(x):
            self._forget(t)
        return x


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """Yield plain tensors: x, or those that it lists."""
    if type(x) in _PLAIN:
        yield x
    elif type(x) in (tuple, list):
        for item in x:
            yield from _tensors(item)


def _marked(x: Any) -> Any:
    if type(x) in _PLAIN:
        return ToBeWritten(x)
    return type(x)(map(_marked, x)) if type(x) in (tuple, list) else x


def _has(bits: int, position: int) -> bool:
    return bool(bits >> position & 1)


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version
