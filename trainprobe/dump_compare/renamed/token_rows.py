"""A rank of a dump of which the calls of each module, over several passes of the model, are one with a row for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trainprobe.dump_compare.call_slots import fill, is_result
from trainprobe.dump_compare.dump_side import Columns, Side
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import ValuesOfCalls, slots
from trainprobe.errors import CompareError

Indices = npt.NDArray[np.int64]
Rows = Literal["each", "shared", "last"]  # a row for each token; one for each place of all texts; one for the last of each text
Form = tuple[Rows, tuple[int, ...]]


class Pass(NamedTuple):
    """One forward of the whole model. ids: int64 [texts, tokens]. calls: of its modules, in order."""

    ids: Indices
    calls: list[Call]


class Tokens(NamedTuple):
    """Where tokens are on one side. of: number of the pass, [n]. at: place in its flat ids, [n].

    last: which of them have logits on both sides, [n].
    """

    passes: Sequence[Pass]
    of: Indices
    at: Indices
    last: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Joined:
    """parts: number of the pass → value. keep: which tokens it has, [n]."""

    parts: Mapping[int, Value]
    forms: Mapping[int, Form]
    keep: npt.NDArray[np.bool_]


def passes_of(side: Side) -> list[Pass]:
    """Return the forwards of the model that a dump holds. Raises CompareError where it holds none with its tokens."""
    found: list[Pass] = []
    name: str | None = None
    for call in side.step_data.calls:
        if call.kind != "module" or call.phase != "forward":
            continue
        if name in (None, call.name) and (value := _ids_of(call)) is not None:
            ids = side.array(value)
            if ids is None:
                raise CompareError(f"{side.folder} does not store the tokens that the model is given: record with task: tensor")
            name = call.name
            found.append(Pass(np.asarray(ids, np.int64).reshape(-1, ids.shape[-1]), []))
        if found:
            found[-1].calls.append(call)
    if not found:
        raise CompareError(f"no module in {side.folder} is given tokens: record the forward of the whole model")
    return found


def _ids_of(call: Call) -> Value | None:
    """Return the tokens that a module is given, None where it is given none."""
    given = [(slot, x) for slot, x in slots(call) if not is_result(slot) and "int" in x.dtype and 1 <= len(x.shape) <= 2]
    named = [x for slot, x in given if slot == "kwargs.input_ids"]
    return next(iter(named or [x for slot, x in given if slot == "input.0"]), None)


def _vocabulary(passes: Sequence[Pass]) -> int:
    """Return the number of rows of the embedding of the tokens; 0 where it is not seen."""
    first = passes[0]
    for call in first.calls:
        weight = dict(slots(call)).get("parameters.weight")
        if weight is not None and len(weight.shape) == 2 and _ids_of(call) is not None:
            return int(weight.shape[0])
    return 0


def takes_last(passes: Sequence[Pass]) -> bool:
    """Return whether logits are calculated of the last token of a pass alone."""
    size = _vocabulary(passes)
    return any(
        is_result(slot) and tuple(x.shape) in ((len(each.ids), 1, size), (len(each.ids), size))
        for each in passes
        if each.ids.shape[1] > 1
        for call in each.calls
        for slot, x in slots(call)
    )


def _forms(shape: tuple[int, ...], texts: int, tokens: int) -> list[Form]:
    """Return how a value of a pass may have rows for its tokens, the likeliest first, with the shape of a row."""
    found: list[Form] = []
    if shape[:2] == (texts, tokens):
        found.append(("each", shape[2:]))
    if shape[:1] == (texts * tokens,):
        found.append(("each", shape[1:]))
    if shape[:2] == (1, tokens):
        found.append(("shared", shape[2:]))
    if shape[:2] == (texts, 1):
        found.append(("last", shape[2:]))
    if shape[:1] == (texts,):
        found.append(("last", shape[1:]))
    return found


class TokenSide(Side):
    """A side with one call for each module; its values are behind the rows of the dump. left: modules that have none."""

    def __init__(self, side: Side, tokens: Tokens) -> None:
        self.folder, self.unread = side.folder, side.unread
        self._side, self._tokens = side, tokens
        self._count = len(side.step_data.partials)
        self._made: list[_Joined] = []
        self._size = _vocabulary(tokens.passes)
        self.left: list[str] = []
        calls = self._calls()
        self.step_data = copy(side.step_data)
        self.step_data.calls, self.step_data.values, self.step_data.states = calls, ValuesOfCalls(calls), ()
        partials = side.step_data.partials
        self.step_data.partials = np.zeros((self._count + len(self._made), *partials.shape[1:]))

    def _calls(self) -> list[Call]:
        used = np.unique(self._tokens.of).tolist()
        by_name: dict[str, list[tuple[int, Call]]] = {}
        for number in used:
            for call in self._tokens.passes[number].calls:
                by_name.setdefault(call.name, []).append((number, call))
        joined: dict[str, Call] = {}
        for name, of_name in by_name.items():
            if [number for number, _ in of_name] != used:
                self.left.append(name)
                continue
            first = of_name[0][1]
            around = first.parent
            while isinstance(around, Call) and around.name not in joined:
                around = around.parent
            parent = joined[around.name] if isinstance(around, Call) else around
            joined[name] = Call("module", name, 0, "forward", cls=first.cls, parent=parent)
            fill(joined[name], self._values(dict(of_name)))
        return list(joined.values())

    def _values(self, calls: Mapping[int, Call]) -> dict[str, Value]:
        """Return slot → value of a module over all passes."""
        of_pass = {number: dict(slots(call)) for number, call in calls.items()}
        first = next(iter(of_pass.values()))
        scores = any(is_result(slot) and tuple(x.shape)[-1:] == (self._size,) for slot, x in first.items())
        leaf = scores and any(slot.startswith("parameters") for slot in first)
        ids = _ids_of(next(iter(calls.values())))
        found: dict[str, Value] = {}
        for slot, x in first.items():
            if slot.startswith("parameters"):
                found[slot] = x
            elif all(slot in each for each in of_pass.values()):
                if ids is not None and not is_result(slot):
                    if x is not ids:
                        continue  # positions, which a caller may leave to the model
                    name = "input.0"
                else:
                    name = slot
                made = self._made_of({number: each[slot] for number, each in of_pass.items()}, leaf)
                if made is not None:
                    found[name] = made
        return found

    def _made_of(self, parts: Mapping[int, Value], leaf: bool) -> Value | None:
        """Return a value with a row for each token; None where its parts have none. leaf: whether logits are made of it."""
        forms = {n: _forms(tuple(x.shape), *self._tokens.passes[n].ids.shape) for n, x in parts.items()}
        for row in [row for _, row in next(iter(forms.values()))]:
            chosen = {n: next((form for form in f if form[1] == row), None) for n, f in forms.items()}
            logits = leaf or row[-1:] == (self._size,)
            if None not in chosen.values() and (logits or all(form and form[0] != "last" for form in chosen.values())):
                break
        else:
            return None
        first = next(iter(parts.values()))
        keep = self._tokens.last if logits else np.ones_like(self._tokens.last)
        self._made.append(_Joined(parts, {n: form for n, form in chosen.items() if form}, keep))
        tensor = first.tensor if all(x.tensor for x in parts.values()) else None
        return Value(self._count + len(self._made) - 1, first.dtype, (int(keep.sum()), *row), type=first.type, tensor=tensor)

    def array(self, value: Value) -> npt.NDArray[Any] | None:
        """Return the elements of a value, [tokens, …], where the dump stores them."""
        if value.row < self._count:
            return self._side.array(value)
        made = self._made[value.row - self._count]
        of, at = self._tokens.of[made.keep], self._tokens.at[made.keep]
        whole: npt.NDArray[Any] | None = None
        for number, part in made.parts.items():
            here, (kind, row) = of == number, made.forms[number]
            piece = self._side.array(part)
            if piece is None:
                return None
            tokens = self._tokens.passes[number].ids.shape[1]
            places = at[here] % tokens if kind == "shared" else at[here] // tokens if kind == "last" else at[here]
            whole = np.empty((len(of), *row), piece.dtype) if whole is None else whole
            whole[here] = piece.reshape(-1, *row)[places]
        return whole

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics of a value by name; those of a made one are taken of its elements."""
        if value.row < self._count:
            return self._side.numbers(value)
        array = self.array(value)
        if array is None or not array.size:
            return {}
        wide = np.asarray(array, np.float64)
        return {
            "norm": float(np.linalg.norm(wide)),
            "max": float(wide.max()),
            "min": float(wide.min()),
            "mean": float(wide.mean()),
        }

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return the fingerprints of a value of the dump; of a made one none are known."""
        return self._side.bits(value) if value.row < self._count else {}

    @cached_property
    def _columns(self) -> Columns:
        made = [value for call in self.step_data.calls for _, value in slots(call) if value.row >= self._count]
        return self._side._columns.and_made([self.numbers(value) for value in sorted(made, key=lambda value: value.row)])

    def place_of(self, value: Value, at: Sequence[int]) -> str:
        """Return which token an element is of, and which forward has it."""
        if value.row < self._count or not at:
            return ""
        keep = self._made[value.row - self._count].keep
        number, place = int(self._tokens.of[keep][at[0]]), int(self._tokens.at[keep][at[0]])
        text, token = divmod(place, self._tokens.passes[number].ids.shape[1])
        before = sum(each.ids.shape[1] for each in self._tokens.passes[:number])
        return f"most at {[*at]}: token {before + token} of text {text}, in forward {number} of {len(self._tokens.passes)}"
