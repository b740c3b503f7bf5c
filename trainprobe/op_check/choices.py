"""Operators that choose elements or places, judged by what every right choice has: equal elements leave it open."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from trainprobe.op_check.cases import Case, Tensor, argument
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement

PLACED = {  # operator → position of what it writes
    **{"scatter": 3, "index_copy": 3, "index_put": 2, "_unsafe_index_put": 2, "put": 2, "setitem": 2},
}
_SOURCES = {"scatter": "src", "index_copy": "source", "put": "source", "index_put": "values", "_unsafe_index_put": "values"}


def extremum(largest: bool) -> Callable[[Case], list[Judgement]]:
    """Return the check of argmax or argmin: the index points at the largest (least) value, whichever of several."""

    def check(case: Case) -> list[Judgement]:
        x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
        dim = argument(case, "dim", 1, None) if x.ndim else None
        if y is None:
            return [Judgement("not checked", "the dump does not hold its output")]
        flat = x.reshape(-1) if dim is None else x.movedim(int(dim), -1)  # type: ignore[call-overload]
        places = y.reshape(()) if dim is None else y.squeeze(int(dim)) if y.ndim == x.ndim else y  # type: ignore[call-overload]
        return [_points_at(flat, places.unsqueeze(-1), flat.amax(-1, True) if largest else flat.amin(-1, True))]

    return check


def _points_at(x: Tensor, places: Tensor, want: Tensor) -> Judgement:
    """Judge indices along the last dimension by the values that they point at."""
    if places.numel() == 0:
        return Judgement("exact", "it has no elements")
    if int(places.min()) < 0 or int(places.max()) >= x.shape[-1]:
        return Judgement("bug", f"an index lies outside of 0 to {x.shape[-1] - 1}", math.inf)
    if places.shape != want.shape:
        return Judgement("bug", f"its shape is {[*places.shape]} and not {[*want.shape]}", math.inf)
    got = x.gather(-1, places)
    wrong = (got != want) & ~(got.isnan() & want.isnan()) if x.is_floating_point() else got != want
    if bool(wrong.any()):
        return Judgement(
            "bug", f"{int(wrong.sum())} of {wrong.numel()} indices point at another value", math.inf, count=wrong.numel()
        )
    return Judgement(
        "unspecified", "indices point at the right values; among equal ones any may be chosen", count=places.numel()
    )


def chosen(case: Case) -> list[Judgement] | None:
    """Values and indices along a dimension (max, min, sort, topk, kthvalue, median, mode): values exact, indices fetch them."""
    if len([o for o in case.outputs if o is not None]) < 2:
        return None
    x = case.args[0] if case.args else case.kwargs["input"]
    name = api(case.name)
    place = 2 if name in ("topk", "kthvalue") else 1
    dim = argument(case, "dim", place, -1)
    values, places = case.outputs[0], case.outputs[1]
    if values is None or places is None or not isinstance(dim, int) or isinstance(dim, bool) or not x.ndim:
        return None
    if values.ndim != x.ndim:
        values, places = values.unsqueeze(dim), places.unsqueeze(dim)
    found = _points_at(x.movedim(dim, -1), places.movedim(dim, -1), values.movedim(dim, -1))
    twice = places.movedim(dim, -1).sort(-1).values.diff(dim=-1) == 0
    if found.outcome != "bug" and bool(twice.any()):
        found = Judgement("bug", f"{int(twice.sum())} indices are there twice", math.inf, count=places.numel())
    return [*_values(case), _stable(case, x.movedim(dim, -1), places.movedim(dim, -1), found)]


def _stable(case: Case, x: Tensor, places: Tensor, found: Judgement) -> Judgement:
    """Judge the order of equal elements after a stable sort along the last dimension. found: what is said of the indices."""
    if case.kwargs.get("stable") is not True or found.outcome == "bug":
        return found
    values = x.gather(-1, places)
    equal = (values[..., 1:] == values[..., :-1]) | (values[..., 1:].isnan() & values[..., :-1].isnan())
    turned = equal & (places.diff(dim=-1) < 0)
    if not bool(turned.any()):
        return Judgement("exact", count=places.numel())
    text = (
        f"{int(turned.sum())} of {int(equal.sum())} equal neighbours are not in their first order, and `stable=True` keeps it"
    )
    return Judgement("bug", text, math.inf, count=places.numel())


def _values(case: Case) -> list[Judgement]:
    from trainprobe.op_check.evaluate import expect
    from trainprobe.op_check.judge import judge

    expected = expect(case).results[0]
    assert expected is not None
    assert case.outputs[0] is not None
    return [judge(case.outputs[0], expected)]


def pooled(case: Case) -> list[Judgement] | None:
    """Values and indices of max pooling: values exact, each index fetches its value from inside its window."""
    if len([o for o in case.outputs if o is not None]) < 2:
        return None
    x = case.args[0] if case.args else case.kwargs["input"]
    values, places = case.outputs[0], case.outputs[1]
    dims = next(int(c) for c in api(case.name) if c.isdigit())
    if values is None or places is None or places.shape != values.shape:
        return None
    flat, inside = x.flatten(-dims), x[(0,) * (x.ndim - dims)].numel()
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < inside:
        return [*_values(case), Judgement("bug", f"an index lies outside of 0 to {inside - 1}", math.inf)]
    got = flat.gather(-1, places.flatten(-dims)).view_as(values)
    wrong = (got != values) & ~(got.isnan() & values.isnan())
    if not api(case.name).startswith("adaptive"):
        wrong = wrong | _outside_of_its_window(case, x.shape[-dims:], places)
    if bool(wrong.any()):
        text = f"{int(wrong.sum())} of {wrong.numel()} indices point at another value or out of their window"
        return [*_values(case), Judgement("bug", text, math.inf, count=wrong.numel())]
    text = "indices point at the right values; among equal ones any may be chosen"
    return [*_values(case), Judgement("unspecified", text, count=places.numel())]


def _outside_of_its_window(case: Case, shape: tuple[int, ...], places: Tensor) -> Tensor:
    """Return which indices of max pooling do not lie in the window of their place."""
    dims = len(shape)

    def each(name: str, place: int, default: object) -> list[int]:
        found: Any = argument(case, name, place, default)
        found = [found] if isinstance(found, int) else [*found]
        return found * dims if len(found) == 1 else found

    kernel = each("kernel_size", 1, 1)
    stride = argument(case, "stride", 2, None)
    strides = each("stride", 2, None) if isinstance(stride, int) or stride else kernel
    padding, dilation = each("padding", 3, 0), each("dilation", 4, 1)
    outside = torch.zeros(places.shape, dtype=torch.bool)
    rest = places
    for d in range(dims - 1, -1, -1):
        at, rest = rest % shape[d], rest // shape[d]
        axis = [1] * places.ndim
        axis[d - dims] = -1
        begin = (torch.arange(places.shape[d - dims]) * strides[d] - padding[d]).view(axis)
        step = at - begin
        outside |= (step < 0) | (step % dilation[d] != 0) | (step // dilation[d] >= kernel[d])
    return outside


def sorting(case: Case) -> list[Judgement] | None:
    """Argsort: the indices are a permutation that sorts."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
    dim = argument(case, "dim", 1, -1)
    descending = argument(case, "descending", 2, False)
    if y is None or not isinstance(dim, int) or isinstance(dim, bool) or not x.ndim:
        return None
    want = x.sort(dim, descending=bool(descending)).values
    along = x.movedim(dim, -1), y.movedim(dim, -1)
    return [_stable(case, *along, _points_at(*along, want.movedim(dim, -1)))]


