"""Cheaper ways to calculate that are no fault: each with its name and the switch that governs it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from trainprobe.op_check.autocast import takes_mixed_formats
from trainprobe.op_check.cases import Case, NotChecked, Tensor, mapped
from trainprobe.op_check.causes import threads_that_kept_sums_in_16_bits
from trainprobe.op_check.evaluate import EvaluationSteps, Expected, expect
from trainprobe.op_check.functions import api
from trainprobe.op_check.judge import FLIPPED, GROSS, ONE_SIDED, Judgement, judge, scaled
from trainprobe.op_check.measure import bounds
from trainprobe.op_check.noise import UNIT
from trainprobe.op_check.references import formulas
from trainprobe.op_check.run import named_tensors

_PRODUCTS = frozenset(
    """
    linear matmul rmatmul mm bmm mv addmm baddbmm addbmm addmv einsum dot vdot inner outer tensordot bilinear
    chain_matmul conv1d
    conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution scaled_dot_product_attention
    multi_head_attention_forward lstm gru rnn_tanh rnn_relu cdist
    linalg_multi_dot linalg_solve linalg_inv inverse linalg_matrix_power matrix_power
    """.split()  # noqa: SIM905
)
_TF32 = "TF32: torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 or torch.set_float32_matmul_precision"
_HF32 = "HF32: torch.npu.matmul.allow_hf32 and torch.npu.conv.allow_hf32"
_MEDIUM = "inputs in bfloat16: torch.set_float32_matmul_precision('medium')"


def nearest(bits: int, to_whole: Callable[[Tensor], Tensor] = torch.round) -> Callable[[Tensor], Tensor]:
    """Return what rounds float64 to the nearest number with so many bits after the leading one; with torch.trunc, what cuts."""

    def rounded(x: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(x)
        return torch.ldexp(to_whole(torch.ldexp(fraction, torch.tensor(bits + 1))), exponent - bits - 1)

    return rounded


_INPUTS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    (_TF32, nearest(10)),
    (f"{_TF32} (inputs cut, not rounded)", nearest(10, torch.trunc)),
    (_HF32, nearest(11)),
    (f"{_HF32} (inputs cut, not rounded)", nearest(11, torch.trunc)),
    (_MEDIUM, nearest(7)),
)


def recognised(case: Case, index: int, y: Tensor, expected: Expected, found: Judgement, backward: bool) -> Judgement:
    """Return a judgement as a mode where a declared one explains the result, and `found` where none does.

    index: which of the call's results y is.
    """
    if found.outcome not in ("bug", "suspicious") or y.shape != expected.value.shape or y.dtype not in UNIT or y.is_complex():
        return found
    if _flushed(y, expected):
        text = f"numbers below the least normal one of {_name(y)} became 0: torch.set_flush_denormal, or the device's own habit"
        return replace(found, outcome="mode", reason=text)
    if found.at is not None and found.worst == float("inf"):
        return found
    try:
        return (
            _rounded_inputs(case, index, y, found, backward)
            or _rounded_inside(case, index, y, expected, found, backward)
            or found
        )
    except (NotChecked, RuntimeError):
        return found


def _name(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")


def _flushed(y: Tensor, expected: Expected) -> bool:
    least = torch.finfo(y.dtype).tiny
    wrong = (y.to(torch.float64) - expected.value).abs() > bounds(y, expected.value, expected.noise)
    small = (expected.value.abs() < least) & (y == 0)
    return bool(wrong.any()) and bool((small | ~wrong).all())


def _rounded_inputs(case: Case, index: int, y: Tensor, found: Judgement, backward: bool) -> Judgement | None:
    if y.dtype != torch.float32 or api(case.name) not in _PRODUCTS:
        return None
    for text, rounded in _INPUTS:
        expected = expect(_with_factors(case, rounded), backward=backward).results[index]
        if expected is not None and judge(y, expected).outcome in ("exact", "rounding"):
            return replace(found, outcome="mode", reason=text)
    return None


def _with_factors(case: Case, rounded: Callable[[Tensor], Tensor]) -> Case:
    """Return the call with what it multiplies rounded; what it adds (a bias) is added as it is."""
    known = formulas().get(api(case.name))
    adds = None if known is None else known.adds
    added = [] if adds is None else [t for name, t in named_tensors(case) if name in adds.addends]

    def given(t: Tensor) -> Tensor:
        if not t.is_floating_point() or any(t is one for one in added):
            return t
        return rounded(t.detach().to(torch.float64)).to(t.dtype)

    args, kwargs = mapped((tuple(case.args), dict(case.kwargs)), given)
    gradients = None if case.gradients is None else [None if g is None else given(g) for g in case.gradients]
    return replace(case, args=args, kwargs=kwargs, gradients=gradients)


def _rounded_inside(
    case: Case, index: int, y: Tensor, expected: Expected, found: Judgement, backward: bool
) -> Judgement | None:
    """Recognise results whose errors are as large, and as unbiased, as those of a cheaper format inside."""
    unit = UNIT.get(y.dtype, 0.0)
    if unit >= 2.0**-11:
        steps, text = EvaluationSteps(accumulate=unit, walk=True), _inside(case, y.dtype)
    elif (
        y.dtype == torch.float32 and backward and takes_mixed_formats(case)
    ):  # threads add up in 16 bits, and their sums in float32
        low = case.tensors()[0].dtype
        steps = EvaluationSteps(accumulate=UNIT[low], walk=True)
        text = _inside(case, low)
    elif y.dtype == torch.float32 and api(case.name) in _PRODUCTS:
        steps, text = EvaluationSteps(matrices=2.0**-11, walk=True), _TF32
    else:
        return None
    looser = expect(case, backward=backward, steps=steps).results[index]
    if looser is None or looser.noise is None:
        return None
    error = y.to(torch.float64) - expected.value
    allowed = bounds(y, expected.value, looser.noise)
    both = error.isfinite() & allowed.isfinite()
    error, allowed, r = error[both], allowed[both], expected.value[both]
    if float((allowed * allowed).sum()) * 4 >= float((r * r).sum()):
        return None  # a mode as rough as that explains anything
    if float((error * error).sum()) > float((allowed * allowed).sum()) or float((error.abs() / allowed).max()) > 8:
        return None
    if not _all_over(error, allowed, found, unit) and not (backward and threads_that_kept_sums_in_16_bits(case, y)):
        return None  # where few numbers are added up, half of the sums may be exact
    weight = error * r
    biased = abs(float(weight.sum())) > ONE_SIDED * float((weight * weight).sum().sqrt())
    if biased or (unit > 2.0**-12 and abs(found.one_sided) >= ONE_SIDED):
        outcome = "bug" if abs(found.gain) > GROSS else "suspicious"
        told = f"{scaled(found.gain)}; a kernel that {text.partition(':')[0]} may be as far off, but not to one side"
        return replace(found, outcome=outcome, reason=told)
    off = math.sqrt(float((error * error).sum()) / float((r * r).sum()))
    if off > _ROUGH and not (backward and threads_that_kept_sums_in_16_bits(case, y)):
        why = f"it is {off:.1%} off as a whole, as a kernel is that {text}"
        return replace(found, outcome="bug", reason=why)
    return replace(found, outcome="mode", reason=text)


def _inside(case: Case, low: torch.dtype) -> str:
    by = f": {_REDUCED}" if api(case.name) in _PRODUCTS else ""
    return f"calculates in {str(low).removeprefix('torch.')} inside, not in float32{by}"


def _all_over(error: Tensor, allowed: Tensor, found: Judgement, unit: float) -> bool:
    """Return whether most elements err as in a cheaper format, and not a few alone."""
    if unit >= 2.0**-11:  # a kernel that rounds once differs from the correctly rounded value in few elements
        return found.flips >= FLIPPED
    return float((error.abs() / allowed).median()) >= _TYPICAL


_ROUGH = 0.02  # of the result: more is wrong, however it came about
_TYPICAL = 0.01  # of what is allowed
_REDUCED = (
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction and allow_fp16_reduced_precision_reduction, "
    "or a kernel that has no float32 inside"
)
