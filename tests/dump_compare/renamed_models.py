"""A GPT as Hugging Face transformers writes it and as somebody else does, with the same weights under other names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 97, 64
FUSED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
}


class Attention(nn.Module):
    """`order`: in which its projections are called; "fused" has one for all three."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        if order == "fused":
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "fused":
            found = dict(zip("qkv", self.qkv(x).split(WIDTH, -1), strict=True))
        else:
            found = {name: getattr(self, name)(x) for name in self.order}
        b, t, d = x.shape
        q, k, v = (found[name].view(b, t, HEADS, d // HEADS).transpose(1, 2) for name in "qkv")
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(WIDTH), Attention(order), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(self.act(self.up(self.between(x))))


class Own(nn.Module):
    def __init__(self, order: str = "fused", layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.last = nn.ModuleList(Layer(order) for _ in range(layers)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(y)
        return self.head(self.last(y))


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def hugging_face(seed: int = 0) -> Any:
    """Return GPT-2, made small; its matrices are kept transposed."""
    import transformers

    torch.manual_seed(seed)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, initializer_range=0.2))


def own(order: str = "fused", seed: int = 0) -> Own:
    """Return the model of other names with the weights of that one."""
    source, model = hugging_face(seed).transformer, Own(order)
    pairs = [(model.words, source.wte), (model.places, source.wpe), (model.last, source.ln_f)]
    for mine, theirs in zip(model.layers, source.h, strict=True):
        assert isinstance(mine, Layer)
        pairs += [(mine.before, theirs.ln_1), (mine.between, theirs.ln_2), (mine.up, theirs.mlp.c_fc)]
        pairs += [(mine.down, theirs.mlp.c_proj), (mine.attention.project, theirs.attn.c_proj)]
        _give_attention(mine.attention, theirs.attn.c_attn)
    with torch.no_grad():
        for mine, theirs in pairs:
            turned = type(theirs).__name__ == "Conv1D"
            mine.weight.copy_(theirs.weight.T if turned else theirs.weight)
            if getattr(mine, "bias", None) is not None:
                mine.bias.copy_(theirs.bias)
    model.head.weight = model.words.weight
    return model


def _give_attention(attention: Attention, fused: Any) -> None:
    with torch.no_grad():
        if attention.order == "fused":
            attention.qkv.weight.copy_(fused.weight.T)
            attention.qkv.bias.copy_(fused.bias)
            return
        for i, name in enumerate("qkv"):
            part = slice(i * WIDTH, (i + 1) * WIDTH)
            getattr(attention, name).weight.copy_(fused.weight.T[part])
            getattr(attention, name).bias.copy_(fused.bias[part])


def llama() -> Any:
    """Return a Llama, made small: q, k and v, gate and up are modules of their own."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_gated()))


def phi() -> Any:
    """Return a Phi-3 with the weights of that Llama: it has one projection for q, k and v, and one for gate and up."""
    import transformers

    source = llama()
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**_gated(), pad_token_id=0))
    weights = source.state_dict()
    for layer, (fused, parts) in product(range(2), FUSED.items()):
        names = [f"model.layers.{layer}.{part}.weight" for part in parts]
        weights[f"model.layers.{layer}.{fused}.weight"] = torch.cat([weights.pop(name) for name in names])
    model.load_state_dict(weights)
    return model


def _gated() -> dict[str, Any]:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return {
        **heads,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "vocab_size": WORDS,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-6,
    }


def train(output: Path, model: nn.Module, change: Callable[[Any], Any] | None = None, steps: int = 1, **plan: Any) -> Path:
    """Train and return the dump's folder. change: is given the model beforehand."""
    if change is not None:
        with torch.no_grad():
            change(model)
    optimizer, generator = torch.optim.AdamW(model.parameters(), 1e-3), torch.Generator().manual_seed(3)
    with trainprobe.watch(model, optimizer, output=output, console=False, **plan) as probe:
        for _ in range(steps):
            words = torch.randint(WORDS, (3, 13), generator=generator)
            with probe.step():
                optimizer.zero_grad()
                made = model(words[:, :-1])
                logits = getattr(made, "logits", made)
                functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()).backward()
                optimizer.step()
    return output
