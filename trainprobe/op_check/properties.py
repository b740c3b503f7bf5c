"""Operators that have more than one right answer, judged by what every right answer has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainprobe.op_check.cases import Case, Tensor, mapped
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.measure import NEAR, bounds
from trainprobe.op_check.noise import COARSE, UNIT

if TYPE_CHECKING:
    from trainprobe.op_check.evaluate import Expected

Property = Callable[[Case], list[Judgement]]
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize"})
_RANDOM = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm normal uniform bernoulli multinomial random exponential
    geometric
    cauchy log_normal poisson rrelu gumbel_softmax fractional_max_pool2d fractional_max_pool3d feature_dropout alpha_dropout
    feature_alpha_dropout dropout1d dropout2d dropout3d native_dropout svd_lowrank pca_lowrank
    """.split()  # noqa: SIM905
)


def unspecified(case: Case) -> list[Judgement] | None:
    """Judge each output of a call without a single right answer; None where there is one."""
    name = api(case.name)
    known = _PROPERTIES.get(name)
    if known is not None:
        return known(case)
    if name in _RANDOM:
        return [_drawn(case, name, y) for y in case.outputs]
    return None


def _drawn(case: Case, name: str, y: Tensor | None) -> Judgement:
    """Judge random numbers by what holds for all of them."""
    if y is not None and y.is_floating_point():
        at_all = not any(bool(t.isnan().any()) for t in case.tensors()) and name not in UNWRITTEN
        nans = int(y.isnan().sum()) if at_all else 0
        outside = int(((y < 0) | (y > 1)).sum()) if name in ("rand", "rand_like", "bernoulli") else 0
        for count, text in ((nans, "NaN"), (outside, "numbers outside of 0 to 1")):
            if count:
                return Judgement("bug", f"{count} {text} in {y.numel()} random elements", math.inf, count=y.numel())
    return Judgement("unspecified", "random numbers: another device draws others")


def signed_zeros(case: Case, y: Tensor, expected: Expected, found: Judgement) -> Judgement:
    """Judge the signs of zeros that an operator moves or makes in one step, as IEEE 754 has them."""
    if api(case.name) not in _SIGNS or found.outcome not in ("exact", "rounding"):
        return found
    r = expected.value
    if not y.is_floating_point() or y.shape != r.shape or y.dtype not in UNIT:
        return found
    zeros = y == 0
    if not bool(zeros.any()):
        return found
    wrong = zeros & (r == 0) & (y.signbit() != r.signbit())
    if not bool(wrong.any()):
        return found
    at = tuple(wrong.nonzero()[0].tolist())
    text = f"{int(wrong.sum())} of {int((r == 0).sum())} zeros have the other sign"
    return Judgement("bug", text, math.inf, at, float(y[at]), float(r[at]), int(wrong.sum()) / y.numel(), count=y.numel())


# they move numbers, or make one rounding, so that the sign of a zero is not free
_SIGNS = frozenset(
    """
    clone contiguous to type_as type float half bfloat16 detach neg negative positive abs absolute cat concat concatenate stack
    hstack vstack view reshape flatten permute transpose t expand squeeze unsqueeze select narrow split chunk unbind
    index_select gather getitem take take_along_dim where masked_select roll flip repeat tile movedim swapaxes swapdims diagonal
    repeat_interleave mul multiply div divide true_divide truediv sqrt ceil floor round trunc copysign _to_copy alias view_as
    expand_as
    """.split()  # noqa: SIM905
)


def _given(case: Case, name: str, place: int, default: object) -> object:
    return case.kwargs.get(name, case.args[place] if len(case.args) > place else default)


