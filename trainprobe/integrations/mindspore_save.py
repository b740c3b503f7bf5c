"""`save`, `save_grad` and `step` of `msprobe.mindspore`: values written as `.npy` files from anywhere, also inside a graph.

    from trainprobe.mindspore import save, save_grad, step

    class Net(nn.Cell):
        def construct(self, x):
            hidden = self.layer(x)
            save("out", "hidden", hidden)                   # out/step0/rank0/hidden_float32_0.npy
            hidden = save_grad("out", "hidden", hidden)     # out/step0/rank0/hidden_grad_float32_1.npy
            return self.head(hidden)

On a CPU a callback writes them. Elsewhere MindSpore's own `TensorDump` does, which no CPU can run in a graph.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import ops

from trainprobe.engine.arrays.mindspore_library import HostArray
from trainprobe.engine.capture.mindspore.graph_callback import array_callback, callbacks_work
from trainprobe.engine.capture.mindspore.tensor_hooks import wait
from trainprobe.errors import UsageError
from trainprobe.integrations.mindspore_place import place_of_process

_numbers = count()  # one a file of this process
_NEXT_STEP = "<tensordump-update-step>"  # TensorDump counts its steps by this


class _Steps:
    done = 0


def save(save_dir: Any, name: Any, data: Any) -> None:
    """Write a tensor, or the tensors of nested lists, tuples and dicts, whose keys follow the name after a dot.

    Raises UsageError for a name that is none of a file, and TypeError for anything but tensors and None.
    """
    if isinstance(data, dict):
        for key in data:  # pyright: ignore[reportUnknownVariableType]
            save(save_dir, f"{name}.{key}", data[key])
    elif isinstance(data, (list, tuple)):
        for i, item in enumerate(data):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            save(save_dir, f"{name}.{i}", item)
    elif ops.is_tensor(data):
        _Saved(save_dir, name)(data)
    elif data is not None:
        raise TypeError("save: give it a tensor, or lists, tuples and dicts of tensors")


def save_grad(save_dir: Any, name: Any, data: Any) -> Any:
    """Return the tensor, whose gradient is written as `{name}_grad` when it arrives: go on with what this returns.

    Raises UsageError for a name that is none of a file.
    """
    return _SavedGradient(save_dir, f"{name}_grad")(data)


def step() -> None:
    """End a step: what is saved from now on belongs to the next."""
    wait()
    _Steps.done += 1
    if not callbacks_work():
        mindspore.runtime.synchronize()
        ops.TensorDump()(_NEXT_STEP, mindspore.Tensor([1.0], mindspore.float32))


@mindspore.jit_class  # pyright: ignore[reportUntypedClassDecorator]
class _Saved:
    def __init__(self, save_dir: str, name: str) -> None:
        self.write = _writer(str(save_dir), name)

    def __call__(self, x: Any) -> None:
        if 0 not in x.shape:
            self.write(ops.stop_gradient(x))


@mindspore.jit_class  # pyright: ignore[reportUntypedClassDecorator]
class _SavedGradient:
    def __init__(self, save_dir: str, name: str) -> None:
        self.insert = _gradient_writer(str(save_dir), name)

    def __call__(self, x: Any) -> Any:
        return self.insert(x)


@cache
def _gradient_writer(save_dir: str, name: str) -> Any:
    write = _writer(save_dir, name)

    def passed(gradient: Any) -> Any:
        write(gradient)
        return gradient

    return ops.InsertGradientOf(passed)


@cache
def _writer(save_dir: str, name: str) -> Any:
    """Return what writes a tensor, from Python or from a graph. Raises UsageError for a name that is none of a file."""
    if not name or Path(name).name != name:
        raise UsageError(f"save: {name!r} is the name of no file: leave out what makes it a path")
    if callbacks_work():
        return array_callback(lambda array: _write(Path(save_dir), name, array))
    dump, path = ops.TensorDump(), str(Path(save_dir) / "{step}" / "{rank}" / name)  # MindSpore fills in step and rank

    def write(x: Any) -> None:
        dump(path, x)

    return write


def _write(save_dir: Path, name: str, array: HostArray) -> None:
    folder = save_dir / f"step{_Steps.done}" / f"rank{place_of_process().rank}"
    folder.mkdir(parents=True, exist_ok=True)
    data = array.data.astype(np.float32) if array.dtype == "BFloat16" else array.data
    with (folder / f"{name}_{data.dtype.name}_{next(_numbers)}.npy").open("xb") as file:
        np.save(file, data)
