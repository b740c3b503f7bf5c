"""A Llama as Megatron names and stores it: q, k and v of each group of heads stand together, gate and up are one projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.dump_compare.renamed_models import HEADS, WIDTH, WORDS, llama

GROUPS, DIM, HIDDEN = 2, WIDTH // HEADS, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * DIM, bias=False)
        self.linear_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rotary: Any) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        b, t, _ = x.shape
        of_groups = self.linear_qkv(x).view(b, t, GROUPS, (HEADS // GROUPS + 2) * DIM)
        found = of_groups.split([HEADS // GROUPS * DIM, DIM, DIM], -1)
        q, k, v = (each.reshape(b, t, -1, DIM).transpose(1, 2) for each in found)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.activation_func = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(self.activation_func(gate) * up)


class Layer(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention, self.pre_mlp_layernorm, self.mlp = norm(), Attention(), norm(), Mlp()

    def forward(self, x: Tensor, rotary: Any) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), rotary)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Grouped(nn.Module):
    def __init__(self, rotary: nn.Module, norm: Any) -> None:
        super().__init__()
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(WORDS, WIDTH)})
        layers = nn.ModuleList([Layer(norm), Layer(norm)])
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": norm()})
        self.output_layer, self.rotary_pos_emb = nn.Linear(WIDTH, WORDS, bias=False), rotary

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding["word_embeddings"](words)
        rotary = self.rotary_pos_emb(x, torch.arange(words.shape[1])[None])
        for layer in self.decoder["layers"]:
            x = layer(x, rotary)
        return self.output_layer(self.decoder["final_layernorm"](x))


def grouped() -> Grouped:
    """Return this model with the weights of `llama()`."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    source = llama()
    model = Grouped(source.model.rotary_emb, lambda: LlamaRMSNorm(WIDTH, 1e-6))
    weights = {"embedding.word_embeddings.weight": source.model.embed_tokens.weight}
    weights |= {"decoder.final_layernorm.weight": source.model.norm.weight, "output_layer.weight": source.lm_head.weight}
    for i, layer in enumerate(source.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        of_groups = [part.weight.view(GROUPS, -1, WIDTH) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        found = {
            "input_layernorm": layer.input_layernorm.weight,
            "pre_mlp_layernorm": layer.post_attention_layernorm.weight,
            "self_attention.linear_qkv": torch.cat(of_groups, 1).reshape(-1, WIDTH),
            "self_attention.linear_proj": attention.o_proj.weight,
            "mlp.linear_fc1": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            "mlp.linear_fc2": mlp.down_proj.weight,
        }
        weights |= {f"decoder.layers.{i}.{name}.weight": weight for name, weight in found.items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert not missing, missing
    return model
