"""The constants of the six standards, as their documentation has them, and which operator is judged by which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainprobe.op_check.functions import api

NAMES = ("absolute", "binary", "ulp", "thousandth", "benchmark", "accumulative")
BY_OPERATOR = "by-operator"  # the standard that mindstudio-probe's list assigns to an operator
# what the standards are called in mindstudio-probe's code and lists
ALIASES = {
    **{"absolute_threshold": "absolute", "AbsoluteThreshStandard": "absolute"},
    **{"binary_consistency": "binary", "BinaryCompareStandard": "binary"},
    **{"ulp_compare": "ulp", "ULPStandard": "ulp"},
    **{"thousandth_standard": "thousandth", "ThousandthStandard": "thousandth"},
    **{"accumulative_error_compare": "accumulative", "AccumulativeErrorStandard": "accumulative"},
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a number format is held to.

    small: values up to it are small ones. atol: their largest absolute error. rtol: the largest relative error of the others.
    ratio_floor: the least divisor of a ratio of errors. ulps: an error above it counts. bound, balance: of the accumulative
    standard, whose small values are those up to 1.
    """

    small: float
    atol: float
    rtol: float
    ratio_floor: float
    ulps: float
    bound: float
    balance: float


LIMITS = {
    torch.float16: Limits(2.0**-10, 2.0**-16, 2.0**-10, 2.0**-11, 1.0, 2.0**-8, 2.0**-20),
    torch.bfloat16: Limits(2.0**-10, 2.0**-16, 2.0**-8, 2.0**-8, 1.0, 2.0**-7, 2.0**-7),
    torch.float32: Limits(2.0**-20, 2.0**-30, 2.0**-20, 2.0**-14, 32.0, 2.0**-11, 2.0**-14),
}
SMALL_WHEN_ACCUMULATED = 1.0
# formats that the standards know by their ULPs alone
EIGHT_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
# limits of (RMSE, largest relative error, mean relative error) against the second result, by the level of the operator
RATIOS = {"L0": (2.0, 10.0, 2.0), "L1": (1.5, 5.0, 1.5), "L2": (1.2, 2.0, 1.2)}
SMALL_SHARE_RATIO = 2.0
ULP_MEAN = 64.0  # float32
ULP_SHARE = {torch.float32: 0.05}  # others 0.001
ULP_SHARE_ELSE = 0.001
THOUSANDTH = 0.999

_L1 = frozenset("embedding npu_fusion_attention npu_fusion_attention_grad scatter_ scatter_add_".split())  # noqa: SIM905
_L2 = frozenset(
    """
    addmm matmul mm layer_norm sum index one_hot nonzero gelu npu_rms_norm npu_rms_norm_backward npu_cross_entropy_loss
    npu_cross_entropy_loss_backward
    """.split()  # noqa: SIM905
)
_LISTS = {
    "absolute": """
        mul mul_ __mul__ __imul__ __rmul__ add add_ __add__ __iadd__ __radd__ div div_ __div__ __idiv__ divide divide_
        __truediv__ leaky_relu leaky_relu_ prelu reciprocal reciprocal_ rsqrt rsqrt_ square square_ sub sub_ rsub __isub__
        __sub__
    """,
    "binary": """
        abs abs_ absolute absolute_ argmin bitwise_and bitwise_and_ broadcast_to ceil ceil_ equal fill_ flatten floor floor_
        gather greater greater_ greater_equal greater_equal_ histc isfinite isnan less less_ less_equal less_equal_ logical_and
        logical_and_ logical_not logical_not_ logical_or logical_or_ masked_fill masked_fill_ max_pool3d maximum minimum neg
        neg_ nonzero not_equal not_equal_ one_hot pad relu reshape round round_ select sign sign_ sort tile topk transpose
        transpose_ tril tril_ triu triu_ type_as
    """,
    "ulp": """
        __matmul__ addbmm addbmm_ addmm addmm_ baddbmm baddbmm_ bilinear bmm chain_matmul hspmm linear matmul mm mv smm
        sspaddmm
    """,
    "thousandth": "conv1d conv2d",
}
_ASSIGNED = {name: standard for standard, names in _LISTS.items() for name in names.split()}


def level(name: str) -> str:
    """Return the level of an operator (`Functional.linear`), which decides how close to the second result it has to be."""
    short = name.rpartition(".")[2]
    return "L2" if short in _L2 else "L1" if short in _L1 else "L0"


def assigned(name: str, dtype: torch.dtype) -> str:
    """Return the standard of an operator's result: by its format where that is no 16-bit or 32-bit float, else by the list."""
    if dtype in EIGHT_BITS:
        return "ulp"
    if not dtype.is_floating_point and not dtype.is_complex:
        return "binary"
    return _ASSIGNED.get(name.rpartition(".")[2], _ASSIGNED.get(api(name), "benchmark"))
