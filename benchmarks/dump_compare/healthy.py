"""Healthy pairs: two ways to run the same training that may differ by rounding alone. None may be called a bug."""

from __future__ import annotations

import torch

from benchmarks.dump_compare.runs import Way

PLANS = {
    "mix": {"level": "mix", "summary": "both"},
    "statistics": {"level": "mix"},
    "modules": {"level": "L0"},
    "monitored": {"level": "L0", "monitor": {"parameters": True, "gradients": True, "optimizer_state": True}},
    "tensors": {"level": "mix", "task": "tensor"},
}
_SGD = {"momentum": 0.9}
_OTHER: dict[str, tuple[Way, Way]] = {
    "repeat": (Way(), Way()),
    "threads": (Way(threads=1), Way(threads=2)),
    "fused optimizer": (Way(optimizer={"foreach": True}), Way(optimizer={"fused": True})),
    "plain optimizer": (Way(optimizer={"foreach": False}), Way(optimizer={"foreach": True})),
    "bfloat16 autocast": (Way(), Way(autocast=torch.bfloat16)),
    "compiled": (Way(), Way(compiled=True)),
    "float64": (Way(), Way(dtype=torch.float64)),
}
PAIRS: dict[str, tuple[str, Way, Way]] = {
    f"{subject}: {name}": (subject, *ways) for subject in ("gpt", "conv", "lstm", "moe") for name, ways in _OTHER.items()
} | {
    "gpt: eager attention": ("gpt", Way(), Way(model={"eager": True})),
    "gpt: eager attention, compiled": ("gpt", Way(model={"eager": True}), Way(model={"eager": True}, compiled=True)),
    "gpt: eager attention in bfloat16": (
        "gpt",
        Way(autocast=torch.bfloat16),
        Way(model={"eager": True}, autocast=torch.bfloat16),
    ),
    "conv: channels last": ("conv", Way(), Way(channels_last=True)),
    "conv: channels last, two threads": ("conv", Way(), Way(channels_last=True, threads=2)),
    "conv: momentum, fused": (
        "conv",
        Way(algorithm="SGD", optimizer={**_SGD, "foreach": True}),
        Way(algorithm="SGD", optimizer={**_SGD, "fused": True}),
    ),
    "gpt: bfloat16 throughout": ("gpt", Way(dtype=torch.bfloat16), Way(dtype=torch.bfloat16, threads=2)),
}