def dropout(case: Case) -> list[Judgement]:
    """Kept elements are x / (1 − p), the others 0, and the share that is kept is near 1 − p."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
    p = float(_given(case, "p", 1, 0.5))  # type: ignore[arg-type]
    training = bool(_given(case, "training", 2, True))
    if y is None:
        return [Judgement("not checked", "the dump does not hold its output")]
    return [_dropped(x, y, p if training else 0.0, _SPREAD.get(api(case.name), 0))]


def dropout_gradient(case: Case) -> Judgement:
    """The gradient is g / (1 − p) where the forward kept an element, 0 where it did not; where x is 0 that does not show."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0] if case.outputs else None
    g, result = (case.gradients or [None])[0], case.results[0]
    if y is None or g is None or result is None or not result.shape == g.shape == y.shape == x.shape:
        return Judgement("not checked", "the dump does not hold what its forward kept")
    p = float(_given(case, "p", 1, 0.5)) if _given(case, "training", 2, True) else 0.0  # type: ignore[arg-type]
    want = torch.where(y != 0, g.to(torch.float64) * (1.0 / (1.0 - p) if p < 1 else 0.0), 0.0)
    shown = x != 0
    noise = want.abs() * (2 * max(2.0**-24, UNIT[result.dtype]))
    wrong = shown & _off(result, want, noise)
    if bool(wrong.any()):
        text = f"{int(wrong.sum())} of {result.numel()} gradients are not those of what its forward kept"
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return Judgement("bug", text, math.inf, at, float(result[at]), float(want[at]), count=result.numel())
    return Judgement("unspecified", "random: it hands on the gradients of what its forward kept, scaled", count=result.numel())


def _off(y: Tensor, want: Tensor, noise: Tensor) -> Tensor:
    """Return which elements are not what they should be, NaN among them."""
    wide = y.to(torch.float64)
    near = ((wide - want).abs() <= bounds(y, want, noise)) | (wide == want) | (wide.isnan() & want.isnan())
    return ~near


def _dropped(x: Tensor, y: Tensor, p: float, spread: int) -> Judgement:
    """Judge what was kept. spread: how many dimensions are kept or dropped as one, −1 for all but the first two."""
    if y.shape != x.shape:
        return Judgement("bug", f"its shape is {[*y.shape]} and not {[*x.shape]}", math.inf)
    n, scale = y.numel(), 1.0 / (1.0 - p) if p < 1 else 0.0
    want = x.to(torch.float64) * scale
    kept = y != 0
    noise = want.abs() * (2 * max(2.0**-24, UNIT[y.dtype]))  # the factor is rounded, in some kernels to the format of x
    off = _off(y, want, noise)
    wrong = off & kept if p else off
    if bool(wrong.any()):
        text = f"{int(wrong.sum())} of {n} elements are neither 0 nor x / (1 − {p:g})"
        at = tuple(int(i) for i in wrong.nonzero()[0])
        return Judgement("bug", text, math.inf, at, float(y[at]), float(want[at]), float(wrong.sum()) / n, count=n)
    if not p:
        return Judgement("exact" if bool((y == x).all()) else "rounding", count=n)
    alive = x != 0
    if spread:
        dims = [*range(2, x.ndim)] if spread < 0 else [*range(-spread, 0)]
        dropped = (alive & ~kept).any(dims) if dims else alive & ~kept
        alive, kept = (t.any(dims) if dims else t for t in (alive, kept & alive))
        if bool((kept & dropped).any()):
            text = f"{int((kept & dropped).sum())} of {kept.numel()} channels are dropped in part"
            return Judgement("bug", text, math.inf, count=n)
    count = int(alive.sum())
    share = float((kept & alive).sum()) / count if count else 1 - p
    margin = 6 * math.sqrt(p * (1 - p) / count) if count else 1.0
    if abs(share - (1 - p)) > margin + 1.0 / max(1, count):
        return Judgement(
            "bug", f"it keeps {share:.2%} of the elements and should keep {1 - p:.2%} (p = {p:g})", math.inf, share=share
        )
    return Judgement("unspecified", f"random: it keeps {share:.2%} for p = {p:g}, and what it keeps is x / (1 − p)", count=n)


def extremum(largest: bool) -> Property:
    """Return the check of argmax or argmin: the index points at the largest (least) value, whichever of several."""

    def check(case: Case) -> list[Judgement]:
        x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
        dim = _given(case, "dim", 1, None) if x.ndim else None
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
    dim = _given(case, "dim", place, -1)
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
        found: Any = _given(case, name, place, default)
        found = [found] if isinstance(found, int) else [*found]
        return found * dims if len(found) == 1 else found

    kernel = each("kernel_size", 1, 1)
    stride = _given(case, "stride", 2, None)
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


