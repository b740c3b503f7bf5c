"""What the twins share: sizes, weights, batches, and how a case changes them; by NumPy alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Twin:
    """One side of a pair: its model, its data, its optimizer, and how it trains.

    optimizer: a name of `OPTIMIZERS` in the module of the framework. mask: what is added to scores above the diagonal.
    scale: what the loss is multiplied by, and divided from gradients unless `left_scaled`. clip: largest norm, 0: none.
    schedule: factors of the rate, step by step. grow: what gradients are multiplied by before the optimizer.
    """

    seed: int = 1
    layers: int = 2
    width: int = 32
    heads: int = 4
    words: int = 61
    length: int = 12
    batch: int = 4
    micro: int = 1
    steps: int = 3
    norm: str = "layer"
    activation: str = "gelu"
    mask: float = -1e4
    bias: bool = True
    optimizer: str = "AdamW"
    rate: float = 1e-2
    decay: float = 0.1
    epsilon: float = 1e-5
    adam_epsilon: float = 1e-8
    dropout: float = 0.0
    schedule: tuple[float, ...] = ()
    initial: str = ""
    transposed: str = ""
    order: str = ""
    half: str = ""
    clip: float = 0.0
    scale: float = 1.0
    left_scaled: bool = False
    grow: float = 1.0

    @staticmethod
    def of(given: dict[str, Any]) -> Twin:
        """Return a twin of what `asdict` made of it and JSON kept."""
        known = {f.name for f in fields(Twin)}
        return replace(Twin(**{k: v for k, v in given.items() if k in known}), schedule=tuple(given.get("schedule", ())))

    def given(self) -> dict[str, Any]:
        """Return all fields as JSON can hold them."""
        return {**asdict(self), "schedule": list(self.schedule)}

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.rate * (self.schedule[step] if step < len(self.schedule) else 1.0)


def weights(twin: Twin) -> dict[str, Array]:
    """Return parameter → float32 array by the names of torch; linear layers as [out, in]."""
    draw = np.random.default_rng(twin.seed)
    width = twin.width

    def normal(*shape: int) -> Array:
        return (draw.standard_normal(shape) * 0.1).astype(np.float32)

    found = {"words.weight": normal(twin.words, width), "places.weight": normal(twin.length, width)}
    shapes = {"attention.qkv": (3 * width, width), "attention.proj": (width, width)}
    shapes |= {"mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)}

    def norm(name: str) -> dict[str, Array]:
        return {f"{name}.weight": 1 + normal(width)} | ({f"{name}.bias": normal(width)} if twin.norm == "layer" else {})

    for i in range(twin.layers):
        found |= norm(f"blocks.{i}.norm1") | norm(f"blocks.{i}.norm2")
        for name, shape in shapes.items():
            found[f"blocks.{i}.{name}.weight"] = normal(*shape)
            if twin.bias:
                found[f"blocks.{i}.{name}.bias"] = normal(shape[0])
    found |= {**norm("norm"), "head.weight": normal(twin.words, width)}
    if twin.initial:
        found[twin.initial] = found[twin.initial] * np.float32(1.5)
    if twin.transposed:
        found[twin.transposed] = np.ascontiguousarray(found[twin.transposed].T)
    return found


def batch(twin: Twin, step: int, micro: int) -> Array:
    """Return the tokens of a micro-batch, int32 [batch, length + 1]."""
    number = step * twin.micro + micro
    if twin.order == "batches" and twin.steps > 2:  # the second and the third step exchange theirs
        number = {1: 2, 2: 1}.get(step, step) * twin.micro + micro
    draw = np.random.default_rng([twin.seed, number])
    tokens = draw.integers(0, twin.words, (twin.batch, twin.length + 1)).astype(np.int32)
    return np.ascontiguousarray(tokens[::-1]) if twin.order == "samples" else tokens


def mask(twin: Twin) -> Array:
    """Return what is added to the scores, float32 [length, length]."""
    return np.triu(np.full((twin.length, twin.length), twin.mask, np.float32), 1)


def plan(output: str) -> dict[str, Any]:
    """Return what both sides record in one run."""
    return {
        "output": output,
        "level": "mix",
        "task": "statistics",
        "monitor": {"parameters": True, "gradients": True},
        "config_check": {"micro_steps": 64},
        "console": False,
    }
