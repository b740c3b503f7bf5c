"""Operators that have more than one right answer, judged by what every right answer has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainprobe.op_check.cases import Case, Tensor, argument, mapped
from trainprobe.op_check.choices import PLACED, chosen, extremum, overwriting, pooled, sorting
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import Judgement
from trainprobe.op_check.measure import NEAR, bounds
from trainprobe.op_check.noise import COARSE, UNIT

if TYPE_CHECKING:
    from trainprobe.op_check.evaluate import Expected

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
    if int(y.count_nonzero()) == y.numel():  # a fifth of the time of looking for a zero
        return found
    wrong = (y == 0) & (r == 0) & (y.signbit() != r.signbit())
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


def dropout(case: Case) -> list[Judgement]:
    """Kept elements are x / (1 − p), the others 0, and the share that is kept is near 1 − p."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0]
    p = float(argument(case, "p", 1, 0.5))  # type: ignore[arg-type]
    training = bool(argument(case, "training", 2, True))
    if y is None:
        return [Judgement("not checked", "the dump does not hold its output")]
    return [_dropped(x, y, p if training else 0.0, _SPREAD.get(api(case.name), 0))]


def dropout_gradient(case: Case) -> Judgement:
    """The gradient is g / (1 − p) where the forward kept an element, 0 where it did not; where x is 0 that does not show."""
    x, y = case.args[0] if case.args else case.kwargs["input"], case.outputs[0] if case.outputs else None
    g, result = (case.gradients or [None])[0], case.results[0]
    if y is None or g is None or result is None or not result.shape == g.shape == y.shape == x.shape:
        return Judgement("not checked", "the dump does not hold what its forward kept")
    p = float(argument(case, "p", 1, 0.5)) if argument(case, "training", 2, True) else 0.0  # type: ignore[arg-type]
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
    mode = argument(case, "mode" if "mode" in case.kwargs else "interpolation_mode", 2, "bilinear")
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
    **dict.fromkeys(PLACED, overwriting),
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