def tied(case: Case, found: Judgement) -> Judgement:
    """Judge the gradient of an operator that chooses elements anew, where equal elements leave the choice open.

    The reference is taken twice, with equal elements told apart in the order in which they lie and against it. What both agree
    on has to be there, and the sum of all gradients.
    """
    x = next(iter(case.tensors()), None)
    y = case.results[0] if case.results else None
    if api(case.name) not in _CHOOSE or x is None or y is None or y.shape != x.shape or not x.is_floating_point():
        return found
    values = x.to(torch.float64).reshape(-1)
    gaps = values.unique().diff()
    gaps = gaps[gaps > 0]
    if not len(gaps) or not bool(values.isfinite().all()):
        return found
    order = torch.arange(x.numel(), dtype=torch.float64).view(x.shape) * (float(gaps.min()) / (4 * x.numel()))
    one, other = (_gradient(case, x.to(torch.float64) + order * sign) for sign in (1, -1))
    if one is None or other is None or one.value.shape != y.shape:
        return found
    bound = NEAR * bounds(y, one.value, one.noise)
    wrong = ((y.to(torch.float64) - one.value).abs() > bound) & (one.value == other.value)
    lost = abs(float(y.to(torch.float64).sum() - one.value.sum())) > float(bound.sum())
    if not bool(y.isfinite().all()) or bool(wrong.any()) or lost or torch.equal(one.value, other.value):
        return found
    return Judgement("unspecified", "among equal elements any may get the gradient", count=y.numel())


def _gradient(case: Case, x: Tensor) -> Expected | None:
    from trainprobe.op_check.evaluate import expect

    first = iter([x])
    args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), lambda t: next(first, t))
    return expect(replace(case, args=args, kwargs=kwargs), backward=True).results[0]


