"""The tape of one step: calls in order, and each distinct tensor value looked at once.

Hooks append to it; nothing on it is read before the step ends. A value is recognised by the identity of its tensor, its version
counter, its memory address and its shape. The tensor is held weakly, so nothing is kept alive and a reused address is not
mistaken. The output of one op is the input of the next and is reduced once. An in-place write increments the version and makes
a new value. Writes that do not (through `.data`, by a collective) are announced by `touched`. For large values on the host,
other views of the same memory are recognised too (`native/seen.c`), and their numbers are copied.

The compiled `NativeTape` does this for plain tensors on the host and for plain containers. It calls the methods of `Tape` for
everything else: tensors on other devices, subclasses, the program's own containers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from trainprobe.engine.compiled import recording
from trainprobe.engine.core.containers import MOST, children
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.library import Deferred, Library, Reading, StatsRows
from trainprobe.engine.core.naming import utf8
from trainprobe.engine.core.records import NOT_WRITTEN, Call, Kind, Opaque, Phase, Place, StepData, ToBeWritten, Value
from trainprobe.engine.geometry.shards import Shard, is_cut, mesh_shard
from trainprobe.engine.sent_step import DeferredFeature, Fingerprinted, SentStep
from trainprobe.engine.stats.checksum import joined
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.storage.step_journal import StepJournal

SAVE = 256  # save the values themselves too
KINDS = 0xFFFF
CUT = 16  # above these bits: number of the cut through the values that is saved, 0 for the whole
_DEPTH = 400
_UNWATCHED = 4  # levels in which nobody asks whether a container holds itself
_BITS = 4096  # of a whole number that is written out
_NOT_HERE = (None, 0)  # row and fingerprint of what is still on a device


Save = Callable[[str, Any, Value, int], None]
Awaits = Callable[[Any, Callable[[Any], None]], bool]


class Tape:
    """Calls and values of the step being collected on this rank.

    value(tensor, flags): look at a tensor once and return its Value; flags: what to record of it. tree(x, flags, path=None):
    turn an argument or a result into a tree of Values and scalars; path: where to save its values, if they are to be saved.
    touched(tensor): forget a tensor, which was written in a way that its version counter does not show. forget_all(): forget
    every tensor.

    save: gets (key, tensor, value, cut) for each value that is to be saved. arena: where there is one (a compiled Arena),
    values on the host are copied there instead, and handed over in pieces. journal: gets everything as it comes. shares:
    whether the fingerprints of parameters and gradients are wanted, and of shards their share in that of the whole tensor.
    """

    value: Callable[[Any, int], Value]
    tree: Callable[..., Any]
    touched: Callable[[Any], None]
    forget_all: Callable[[], None]

    def __init__(
        self,
        library: Library,
        save: Save | None = None,
        reuse: bool = True,
        arena: Any = None,
        journal: StepJournal | None = None,
        shares: bool = False,
    ) -> None:
        self.library = library
        self.calls: list[Call] = []
        self.scalars: dict[str, Any] = {}
        self._batches: list[int] = []  # how many tensors the model was called with, a number a call
        self._batch_rows: StatsRows | None = None  # apart, so that a step has checksums only where they were asked for
        self.shares = shares
        self._share_rows: StatsRows | None = None
        self._shares: list[tuple[Value, list[int]]] = []  # each with the rows whose fingerprints make up its share
        self._deferred: list[Deferred] = []
        self._features: list[DeferredFeature] = []
        self.micro = 0
        self.micro_given = False
        self.awaits: Awaits | None = None  # takes what is still written, to look at it once it is there (see capture/awaited)
        self.written: Callable[[Any], None] = lambda _: None  # is told of tensors that a collective has written
        self.looks_again = False  # at every forward of the outermost module, at what was seen before it
        self._save = save
        self._plain = library.plain
        self._dtypes = library.dtype_text
        self._stats_rows: dict[int, tuple[StatsRows, list[Value]]] = {}
        self._above: set[int] = set()  # those that hold what is looked at
        self._counts: dict[tuple[str, str], int] = {}
        self._noted: list[tuple[Value, Value]] = []
        self.native: Any = recording.NativeTape(
            tuple(library.plain),
            reuse,
            self._open_rows,
            self._look,
            self._special,
            self._rare,
            self._keep_at,
            self._about_dtype,
            self._one_by_one,
        )
        self.value, self.tree = self.native.value, self.native.tree
        self.touched, self.forget_all = self.native.touched, self.native.forget_all
        self._journal = journal
        self.has_journal = journal is not None  # else `more_known` does nothing
        if journal is not None:
            self.native.record_into(journal)
        self._arena = arena
        if arena is not None:
            arena.drop()  # what a step left behind that never ended
            self.native.gather_into(arena)

    # ---- calls -------------------------------------------------------------------------------------------------

    def count(self, name: str, phase: str) -> int:
        """Return how often `name` was counted in this phase before, and count it once more."""
        key = (name, phase)
        n = self._counts.get(key, 0)
        self._counts[key] = n + 1
        return n

    def call(
        self, kind: Kind, name: str, n: int, phase: Phase, cls: str = "", parent: Call | str | None = None, stack: int = -1
    ) -> Call:
        """Append a call and return it."""
        made = Call(kind, name, n, phase, cls=cls, micro=self.micro, parent=parent, stack=stack)
        self.calls.append(made)
        return made

    def more_known(self, call: Call) -> None:
        """More is known of a call: write it to the journal, if there is one."""
        if self._journal is not None:
            self._journal.call(call)

    def begin_micro(self, number: Any) -> None:
        """Learn which micro-batch begins, counted from 0."""
        self.micro, self.micro_given = int(number), True

    def forward_begins(self, name: str) -> None:
        """Count micro-batches by the forwards of the outermost module, unless somebody tells them.

        Since the forward before, the program may have written to parameters without a trace (`p.data.clamp_`).
        """
        if not self.micro_given:
            self.micro = self.count(name, "outermost forward")
        if self.looks_again:
            self.forget_all()

    # ---- values ------------------------------------------------------------------------------------------------

    def noted(self, value: Value, note: str) -> Value:
        """Return a twin of a value that has a note of its own, and the same row when the step is drained."""
        twin = value.with_note(note)
        self._noted.append((twin, value))
        if self._journal is not None:
            self._journal.twin(twin, value)
        return twin

    def _look(self, t: Any, flags: int) -> Value:
        """Look at a tensor that the compiled kernel does not reduce."""
        return attempt(self._reduce, t, flags, t, otherwise=partial(self.unreadable, t))

    def unreadable(self, t: Any, fault: Exception) -> Value:
        """Return the value of a tensor that could not be looked at: a note that says why, and no numbers."""
        return Value(-1, "unknown", (), type=_class_text(type(t)), note=f"not looked at: {fault_text(fault)}")

    @contextmanager
    def batched(self) -> Generator[None, None, None]:
        """Look at tensors that stay as they are until this ends: a device reduces them all at once."""
        held = self.native.hold()
        try:
            yield
        finally:
            self.native.release(held)

    def _one_by_one(self, stats_rows: Any, tensors: Sequence[Any], values: Sequence[Value]) -> None:
        """Reduce tensors of devices that could not be reduced together; one that cannot at all has a note and no numbers."""
        for t, value in zip(tensors, values, strict=True):
            fault = attempt(stats_rows.add_all, [t], [value.row], otherwise=fault_text)
            if isinstance(fault, str):
                value.row, value.note = -1, f"not looked at: {fault}"

    def _rows_for(self, kinds: int) -> tuple[StatsRows, list[Value]]:
        stats_rows = self._stats_rows.get(kinds)
        if stats_rows is None:
            stats_rows = self._stats_rows[kinds] = (self.library.stats_rows(kinds), [])
        return stats_rows

    def _open_rows(self, kinds: int) -> tuple[StatsRows, Any, list[Value]]:
        stats_rows, owned = self._rows_for(kinds)
        return stats_rows, self.library.native_rows(stats_rows), owned

    def _about_dtype(self, dtype: Any) -> tuple[str, int]:
        return self._dtypes[dtype], self.library.native_code(dtype)

    def _reduce(self, t: Any, flags: int, described: Any) -> Value:
        stats_rows, owned = self._rows_for(flags & 255)
        row = stats_rows.add(t)
        try:
            shape = described.shape
        except RuntimeError:  # a nested tensor
            shape = ()
        value = Value(row, self._dtypes[described.dtype], shape, requires_grad=described.requires_grad)
        if row < 0:
            value.note = self.library.refusal(t)
        owned.append(value)
        if self._journal is not None:
            self._journal.value(value, *((stats_rows.peek(row) if row >= 0 else None) or _NOT_HERE))
        return value

    def _special(self, t: Any, flags: int) -> Value:
        return attempt(self._described, t, flags, otherwise=partial(self.unreadable, t))

    def _described(self, t: Any, flags: int) -> Value:
        with self.library.without_dispatch():
            inner, kind, extra, note = self.library.special(t)
            if inner is None:
                dtype = self._dtypes[t.dtype] if hasattr(t, "dtype") else "unknown"
                value = Value(-1, dtype, _shape(t), type=kind, note=note)
                if self.awaits is not None:
                    self.awaits(t, partial(self._arrived, value, flags))
            else:
                value = self.native.shard(inner, flags) or self._reduce(inner, flags, inner)
                value.requires_grad = bool(t.requires_grad)
                value.type = kind
                value.shape = _shape(t)
                value.note = value.note or note
            value.extra = extra
            placements = (extra or {}).get("placements", ({"Partial": {}},))
            if inner is not None and not any("Partial" in each for each in placements):
                self.share(value, inner, mesh_shard(t), flags)
        return value

    def _arrived(self, value: Value, flags: int, t: Any) -> None:
        """Give a value the numbers of what has been written at last."""
        found = self.value(t, flags)
        value.row, value.note = found.row, found.note
        self._noted.append((value, found))
        if self._journal is not None:
            self._journal.twin(value, found)

    def share(self, value: Value, t: Any, shard: Shard | None, flags: int) -> None:
        """Take the share of a shard in the fingerprint of the whole tensor, where fingerprints are asked for."""
        if not self.shares or not flags & CHECKSUM or value.row < 0 or shard is None or not is_cut(shard):
            return
        if self._share_rows is None:
            self._share_rows = self.library.stats_rows(CHECKSUM)
        rows = attempt(self._share_rows.add_share, t, shard, otherwise=lambda _: [])
        if rows:
            self._shares.append((value, rows))

    def distrust(self) -> None:
        """Look at every tensor anew from here on: something may write to memory at any time, and leave no trace."""
        self.forget_all()
        self.native.reuse = 0

    # ---- trees of arguments -------------------------------------------------------------------------------------

    @contextmanager
    def _entering(self, x: Any, depth: int) -> Generator[bool]:
        """Tell whether a container may be looked into: it is not inside itself, and the tree has not grown too large."""
        few = self.native.enter()
        if depth < _UNWATCHED or not few:
            yield few
        elif id(x) in self._above:
            yield False
        else:
            self._above.add(id(x))
            try:
                yield True
            finally:
                self._above.discard(id(x))

    def _rare(self, x: Any, flags: int, path: str | None, depth: int) -> Any:
        """Do what `tree` does with anything but plain tensors, numbers, text and containers."""
        return attempt(self._look_into, x, flags, path, depth, otherwise=partial(_unreadable, x))

    def _look_into(self, x: Any, flags: int, path: str | None, depth: int) -> Any:
        if type(x) is int:
            return x if x.bit_length() <= _BITS else Opaque("int", f"a number of {x.bit_length()} bits")
        if type(x) is ToBeWritten:
            t = x.tensor
            return Value(-1, self._dtypes[t.dtype], _shape(t), requires_grad=bool(t.requires_grad), note=NOT_WRITTEN)
        if self.library.is_tensor(x):
            value = self._special(x, flags & KINDS)
            if path is not None and flags & SAVE:
                keep = partial(self._keep, path, value, flags)
                if value.row >= 0 or self.awaits is None or not self.awaits(x, keep):
                    keep(x)
            return value
        described = self.library.opaque(x)
        if described is not None:
            return described
        if depth > _DEPTH:
            return Opaque("depth", f"it holds itself, or nests deeper than {_DEPTH}, or among more than {MOST} containers")
        items = children(x)
        if items is None:
            return Opaque(_class_text(type(x)), None)
        with self._entering(x, depth) as entered:
            if not entered:
                return self._look_into(x, flags, path, _DEPTH + 1)
            return self._named(items, flags, path, depth)

    def _named(self, items: list[tuple[str, Any]], flags: int, path: str | None, depth: int) -> Any:
        return {k: self.tree(v, flags, None if path is None else f"{path}.{k}", depth + 1) for k, v in items}

    def _keep_at(self, path: str, t: Any, value: Value, cut: int) -> None:
        why = "nobody saves" if self._save is None else attempt(self._save, path, t, value, cut, otherwise=fault_text)
        if why is not None:
            value.tensor = None
            value.note = value.note or (f"not saved: {why}" if self._save is not None else None)

    def _keep(self, path: str, value: Value, flags: int, t: Any) -> None:
        if value.tensor is None and value.note is None and self._save is not None:
            value.tensor = path
            self._keep_at(path, t, value, flags >> CUT)

    def note(self, name: Any, x: Any) -> None:
        """Keep a scalar of the step (loss, learning rate …); a tensor is read with all others at the step's end."""
        if not isinstance(name, str):
            raise TypeError("a name is text")
        kept = self.value(x, STATS) if attempt(self.library.is_tensor, x, otherwise=lambda _: False) else float(x)
        if isinstance(kept, Value) and kept.row < 0:
            raise ValueError(kept.note)
        self.scalars[utf8(name)] = kept
        if self._journal is not None:
            self._journal.scalar(name, kept)

    def note_once(self, name: str, x: Value | float) -> None:
        """Keep a scalar of the step, unless it is known already."""
        if name not in self.scalars:
            self.scalars[name] = x
            if self._journal is not None:
                self._journal.scalar(name, x)

    def defer(self, tensor: Any = None) -> Deferred:
        """Have a small tensor brought to the host with all else when the step ends; it may be set until then."""
        deferred = Deferred(tensor)
        self._deferred.append(deferred)
        return deferred

    def feature(self, name: str, slots: str | Sequence[str], numbers: Any, reading: Reading | None = None) -> None:
        """Keep numbers that were worked out on a device: a small tensor, or one that is deferred already.

        reading: turns what came to the host into (edges of bins or None, numbers) of each slot; without it, they are numbers.
        """
        if isinstance(slots, str):
            slots = (slots,)
        deferred = numbers if type(numbers) is Deferred else self.defer(numbers)
        number = self.count(f"{name}|{slots[0]}", "feature")
        self._features.append(DeferredFeature(deferred, name, slots, number, self.micro, reading))

    def batch(self, tensors: Sequence[Any]) -> None:
        """Fingerprint what the model is called with."""
        if self._batch_rows is None:
            self._batch_rows = self.library.stats_rows(CHECKSUM)
        with self.library.without_dispatch():
            plain = [t if type(t) in self._plain else self.library.special(t)[0] for t in tensors]
            rows = [row for row in (self._batch_rows.add(t) for t in plain if t is not None) if row >= 0]
        self._batches.append(len(rows))
        if self._journal is not None:
            seen = [self._batch_rows.peek(row) for row in rows]
            if None not in seen:
                self._journal.batch(joined([row[1] for row in seen if row is not None]))

    # ---- the end of the step ------------------------------------------------------------------------------------

    def drain(self, step: int, place: Place, **about: Any) -> StepData:
        """Bring the numbers to the host, once a device, and return the collected step; the tape is then empty."""
        return self.send(step, place, **about).receive()

    def send(self, step: int, place: Place, **about: Any) -> SentStep:
        """End the step: have its numbers brought to the host, once a device; the tape is then empty.

        Waits for none that can come by themselves.
        """
        if self._arena is not None:
            self._arena.flush()
        sent = SentStep(
            self.library,
            {"step": step, "place": place, "calls": self.calls, **about},
            self._stats_rows,
            Fingerprinted(self._batch_rows, self._batches),
            Fingerprinted(self._share_rows, self._shares),
            self._deferred,
            self._features,
            self.scalars,
            [*self._noted, *(self.native.noted or ())],
        )
        self.native.reset()
        self.calls, self.scalars = [], {}
        self._stats_rows, self._counts, self._noted = {}, {}, []
        self._batch_rows = self._share_rows = None
        self._batches, self._shares, self._deferred, self._features = [], [], [], []
        return sent


def _shape(t: Any) -> tuple[int, ...]:
    return tuple(n if type(n) is int else -1 for n in getattr(t, "shape", ()))  # of a jagged tensor one is a symbol


def _unreadable(x: Any, fault: Exception) -> Opaque:
    return Opaque(_class_text(type(x)), f"not looked into: {fault_text(fault)}")


def _class_text(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
