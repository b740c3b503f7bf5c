"""Files of torch.save as training scripts write them: what stands beside the model is compared or missed, never passed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ckpt_compare.verdicts import judged
from trainprobe.cli import main

Edit = Callable[[dict[str, Any]], Any]


def stepped(model: nn.Module, groups: Any = None, **settings: Any) -> torch.optim.AdamW:
    """Take three steps of AdamW, the same ones for the same model."""
    optimizer = torch.optim.AdamW(model.parameters() if groups is None else groups, **settings)
    data = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=data)).square().sum().backward()
        optimizer.step()
    return optimizer


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.fixture
def saved(tmp_path):
    number = iter(range(100))

    def save(edit: Edit = lambda content: None) -> Path:
        model = network()
        content = {"model": model.state_dict(), "optimizer": stepped(model).state_dict(), "epoch": 3}
        edit(content)
        path = tmp_path / f"{next(number)}.pt"
        torch.save(content, path)
        return path

    return save


def another_rate(content: dict[str, Any]) -> None:
    content["optimizer"]["param_groups"][0]["lr"] = 1e-5


def test_another_learning_rate_of_the_optimizer_is_a_difference(saved):
    found = judged(saved(), saved(another_rate))
    assert (found.code, found.sentence) == (
        2,
        "differ: all compared tensors agree, but optimizer lr is 0.001 in A and 1e-05 in B",
    )


def test_an_optimizer_that_was_begun_anew_is_a_difference(saved):
    found = judged(saved(), saved(lambda content: content["optimizer"].update(state={})))
    assert found.code == 2
    assert "optimizer step is 3 in A and 0 in B" in found.sentence


@pytest.mark.parametrize(("decay", "code"), [(0.01, 0), (0.0, 2)])
def test_settings_go_by_parameter_and_not_by_group(saved, decay, code):
    def grouped(content: dict[str, Any]) -> None:
        model = network()
        weights, biases = ([p for p in model.parameters() if (p.ndim > 1) == is_weight] for is_weight in (True, False))
        groups = [{"params": weights}, {"params": biases, "weight_decay": decay}]
        content.update(optimizer=stepped(model, groups).state_dict(), model=model.state_dict())

    assert judged(saved(), saved(grouped)).code == code


def beside(key: str, change: float = 0.0, model: int = 0) -> Edit:
    """Put a second model into the file."""
    return lambda content: content.update({key: {name: x + change for name, x in network(model).state_dict().items()}})


@pytest.mark.parametrize("key", ["ema", "model_ema", "discriminator"])
def test_a_second_model_counts(saved, key):
    assert judged(saved(beside(key)), saved(beside(key))).code == 0
    found = judged(saved(beside(key)), saved(beside(key, 1.0)))
    assert found.code == 2 and found.sentence.startswith("differ: 4 of 16 tensors") and f"({key})" in found.sentence
    assert judged(saved(beside(key)), saved()).code == 3


def test_a_second_model_has_an_optimizer_of_its_own(saved):
    def two(change: float) -> Edit:
        def edit(content: dict[str, Any]) -> None:
            other = network(1)
            optimizer = stepped(other).state_dict()
            optimizer["state"][2]["exp_avg"][1, 2] += change
            content.update(discriminator=other.state_dict(), optimizer_d=optimizer)

        return edit

    assert judged(saved(two(0.0)), saved(two(0.0))).code == 0
    found = judged(saved(two(0.0)), saved(two(1.0)))
    assert found.code == 2
    assert found.sentence.startswith("differ: 1 of 24 tensors; worst is 2.weight (discriminator)#exp_avg")


def test_a_part_of_the_model_that_is_called_module_is_no_copy(tmp_path):
    torch.save({"module.weight": torch.ones(3, 3), "weight": torch.zeros(3, 3)}, tmp_path / "a.pt")
    assert judged(tmp_path / "a.pt", tmp_path / "a.pt").code == 0


def test_what_was_asked_for_and_only_one_side_holds_is_no_pass(saved):
    with_rng = saved(lambda content: content.update(rng=torch.Generator().manual_seed(1).get_state()))
    found = judged(with_rng, saved(), ("weights", "optimizer", "rng"))
    assert (found.code, found.sentence) == (3, "incomplete: all compared tensors agree, but rng: only in A")
    assert judged(with_rng, saved()).code == 0


@pytest.mark.parametrize(("size", "said"), [(-200, "truncated"), (0, "an empty file")])
def test_a_file_that_was_cut_is_told_as_such(saved, capsys, size, said):
    whole = saved()
    cut = whole.with_name("cut.pt")
    cut.write_bytes(whole.read_bytes()[:size])
    assert main(["ckpt-compare", str(whole), str(cut)]) == 3
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"w": 1}}'])
def test_an_index_without_shards_is_refused_by_name(saved, tmp_path, capsys, text):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(text)
    assert main(["ckpt-compare", str(saved()), str(folder)]) == 3
    assert "model.safetensors.index.json is no index of shards" in capsys.readouterr().err
