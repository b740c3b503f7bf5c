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
        ({"without_decay": ["norm.gamma"], "weight_decay": 0.1}, "weight decay differs: 0 and 0.1"),
        ({"class": "Adam", "formula.bias_correction": True}, "optimizer class differs: AdamW and Adam"),
        ({"loss_scale": 128.0}, "only in cmp: loss_scale 128"),
    ],
)
def test_what_is_set_otherwise_is_named(changed: dict[str, Any], says: str) -> None:
    assert says in sentence(**changed)


def compared(torch: dict[str, Any], mindspore: dict[str, Any], model: tuple[Any, Any] = MODELS) -> Any:
    return compare_packs(pack("torch", model[0], TORCH | torch), pack("mindspore", model[1], MINDSPORE | mindspore))


def test_rates_of_each_step_are_compared_as_float32_rounds_them() -> None:
    rates = [[0.01], [0.0075], [0.005]]
    rounded = [[0.01], [0.0075000003], [0.0049999999]]
    found = compared({"lr_by_step": [[0.01, 0.01], *rates[1:]]}, {"lr_by_step": rounded})
    assert found.sentence == sentence()
    found = compared({"lr_by_step": rates}, {"lr_by_step": [[0.01], [0.005], [0.005]]})
    assert "learning rate differs from optimizer step 1 on: 0.0075 and 0.005" in found.sentence
    found = compared({"lr_by_step": rates}, {})
    assert found.sentence == sentence()
    assert any("learning rates of each step are not in cmp: not compared" in note for note in found.notes)


def test_parameters_that_one_side_spares_from_weight_decay_are_named() -> None:
    both = {"group0.weight_decay": 0.1}
    found = compared(both, {"weight_decay": 0.1, "without_decay": ["norm.gamma"]})
    assert "optimizer weight decay of norm.weight differs: applied and not applied" in found.sentence


def test_formulas_that_are_not_known_or_round_otherwise_are_notes() -> None:
    found = compared({}, {"formula": "unknown"})
    assert any("how AdamW in cmp calculates is not known" in note for note in found.notes)
    told = {"formula.bias_correction": True, "formula.eps": "before the bias correction", "formula.weight_decay": "decoupled"}
    found = compared({}, told)
    assert found.sentence == sentence()
    assert any("AdamW adds eps behind the bias correction in bench and before" in note for note in found.notes)


@pytest.mark.parametrize(
    ("torch", "mindspore", "says"),
    [
        (
            "LayerNorm((8,), eps=1e-05, elementwise_affine=True)",
            "LayerNorm(normalized_shape=(8,), epsilon=1e-07)",
            "eps of LayerNorm",
        ),
        ("LayerNorm((8,), eps=1e-05, elementwise_affine=True)", "LayerNorm(normalized_shape=(8,), epsilon=1e-05)", ""),
        ("Dropout(p=0.1, inplace=False)", "Dropout(p=0.0)", "dropout p in module a differs: 0.1 and 0.0"),
        ("GELU(approximate='none')", "GELU(approximate=tanh)", "approximate of GELU in module a differs: none and tanh"),
        ("GELU(approximate='none')", "GELU(approximate=none)", ""),
        ("LeakyReLU(negative_slope=0.01)", "LeakyReLU(alpha=0.2)", "negative_slope of LeakyReLU"),
        (
            "Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))",
            "Conv2d(in_channels=3, kernel_size=3, stride=(1, 1), padding=1)",
            "",
        ),
        (
            "Linear(in_features=2, out_features=3, bias=True)",
            "Dense(in_channels=2, out_channels=4, has_bias=True)",
            "out_features",
        ),
        ("Linear(in_features=2, out_features=3, bias=True)", "Dense(in_channels=2, to_float=float16)", "(none) and float16"),
    ],
)
def test_settings_of_modules_are_compared_where_both_sides_know_them(torch: str, mindspore: str, says: str) -> None:
    found = compared({}, {}, ({"a": torch}, {"a": mindspore})).sentence
    assert says in found if says else found == sentence()


def test_a_setting_that_one_side_alone_knows_is_a_note() -> None:
    found = compared({}, {}, ({"a": "RMSNorm(eps=1e-06)"}, {"a": "RMSNorm"}))
    assert found.sentence == sentence()
    assert any("eps of RMSNorm is known in bench alone: not compared" in note for note in found.notes)