def sorting(case: Case) -> list[Judgement] | None:
    """Argsort: the indices are a permutation that sorts."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
    dim = _given(case, "dim", 1, -1)
    descending = _given(case, "descending", 2, False)
    if y is None or not isinstance(dim, int) or isinstance(dim, bool) or not x.ndim:
        return None
    want = x.sort(dim, descending=bool(descending)).values
    along = x.movedim(dim, -1), y.movedim(dim, -1)
    return [_stable(case, *along, _points_at(*along, want.movedim(dim, -1)))]


def overwriting(case: Case) -> list[Judgement] | None:
    """Judge what is written to places that several indices name: any of the values may stay. None where no place is."""
    x = case.args[0] if case.args else case.kwargs.get("input")
    name, y = api(case.name), next(iter([*case.outputs, *case.written.get("0", ())]), None)
    at = _PLACED[name]
    source = _given(
        case, *(("value", at) if name == "scatter" and "value" in case.kwargs else (_SOURCES.get(name, ""), at)), None
    )
    if not isinstance(x, Tensor) or y is None or y.shape != x.shape or source is None or _accumulates(case):
        return None
    places = _written_places(case, torch.arange(x.numel()).view(x.shape)).reshape(-1)
    if places.numel() == places.unique().numel():
        return None
    values = torch.as_tensor(source, dtype=x.dtype)
    if name == "scatter":  # which takes a corner of a larger source
        index = _given(case, "index", 2, None)
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
    return bool(_given(case, "reduce" if name == "scatter" else "accumulate", place, None))


def _written_places(case: Case, numbers: Tensor) -> Tensor:
    """Return which elements of `numbers`, which has the shape of what is written to, the values of a call go to."""
    name = api(case.name)
    if name in ("scatter", "index_copy"):
        dim, index = _given(case, "dim", 1, 0), _given(case, "index", 2, None)
        read: Any = torch.gather if name == "scatter" else torch.index_select
        return read(numbers, dim, index)
    index: Any = _given(case, "index" if name == "put" else "indices", 1, None)
    return numbers.take(index) if name == "put" else numbers[tuple(index) if isinstance(index, list) else index]


_PLACED = {  # operator → position of what it writes
    **{"scatter": 3, "index_copy": 3, "index_put": 2, "_unsafe_index_put": 2, "put": 2, "setitem": 2},
}
_SOURCES = {"scatter": "src", "index_copy": "source", "put": "source", "index_put": "values", "_unsafe_index_put": "values"}


def evenly_spaced(case: Case) -> list[Judgement] | None:
    """Judge numbers from start to end: kernels work them out from either end, each off by as much as the largest of them."""
    from trainprobe.op_check.evaluate import Expected, expect
    from trainprobe.op_check.judge import judge

    y, found = case.outputs[0], expect(case).results[0]
    if y is None or found is None or y.dtype not in UNIT or y.is_complex() or y.shape != found.value.shape or not y.numel():
        return None
    r = found.value.to(torch.float64)
    return [judge(y, Expected(r, torch.full_like(r, 2 * UNIT[y.dtype] * float(r.abs().max()))))]


def nearest_cell(case: Case) -> list[Judgement] | None:
    """Refuse what picks the nearest element by a place of 16 bits."""
    coarse = any(UNIT.get(t.dtype, 0.0) > COARSE for t in case.tensors())
    mode = _given(case, "mode" if "mode" in case.kwargs else "interpolation_mode", 2, "bilinear")
    if coarse and mode in ("nearest", 1):
        return [Judgement("not checked", "it picks the nearest element, and 16 bits do not tell in which cell a place lies")]
    return None


def at_borders(case: Case, y: Tensor, expected: Expected, found: Judgement) -> Judgement:
    """Judge the gradient of places of `grid_sample`: it jumps at borders of cells, and rounding decides on which side one is.

    A border is a multiple of half an element.
    """
    data, grid, *_ = [*case.tensors(), None, None]
    if not api(case.name).startswith("grid_sample") or data is None or grid is None or expected.noise is None:
        return found
    if y.shape != grid.shape or expected.value.shape != y.shape or y.dtype not in UNIT:
        return found
    sizes = torch.tensor([*data.shape[:1:-1]], dtype=torch.float64)
    wide = grid.to(torch.float64)
    on_a_border = torch.zeros(grid.shape[:-1], dtype=torch.bool)
    for spacing in (sizes - 1, sizes):  # with corners aligned and without
        place = (wide + 1) * spacing  # in halves of an element
        reach = 16 * UNIT[y.dtype] * (place.abs() + 2 * sizes)
        on_a_border |= ((place - place.round()).abs() <= reach).any(-1)
    wrong = (y.to(torch.float64) - expected.value).abs() > NEAR * bounds(y, expected.value, expected.noise)
    if bool((wrong & ~on_a_border.unsqueeze(-1)).any()):
        return found
    return Judgement("unspecified", f"{int(wrong.sum())} places lie on the border of two cells", count=y.numel())


_PROPERTIES: dict[str, Callable[[Case], list[Judgement] | None]] = {
    **dict.fromkeys(["dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"], dropout),
    "argmax": extremum(True),
    "argmin": extremum(False),
    **dict.fromkeys(["max", "min", "sort", "topk", "kthvalue", "median", "nanmedian", "mode", "msort"], chosen),
    "argsort": sorting,
    **dict.fromkeys(_PLACED, overwriting),
    **dict.fromkeys(["arange", "linspace", "range"], evenly_spaced),
    **dict.fromkeys(["grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"], nearest_cell),
    **dict.fromkeys([f"{kind}max_pool{d}d" for kind in ("", "adaptive_") for d in (1, 2, 3)], pooled),
    **dict.fromkeys([f"max_pool{d}d_with_indices" for d in (1, 2, 3)], pooled),
}
_SPREAD = {"dropout1d": 1, "dropout2d": -1, "dropout3d": 3, "feature_dropout": -1}
DROPOUTS = frozenset(name for name, judged in _PROPERTIES.items() if judged is dropout)
_CHOOSE = {name for name, judged in _PROPERTIES.items() if judged in (chosen, pooled)}


def is_random(name: str) -> bool:
    """Return whether an entry's operator draws numbers or hands out memory that nobody wrote, so that equal calls differ."""
    return api(name) in _RANDOM | UNWRITTEN | DROPOUTS


def ambiguous_gradient(case: Case) -> str:
    """Return why the gradient of a call is not determined by its inputs, an empty string where it is."""
    if api(case.name) in _RANDOM:
        return "which elements a random operator kept is not recorded as such"
    if api(case.name).startswith("grid_sample") and any(UNIT.get(t.dtype, 0.0) > COARSE for t in case.tensors()):
        return "its gradient jumps from cell to cell, and 16 bits do not tell in which cell a place lies"
    return ""
