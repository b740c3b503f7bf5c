"""A tiny MindSpore training, the same to the bit each time, and what its optimizer held, taken by MindSpore's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

STEPS, BATCH, WORDS, WIDTH = 4, 4, 11, 6


class Block(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([width])
        self.up = nn.Dense(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Dense(2 * width, width)

    def construct(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Cell):
    def __init__(self, width: int = WIDTH, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.SequentialCell(Block(width), Block(width))
        self.drop = nn.Dropout(p=0.2)
        self.head = nn.Dense(width, words)

    def construct(self, x: Any) -> Any:
        return self.head(self.drop(self.blocks(self.embed(x))))


class Loss(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.entropy(logits.reshape((-1, WORDS)), labels.reshape((-1,)))


class Data:
    def __init__(self, steps: int = STEPS, seed: int = 5) -> None:
        draw = np.random.default_rng(seed)
        self.x = draw.integers(0, WORDS, (steps * BATCH, 3)).astype(np.int32)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return self.x[i], (self.x[i] + 1) % WORDS


class Watch(Callback):
    """What MindSpore reports and holds, step by step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.losses: list[bytes] = []
        self.numbers: list[int] = []
        self.reports: list[list[float]] = []

    def on_train_step_end(self, run_context: Any) -> None:
        p = run_context.original_args()
        out = p.net_outputs[0] if isinstance(p.net_outputs, tuple) else p.net_outputs
        reports = p.net_outputs if isinstance(p.net_outputs, tuple) else [out]
        self.reports.append([float(x.asnumpy().reshape(-1)[0]) for x in reports])
        self.losses.append(out.asnumpy().tobytes())
        self.numbers.append(int(p.cur_step_num))


@dataclass
class Outcome:
    losses: list[bytes]
    numbers: list[int]
    weights: dict[str, bytes]
    state: dict[str, bytes]
    random: int
    optimizer: Any
    net: Any
    reports: list[list[float]]
    held: list[dict[str, np.ndarray]] = field(default_factory=list)

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.losses, self.weights, self.state, self.random


def train(
    mode: int,
    callbacks: Sequence[Any] = (),
    *,
    make_optimizer: Callable[[Any], Any] | None = None,
    hold: bool = False,
    prepare: Callable[[Any], None] | None = None,
    epochs: int = 1,
    first_epoch: int = 0,
    around: Callable[[Any, Any], Any] | None = None,
) -> Outcome:
    """Train once.

    hold: take gradients, moments and values at the optimizer by MindSpore's own hooks (PyNative only). around: makes the cell
    that trains, of the model with its loss and the optimizer.
    """
    ms.set_context(mode=mode)
    ms.set_seed(1234)
    np.random.seed(1234)
    net = Net()
    if prepare is not None:
        prepare(net)
    optimizer = make_optimizer(net) if make_optimizer else nn.AdamWeightDecay(net.trainable_params(), 1e-2)
    held: list[dict[str, np.ndarray]] = []
    if hold:
        _hold(optimizer, held)
    model = Model(around(nn.WithLossCell(net, Loss()), optimizer)) if around else Model(net, Loss(), optimizer)
    watch = Watch(optimizer)
    data = GeneratorDataset(Data(), ["x", "y"], shuffle=False).batch(BATCH)
    model.train(epochs, data, callbacks=[*callbacks, watch], dataset_sink_mode=False, initial_epoch=first_epoch)
    weights = {p.name: p.asnumpy().tobytes() for p in net.get_parameters()}
    state = {p.name: p.asnumpy().tobytes() for p in optimizer.get_parameters()}
    return Outcome(
        watch.losses, watch.numbers, weights, state, int(np.random.randint(1 << 30)), optimizer, net, watch.reports, held
    )


def _hold(optimizer: Any, held: list[dict[str, np.ndarray]]) -> None:
    def before(cell: Any, args: Any) -> None:
        step = {f"grad|{p.name}": g.asnumpy().copy() for p, g in zip(cell.parameters, args[0], strict=True)}
        step |= {f"value|{p.name}": p.asnumpy().copy() for p in cell.parameters}
        held.append(step)

    def after(cell: Any, args: Any, out: Any) -> None:
        step = held[-1]
        step |= {f"value_after|{p.name}": p.asnumpy().copy() for p in cell.parameters}
        step |= {f"exp_avg_after|{p.name}": m.asnumpy().copy() for p, m in zip(cell.parameters, cell.moments1, strict=True)}
        step |= {f"exp_avg_sq_after|{p.name}": m.asnumpy().copy() for p, m in zip(cell.parameters, cell.moments2, strict=True)}

    optimizer.register_forward_pre_hook(before)
    optimizer.register_forward_hook(after)


PYNATIVE, GRAPH = ms.PYNATIVE_MODE, ms.GRAPH_MODE
