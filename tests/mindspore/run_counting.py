"""A graph of which a cell counts its calls by `self.count += 1`, then a model that is watched with graph callbacks.

Arguments: the folder for what is written, then `counting` or `by a method`. Printed: what each plan recorded and said, and
whether the gradients kept their bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from trainprobe.watching import watch


class Counter(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.count = ms.Parameter(ms.Tensor(np.zeros(1, np.float32)), name="count", requires_grad=False)


def count() -> None:
    """Compile a cell that counts in `construct`."""

    class Counting(Counter):
        def construct(self, x: Any) -> Any:
            self.count += 1
            return x * 2

    Counting()(ms.Tensor([1.0]))


def count_by_a_method() -> nn.Cell:
    """Compile a cell that counts in a method that `construct` calls; return it."""

    class CountingByMethod(Counter):
        def construct(self, x: Any) -> Any:
            self.more()
            return x * 2

        def more(self) -> None:
            self.count += 1

    cell = CountingByMethod()
    cell(ms.Tensor([1.0]))
    return cell


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(8, 8, ms.Tensor(np.eye(8, dtype=np.float32) * 0.3), "zeros")

    def construct(self, x: Any) -> Any:
        return self.inner(x)


class Net(nn.Cell):
    """Its bits changed with callbacks that held Python which MindSpore had to fold, from the second compilation on."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Dense(8, 8, ms.Tensor(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)), "zeros")
        self.layer = Layer()

    def construct(self, x: Any) -> Any:
        h = self.start(x)
        first, again = self.layer(h), self.layer(h)
        again[0]
        y = again + h + first + (again + again)
        return (y * y).mean()


def gradients(folder: str, **plan: Any) -> tuple[list[bytes], int, list[str]]:
    net = Net()
    backward = ms.value_and_grad(net, None, net.trainable_params())
    x = ms.Tensor(np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32))
    if not plan:
        return [g.asnumpy().tobytes() for g in backward(x)[1]], 0, []
    with watch(net, level="L0", output=folder, on_error="raise", console=False, **plan) as probe, probe.step():
        found = [g.asnumpy().tobytes() for g in backward(x)[1]]
    dump = json.loads((Path(folder) / "step0/rank0/dump.json").read_text())
    return found, len(dump["data"]), dump["trainprobe"]["notes"]


def main(folder: str) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    if "counting" in sys.argv[2:]:
        count()
    kept = count_by_a_method() if "by a method" in sys.argv[2:] else None
    bare = gradients("")[0]
    told = {}
    for name, callbacks in (("true", True), ("all", "all")):
        bits, entries, notes = gradients(f"{folder}/{name}", graph_callbacks=callbacks)
        told[name] = {"same": bits == bare, "entries": entries, "notes": notes}
    del kept
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
