"""The twin in MindSpore (PyNative)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

import trainprobe
from benchmarks.moving.twins import Twin, batch, mask, plan, weights

NAMES = {"words.weight": "words.embedding_table", "places.weight": "places.embedding_table"}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda ps, t: optim.AdamW(ps, t.rate, eps=t.adam_epsilon, weight_decay=t.decay),
    "AdamWeightDecay": lambda ps, t: nn.AdamWeightDecay(ps, _rates(t), eps=t.adam_epsilon, weight_decay=t.decay),
    "Adam": lambda ps, t: nn.Adam(ps, _rates(t), eps=t.adam_epsilon),
    "SGD": lambda ps, t: nn.SGD(ps, _rates(t), momentum=0.9, weight_decay=t.decay),
}


def _rates(t: Twin) -> Any:
    return [t.rate_of(step) for step in range(t.steps)] if t.schedule else t.rate


class RMSNorm(nn.Cell):
    """A norm by the root mean square, of its own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = Parameter(ops.ones(width, ms.float32)), eps

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + self.eps) * self.weight


def _norm(t: Twin) -> nn.Cell:
    return nn.LayerNorm([t.width], epsilon=t.epsilon) if t.norm == "layer" else RMSNorm(t.width, t.epsilon)


class Attention(nn.Cell):
    """Causal attention by hand."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Dense(t.width, 3 * t.width, has_bias=t.bias), nn.Dense(t.width, t.width, has_bias=t.bias)
        self.heads = t.heads

    def construct(self, x: Any, added: Any) -> Any:
        size, length, width = x.shape
        q, k, v = (
            part.reshape(size, length, self.heads, width // self.heads).transpose(0, 2, 1, 3)
            for part in ops.chunk(self.qkv(x), 3, -1)
        )
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) * (width // self.heads) ** -0.5
        shares = ops.softmax(scores + added, -1)
        return self.proj(ops.matmul(shares, v).transpose(0, 2, 1, 3).reshape(size, length, width))


class MLP(nn.Cell):
    """Two linear layers."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(t.width, 4 * t.width, has_bias=t.bias), nn.Dense(4 * t.width, t.width, has_bias=t.bias)
        self.act = nn.GELU(approximate=False) if t.activation == "gelu" else nn.SiLU()

    def construct(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Block(nn.Cell):
    """A block with norms before its parts."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = _norm(t), Attention(t), _norm(t), MLP(t)
        self.dropout = nn.Dropout(p=t.dropout)

    def construct(self, x: Any, added: Any) -> Any:
        x = x + self.dropout(self.attention(self.norm1(x), added))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Cell):
    """The model."""

    def __init__(self, t: Twin) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(t.words, t.width), nn.Embedding(t.length, t.width)
        self.blocks = nn.CellList([Block(t) for _ in range(t.layers)])
        self.norm, self.head = _norm(t), nn.Dense(t.width, t.words, has_bias=False)

    def construct(self, tokens: Any, added: Any) -> Any:
        x = self.words(tokens) + self.places(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, added)
        return self.head(self.norm(x))


def _load(model: nn.Cell, t: Twin) -> None:
    found: dict[str, Parameter] = {}
    for name, array in weights(t).items():
        norm = "norm" in name and t.norm == "layer"
        there = NAMES.get(name, name.replace(".weight", ".gamma").replace(".bias", ".beta") if norm else name)
        found[there] = Parameter(Tensor(array), name=there)
    missing, unknown = ms.load_param_into_net(model, found)
    if missing or unknown:
        raise SystemExit(f"weights of the twin do not fit: {missing} {unknown}")


def train(t: Twin, output: Path, more: Mapping[str, Any] | None = None) -> None:
    """Train a twin under the plan of the bench. more: other fields of the plan."""
    ms.set_seed(t.seed)
    model = GPT(t)
    _load(model, t)
    if t.half:
        dict(model.cells_and_names())[t.half].to_float(ms.float16)
    model.set_train()
    optimizer, added = OPTIMIZERS[t.optimizer](model.trainable_params(), t), Tensor(mask(t))

    def forward(x: Any, y: Any) -> Any:
        return ops.cross_entropy(model(x, added).reshape(-1, t.words), y.reshape(-1)) * (t.scale / t.micro)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)
    with trainprobe.watch(model, optimizer, {**plan(str(output)), **(more or {})}) as probe:
        for step in range(t.steps):
            with probe.step():
                if hasattr(optimizer, "param_groups"):
                    for group in optimizer.param_groups:
                        ops.assign(group["lr"], Tensor(t.rate_of(step), ms.float32))
                total: Any = None
                for micro in range(t.micro):
                    tokens = batch(t, step, micro)
                    loss, found = gradients(Tensor(tokens[:, :-1]), Tensor(tokens[:, 1:]))
                    total = found if total is None else tuple(x + y for x, y in zip(total, found, strict=True))
                if t.scale != 1 and not t.left_scaled:
                    total = tuple(x / t.scale for x in total)
                if t.clip:
                    total = ops.clip_by_global_norm(total, t.clip)
                if t.grow != 1:
                    total = tuple(x * t.grow for x in total)
                optimizer(total)
                probe.note("loss", float(loss.asnumpy()) * t.micro / t.scale)


if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    ms.set_device("CPU")
    ms.set_deterministic(True)
    for folder, given in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        train(Twin.of(given), Path(folder), given.get("plan"))
