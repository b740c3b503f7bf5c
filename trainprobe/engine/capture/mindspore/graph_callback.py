"""Calls Python from inside a graph that MindSpore has compiled: `ops.Custom` of the type "pyfunc", which runs on a CPU only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from trainprobe.engine.arrays.mindspore_library import HostArray

_NOTHING = np.zeros(1, np.int32)
_NAMES = ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TEXT = {name: str(getattr(mindspore, name)) for name in (*_NAMES, "complex64", "complex128")} | {"bool": str(mindspore.bool_)}


def callbacks_work() -> bool:
    """Tell whether graphs of this process can call Python."""
    return mindspore.get_context("device_target") == "CPU"


def array_callback(tell: Callable[[HostArray], None]) -> Any:
    """Return an operator that hands a tensor to Python where it stands in the program, in a graph or outside of one.

    It cannot be differentiated: give it `ops.stop_gradient(x)`. The tensor may not be empty.
    """
    dtypes: list[Any] = []  # of the tensor, as MindSpore compiles it

    def run(data: Any) -> Any:
        tell(_array(data, dtypes))
        return _NOTHING

    def dtype(given: Any) -> Any:
        dtypes.append(mindspore.dtype_to_nptype(getattr(given, "element_type", lambda: given)()))
        return mindspore.int32

    shape: Any = lambda _: (1,)  # noqa: E731
    operator = ops.Custom(run, out_shape=shape, out_dtype=dtype, func_type="pyfunc")
    operator.add_prim_attr("side_effect_io", True)
    operator.recompute(False)
    return operator


def _array(data: Any, dtypes: list[Any]) -> HostArray:
    array = np.asarray(data, None if isinstance(data, np.ndarray) else dtypes[-1])  # MindSpore hands over scalars as numbers
    return HostArray(_TEXT.get(array.dtype.name, array.dtype.name), array.shape, None, array)
