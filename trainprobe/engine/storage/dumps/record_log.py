"""One collected step as one line of the record log, and back: everything in it, partials included, so nothing is lost.

A tree of values is written with a value as its number, a whole number as {"i": 3}, a dict as {"d": {…}}, an opaque leaf as
{"o": [type, value, extra]} and all else as JSON has it. Columns of numbers are lists; a column of zeros is left out. What was
not computed is null, and a column of "nullable" in which nothing was is left out. Lines of earlier releases have no "nullable":
they have 0 for what was not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.engine.core.records import Call, Feature, Opaque, StepData, Value
from trainprobe.engine.core.step_layout import layout_of
from trainprobe.engine.stats.partials import COMPUTED_WITH, F64, PARTIALS, STATS, column
from trainprobe.engine.storage.dumps.entry_text import plain_numbers, read_number
from trainprobe.engine.storage.dumps.header import place_text, read_place, read_scalars

FORMAT = 1
DEPTH = 400
_CALL = ("kind", "name", "call", "phase", "cls", "micro", "stack", "node")
TREES = ("args", "kwargs", "out", "params")
_VALUE = ("type", "dtype", "shape", "device", "requires_grad")
_SPARSE = ("note", "tensor", "extra")
_COUNTS = frozenset({"count", "nan", "posinf", "neginf", "zero", "exponent", "sublow"})
_COLUMNS = ["sublow" if name == "subnormal" else name for name in PARTIALS]  # as files of this format call them
_NULLABLE = frozenset(_COLUMNS[PARTIALS.index(name)] for name, flags in COMPUTED_WITH.items() if flags & ~STATS)


# ---- writing ----------------------------------------------------------------------------------------------------------


def encode(step_data: StepData) -> bytes:
    """Return a collected step as one line, its newline included."""
    calls = layout_of(step_data).derived(calls_text, lambda: calls_text(step_data))
    numbers = {"rows": len(step_data.partials), "nullable": sorted(_NULLABLE), "partials": _partials(step_data.partials)}
    return b"".join((b"{", _members(_first(step_data)), b",", calls, b",", _members(numbers), _rare(step_data), b"}\n"))


def calls_text(step_data: StepData) -> bytes:
    """Return what a line has of the calls, values and call stacks, without the braces around it."""
    calls, columns = _calls_and_columns(step_data)
    return _members({"calls": calls, **columns, "stacks": [list(stack) for stack in step_data.stacks]})


def _members(thing: Mapping[str, Any]) -> bytes:
    return orjson.dumps(thing, default=described, option=OPTIONS)[1:-1]


def _first(step_data: StepData) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": step_data.step,
        "place": place_text(step_data.place),
        "framework": step_data.framework,
        "level": step_data.level,
        "task": step_data.task,
        "wanted": step_data.statistics,
        "complete": step_data.complete,
        "programs": list(step_data.programs),
        "scalars": {k: x if x - x == 0 else str(x) for k, x in step_data.scalars.items()},
        "notes": list(step_data.notes),
    }


def _rare(step_data: StepData) -> bytes:
    line: dict[str, Any] = {}
    if step_data.checksums is not None:
        line["checksums"] = step_data.checksums.tolist()
    if step_data.crc32 is not None:
        line["crc32"] = dict(step_data.crc32)
    if step_data.histograms is not None:
        line["histograms"] = {
            row: [np.asarray(edges), np.asarray(counts)] for row, (edges, counts) in step_data.histograms.items()
        }
    if step_data.quantiles is not None:
        line["quantiles"] = {row: plain_numbers(np.asarray(x, float)) for row, x in step_data.quantiles.items()}
    if step_data.features:
        line["features"] = _features_text(step_data.features)
    if step_data.batches:
        line["batches"] = list(step_data.batches)
    return b"," + _members(line) if line else b""


def _features_text(features: Sequence[Feature]) -> list[Any]:
    finite = np.isfinite(np.concatenate([x for f in features for x in (f.numbers, f.edges) if x is not None])).all()
    text = np.ascontiguousarray if finite else plain_numbers  # JSON has no other numbers
    return [[f.name, f.slot, f.call, f.micro, text(f.numbers), *([] if f.edges is None else [text(f.edges)])] for f in features]


def _read_feature(text: Sequence[Any]) -> Feature:
    name, slot, call, micro, *arrays = text
    return Feature(name, slot, call, micro, *(np.array([read_number(x) for x in array], float) for array in arrays))


OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def _calls_and_columns(step_data: StepData, values: _Values | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    values = values or _Values()
    numbers = {id(call): i for i, call in enumerate(step_data.calls)}
    calls = [_call_text(call, numbers, values) for call in step_data.calls]
    return calls, values.columns()


def structure(step_data: StepData, places: Sequence[Value]) -> bytes:
    """Return what the steps with equal calls share, as JSON without shapes: calls, values and call stacks.

    places: the values of the rows that show them; `places` of the text has their numbers.
    """
    values = _Values()
    calls, columns = _calls_and_columns(step_data, values)
    shapeless = [(*head[:2], *head[3:]) for head in columns["heads"]]
    heads = {head: number for number, head in enumerate(dict.fromkeys(shapeless))}
    number_of = [heads[head] for head in shapeless]
    text = {
        "calls": calls,
        **columns,
        "heads": [*heads],
        "head": [number_of[head] for head in columns["head"]],
        "places": [values.numbers[id(value)] for value in places],
        "stacks": [list(stack) for stack in step_data.stacks],
    }
    return orjson.dumps(text, default=described, option=OPTIONS)


def read_structure(text: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> tuple[list[Call], list[Value]]:
    """Return the calls and values of `structure`; shapes: of the logical tensor of each row. Raises as `decode` does."""
    of_value = dict(zip(text["places"], shapes, strict=True))
    heads = [text["heads"][head] for head in text["head"]]
    whole = [[kind, dtype, of_value.get(i, ()), device, grad] for i, (kind, dtype, device, grad) in enumerate(heads)]
    values = _read_values({**text, "heads": whole, "head": range(len(whole))})
    for value in values:
        if shard := (value.extra or {}).get("shard"):
            value.shape = tuple(shard["shape"])
    return _read_calls(text["calls"], values), values


class _Values:
    """Numbers the values as they are met; heads (type, dtype, shape, device, requires_grad) are written once each."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self._heads: dict[Any, int] = {}
        self._head_of: list[int] = []
        self._rows: list[int] = []
        self._sparse: dict[str, dict[int, Any]] = {name: {} for name in _SPARSE}

    def number(self, value: Value) -> int:
        found = self.numbers.get(id(value))
        return self._add(value) if found is None else found

    def _add(self, value: Value) -> int:
        number = self.numbers[id(value)] = len(self._rows)
        self._rows.append(value.row)
        head = (value.type, value.dtype, value.shape, value.device, value.requires_grad)
        self._head_of.append(self._heads.setdefault(head, len(self._heads)))
        if value.note is not None or value.tensor is not None or value.extra is not None:
            for name in _SPARSE:
                if getattr(value, name) is not None:
                    self._sparse[name][number] = getattr(value, name)
        return number

    def columns(self) -> dict[str, Any]:
        sparse = {name: column for name, column in self._sparse.items() if column}
        return {"heads": list(self._heads), "head": self._head_of, "row": self._rows, "about": sparse}


