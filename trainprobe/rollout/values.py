"""What can be saved: values are copied when they are handed over, and become NumPy arrays when they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.compare.number_formats import FORMATS, decode
from trainprobe.rollout.folders import refusal_of_name

Array = npt.NDArray[Any]
DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a value. item: its dotted path within the value, empty for the value itself; dtype: as it was saved."""

    item: str
    dtype: str
    copy: Any  # an array, or a copy of a tensor, on the host or still on its device: bytes, dtype and shape

    @property
    def nbytes(self) -> int:
        """Bytes that wait to be written."""
        return int(self.copy.nbytes)

    def array(self) -> Array:
        """Return the elements. Formats that NumPy does not have (bfloat16, 8-bit floats) become float32, which is exact."""
        if isinstance(self.copy, np.ndarray):
            return self.copy  # pyright: ignore
        shape = tuple(self.copy.shape)
        known = FORMATS[self.dtype]
        bits = np.frombuffer(self.copy.data, dtype=np.dtype(known.storage)).reshape(shape)
        if self.dtype == "bool":
            return bits.view(np.bool_)
        return bits if known.name == bits.dtype.name else decode(bits, known)


def leaves_of(value: Any, framework: str) -> tuple[Any, list[Leaf], list[tuple[str, str]]]:
    """Return (tree, leaves, refused) of a value.

    tree: the value with each leaf replaced by its path. refused: (path, why) of what cannot be saved.
    """
    leaves: list[Leaf] = []
    refused: list[tuple[str, str]] = []

    def walk(x: Any, path: tuple[str, ...]) -> Any:
        item = ".".join(path)
        if x is None:
            return None
        if len(path) > DEEPEST:
            refused.append((item, f"it is nested more than {DEEPEST} deep"))
            return None
        if isinstance(x, Mapping):
            wrong = [why for name in x if (why := refusal_of_name(str(name))) is not None]
            refused.extend((item, why) for why in wrong)
            return {} if wrong else {str(name): walk(branch, (*path, str(name))) for name, branch in x.items()}
        if isinstance(x, list | tuple) and not _is_array(x):
            return [walk(branch, (*path, str(i))) for i, branch in enumerate(x)]  # pyright: ignore
        leaf = _leaf(item, x, framework)
        if isinstance(leaf, str):
            refused.append((item, leaf))
            return None
        leaves.append(leaf)
        return item

    return walk(value, ()), leaves, refused


def statistics_of(array: Array, dtype: str) -> dict[str, Any]:
    """Return max, min, mean and l2 norm (float64; the last two over all elements), shape and dtype. Texts have no numbers."""
    facts: dict[str, Any] = {"shape": list(array.shape), "dtype": dtype}
    if array.dtype.kind not in "biuf" or not array.size:
        return facts
    with np.errstate(all="ignore"):
        wide = array.astype(np.float64)
        numbers = {"max": wide.max(), "min": wide.min(), "mean": wide.mean(), "norm": np.linalg.norm(wide.reshape(-1))}
    return {name: _json_number(float(number)) for name, number in numbers.items()} | facts


def _json_number(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _is_array(x: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a list is one array: of texts, or of numbers, alone."""
    return all(isinstance(item, str) for item in x) or all(isinstance(item, bool | int | float) for item in x)


def _leaf(item: str, x: Any, framework: str) -> Leaf | str:
    """Return the leaf of a value, or why it cannot be saved."""
    if isinstance(x, np.ndarray | np.generic | bool | int | float | str | list | tuple):
        array = np.array(x)  # pyright: ignore
        if array.dtype.kind not in "biufcU":
            return f"an array of dtype {array.dtype} cannot be written without pickle: convert it to numbers or texts"
        return Leaf(item, "str" if array.dtype.kind == "U" else array.dtype.name, array)
    copy = _copied(x, framework)
    if copy is None:
        return f"a {type(x).__name__} is neither a tensor of {framework} nor an array, number or text"
    dtype = str(copy.dtype).rpartition(".")[2].lower()
    return Leaf(item, dtype, copy) if dtype in FORMATS else f"a tensor of {dtype} has no place in a NumPy file"


def _copied(x: Any, framework: str) -> Any:
    """Return a copy of a tensor, or None for what is no tensor; only one of MindSpore waits for the device."""
    if framework == "mindspore":
        from trainprobe.engine.arrays import mindspore_library

        return mindspore_library.copy_out(x) if hasattr(x, "asnumpy") else None
    from trainprobe.engine.arrays import torch_arrays

    return torch_arrays.copy_late(x) if isinstance(x, torch_arrays.Tensor) else None
