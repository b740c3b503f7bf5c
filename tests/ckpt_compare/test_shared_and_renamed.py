"""Parameters that a model uses twice, heads that got lost, and tensors that stand under another name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.ckpt_compare.verdicts import compared, judged

pytestmark = pytest.mark.frameworks
WIDTHS = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 36}
LLAMA = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 6}
SIDES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# family → the class of transformers, and the sizes of a tiny model
MODELS = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "bert": ("BertForMaskedLM", "BertConfig", {**WIDTHS, "max_position_embeddings": 19}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 2, "num_heads": 4}),
    "mamba": ("MambaForCausalLM", "MambaConfig",
              {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                {"vocab_size": 61, "d_model": 24, "encoder_ffn_dim": 36, "decoder_ffn_dim": 36, "num_mel_bins": 7,
                 "max_source_positions": 11, "max_target_positions": 13, **SIDES, **TOKENS}),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config",
                 {**WIDTHS, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 2,
                  "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                  "v_head_dim": 8, "first_k_dense_replace": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def build(require):
    transformers = require("transformers")

    def make(family, **more):
        model, config, sizes = MODELS[family]
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes, **more))
        torch.manual_seed(1)
        with torch.no_grad():
            for value in made.parameters():
                value.copy_(torch.randn_like(value))  # no two norms are alike
        return made

    return make


def owned(model):
    """Every entry of a state dict as a tensor of its own, as a script writes that knows nothing of shared parameters."""
    return {k: v.detach().clone().contiguous() for k, v in model.state_dict().items()}


@pytest.mark.parametrize(("family", "names"), [("bert", 2), ("t5", 3), ("mamba", 1), ("whisper", 1), ("gemma2", 1)])
def test_a_parameter_under_two_names_is_the_one_that_the_other_side_stores_once(build, tmp_path, family, names):
    model = build(family)
    model.save_pretrained(tmp_path / "once")
    torch.save(model.state_dict(), tmp_path / "shared.pt")
    torch.save(owned(model), tmp_path / "twice.pt")
    for other in ("shared.pt", "twice.pt"):
        found = compared(tmp_path / "once", tmp_path / other)
        assert {r.verdict for r in found.rows} == {"identical"}
        assert sum("A stores it once, as" in r.note for r in found.rows) == names
        assert len({r.key for r in found.rows}) == len(found.rows) == len(model.state_dict())
        assert judged(tmp_path / "once", tmp_path / other).code == judged(tmp_path / other, tmp_path / "once").code == 0


@pytest.mark.parametrize("family", ["bert", "t5", "mamba", "whisper"])
def test_a_copy_that_drifted_from_its_shared_parameter_is_no_copy(build, tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "once")
    held = owned(model)
    lone = next(k for k in held if "head" in k or "proj_out" in k or "predictions.decoder.weight" in k)
    held[lone][3, 2] += 1
    torch.save(held, tmp_path / "drifted.pt")
    assert judged(tmp_path / "once", tmp_path / "drifted.pt").code == 3


def test_a_lost_head_is_lost_where_no_configuration_says_so(build, tmp_path):
    held = owned(build("llama"))
    torch.save(held, tmp_path / "a.pt")
    torch.save({k: v for k, v in held.items() if k != "lm_head.weight"}, tmp_path / "b.pt")
    found = judged(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.code == 3
    assert "output.weight: only in A, lost in B, as the other side shows that it is not tied to the embedding" in found.details


def test_a_head_that_is_the_embedding_is_held_against_the_embedding(build, tmp_path):
    held = owned(build("llama"))
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    torch.save(held, tmp_path / "a.pt")
    without = {k: v for k, v in held.items() if k != "lm_head.weight"}
    torch.save(without, tmp_path / "b.pt")
    assert judged(tmp_path / "a.pt", tmp_path / "b.pt").code == 0
    without["model.embed_tokens.weight"] = without["model.embed_tokens.weight"].clone()
    without["model.embed_tokens.weight"][5] += 1
    torch.save(without, tmp_path / "b.pt")
    assert judged(tmp_path / "a.pt", tmp_path / "b.pt").code == 2


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_each_of_the_four_norms_of_gemma_has_its_own_place(build, tmp_path, family):
    build(family).save_pretrained(tmp_path)
    names = {r.key: r.a.native for r in compared(tmp_path, tmp_path).rows}
    assert names["layers.1.attention.norm.weight"] == "model.layers.1.input_layernorm.weight"
    assert names["layers.1.attention.post_norm.weight"] == "model.layers.1.post_attention_layernorm.weight"
    assert names["layers.1.mlp.norm.weight"] == "model.layers.1.pre_feedforward_layernorm.weight"
    assert names["layers.1.mlp.post_norm.weight"] == "model.layers.1.post_feedforward_layernorm.weight"
    assert not [n for n in names if n.startswith("model.")]


def test_gemma_s_norms_with_the_one_added_are_explained(build, tmp_path):
    model = build("gemma2")
    torch.save(owned(model), tmp_path / "a.pt")
    added = {k: v + 1 if "norm" in k else v for k, v in owned(model).items()}
    torch.save(added, tmp_path / "b.pt")
    found = judged(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.code == 2
    assert "zero-centred in A: one less than in the other. 9 of" in found.sentence


def test_llama_s_rule_for_the_norm_before_the_mlp_is_not_gemma_s(build, tmp_path):
    build("llama").save_pretrained(tmp_path)
    names = {r.key: r.a.native for r in compared(tmp_path, tmp_path).rows}
    assert names["layers.1.mlp.norm.weight"] == "model.layers.1.post_attention_layernorm.weight"


def test_the_decoder_of_whisper_is_no_wrapper_around_a_llama(build, tmp_path):
    build("whisper").save_pretrained(tmp_path)
    names = {r.key for r in compared(tmp_path, tmp_path).rows}
    assert {"model.decoder.layers.0.self_attn.q_proj.weight", "model.encoder.layers.0.self_attn.q_proj.weight"} <= names


def test_a_routing_bias_of_zeros_has_megatron_s_name(build, tmp_path):
    held = owned(build("deepseek"))
    bias = [k for k in held if k.endswith("e_score_correction_bias")]
    assert bias
    assert not any(held[k].any() for k in bias)  # as it is before the first training step
    torch.save(held, tmp_path / "a.pt")
    assert "layers.1.mlp.router.expert_bias" in {r.key for r in compared(tmp_path / "a.pt", tmp_path / "a.pt").rows}


def test_a_tensor_under_another_name_is_said_and_is_not_plainly_identical(build, tmp_path):
    held = owned(build("llama"))
    torch.save(held, tmp_path / "a.pt")
    old = "model.layers.1.mlp.down_proj.weight"
    torch.save({k.replace("down_proj", "contract") if k == old else k: v for k, v in held.items()}, tmp_path / "b.pt")
    found = judged(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.code == 3
    assert found.sentence.startswith(
        "incomplete: 1 of 21 tensors has another name in B with the same values: layers.1.mlp.fc2.w"
    )
    assert "layers.1.mlp.fc2.weight of A is model.layers.1.mlp.contract.weight in B: the same values" in found.details


def test_a_model_under_names_of_its_own_is_identical_and_the_names_are_said(build, tmp_path):
    held = owned(build("llama"))
    held = {k: v for k, v in held.items() if v.ndim == 2}
    torch.save(held, tmp_path / "a.pt")
    torch.save({f"w{i}": v for i, v in enumerate(held.values())}, tmp_path / "b.pt")
    found = judged(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (found.code, found.sentence.endswith(f", {len(held)} of them under other names")) == (0, True)


def test_a_configuration_that_denies_the_tie_makes_a_missing_copy_a_loss(build, tmp_path):
    model = build("mamba")
    model.config.tie_word_embeddings = False
    (tmp_path / "b").mkdir()
    save_file({k: v for k, v in owned(model).items() if k != "lm_head.weight"}, tmp_path / "b" / "model.safetensors")
    (tmp_path / "b" / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "hidden_size": 24}))
    torch.save(owned(model), tmp_path / "a.pt")
    assert judged(tmp_path / "a.pt", tmp_path / "b").code == 3