def _call_text(call: Call, numbers: Mapping[int, int], values: _Values) -> dict[str, Any]:
    text = call_head(call, numbers.get(id(call.parent)))
    for field in TREES:
        tree = getattr(call, field)
        if tree is not None:
            text[field] = tree_text(tree, values.number)
    return text


def call_head(call: Call, parent: int | None) -> dict[str, Any]:
    """Return what a line has of a call but for its trees. parent: the number of the call that it was made in, where known."""
    text: dict[str, Any] = {"kind": call.kind, "name": call.name, "call": call.call, "phase": call.phase}
    if call.cls:
        text["cls"] = call.cls
    if call.micro is not None:
        text["micro"] = call.micro
    if call.stack >= 0:
        text["stack"] = call.stack
    if call.node is not None:
        text["node"] = call.node
    if call.parent is not None:
        text["parent"] = call.parent if isinstance(call.parent, str) else parent
    return text


def tree_text(tree: Any, number: Callable[[Value], int]) -> Any:
    """Return a tree as a line has it. number: of a value."""
    kind = type(tree)
    if kind is Value:
        return number(tree)
    if kind is list:
        return [tree_text(item, number) for item in tree]
    if kind is dict:
        return {"d": {str(k): tree_text(v, number) for k, v in tree.items()}}
    if kind is int:
        return {"i": tree if -(1 << 63) <= tree < 1 << 63 else str(tree)}
    if kind is float:
        return tree if tree - tree == 0 else {"f": str(tree)}
    if kind is Opaque:
        return {"o": [tree.type, tree.value, tree.extra]}
    return tree


def described(thing: Any) -> Any:
    """Return what JSON has no form for as a list or as text."""
    return list(thing) if isinstance(thing, (set, frozenset, tuple, Mapping)) else str(thing)  # pyright: ignore


