"""A comparison as the sheet that users of mindstudio-probe know: a row a tensor, with its columns, and our verdict behind them.

A is what they call NPU, B what they call Bench. Which columns there are follows from what both dumps hold: stored tensors,
statistics, or fingerprints alone. Numbers are worked out in float64. Cosine is that of the flattened tensors, and "unsupported"
of one element; MaxRelativeErr is the largest |a − b| / |b|, with the dtype's epsilon added to both sides where b is zero; the
ratios are the shares of elements with a relative error below 1/1000 and 5/1000. Where NaN and infinities do not stand at the
same places of both, there is no number ("N/A").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from trainprobe.comparison.files import write_csv, writing
from trainprobe.dump_compare.distances import Distance
from trainprobe.dump_compare.dump_side import Side, hexadecimal
from trainprobe.dump_compare.judge import Judged, Outcome
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.core.step_data import entry_name, slots
from trainprobe.engine.storage.sheet_cells import append, new_book

Mode = Literal["tensor", "statistics", "md5"]
_HEAD = ("Name", "Dtype", "Tensor Shape", "Requires_grad")
_STATISTICS = (("max", "max"), ("min", "min"), ("mean", "mean"), ("l2norm", "norm"))
_ERRORS = ("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "One Thousandth Err Ratio", "Five Thousandths Err Ratio")
_DIFFERENCES = ("Max diff", "Min diff", "Mean diff", "L2norm diff")
_RELATIVE = ("MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr")
_ACCURACY = "Accuracy Reached or Not"  # of mindstudio-probe up to 8.1
_OURS = ("Verdict", "Apart", "Given apart", "Own rounding")
_RESULTS: dict[Outcome, str] = {
    "identical": "pass",
    "rounding": "pass",
    "carried": "pass",
    "suspicious": "warning",
    "unknown": "warning",
    "missing": "unmatched",
    "bug": "error",
}
_COLOURS = {"error": "FF7171", "warning": "FFDC7F", "unmatched": "C7C7C7"}
NONE, UNSUPPORTED = "N/A", "unsupported"
MOST_ROWS = 1_000_000  # a sheet ends at 1 048 576 rows
F64 = npt.NDArray[np.float64]


def write_sheet(judged: Sequence[Judged], a: Side, b: Side, path: Path) -> None:
    """Write the values of one rank and step to `path`, a .csv or .xlsx. Raises OutputError, and MissingExtra for .xlsx."""
    mode = _mode(a, b)
    rows = (row for one in judged for row in _rows(one, a, b, mode))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xlsx":
            _write_xlsx(columns(mode), rows, path)
        else:
            write_csv(columns(mode), rows, path, "utf-8-sig")


def columns(mode: Mode) -> list[str]:
    """Return the heads of the columns, in order."""
    both = [f"{side} {head}" for head in _HEAD for side in ("NPU", "Bench")]
    own = [f"{side} {head}" for side in ("NPU", "Bench") for head, _ in _STATISTICS]
    tail = ["Requires_grad Consistent", "Result", "Err_message", "NPU_Stack_Info"]
    if mode == "md5":
        return [*both, "NPU MD5", "BENCH MD5", *tail, *_OURS]
    numbers = _ERRORS if mode == "tensor" else (*_DIFFERENCES, *_RELATIVE)
    return [*both, *numbers, *own, *tail, *(["Data_name", _ACCURACY] if mode == "tensor" else []), *_OURS]


def _mode(a: Side, b: Side) -> Mode:
    if all(any(value.tensor is not None for value in side.step_data.values) for side in (a, b)):
        return "tensor"
    return "statistics" if all("norm" in side.step_data.finished for side in (a, b)) else "md5"


def _write_xlsx(heads: Sequence[str], rows: Iterator[list[Any]], path: Path) -> None:
    book = new_book("the sheet of a comparison")
    sheet: Any = book.active
    append(sheet, heads)
    sheet.freeze_panes = "B2"
    for i, row in enumerate(rows):
        if i == MOST_ROWS:
            append(sheet, ("more rows were left out: write a .csv",))
            break
        append(sheet, row, _COLOURS, heads.index("Result"))
    with path.open("wb") as file:
        book.save(file)


def _rows(one: Judged, a: Side, b: Side, mode: Mode) -> Iterator[list[Any]]:
    left, right = (dict(slots(call)) if call is not None else {} for call in (one.pair.a, one.pair.b))
    distances = {value.slot: value for value in one.values}
    plain = [_given(call) if mode != "md5" else {} for call in (one.pair.a, one.pair.b)]
    names = list(dict.fromkeys([*plain[0], *left, *plain[1], *right]))
    for i, slot in enumerate(names):
        if slot not in left and slot not in right:
            yield _row_of_plain(one, slot, plain, (a, b), mode, i == 0)
            continue
        x, y = left.get(slot), right.get(slot)
        distance = distances.get(slot)
        numbers = _numbers(x, y, a, b, mode)
        accuracy = [_accuracy(x, y, numbers)] if mode == "tensor" else []
        yield [
            *_about(one, slot, x, y, a, b),
            *numbers,
            *_tail(one, distance, x, y, a, i == 0, mode),
            *accuracy,
            *_ours(one, distance),
        ]


def classic_name(call: Call, slot: str, framework: str, *, stored: bool = False) -> str:
    """Return the name of a value in the sheet: `Functional.linear.0.forward.input.0`, `Module.m.Linear.backward.0.output.0`.

    stored: whether its elements are, as mindstudio-probe then names what is given by keyword for its file.
    """
    first, _, rest = slot.partition(".")
    kind = {"grad_output": "input", "grad_input": "output", "kwargs": "kwargs" if stored else "input"}.get(first, first)
    entry = entry_name(call, framework)
    if first in ("input", "output", "grad_output", "grad_input", "kwargs"):
        return f"{entry}.{kind}.{rest or 0}"
    return f"{entry}.{slot}"


def _given(call: Call | None) -> dict[str, Any]:
    """Return what a forward call is given by slots, in order: values of tensors, and numbers, booleans and texts."""
    found: dict[str, Any] = {}

    def walk(tree: Any, path: str) -> None:
        if isinstance(tree, (Value, bool, int, float, str)):
            found[path] = tree
        elif isinstance(tree, (list, dict)):
            for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                walk(item, f"{path}.{key}")

    if call is not None and call.phase != "backward" and call.kind in ("op", "module", "collective"):
        walk(call.args, "input")
        walk(call.kwargs, "kwargs")
    return found


def _row_of_plain(
    one: Judged, slot: str, plain: Sequence[dict[str, Any]], sides: tuple[Side, Side], mode: Mode, first: bool
) -> list[Any]:
    """Return the row of a plain argument: what it is stands in the places of the statistics, as mindstudio-probe writes it."""
    there = [slot in each for each in plain]
    values = [each.get(slot) for each in plain]
    calls = one.pair.a, one.pair.b
    names = [
        classic_name(call, slot, side.step_data.framework) if has and call is not None else NONE
        for call, side, has in zip(calls, sides, there, strict=True)
    ]
    about = [[str(type(x)) if has else NONE, "[]" if has else NONE] for x, has in zip(values, there, strict=True)]
    same = repr(values[0]) == repr(values[1])
    far = [0] * 8 if same else [NONE] * 8
    numbers = [UNSUPPORTED] * len(_ERRORS) if mode == "tensor" else far
    own = [
        (_cell(x) if isinstance(x, float) else x) if has else NONE
        for x, has in zip(values, there, strict=True)
        for _ in range(4)
    ]
    result = "pass" if same else "error" if all(there) else "unmatched"
    lone = f"there is no such argument in {'A' if not there[0] else 'B'}"
    says = [] if same else [f"{values[0]!r} and {values[1]!r}"] if all(there) else [lone]
    kinds = [about[0][0], about[1][0], about[0][1], about[1][1], NONE, NONE]
    tail = [
        True,
        result,
        orjson.dumps(says).decode(),
        _stack(one, sides[0], first),
        *([str([NONE, NONE]), "None"] if mode == "tensor" else []),
    ]
    return [*names, *kinds, *numbers, *own, *tail, one.outcome, NONE, _cell(one.given), _cell(one.own)]


def _stack(one: Judged, a: Side, first: bool) -> str:
    """Return where the program calls it, in the first row of a call."""
    call = one.pair.a
    known = first and call is not None and 0 <= call.stack < len(a.step_data.stacks)
    return str([str(frame) for frame in a.step_data.stacks[call.stack]]) if known and call is not None else NONE


def _about(one: Judged, slot: str, x: Value | None, y: Value | None, a: Side, b: Side) -> list[Any]:
    sides = ((one.pair.a, x, a), (one.pair.b, y, b))
    names = [
        NONE if call is None or v is None else classic_name(call, slot, side.step_data.framework, stored=v.tensor is not None)
        for call, v, side in sides
    ]
    both = (x, y)
    return [
        *names,
        *(NONE if v is None else v.dtype for v in both),
        *(NONE if v is None else str(list(v.shape)) for v in both),
        *(NONE if v is None or v.requires_grad is None else v.requires_grad for v in both),
    ]


def _numbers(x: Value | None, y: Value | None, a: Side, b: Side, mode: Mode) -> list[Any]:
    numbers = [{} if v is None else side.numbers(v) for v, side in ((x, a), (y, b))]
    if mode == "md5":
        bits = [{} if v is None else side.bits(v) for v, side in ((x, a), (y, b))]
        return [next((hexadecimal(kind, number) for kind, number in kinds.items()), NONE) for kinds in bits]
    own = [_cell(each.get(key)) for each in numbers for _, key in _STATISTICS]
    if x is None or y is None:
        return [*[UNSUPPORTED] * (len(_ERRORS) if mode == "tensor" else 8), *own]
    if mode == "tensor":
        return [*_errors(a.array(x), b.array(y)), *own]
    pairs = [(numbers[0].get(key), numbers[1].get(key)) for _, key in _STATISTICS]
    return [*(_difference(p, q) for p, q in pairs), *(_relative(p, q) for p, q in pairs), *own]


def _cell(number: float | None) -> Any:
    return NONE if number is None else number if math.isfinite(number) else str(number)


def _difference(p: float | None, q: float | None) -> Any:
    return NONE if p is None or q is None or not math.isfinite(p - q) else p - q


def _relative(p: float | None, q: float | None) -> Any:
    far = _difference(p, q)
    if far == NONE or q is None:
        return NONE
    return 0.0 if far == 0 else NONE if q == 0 else abs(far / q)


def _errors(x: npt.NDArray[Any] | None, y: npt.NDArray[Any] | None) -> list[Any]:
    """Return the six errors of two arrays of equal shape."""
    if x is None or y is None or x.shape != y.shape or x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        return [UNSUPPORTED] * len(_ERRORS)
    epsilon = float(np.finfo(np.result_type(x.dtype, y.dtype, np.float32)).eps)
    p, q = np.asarray(x, np.float64).reshape(-1), np.asarray(y, np.float64).reshape(-1)
    nonfinite = ~np.isfinite(p) | ~np.isfinite(q)
    if nonfinite.any():
        if not np.array_equal(p[nonfinite], q[nonfinite], equal_nan=True):
            return [NONE] * len(_ERRORS)
        p, q = np.where(nonfinite, 0.0, p), np.where(nonfinite, 0.0, q)
    if p.size == 0:
        return [UNSUPPORTED] * len(_ERRORS)
    far = np.abs(p - q)
    relative = far / np.where(q == 0, epsilon, np.abs(q))
    largest = [float(far.max()), float(relative.max())]
    if p.size == 1:
        return [UNSUPPORTED, UNSUPPORTED, *largest, UNSUPPORTED, UNSUPPORTED]
    return [_cosine(p, q), float(np.linalg.norm(far)), *largest, *(float((relative < t).mean()) for t in (1e-3, 5e-3))]


def _cosine(p: F64, q: F64) -> Any:
    norms = float(np.linalg.norm(p)), float(np.linalg.norm(q))
    least = float(np.finfo(np.float64).eps)
    if max(norms) <= least:
        return 1.0
    return UNSUPPORTED if min(norms) <= least else float(p @ q) / (norms[0] * norms[1])


def _tail(
    one: Judged, distance: Distance | None, x: Value | None, y: Value | None, a: Side, first: bool, mode: Mode
) -> list[Any]:
    result, says = _result(one, distance, x, y)
    same = x is not None and y is not None and x.requires_grad == y.requires_grad
    stored = [NONE if v is None or v.tensor is None else v.tensor for v in (x, y)]
    names = [str(stored)] if mode == "tensor" else []
    return [same, result, orjson.dumps(says).decode(), _stack(one, a, first), *names]


def _ours(one: Judged, distance: Distance | None) -> list[Any]:
    return [one.outcome, NONE if distance is None else _cell(distance.interval.low), _cell(one.given), _cell(one.own)]


def _accuracy(x: Value | None, y: Value | None, errors: Sequence[Any]) -> str:
    """Return whether mindstudio-probe 8.1 calls a result accurate: a cosine above 0.9, and 0.99 unless errors are small."""
    cosine, _, largest = errors[:3]
    if x is not None and y is not None and tuple(x.shape) != tuple(y.shape):
        return "Unmatched"
    if NONE in (cosine, largest):
        return "No"
    if UNSUPPORTED in (cosine, largest):
        return "None"
    return "No" if cosine < 0.9 or largest > 1 or (cosine < 0.99 and largest > 1e-3) else "Yes"


def _result(one: Judged, distance: Distance | None, x: Value | None, y: Value | None) -> tuple[str, list[str]]:
    """Return the word of the column Result, and why. A result has its call's verdict; what is given passes."""
    if x is None or y is None:
        return "unmatched", [f"there is no such value in {'A' if x is None else 'B'}"]
    says = [text for text in (one.argument, distance.formats if distance is not None else "") if text]
    if tuple(x.shape) != tuple(y.shape):
        return "error", [f"shapes {list(x.shape)} and {list(y.shape)}", *says]
    if distance is None or not distance.result:
        return ("warning", says) if says else ("pass", [])
    if distance.interval.high == 0:
        return "pass", says
    word = _RESULTS[one.outcome]
    if word != "pass":
        says.append(
            distance.interval.note or f"{distance.interval.low:.1e} apart, own rounding {one.own:.1e}, given {one.given:.1e}"
        )
    return word, says


def sheet_path(folder: Path, step: int, rank: int, suffix: str) -> Path:
    """Return where the sheet of a rank and step goes."""
    return folder / f"compare_result_step{step}_rank{rank}{suffix}"
