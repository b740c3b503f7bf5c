"""Folders and objects that other libraries save: all that they hold is read, so that a change in any part of it is found."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.names import to_logical
from trainprobe.errors import FormatError


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a net and its optimizer after a step."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(2, 5)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.frameworks
def test_what_accelerate_saves_is_read_with_its_optimizer(require, tmp_path):
    accelerator = require("accelerate").Accelerator(cpu=True)
    accelerator.prepare(*trained())
    for name in "ab":
        accelerator.save_state(str(tmp_path / name))
    assert recognise(tmp_path / "a") == "accelerate"
    found = compared(tmp_path / "a", tmp_path / "b")
    assert judged(tmp_path / "a", tmp_path / "b").code == 0
    assert sum(row.what == "optimizer" for row in found.rows) == 8  # by number: the model's file has lost their order
    held = torch.load(tmp_path / "b/optimizer.bin", weights_only=True)
    held["state"][1]["exp_avg"][2] += 1
    torch.save(held, tmp_path / "b/optimizer.bin")
    assert judged(tmp_path / "a", tmp_path / "b").code == 2


@pytest.mark.frameworks
def test_a_second_adapter_and_modules_that_are_trained_whole_are_compared(require, tmp_path):
    transformers, peft = require("transformers"), require("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=False))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        next(p for n, p in adapted.named_parameters() if "lora_A.other" in n)[0, 0] += 1
    adapted.save_pretrained(tmp_path / "b")
    assert judged(tmp_path / "a", tmp_path / "a").code == 0
    changed = [row.key for row in compared(tmp_path / "a", tmp_path / "b").rows if row.verdict != "identical"]
    assert changed == ["layers.0.attention.q.lora_A.weight (other)"]
    torch.save(adapted.state_dict(), tmp_path / "whole.pt")
    whole = open_checkpoint(tmp_path / "whole.pt")
    assert "output.weight" in to_logical(whole, whole.config).tensors


def sentences(folder: Path, dense: torch.Tensor) -> Path:
    """Write a folder as sentence-transformers does: the model in the folder itself, a dense layer in one of its own."""
    net, _ = trained()
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "2_Dense").mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    save_file({"linear.weight": dense}, folder / "2_Dense/model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "modules.json").write_text(
        json.dumps([{"idx": i, "path": p} for i, p in enumerate(["", "1_Pooling", "2_Dense"])])
    )
    return folder


def test_every_module_that_sentence_transformers_names_is_compared(tmp_path):
    dense = torch.randn(3, 3)
    a, same = sentences(tmp_path / "a", dense), sentences(tmp_path / "same", dense)
    other = sentences(tmp_path / "other", dense + torch.eye(3))
    assert recognise(a) == "component_folders" and judged(a, same).code == 0 and judged(a, other).code == 2
    assert [row.key for row in compared(a, other).rows if row.verdict != "identical"] == ["2_Dense.linear.weight"]
    (other / "modules.json").write_text('{"a": 1}')
    assert open_checkpoint(other).tensors == {}  # a dict that names no folder
    (other / "modules.json").write_text("[1]")
    with pytest.raises(FormatError, match="does not name the parts of a model"):
        open_checkpoint(other)


def test_what_speechbrain_recovers_is_compared(tmp_path):
    net, optimizer = trained()
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "CKPT.yaml").write_text("end-of-epoch: true\n")
        (tmp_path / name / "counter.ckpt").write_text("3")
        torch.save(net.state_dict(), tmp_path / name / "model.ckpt")
        torch.save(optimizer.state_dict(), tmp_path / name / "optimizer.ckpt")
    assert recognise(tmp_path / "a") == "speechbrain" and judged(tmp_path / "a", tmp_path / "b").code == 0
    changed = copy.deepcopy(net.state_dict())
    changed["1.weight"][0, 0] += 1
    torch.save(changed, tmp_path / "b/model.ckpt")
    assert judged(tmp_path / "a", tmp_path / "b").code == 2


def test_a_model_and_an_optimizer_that_were_saved_as_objects_are_their_state_dicts(tmp_path):
    net, optimizer = trained()
    torch.save({"model": net, "optimizer": optimizer}, tmp_path / "objects.pt")
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "dicts.pt")
    found = compared(tmp_path / "objects.pt", tmp_path / "dicts.pt")
    assert {row.verdict for row in found.rows} == {"identical"} and len(found.rows) == 4 + 8
    torch.save(net, tmp_path / "model.pt")
    assert {row.verdict for row in compared(tmp_path / "model.pt", tmp_path / "dicts.pt", ["weights"]).rows} == {"identical"}
