"""A run of MindSpore and one of PyTorch are compared in one framework's words; what is set otherwise stays a difference."""

from __future__ import annotations

from typing import Any

import pytest

from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.pack import Pack, RankPack

TORCH = {"class": "AdamW", "group0.lr": 0.01, "group0.betas": [0.9, 0.999], "group0.eps": 1e-6, "group0.weight_decay": 0}
TORCH |= {
    "group0.amsgrad": False,
    "group0.foreach": None,
    "group0.fused": None,
    "group0.parameters": ["norm.weight", "a.weight"],
}
MINDSPORE = {"class": "AdamW", "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0, "loss_scale": 1.0}
MINDSPORE |= {"group0.lr": 0.01, "group0.parameters": ["norm.gamma", "a.weight"]}
MODELS = ({"a": "Linear(in_features=2, out_features=3, bias=True)", "rows": "ModuleList"}, {"a": "Dense", "rows": "CellList"})


def pack(framework: str, model: dict[str, Any], optimizer: dict[str, Any]) -> Pack:
    sources = [{"kind": "model", "name": "model", "values": model}, {"kind": "optimizer", "name": "0", "values": optimizer}]
    content = {"sources": sources} | ({"framework": framework} if framework == "mindspore" else {"model_state": {}})
    return Pack(framework, {0: RankPack(0, {"hyperparameters": content})})


def sentence(**changed: Any) -> str:
    return compare_packs(pack("torch", MODELS[0], TORCH), pack("mindspore", MODELS[1], {**MINDSPORE, **changed})).sentence


def test_the_same_training_has_no_difference() -> None:
    assert sentence() == "weights: captured on neither side; dataset: captured on neither side"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"group0.lr": 0.1}, "learning rate differs: 0.01 and 0.1"),
        ({"beta2": 0.95}, "betas differs: [0.9, 0.999] and [0.9, 0.95]"),
        ({"weight_decay": 0.1}, "weight decay differs: 0 and 0.1"),
        ({"class": "Momentum"}, "AdamW and SGD"),
        ({"class": "AdamWeightDecay"}, "optimizer class differs: AdamW and AdamWeightDecay (without bias correction)"),
        ({"class": "Adam", "formula.bias_correction": True}, "optimizer class differs: AdamW and Adam"),
        ({"loss_scale": 128.0}, "only in cmp: loss_scale 128"),
    ],
)
def test_what_is_set_otherwise_is_named(changed: dict[str, Any], says: str) -> None:
    assert says in sentence(**changed)
