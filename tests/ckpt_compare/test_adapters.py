"""LoRA adapters that PEFT wrote: named by what they adapt, beside the base model and by themselves."""

import pytest
import torch

from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.names import to_logical

pytestmark = pytest.mark.frameworks


@pytest.fixture
def saved(require, tmp_path):
    """Return a folder with base/ (the model), adapter/ (what PEFT saves) and whole.pt (the state dict of a training)."""
    transformers, peft = require("transformers"), require("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    torch.save({"model": adapted.state_dict()}, tmp_path / "whole.pt")
    return tmp_path


def test_an_adapter_s_tensors_go_by_the_name_of_what_they_adapt(saved):
    checkpoint = open_checkpoint(saved / "adapter")
    assert recognise(saved / "adapter") == "huggingface"
    assert set(to_logical(checkpoint, checkpoint.config).tensors) == {
        f"layers.{layer}.{module}.lora_{part}.weight"
        for layer in (0, 1)
        for module in ("attention.q", "mlp.fc2")
        for part in "AB"
    }


def test_the_state_of_a_training_holds_the_adapter_and_the_base_model(saved):
    both = [compared(saved / name, saved / "whole.pt", ["weights"]) for name in ("adapter", "base")]
    for found, count in zip(both, (8, 21), strict=True):
        assert sum(r.verdict == "identical" for r in found.rows) == count
        assert {r.verdict for r in found.rows} == {"identical", "only in B"}
    said = "incomplete: A is an adapter (LoRA) alone and B also holds its model (--only '*.lora_*' compares the adapters); "
    assert judged(saved / "adapter", saved / "whole.pt").sentence.startswith(said)
    said = "not comparable: B is an adapter (LoRA) alone and A is a model ("
    assert judged(saved / "base", saved / "adapter").sentence.startswith(said)


def test_one_changed_element_of_an_adapter_is_named(saved):
    content = torch.load(saved / "whole.pt")
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.default.weight"
    content["model"][key][3, 1] += 1
    torch.save(content, saved / "other.pt")
    found = judged(saved / "whole.pt", saved / "other.pt")
    assert found.code == 2
    assert "layers.1.mlp.fc2.lora_B.weight" in found.sentence
    assert "[3, 1]" in found.sentence


def test_adapters_of_a_model_that_no_map_knows_are_named_alike(require, tmp_path):
    transformers, peft = require("transformers"), require("peft")
    sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q", "wo"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    torch.save({"model": adapted.state_dict()}, tmp_path / "whole.pt")
    both = [compared(tmp_path / name, tmp_path / "whole.pt", ["weights"]) for name in ("adapter", "base")]
    assert [sum(r.verdict != "only in B" for r in found.rows) for found in both] == [
        len(found.a.tensors) + extra for found, extra in zip(both, (0, 3), strict=True)
    ]
    assert {r.verdict for found in both for r in found.rows} == {"identical", "only in B"}
