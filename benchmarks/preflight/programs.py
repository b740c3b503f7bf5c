"""Models of other people from tiny random configurations, their batches, and loops as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

V, WIDTH, LAYERS, HEADS = 96, 32, 2, 4
PAD = 0

_LIKE_LLAMA = {
    "vocab_size": V,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OF_ONE_HEAD_COUNT = {name: value for name, value in _LIKE_LLAMA.items() if name != "num_key_value_heads"}
_LIKE_GPT2 = {
    "vocab_size": V,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": _LIKE_LLAMA,
    "mistral": _LIKE_LLAMA,
    "qwen2": _LIKE_LLAMA,
    "qwen3": {**_LIKE_LLAMA, "head_dim": 8},
    "gemma": {**_LIKE_LLAMA, "head_dim": 8},
    "gemma2": {**_LIKE_LLAMA, "head_dim": 8},
    "olmo": _LIKE_LLAMA,
    "starcoder2": _LIKE_LLAMA,
    "stablelm": _LIKE_LLAMA,
    "phi": _LIKE_LLAMA,
    "phi3": _LIKE_LLAMA,
    "granite": _LIKE_LLAMA,
    "mixtral": {**_LIKE_LLAMA, "num_local_experts": 4},
    "gpt_neox": _OF_ONE_HEAD_COUNT,
    "gpt2": _LIKE_GPT2,
    "gptj": {**_LIKE_GPT2, "rotary_dim": 4},
    "opt": {
        "vocab_size": V,
        "hidden_size": WIDTH,
        "word_embed_proj_dim": WIDTH,
        "ffn_dim": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
    },
    "bloom": {"vocab_size": V, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    "falcon": {"vocab_size": V, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS},
    "mamba": {"vocab_size": V, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 4, "pad_token_id": PAD},
}
MASKED = ("bert", "roberta", "electra", "distilbert")
SEQ2SEQ = ("t5", "bart")
VISION = ("vit", "resnet", "convnext")


def causal(kind: str = "llama", **changes: Any) -> Any:
    """Return a causal language model with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CAUSAL[kind], **changes})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def masked(kind: str = "bert", **changes: Any) -> Any:
    """Return a masked language model with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "max_position_embeddings": 80,
        "pad_token_id": PAD,
    }
    if kind == "distilbert":
        sizes = {"vocab_size": V, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64, "pad_token_id": PAD}
    if kind == "electra":
        sizes["embedding_size"] = WIDTH
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    return transformers.AutoModelForMaskedLM.from_config(config).train()


def seq2seq(kind: str) -> Any:
    """Return an encoder with a decoder, with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "t5": {
            "vocab_size": V,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "pad_token_id": PAD,
            "decoder_start_token_id": 0,
        },
        "bart": {
            **{"vocab_size": V, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": PAD},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
            **{"max_position_embeddings": 64, "decoder_start_token_id": 2},
        },
    }[kind]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    return transformers.AutoModelForSeq2SeqLM.from_config(config).train()


def vision(kind: str) -> Any:
    """Return a classifier of pictures [rows, 3, 32, 32] in 10 classes, with random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vit": {
            **{"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64},
            **{"image_size": 32, "patch_size": 8},
        },
        "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "convnext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    }[kind]
    config = transformers.AutoConfig.for_model(kind, num_labels=10, **sizes)
    return transformers.AutoModelForImageClassification.from_config(config).train()


def texts(rows: int = 4, length: int = 16, *, ragged: bool = True, left: bool = False) -> dict[str, Tensor]:
    """Return a batch of a causal language model: tokens, mask and labels, [rows, length]; shorter rows are padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, V, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    if ragged:
        for row in range(1, rows):
            short = (row * 5) % (length - 4)
            mask[row, slice(None, short) if left else slice(length - short, None)] = 0
    tokens = torch.where(mask.bool(), tokens, PAD)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def packed(rows: int = 3, length: int = 16) -> dict[str, Tensor]:
    """Return rows that hold two documents each, told by positions that begin again."""
    batch = texts(rows, length, ragged=False)
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, length // 2 :] -= length // 2
    return {"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["labels"]}


def clozes(rows: int = 4, length: int = 16) -> dict[str, Tensor]:
    """Return a batch of a masked language model: every fourth token is hidden."""
    batch = texts(rows, length)
    hidden = (torch.arange(length) % 4 == 1) & batch["attention_mask"].bool()
    labels = torch.where(hidden, batch["input_ids"], -100)
    return {**batch, "input_ids": torch.where(hidden, 3, batch["input_ids"]), "labels": labels}


def pictures(rows: int = 6) -> dict[str, Tensor]:
    """Return pictures and their classes."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(rows, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,), generator=generator)}


def of_model(model: Any, batch: Any) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


class Block(nn.Module):
    """A block of a GPT, as in the loops that people write after minGPT. causal: whether a token is kept from later ones."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, time, width]."""
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(c, dim=2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """A GPT in the manner of minGPT. block: makes its blocks. between: what is done to the stream between two of them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, V, bias=False)
        self.between = between
        self.apply(self._begin)

    @staticmethod
    def _begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else 0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, time, V] of tokens [rows, time]."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            x = self.between(x) if self.between is not None else x
        return self.head(self.ln_f(x))


def gpt(**parts: Any) -> GPT:
    """Return a GPT with random weights."""
    torch.manual_seed(0)
    return GPT(**parts).train()


def pairs(rows: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens that follow them, [rows, length] each."""
    tokens = texts(rows, length + 1, ragged=False)["input_ids"]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def of_pairs(model: Any, batch: Any) -> Tensor:
    """The loss of a loop whose data set shifts the targets."""
    tokens, targets = batch
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.view(-1, V), targets.view(-1))