def overwriting(case: Case) -> list[Judgement] | None:
    """Judge what is written to places that several indices name: any of the values may stay. None where no place is."""
    x = case.args[0] if case.args else case.kwargs.get("input")
    name, y = api(case.name), next(iter([*case.outputs, *case.written.get("0", ())]), None)
    at = PLACED[name]
    source = argument(
        case, *(("value", at) if name == "scatter" and "value" in case.kwargs else (_SOURCES.get(name, ""), at)), None
    )
    if not isinstance(x, Tensor) or y is None or y.shape != x.shape or source is None or _accumulates(case):
        return None
    places = _written_places(case, torch.arange(x.numel()).view(x.shape)).reshape(-1)
    if places.numel() == places.unique().numel():
        return None
    values = torch.as_tensor(source, dtype=x.dtype)
    if name == "scatter":  # which takes a corner of a larger source
        index = argument(case, "index", 2, None)
        assert isinstance(index, Tensor)
        values = values[tuple(slice(n) for n in index.shape)] if values.ndim else values
        values = values.expand(index.shape)
    elif values.numel() != places.numel():
        values = values.expand(_written_places(case, x).shape)
    got, before, values = y.reshape(-1), x.reshape(-1), values.reshape(-1)
    right = _same(got, before)
    right[places] = False
    right[places[_same(got[places], values)]] = True
    wrong = int((~right).sum())
    if wrong:
        return [
            Judgement(
                "bug", f"{wrong} of {y.numel()} elements hold none of the values written there", math.inf, count=y.numel()
            )
        ]
    text = "of the values that are written to one place any may stay"
    return [Judgement("unspecified", text, count=y.numel())]


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | ((a != a) & (b != b))


def _accumulates(case: Case) -> bool:
    name = api(case.name)
    place = 3 if name in ("index_put", "_unsafe_index_put", "put") else 4
    return bool(argument(case, "reduce" if name == "scatter" else "accumulate", place, None))


def _written_places(case: Case, numbers: Tensor) -> Tensor:
    """Return which elements of `numbers`, which has the shape of what is written to, the values of a call go to."""
    name = api(case.name)
    if name in ("scatter", "index_copy"):
        dim, index = argument(case, "dim", 1, 0), argument(case, "index", 2, None)
        read: Any = torch.gather if name == "scatter" else torch.index_select
        return read(numbers, dim, index)
    index: Any = argument(case, "index" if name == "put" else "indices", 1, None)
    return numbers.take(index) if name == "put" else numbers[tuple(index) if isinstance(index, list) else index]
