"""The entries of a dump as JSON text: each distinct value is turned into text once, whatever the number of places it is at.

A column of numbers is turned into text at once; NaN and infinities have names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.engine.core.records import Call, Opaque, StepData, Value
from trainprobe.engine.core.step_data import entry_name, fingerprinted, parent_name, unknown
from trainprobe.engine.stats.partials import column
from trainprobe.engine.storage.dumps.tensor_files import file_name, plain_dtype

# statistic → key in a leaf; every other statistic is written under its own name
KEYS = {"max": "Max", "min": "Min", "mean": "Mean", "norm": "Norm"}
STRICT = ('"nan"', '"inf"', '"-inf"')  # as Python writes them: float() of the text gives the number back
BARE = ("NaN", "Infinity", "-Infinity")
_NO_NUMBERS = "".join(f', "{key}": null' for key in KEYS.values())


class DumpText(NamedTuple):
    """The entries of a collected step as the inside of a JSON object, their names and their calls."""

    text: bytes
    names: list[str]
    calls: list[Call]


class EntryText:
    """Turns the calls of one collected step into JSON text.

    stored: keys of the values that are in the step's tensor files. suffix: "pt" or "npy" where each is a file of its own, which
    is then named for its place (`Functional.linear.0.forward.input.0.pt`): `links` holds file name → key for all places.
    sides: which of "input" and "output" the entries hold; the other one is empty.
    """

    def __init__(
        self,
        step_data: StepData,
        *,
        nan_tokens: bool = False,
        stored: Collection[str] = (),
        suffix: str = "",
        sides: Collection[str] = ("input", "output"),
    ) -> None:
        self.links: dict[str, str] = {}
        self._step_data = step_data
        self._tokens = BARE if nan_tokens else STRICT
        self._stored = stored
        self._suffix = suffix if stored else ""
        self._inputs, self._outputs = "input" in sides, "output" in sides
        self._leaves: dict[int, str] = {}
        self._heads: dict[Any, str] = {}
        self._whole_numbers: list[str] | None = None

    @property
    def _numbers(self) -> list[str]:
        if self._whole_numbers is None:
            self._whole_numbers = _numbers_text(self._step_data, self._tokens)
        return self._whole_numbers

    def document(self) -> DumpText:
        """Return all entries as the inside of a JSON object; see `entries`."""
        whole = list(self.entries())
        text = ",".join(f"\n  {quote(name)}: {entry}" for name, entry, _ in whole)
        return DumpText(text.encode("utf-8", "replace"), [name for name, _, _ in whole], [call for _, _, call in whole])

    def entries(self) -> Iterator[tuple[str, str, Call]]:
        """Yield (entry name, JSON text, call) in execution order.

        A recomputed forward is left out, so that nothing counts twice, and what was recorded for the monitor alone. A name that
        is taken gets the next free number.
        """
        taken: set[str] = set()
        others = ("state", "module", "parameter") if _modules_are_watched_only(self._step_data) else ("state",)
        for call in self._step_data.calls:
            if call.phase == "recompute" or call.kind in others:
                continue
            name = entry_name(call, self._step_data.framework)
            if name in taken:
                name = _free_name(call, taken, self._step_data.framework)
            taken.add(name)
            yield name, self.entry(call, name), call

    def entry(self, call: Call, name: str = "") -> str:
        """Return the text of one call. name: its entry name, from which tensor files are named."""
        at = f"{name}." if self._suffix else ""
        if call.kind == "saved":
            return self._named(call.args, at and name)
        if call.kind == "parameter":
            pairs = [quote(k) + ": " + self._listed(v, at and at + k, "") for k, v in (call.params or {}).items()]
            return f"{{{', '.join(pairs)}}}"
        args = self._listed(call.args if self._inputs else None, at and at + "input")
        out = self._listed(call.out if self._outputs else None, at and at + "output")
        if call.phase == "backward":
            return f'{{"input": {args}, "output": {out}}}'
        kwargs = self._named(call.kwargs, at and at + "kwargs") if call.kwargs and self._inputs else "{}"
        return f'{{"input_args": {args}, "input_kwargs": {kwargs}{self._params(call, at)}, "output": {out}}}'

    def _params(self, call: Call, at: str) -> str:
        """Return the parameters of a module, or what an operator has written and drew from, each under its key."""
        if not call.params:
            return ""
        trees = call.params if call.kind == "op" else {"parameters": call.params}
        return "".join(f", {quote(key)}: {self._named(tree, at and at + key)}" for key, tree in trees.items())

    def _named(self, tree: Any, at: str) -> str:
        return self._placed(tree, at) if at else self.text(tree)

    def _listed(self, tree: Any, at: str, first: str = ".0") -> str:
        """Return a list as it is, and anything else as a list of one, whose place is `at` and `first`."""
        if tree is None:
            return "[]"
        if type(tree) is list:
            return self._named(tree, at)
        return f"[{self._named(tree, at and at + first)}]"

    def _placed(self, tree: Any, at: str) -> str:
        """Return the text of a tree, with the file of each stored value named for its place."""
        if isinstance(tree, list):
            items = [self._placed(item, f"{at}.{i}") for i, item in enumerate(tree)]
            return f"[{', '.join(items)}]"
        if isinstance(tree, dict):
            pairs = [quote(k) + ": " + self._placed(v, f"{at}.{k}") for k, v in tree.items()]
            return f"{{{', '.join(pairs)}}}"
        text = self.text(tree)
        if isinstance(tree, Value) and tree.tensor is not None and tree.tensor in self._stored:
            name = file_name(at, self._suffix)
            self.links[name] = tree.tensor
            return f'{text[:-1]}, "data_name": {quote(name)}}}'
        return text

    def text(self, tree: Any) -> str:
        """Return the text of a tree of values, scalars, lists and dicts."""
        kind = type(tree)
        if kind is Value:
            return self._leaves.get(id(tree)) or self._leaf(tree)
        if tree is None:
            return "null"
        if kind is list:
            return f"[{', '.join(map(self.text, tree))}]"
        if kind is dict:
            return f"{{{', '.join(f'{quote(k)}: {self.text(v)}' for k, v in tree.items())}}}"
        if kind is bool:
            return '{"type": "bool", "value": true}' if tree else '{"type": "bool", "value": false}'
        if kind is int or kind is float:
            return f'{{"type": "{kind.__name__}", "value": {number_text(tree, self._tokens)}}}'
        if kind is Opaque:
            return dumps({"type": tree.type, "value": tree.value, **(tree.extra or {})})
        return f'{{"type": "{kind.__name__}", "value": {quote(str(tree))}}}'

    def _leaf(self, value: Value) -> str:
        key = (value.type, value.dtype, value.shape)
        head = self._heads.get(key)
        if head is None:
            shape = list(value.shape)
            head = self._heads[key] = f'{{"type": {quote(value.type)}, "dtype": {quote(value.dtype)}, "shape": {shape}'
        numbers = self._numbers[value.row] if value.row >= 0 else _NO_NUMBERS
        grad = value.requires_grad
        text = head + numbers + ("" if grad is None else ', "requires_grad": true' if grad else ', "requires_grad": false')
        if value.tensor is not None or value.note is not None or value.extra or value.row in self._step_data.shares:
            text += self._rare(value)
        text += "}"
        self._leaves[id(value)] = text
        return text

    def _rare(self, value: Value) -> str:
        text = ""
        if value.tensor is not None and value.tensor in self._stored and not self._suffix:
            text += f', "data_name": {quote(value.tensor)}'
        if value.note is not None:
            text += f', "note": {quote(value.note)}'
        for key, item in (value.extra or {}).items():
            text += f", {quote(key)}: {dumps(item)}"
        share = self._step_data.shares.get(value.row)
        return text if share is None else f'{text}, "share": "{share:016x}"'


def _modules_are_watched_only(step_data: StepData) -> bool:
    """Tell whether the modules of a step were recorded for other programs: what a dump of level L1 records has none."""
    return step_data.level == "L1" and len(step_data.programs) > 1


def column_text(column: npt.NDArray[Any], tokens: tuple[str, str, str] = STRICT) -> list[str]:
    """Return the shortest text of each number that reads back as the same float64.

    tokens: how NaN, +inf and -inf are written (JSON has no numbers for them).
    """
    if not column.size:
        return []
    text = orjson.dumps(np.ascontiguousarray(column), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode().split(",")
    if column.dtype.kind == "f":
        for i in np.flatnonzero(~np.isfinite(column)).tolist():
            text[i] = number_text(float(column[i]), tokens)
    return text


def number_text(x: float, tokens: tuple[str, str, str] = STRICT) -> str:
    """Return the text of one number."""
    if x != x:
        return tokens[0]
    if x in (float("inf"), float("-inf")):
        return tokens[1] if x > 0 else tokens[2]
    return repr(x)


def plain_numbers(column: npt.NDArray[Any]) -> list[Any]:
    """Return a column as a list for JSON, NaN and infinities as the strings "NaN", "Infinity" and "-Infinity"."""
    values: list[Any] = column.tolist()
    if column.dtype.kind == "f":
        for i in np.flatnonzero(~np.isfinite(column)).tolist():
            values[i] = number_text(values[i], STRICT).strip('"')
    return values


def read_number(x: Any) -> float:
    """Return a number from JSON: NaN for null, and the strings that stand for NaN and infinities as what they are.

    Raises ValueError or TypeError for anything else.
    """
    if x is None:
        return float("nan")
    if isinstance(x, str) and x not in {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "Nan"}:
        raise ValueError(f"{x!r} is not a number")
    return float(x)


def quote(text: str) -> str:
    """Return a string as JSON text; what is not valid Unicode is replaced."""
    try:
        return orjson.dumps(text).decode()
    except (TypeError, ValueError):
        return orjson.dumps(str(text).encode("utf-8", "replace").decode()).decode()


def fragment(text: bytes | str) -> Any:
    """Return JSON text for a place in something that orjson turns into text."""
    return orjson.Fragment(text)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


def dumps(thing: Any) -> str:
    """Return any description as JSON text; what JSON does not know is written as its text, deep nests are cut."""
    try:
        return orjson.dumps(thing, default=_described, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()
    except (TypeError, ValueError):
        return quote(str(thing))


def _described(thing: Any) -> Any:
    if isinstance(thing, (set, frozenset, tuple)):
        return list(thing)  # pyright: ignore[reportUnknownArgumentType]
    return str(thing)


def _free_name(call: Call, taken: set[str], framework: str) -> str:
    again = Call(call.kind, call.name, call.call, call.phase, cls=call.cls)
    while True:
        again.call += 1
        name = entry_name(again, framework)
        if name not in taken:
            return name


def _numbers_text(step_data: StepData, tokens: tuple[str, str, str]) -> list[str]:
    """Return, for each row, the text of its statistics, checksum and CRC-32, from `, "Max": …` on."""
    numbers, rows = step_data.numbers(), len(step_data.partials)

    def column_of(name: str) -> list[str]:
        if name not in numbers:
            return ["null"] * rows
        texts = column_text(numbers[name], tokens)
        for row in np.flatnonzero(unknown(step_data, name)).tolist():
            texts[row] = "null"
        return texts

    text = [f', "Max": {a}, "Min": {b}, "Mean": {c}, "Norm": {d}' for a, b, c, d in zip(*map(column_of, KEYS), strict=True)]
    for name in numbers:
        if name not in KEYS:
            text = [f'{t}, "{name}": {x}' for t, x in zip(text, column_of(name), strict=True)]
    for row in np.flatnonzero(column(step_data.partials, "count") == 0).tolist():
        text[row] = _NO_NUMBERS
    _add_beside_statistics(text, step_data, alone=not numbers)
    if "max" in numbers and "min" in numbers:
        for row in {v.row for v in step_data.values if v.row >= 0 and plain_dtype(v.dtype) == "bool"}:
            text[row] = _bool_text(text[row])
    return text


def _add_beside_statistics(text: list[str], step_data: StepData, *, alone: bool) -> None:
    """Add fingerprints, histograms, quantiles and CRC-32 to the text of their rows. alone: there are no statistics."""
    if step_data.checksums is not None:
        # tools that compare bits look for checksums that stand alone under "md5"
        key = ', "checksum": "0x{0:016x}", "md5": "0x{0:016x}"' if alone else ', "checksum": "0x{0:016x}"'
        for row in np.flatnonzero(fingerprinted(step_data)).tolist():
            text[row] += key.format(int(step_data.checksums[row]))
    for row, (edges, found) in (step_data.histograms or {}).items():
        text[row] += f', "histogram": {{"edges": {dumps(np.asarray(edges))}, "counts": {dumps(np.asarray(found))}}}'
    for row, quantiles in (step_data.quantiles or {}).items():
        text[row] += f', "quantiles": {dumps(plain_numbers(np.asarray(quantiles, float)))}'
    for row, crc in (step_data.crc32 or {}).items():
        text[row] += f', "md5": "{crc}"'


def _bool_text(text: str) -> str:
    """Write the extremes of a bool tensor as existing tools do: Max is any, Min is all."""
    for key in ("Max", "Min"):
        text = text.replace(f'"{key}": 1.0', f'"{key}": true').replace(f'"{key}": 0.0', f'"{key}": false')
    return text


def construct(step_data: StepData, names: list[tuple[str, Call]]) -> dict[str, Any]:
    """Return what is written to construct.json: entry → enclosing entry or null; with micro-batches, [entry, micro-batch].

    Empty where no call has a parent and the collected step is of level L1, as existing tools have it.
    """
    if step_data.level == "L1" or step_data.level == "debug":
        return {}
    nodes = {
        name: (parent_name(call, step_data.framework), call.micro or 0) for name, call in names if call.kind != "parameter"
    }
    for stage in {parent for parent, _ in nodes.values()} & {"optimizer", "clip_grad"}:
        nodes[str(stage)] = (None, 0)
    last = max((micro for _, micro in nodes.values()), default=0)
    if last == 0:
        return {name: parent for name, (parent, _) in nodes.items()}
    return {**{name: list(node) for name, node in nodes.items()}, "megatron_micro_step_number": last}


def construct_text(step_data: StepData, names: list[str], calls: list[Call]) -> bytes:
    """Return `construct` as the text of its file."""
    return orjson.dumps(construct(step_data, list(zip(names, calls, strict=True))), option=orjson.OPT_INDENT_2)


def stacks(step_data: StepData, names: list[tuple[str, Call]]) -> dict[str, Any]:
    """Return what is written to stack.json: number → [entries with this stack, its frames]."""
    users: dict[int, list[str]] = {}
    for name, call in names:
        if 0 <= call.stack < len(step_data.stacks):
            users.setdefault(call.stack, []).append(name)
    return {str(i): [entries, list(step_data.stacks[stack])] for i, (stack, entries) in enumerate(users.items())}
