"""Values, gradients and optimizer state of every parameter, around the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.capture import StatesTap
from trainprobe.engine.capture.requests import StatesRequest
from trainprobe.engine.capture.saved_shards import HeldShards, shards_of
from trainprobe.engine.capture.turns import Turns
from trainprobe.engine.core.flat_parameters import FlatSlice, flat_slices_of, handles_of
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Call, StepData, Value
from trainprobe.engine.core.sources import SORTS, Part, PlainSource, Source, sort_of
from trainprobe.engine.core.unscaling import Scaled, unscale
from trainprobe.engine.geometry.shards import SavedShard, ShardOf
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape

_VALUES = frozenset({"value"})


@dataclass(slots=True)
class Clipping:
    """A call that clipped: whose gradients, the norm found, the largest one it leaves, and whether an update came after it.

    others: it was given gradients of more than the model.
    """

    names: frozenset[str]
    norm: Value
    limit: float
    used: bool = False
    others: bool = False


class _SlotRequest(NamedTuple):
    """What is recorded of one slot of one parameter: flags of the tape, those of its update, and its name after the step.

    state: whether the plan records the state that the optimizer keeps of this parameter.
    """

    flags: int
    update: int
    sort: str
    after: str
    state: bool


class ParameterStateTap(StatesTap):
    """Asks its Source at each moment for what this process holds and hands it to the tape.

    source: set by an integration; otherwise the plain one, made from the model and the optimizer at `open` (without an
    optimizer, the ones that step while the model is watched are taken as they come). more: flags of the tape that are
    wanted of everything, whatever the plan selects (the audit's). shard_of: returns which part of the whole a plain
    parameter is; None where every plain parameter is whole. named: id of parameter → its name over all processes, where
    that is another.
    """

    def __init__(self, request: StatesRequest, names: Callable[[], dict[int, str]]) -> None:
        self.source: Source | None = None
        self.shard_of: ShardOf | None = None
        self.named: Mapping[int, str] = {}
        self.more = 0
        self._request = request
        self._names = names
        self._known: dict[tuple[str, str], _SlotRequest] = {}
        self._anywhere: tuple[frozenset[str], bool] | None = None  # sorts recorded of any parameter; whether updates are
        self._models: list[Any] = []
        self._listed: Mapping[int, str] = {}  # the names that the plain source was made with
        self._plain: PlainSource | None = None
        self._tape: Tape | None = None
        self._calls: dict[tuple[str, str, int], Call] = {}
        self._before: dict[str, Any] = {}  # copies of parameters while the optimizer runs, where updates are recorded
        self._collected = -1
        self.clips: list[Clipping] = []  # calls that clipped in this step
        self._clipping: frozenset[str] = frozenset()
        self._clips_others = False
        self._updated = False  # an optimizer has stepped in this step
        self._late: list[tuple[Part, Value, Value | None]] = []  # gradients at a clipping behind that, until the next update
        self._scale: Value | None = None  # what torch's scaler has multiplied gradients by and not divided again
        self._multiplied: list[Scaled] = []
        self._turns = Turns()

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember whose parameters to look at."""
        self._models = chunks_of(model)
        self._list(list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else [])

    def _list(self, optimizers: list[Any]) -> None:
        self._listed = names = self._names()
        names = {**names, **{number: name for number, name in self.named.items() if number in names}}
        parameters = [p for p in parameters_in(self._models) if id(p) in names]
        self._plain = PlainSource(names, parameters, optimizers, *_flattened(self._models, names))
        self._plain.shard_of = self.shard_of
        self._anywhere = None

    def change(self, request: StatesRequest) -> None:
        """Take these from the next step on."""
        self._request = request
        self._known.clear()
        self._anywhere = None

    @property
    def parameters(self) -> list[Any]:
        """The parameters of the model, each once, as they were when the step began."""
        return [] if self._plain is None else self._plain.parameters

    def stepping(self, optimizer: Any) -> None:
        """Learn which optimizer steps; it becomes known, and what belongs to others is left to their own step.

        Where several take turns, their number becomes the scalar `objectives`.
        """
        if self._plain is not None:
            self._plain.learn(optimizer)
            self._plain.step_of(optimizer)
        objectives = self._turns.step(optimizer)
        if objectives and self._tape is not None:
            self._tape.note("objectives", float(objectives))

    def unclipped(self, parameters: Sequence[Any]) -> None:
        """Look at the gradients of these parameters, which are about to be clipped."""
        tape = self._tape
        if tape is None or self._plain is None or self.source is not None:
            return
        names = self._plain.names
        if self.more:
            tape.forget_all()
        with DisableTorchFunction(), tape.batched():
            parts = [part for p in parameters if id(p) in names for part in self._plain.gradients(p, "grad_unclipped")]
            self._clipping = frozenset(part.name for part in parts)
            self._clips_others = any(id(p) not in names and p.grad is not None for p in parameters)
            for part in parts:
                if flags := self._request.gradient(part.name) | self.more:
                    flags |= CHECKSUM if tape.shares else 0
                    looked = part, self._look(tape, part, flags), self._scale
                    self._late.append(looked) if self._updated else self._put_unclipped(tape, *looked)

    def _put_unclipped(self, tape: Tape, part: Part, value: Value, scale: Value | None) -> None:
        self._divide(self._put(tape, "unclipped", part, part.slot, value), part.slot, scale)

    def arrived(self, p: Any, gradient: Any, per_micro: bool) -> None:
        """Look at this process's own gradient: of one micro-batch, or, the last one staying, summed over those of the step.

        Of a flat parameter, whose sum is reduced with each micro-batch, at each parameter that it holds and each micro-batch.
        """
        tape, plain = self._tape, self._plain
        if tape is None or plain is None:
            return
        with torch.no_grad(), DisableTorchFunction():
            slices = plain.flat.get(id(p))
            if slices is not None:
                found = [(flat_slice.name, flat_slice.whole(gradient)) for flat_slice in slices]
            elif id(p) in plain.names:
                found = [(plain.names[id(p)], gradient if per_micro or p.grad is None else p.grad + gradient)]
            else:
                return
            for name, own in found:
                if flags := self._request.gradient(name):
                    part = Part(name, "grad_unreduced", own, micro=tape.micro if per_micro or slices is not None else 0)
                    looked = self._look(tape, part, flags)
                    self._divide(self._put(tape, "unreduced", part, part.slot, looked), part.slot, self._scale)

    def reported_norm(self, norm: Any, limit: float = float("inf")) -> None:
        """Keep the norm that the clipping found: the first one of a step as what was reported, each for the audit."""
        if self._tape is not None and self.more:
            self.clips.append(Clipping(self._clipping, self._tape.value(norm, self.more), limit, others=self._clips_others))
        if self._tape is not None and "grad_norm" not in self._tape.scalars:
            self._tape.note("grad_norm", norm)

    def begin(self, tape: Tape) -> None:
        """Take moments from now on."""
        if self._plain is not None and self._listed is not self._names():  # the model has other parameters than before
            self._list(self._plain.optimizers)
        self._tape = tape
        self._calls.clear()
        self._before.clear()
        self.clips = []
        self._late, self._updated = [], False
        self._scale, self._multiplied = None, []
        self._collected += 1

    def end(self, again: bool = False) -> None:
        """Take no more moments."""
        self._tape = None
        self._calls.clear()
        self._before.clear()

    def moment(self, name: str) -> None:
        """Look at what the source holds at "before_step", "after_step", "unreduced" or "unclipped"."""
        tape = self._tape
        source = self.source or self._plain
        if tape is None or source is None or (name == "after_step" and not (self._request.after or self.more)):
            return
        after = name == "after_step"
        self._forget(tape, after)
        due = self._due()
        plain = self._plain if source is self._plain else None
        # another source may fill one buffer after the other; what the plain one gives stays
        with DisableTorchFunction(), nullcontext() if plain is None else tape.batched():
            for part in source.parts(name) if plain is None else plain.parts(name, self._asked(due)):
                asked = self._known.get((part.name, part.slot)) or self._learn(part.name, part.slot)
                if asked.update and "update" in due:
                    self._update(tape, name, part, asked.update)
                flags = (asked.flags if asked.sort in due else 0) | self.more
                if tape.shares and flags and (asked.state or (asked.sort != "state" and not after)):
                    flags |= CHECKSUM  # of what the optimizer makes too, where its state is recorded
                if flags:
                    slot = asked.after if after else part.slot
                    whole = part.shard is None  # of most; a call less for each value
                    value = tape.tree(part.tensor, flags) if whole else self._look(tape, part, flags)
                    call = self._put(tape, name, part, slot, value)
                    scale = self._scale if part.slot == "grad" and plain is not None else None
                    if scale is not None or part.scale != 1.0:
                        self._divide(call, slot, part.scale if part.scale != 1.0 else scale)
            if name == "before_step":
                self._end_of_gradients(tape, source)

    def _forget(self, tape: Tape, after: bool) -> None:
        """Have the tape look again at what may have been written without a trace. after: the optimizer has stepped."""
        if self.more:
            tape.forget_all()  # a write through `.data`, or by a collective, leaves no trace: the audit looks again
        if after:
            for clipping in self.clips:
                clipping.used = True
            self._updated = True
            tape.forget_all()  # fused optimizers write without a trace in the version counters

    def _end_of_gradients(self, tape: Tape, source: Source) -> None:
        for looked in self._late:
            self._put_unclipped(tape, *looked)
        self._late.clear()
        for key, number in source.scalars().items():
            tape.note_once(key, number)

    def scaled(self, scale: Any) -> None:
        """Learn that gradients arrive multiplied from now on. scale: a tensor of one element, looked at as it is now."""
        if self._tape is not None:
            value = self._scale = self._tape.value(scale, STATS)
            self._tape.note_once("loss_scale", value)

    def unscaled(self) -> None:
        """Learn that gradients are as they are again."""
        self._scale = None

    def unscaling(self) -> Callable[[StepData], None] | None:
        """Return what takes out of the numbers of this step what gradients were multiplied by; None where they were not."""
        return partial(unscale, scaled=self._multiplied) if self._multiplied else None

    def _look(self, tape: Tape, part: Part, flags: int) -> Value:
        value = tape.tree(part.tensor, flags)
        if part.shard is not None:
            value.extra = {**(value.extra or {}), "shard": part.shard.described()}
            if type(part.tensor) in tape.library.plain:  # others say themselves what they hold
                tape.share(value, part.tensor, part.shard, flags)
        return value

    def _put(self, tape: Tape, moment: str, part: Part, slot: str, value: Value) -> Call:
        call = self._calls.get((moment, part.name, part.micro)) or self._new_call(tape, moment, part.name, part.micro)
        call.params[slot] = value
        if tape.has_journal:
            tape.more_known(call)
        return call

    def _divide(self, call: Call, slot: str, scale: float | Value | None) -> None:
        if scale is not None:
            self._multiplied.append((call, slot, scale))

    def at_address(self, address: int) -> str:
        """Return the parameter whose value, or master weight, lies at an address; empty where none does."""
        source = self.source or self._plain
        with DisableTorchFunction():
            for part in source.parts("after_step") if source is not None else ():
                t = getattr(part.tensor, "_local_tensor", part.tensor)
                if part.slot in ("value", "main_value") and 0 <= address - t.data_ptr() < t.numel() * t.element_size():
                    return part.name
        return ""

    def held(self, tape: Tape) -> Iterator[tuple[tuple[str, str], Value]]:
        """Yield (parameter, slot) and the fingerprinted value of all that the source holds now, gradients left out."""
        source = self.source or self._plain
        with DisableTorchFunction():
            for part in source.parts("after_step") if source is not None else ():
                yield (part.name, part.slot), tape.tree(part.tensor, STATS | CHECKSUM)

    def pieces(self) -> dict[tuple[str, str], SavedShard]:
        """Return the pieces that the source holds now of tensors that are cut, gradients left out."""
        source = self.source or self._plain
        with torch.no_grad(), DisableTorchFunction():
            return {} if source is None else shards_of(source.parts("after_step"))

    def deferred_shards(self, tape: Tape) -> HeldShards:
        """Return the same pieces, to be read once the step of this tape is drained."""
        source = self.source or self._plain
        with torch.no_grad(), DisableTorchFunction():
            return HeldShards(() if source is None else source.parts("after_step"), tape.defer)

    def _due(self) -> frozenset[str]:
        """Return what this step is one of the steps for: sorts of tensors, and "update"."""
        every = self._request.every
        return frozenset(sort for sort in (*SORTS, "update") if self._collected % every.get(sort, 1) == 0)

    def _asked(self, due: frozenset[str]) -> frozenset[str]:
        """Return the sorts of tensors to record of any parameter now; others need not be looked up."""
        if self._anywhere is None and self._plain is not None:
            slices = [flat_slice.name for held in self._plain.slices.values() for flat_slice in held]
            names = dict.fromkeys([*self._plain.names.values(), *slices])
            known = [self._learn(name, slot) for name in names for slot in ("value", "grad", "")]
            self._anywhere = frozenset(asked.sort for asked in known if asked.flags), any(asked.update for asked in known)
        sorts, updates = self._anywhere or (SORTS, False)
        return SORTS if self.more else (sorts & due) | (_VALUES if updates and "update" in due else frozenset())

    def _learn(self, name: str, slot: str) -> _SlotRequest:
        sort = sort_of(slot)
        update = self._request.update(name) if sort == "value" else 0
        state = self._request.state(name) > 0
        asked = _SlotRequest(self._flags_of(slot)(name), update, sort, f"{slot}_after", state)
        self._known[name, slot] = asked
        return asked

    def _update(self, tape: Tape, moment: str, part: Part, flags: int) -> None:
        """Record value after the step minus value before it, in the tensor's own dtype; the master weight's too."""
        key = f"{part.name}|{part.slot}"
        if moment == "after_step" and key not in self._before:
            return
        inner = part.tensor if type(part.tensor) in tape.library.plain else tape.library.special(part.tensor)[0]
        if inner is None:
            return
        with torch.no_grad():
            if moment == "before_step":
                self._before[key] = inner.detach().clone()
                return
            change = attempt(_difference, inner, self._before.pop(key), otherwise=partial(tape.unreadable, inner))
        slot = "update" if part.slot == "value" else "main_update"
        call = self._calls.get((moment, part.name, 0)) or self._new_call(tape, moment, part.name, 0)
        call.params[slot] = change if isinstance(change, Value) else tape.tree(change, flags)
        tape.more_known(call)

    def _flags_of(self, slot: str) -> Callable[[str], int]:
        if slot in self._request.without:
            return lambda name: 0
        return {"value": self._request.value, "gradient": self._request.gradient, "state": self._request.state}[sort_of(slot)]

    def _new_call(self, tape: Tape, moment: str, name: str, number: int) -> Call:
        call = self._calls[moment, name, number] = tape.call("state", name, number, "optimizer", parent="optimizer")
        call.node = moment
        call.params = {}
        return call


def _difference(after: Any, before: Any) -> Any:
    return after.detach() - before


def _flattened(models: list[Any], names: dict[int, str]) -> tuple[dict[int, list[FlatSlice]], dict[int, list[FlatSlice]]]:
    """Return the slices of flattened parameters by what the optimizer steps, and by the flat parameter."""
    stepped, flat = dict[int, list[FlatSlice]](), dict[int, list[FlatSlice]]()
    for handle in handles_of(models):
        own = flat[id(handle.flat_param)] = list(flat_slices_of(handle, names))
        for flat_slice in own:
            stepped.setdefault(id(flat_slice.owner), []).append(flat_slice)
    return stepped, flat
