"""Models that transformers saved: shards, `.bin`, trainer files, and the name maps of its families."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.names import to_logical

pytestmark = pytest.mark.frameworks
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def build(require):
    transformers = require("transformers")

    def make(family):
        torch.manual_seed(0)
        if family == "gpt2":
            return transformers.GPT2LMHeadModel(
                transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
            )
        name, more = {
            "llama": ("Llama", {}),
            "qwen2": ("Qwen2", {}),
            "qwen3": ("Qwen3", {"head_dim": 8}),
            "mixtral": ("Mixtral", {"num_local_experts": 4}),
            "qwen2_moe": ("Qwen2Moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 1}),
            "deepseek": (
                "DeepseekV3",
                {
                    **MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 12,
                    "qk_rope_head_dim": 4,
                    "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4,
                },
            ),
        }[family]  # fmt: skip
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def test_a_lost_head_of_an_untied_model_is_missing_and_not_compared_with_the_embedding(build, tmp_path):
    model = build("llama")
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path / "a")
    held = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    model.config.save_pretrained(tmp_path / "b")
    save_file(held, tmp_path / "b" / "model.safetensors")
    found = judged(tmp_path / "a", tmp_path / "b")
    assert found.code == 3
    lost = "output.weight: only in A, lost in B, whose configuration says that it is not tied to the embedding"
    assert lost in found.details


def logical_names(path):
    checkpoint = open_checkpoint(path)
    return set(to_logical(checkpoint, checkpoint.config).tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "deepseek", "gpt2"])
def test_every_tensor_of_a_family_has_a_logical_name(build, tmp_path, family):
    build(family).save_pretrained(tmp_path)
    strange = [n for n in logical_names(tmp_path) if n.startswith(("model.", "lm_head", "transformer.", "h."))]
    allowed = [n for n in strange if "e_score_correction_bias" in n]  # DeepSeek's routing bias, no weight of a layer
    assert [n for n in strange if n not in allowed] == []


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_shards_of_a_kilobyte_hold_what_one_file_holds(build, tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert judged(tmp_path / "one", tmp_path / "many").code == 0


def test_a_bin_file_holds_what_safetensors_hold(build, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "safe")
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert recognise(tmp_path / "bin") == "huggingface"
    assert judged(tmp_path / "safe", tmp_path / "bin").code == 0


def test_a_missing_shard_is_named_with_how_much_it_held(build, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    lost = sorted((tmp_path / "many").glob("*.safetensors"))[1]
    lost.unlink()
    found = judged(tmp_path / "one", tmp_path / "many")
    assert found.code == 3
    assert found.sentence.startswith(f"incomplete: in B {lost.name} is missing; it holds ")
    assert any(lost.name in d and "is missing; it holds" in d for d in found.details)


def test_bfloat16_is_the_same_model_within_rounding(build, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "full")
    model.bfloat16().save_pretrained(tmp_path / "half")
    assert judged(tmp_path / "full", tmp_path / "half").code == 1


def test_separate_and_fused_attention_of_gpt2_mean_the_same(build, tmp_path):
    """The q of the name map, applied to an input, is the q that GPT-2's own layer gives."""
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    q = to_logical(checkpoint, checkpoint.config).tensors["layers.1.attention.q.weight"]
    weight = torch.from_numpy(q.pieces[0].source.load().copy())
    x = torch.randn(3, 32)
    layer = model.transformer.h[1].attn.c_attn
    assert torch.allclose(x @ weight.T + layer.bias[:32], layer(x)[:, :32], atol=1e-6)


def test_names_of_gpt2_with_linear_layers_are_the_same_model(build, tmp_path):
    """nanoGPT has GPT-2's names and stores [output, input], as its own `from_pretrained` turns them."""
    model = build("gpt2")
    model.save_pretrained(tmp_path / "conv")
    turned = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    state = {k: v.t().contiguous() if k.endswith(turned) else v.clone() for k, v in model.state_dict().items()}
    torch.save({"model": state}, tmp_path / "linear.pt")
    assert judged(tmp_path / "conv", tmp_path / "linear.pt").code == 0
    state["transformer.h.1.attn.c_attn.weight"][3] += 1  # in the rows of q
    torch.save({"model": state}, tmp_path / "changed.pt")
    found = judged(tmp_path / "conv", tmp_path / "changed.pt")
    assert (found.code, "worst is layers.1.attention.q.weight" in found.sentence) == (2, True), found.sentence


def test_a_wrapper_around_a_model_does_not_hide_its_family(build, tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "plain")
    torch.save({"state_dict": {f"net.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "wrapped.pt")
    assert judged(tmp_path / "plain", tmp_path / "wrapped.pt").code == 0


def test_the_trainer_s_optimizer_is_named_and_identical_to_one_by_name(build, tmp_path, require):
    transformers = require("transformers")
    model = build("llama")
    data = [{"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))} for _ in range(4)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, weight_decay=0.1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-2"
    names = {p: n for n, p in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    states = {names[p]: s for p, s in optimizer.state.items()}
    torch.save({"model": model.state_dict(), "optimizer": {"state": states, "param_groups": []}}, tmp_path / "named.pt")
    found = compared(folder, tmp_path / "named.pt")
    assert {r.verdict for r in found.rows if r.what == "optimizer"} == {"identical"}
    assert len([r for r in found.rows if r.what == "optimizer"]) == 2 * len(states)
    state = open_checkpoint(folder).state
    assert (state["iteration"]["global_step"], state["optimizer"]["step"]) == (2, 2)
    assert "rank 0/cpu" in state["rng"]


def test_a_broken_config_is_refused_by_name(build, tmp_path):
    build("llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({})[:-1])
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        open_checkpoint(tmp_path)
