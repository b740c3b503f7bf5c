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


def adapted(require, folder, config):
    """Write adapter/, base/ and whole.pt (the state of a training of two steps) for a small Llama that PEFT has adapted."""
    transformers, peft = require("transformers"), require("peft")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(folder / "base")
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(12).view(2, 6)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "adapter")
    torch.save({"model": model.state_dict()}, folder / "whole.pt")
    return folder


METHODS = {
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}, "lora", {"lora_A", "lora_B", "lora_E"}, 12),
    "RandLoRA": ("RandLoraConfig", {"r": 4}, "randlora", {f"randlora_{part}" for part in ("A", "B", "gamma", "lambda")}, 18),
    "VeRA": ("VeraConfig", {"r": 4}, "vera", {f"vera_{part}" for part in ("A", "B", "lambda_b", "lambda_d")}, 18),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_adapter_is_found_in_the_state_of_its_training(require, tmp_path, method):
    config, settings, prefix, parts, count = METHODS[method]
    modules = ["q_proj", "v_proj"] if method == "VeRA" else ["q_proj", "down_proj"]
    adapted(require, tmp_path, getattr(require("peft"), config)(target_modules=modules, **settings))
    state = open_checkpoint(tmp_path / "whole.pt")
    names = to_logical(state, {}).tensors
    of_adapter = {n for n in names if f".{prefix}_" in n}
    assert {n.removesuffix(".weight").rpartition(".")[2] for n in of_adapter} == parts
    assert {n for n in of_adapter if "layers" in n} == {n for n in of_adapter if n.startswith("layers.")}
    found = compared(tmp_path / "adapter", tmp_path / "whole.pt", ["weights"])
    rows = [r for r in found.rows if f".{prefix}_" in r.key]
    assert [r.verdict for r in rows] == ["identical"] * count
    assert not found.renamed
    said = f"incomplete: A is an adapter ({'LoRA' if method == 'AdaLoRA' else method}) alone and B also holds its model "
    said += f"(--only '*.{prefix}_*' compares the adapters); "
    assert judged(tmp_path / "adapter", tmp_path / "whole.pt").sentence.startswith(said)
    assert sum(r.verdict == "identical" for r in compared(tmp_path / "base", tmp_path / "whole.pt").rows) == 21


def test_one_changed_element_of_adalora_s_singular_values_is_named(require, tmp_path):
    adapted(require, tmp_path, require("peft").AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"]))
    content = torch.load(tmp_path / "whole.pt")
    content["model"]["base_model.model.model.layers.1.self_attn.q_proj.lora_E.default"][3, 0] += 1
    torch.save(content, tmp_path / "other.pt")
    found = judged(tmp_path / "adapter", tmp_path / "other.pt")
    assert found.code == 2
    assert "layers.1.attention.q.lora_E.weight" in found.sentence


def test_matrices_that_peft_draws_need_not_be_stored_twice(require, tmp_path):
    config = require("peft").RandLoraConfig
    for name, settings in {"stored": {}, "drawn": {"save_projection": False}}.items():
        (tmp_path / name).mkdir()
        adapted(require, tmp_path / name, config(r=4, target_modules=["q_proj"], **settings))
    stored, drawn = (tmp_path / name / "adapter" for name in ("stored", "drawn"))
    found = judged(stored, drawn)
    assert found.code == 0
    assert found.sentence == "identical: 4 weights tensors (576 elements) hold the same values in both"
    assert "6 tensors that one side alone stores are left out" in " ".join(compared(stored, drawn).notes)
    states = judged(tmp_path / "stored" / "whole.pt", tmp_path / "drawn" / "whole.pt")
    assert states.code == 3  # nothing there says what the drawn ones are drawn from
    assert "B draws it when it is loaded, and no adapter_config.json on both sides" in states.details[0]
    written = (drawn / "adapter_config.json").read_text()
    (drawn / "adapter_config.json").write_text(written.replace('"projection_prng_key": 0', '"projection_prng_key": 1'))
    assert judged(stored, drawn).code == 3