def _partials(partials: npt.NDArray[np.float64]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for i, name in enumerate(_COLUMNS):
        numbers = partials[:, i]
        unknown = np.isnan(numbers) if name != "sum" else np.isnan(column(partials, "nan"))
        if unknown.all() if name in _NULLABLE else not numbers.any():
            continue
        if not unknown.any():
            out[name] = numbers.astype(np.int64) if name in _COUNTS else _listed(numbers)
        else:
            out[name] = [None if gone else x for gone, x in zip(unknown.tolist(), plain_numbers(numbers), strict=True)]
    return out


def _listed(numbers: F64) -> Any:
    return np.ascontiguousarray(numbers) if np.isfinite(numbers).all() else plain_numbers(numbers)


# ---- reading ----------------------------------------------------------------------------------------------------------


def decode(line: bytes) -> StepData:
    """Return the collected step of one line. Raises KeyError, IndexError, TypeError or ValueError when the line is not one."""
    text: dict[str, Any] = orjson.loads(line)
    if text["format"] != FORMAT:
        raise ValueError(f"the record log has format {text['format']!r}, this version reads {FORMAT}")
    values = _read_values(text)
    calls = _read_calls(text["calls"], values)
    partials = _read_partials(text)
    checksums, crc32 = text.get("checksums"), text.get("crc32")
    histograms, quantiles = text.get("histograms"), text.get("quantiles")
    return StepData(
        step=int(text["step"]),
        place=read_place(text["place"]),
        framework=text["framework"],
        level=text["level"],
        task=text["task"],
        calls=calls,
        values=values,
        partials=partials,
        checksums=None if checksums is None else np.array(checksums, np.uint64),
        statistics=tuple(text["wanted"]),
        crc32=None if crc32 is None else {int(k): v for k, v in crc32.items()},
        histograms=None if histograms is None else {int(k): tuple(map(np.array, v)) for k, v in histograms.items()},
        quantiles=None if quantiles is None else {int(k): np.array([read_number(x) for x in v]) for k, v in quantiles.items()},
        scalars=read_scalars(text["scalars"]),
        stacks=text["stacks"],
        notes=text["notes"],
        programs=tuple(text["programs"]),
        complete=text["complete"],
        features=[_read_feature(item) for item in text.get("features", ())],
        batches=text.get("batches", ()),
    )


def _read_partials(text: Mapping[str, Any]) -> F64:
    partials = np.zeros((int(text["rows"]), len(PARTIALS)))
    for i, name in enumerate(_COLUMNS):
        if name in text["partials"]:
            partials[:, i] = [read_number(x) for x in text["partials"][name]]
        elif name in _NULLABLE:
            partials[:, i] = np.nan
    if "nullable" not in text:  # whether a 0 was computed such lines do not tell
        for name in _NULLABLE:
            numbers = partials[:, _COLUMNS.index(name)]
            numbers[numbers == 0] = np.nan
        partials[column(partials, "count") == 0] = np.nan
    return partials


def _read_values(text: Mapping[str, Any]) -> list[Value]:
    values: list[Value] = []
    for head, row in zip(text["head"], text["row"], strict=True):
        kind, dtype, shape, device, grad = text["heads"][head]
        values.append(Value(row, dtype, tuple(shape), type=kind, device=device, requires_grad=grad))
    for name in _SPARSE:
        for number, thing in text["about"].get(name, {}).items():
            setattr(values[int(number)], name, thing)
    return values


def _read_calls(texts: Sequence[Mapping[str, Any]], values: list[Value]) -> list[Call]:
    calls = [read_call(text, values) for text in texts]
    for call, text in zip(calls, texts, strict=True):
        parent = text.get("parent")
        call.parent = calls[parent] if isinstance(parent, int) else parent
    return calls


def read_call(text: Mapping[str, Any], values: Sequence[Value]) -> Call:
    """Return a call without its parent. values: by their numbers."""
    call = Call(
        text["kind"],
        text["name"],
        text["call"],
        text["phase"],
        cls=text.get("cls", ""),
        micro=text.get("micro"),
        stack=text.get("stack", -1),
    )
    call.node = text.get("node")
    for field in TREES:
        if field in text:
            setattr(call, field, read_tree(text[field], values))
    return call


def read_tree(tree: Any, values: Sequence[Value], depth: int = 0) -> Any:
    """Return the tree that `tree_text` wrote. values: by their numbers. Raises IndexError, TypeError or ValueError."""
    if depth > DEPTH:
        raise ValueError(f"a tree is nested deeper than {DEPTH}")
    if isinstance(tree, int) and not isinstance(tree, bool):
        return values[tree]
    if isinstance(tree, list):
        return [read_tree(item, values, depth + 1) for item in tree]
    if isinstance(tree, dict):
        key, thing = next(iter(tree.items()))
        if key == "d":
            return {k: read_tree(v, values, depth + 1) for k, v in thing.items()}
        if key == "i":
            return int(thing)
        return float(thing) if key == "f" else Opaque(*thing)
    return tree
