"""The models of the bench: tiny configurations of transformers with random weights, saved by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
Make = Callable[[], Any]
HEADS, GROUPS, DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 10, 40, 56, 3, 61
LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": DIM, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip
BERT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
LATENT: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k != "head_dim"}, "num_key_value_heads": HEADS, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 12,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 10, "first_k_dense_replace": 1,
}  # fmt: skip


def first_models() -> dict[str, Make]:
    """Return name → how to make a model: those that the first half of the bench has."""
    import transformers as t

    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**LLAMA)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**{**LLAMA, "tie_word_embeddings": True})),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**LLAMA, num_local_experts=3)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**BERT, vocab_size=VOCAB)),
    }


def more_models() -> dict[str, Make]:
    """Return name → how to make a model: encoders with decoders, state spaces, latent attention, fused matrices, images."""
    import transformers as t

    sides: dict[str, Any] = {"encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
             "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN, "d_model": HIDDEN}  # fmt: skip
    tokens: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    short: dict[str, Any] = {**BERT, **tokens}
    t5: dict[str, Any] = {
        "vocab_size": VOCAB,
        "d_model": HIDDEN,
        "d_kv": DIM,
        "d_ff": FFN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
    }
    hear: dict[str, Any] = {
        "num_mel_bins": 7,
        "max_source_positions": 11,
        "max_target_positions": 13,
        "decoder_start_token_id": 1,
    }
    moe: dict[str, Any] = {**LLAMA, "num_experts": 3, "moe_intermediate_size": 16}
    return {
        "t5": lambda: t.T5ForConditionalGeneration(t.T5Config(**t5, feed_forward_proj="gated-gelu")),
        "whisper": lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(**sides, **tokens, **hear)),
        "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**sides, **tokens, max_position_embeddings=19)),
        "mamba": lambda: t.MambaForCausalLM(
            t.MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=5)
        ),
        "deepseek_v2": lambda: t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**LATENT)),
        "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**LATENT)),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe)),
        "phi3": lambda: t.Phi3ForCausalLM(
            t.Phi3Config(**{k: v for k, v in LLAMA.items() if k != "head_dim"}, pad_token_id=0, eos_token_id=2)
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**short, max_position_embeddings=19)),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(**tokens, hidden_size=HIDDEN, ffn_dim=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                        max_position_embeddings=19, word_embed_proj_dim=HIDDEN)
        ),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**BERT, image_size=8, patch_size=4)),
    }  # fmt: skip


def made(name: str, make: Make) -> Any:
    """Make a model with values that are nowhere equal."""
    torch.manual_seed(len(name))
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def saved(name: str, make: Make, folder: Path) -> Path:
    """Save a model by its own `save_pretrained`; return the folder."""
    made(name, make).save_pretrained(folder / name)
    return folder / name
