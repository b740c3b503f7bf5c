"""Healthy pairs of models that nobody here wrote: families of Hugging Face transformers, made small, and modules of torch.

Each is trained for two steps of two micro-batches in two ways that may differ by rounding alone. None may be called a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trainprobe

WORDS, LENGTH, BATCH = 97, 12, 3
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": WORDS}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LANGUAGE = ("llama", "gpt2", "bert", "t5", "mamba", "mixtral", "qwen2", "gpt_neox", "gemma2", "phi", "opt", "bloom")
_FUSED_ATTENTION = ("llama", "gpt2", "bert", "mixtral", "vit", "whisper", "qwen2", "gpt_neox", "phi", "opt")


@dataclass(frozen=True)
class Way:
    """How a training is run; none of it may matter but for rounding."""

    threads: int = 1
    attention: str = ""
    compiled: bool = False
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    fused: bool = False


WAYS: dict[str, tuple[Way, Way]] = {
    "repeat": (Way(), Way()),
    "threads": (Way(), Way(threads=2)),
    "bfloat16 autocast": (Way(), Way(autocast=True)),
    "float64": (Way(), Way(dtype=torch.float64)),
    "fused optimizer": (Way(), Way(fused=True)),
    "compiled": (Way(), Way(compiled=True)),
    "eager attention": (Way(attention="sdpa"), Way(attention="eager")),
}


class Translation(nn.Module):
    """torch.nn.Transformer with embeddings around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.core = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of the next words."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.head.weight.dtype)
        x = self.embed(words)
        return self.head(self.core(x, x, tgt_mask=mask, tgt_is_causal=True))


class Recurrent(nn.Module):
    """torch.nn.LSTM, two layers, both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.core = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.core(self.embed(words))[0])


def _config(family: str) -> Any:
    t: Any = import_module("transformers")
    match family:
        case "gpt2":
            config = t.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, vocab_size=WORDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
            )
        case "bert":
            config = t.BertConfig(**_SMALL, **_NO_DROPOUT)
        case "t5":
            config = t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=WORDS, dropout_rate=0.0)
            config.decoder_start_token_id = 0
        case "mamba":
            config = t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=WORDS, state_size=8)
        case "mixtral":
            config = t.MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=4)
        case "gemma2":
            config = t.Gemma2Config(**_SMALL, num_key_value_heads=2, head_dim=8)
        case "gpt_neox":
            config = t.GPTNeoXConfig(**_SMALL)
        case "phi":
            config = t.PhiConfig(**_SMALL)
        case "opt":
            config = t.OPTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=WORDS, dropout=0.0
            )
            config.word_embed_proj_dim = 32
        case "bloom":
            config = t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=WORDS)
        case "vit":
            config = t.ViTConfig(**{**_SMALL, **_NO_DROPOUT}, image_size=16, patch_size=4, num_labels=7)
        case "whisper":
            config = t.WhisperConfig(
                vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, dropout=0.0,
                decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=12,
                max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )  # fmt: skip
        case "llama" | "qwen2":
            config = {"llama": t.LlamaConfig, "qwen2": t.Qwen2Config}[family](**_SMALL, num_key_value_heads=2)
        case _:
            raise ValueError(family)
    config.use_cache = False
    return config


def _model_class(family: str) -> Any:
    t: Any = import_module("transformers")
    special = {
        "bert": t.BertForMaskedLM,
        "t5": t.T5ForConditionalGeneration,
        "vit": t.ViTForImageClassification,
        "whisper": t.WhisperForConditionalGeneration,
    }
    return special.get(family, t.AutoModelForCausalLM)


def build(family: str, way: Way) -> nn.Module:
    """Return a model with the weights of seed 0."""
    torch.manual_seed(0)
    if family in ("transformer", "lstm"):
        return (Translation if family == "transformer" else Recurrent)()
    config = _config(family)
    if way.attention:
        config._attn_implementation = way.attention
    if family == "mixtral":
        config._experts_implementation = "eager"  # torch multiplies grouped matrices in float32 and bfloat16 alone
    cls = _model_class(family)
    make: Callable[[Any], nn.Module] = cls.from_config if hasattr(cls, "from_config") else cls
    return make(config)


def batches(family: str, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield what a model is called with, a micro-batch each."""
    generator = torch.Generator().manual_seed(3)
    while True:
        words = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
        if family == "vit":
            yield {
                "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).to(dtype),
                "labels": torch.randint(7, (BATCH,), generator=generator),
            }
        elif family == "whisper":
            yield {"input_features": torch.randn(BATCH, 8, 24, generator=generator).to(dtype), "labels": words}
        else:
            yield {"input_ids": words, "labels": words.roll(-1, 1)}


def loss_of(run: Any, family: str, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a micro-batch."""
    if family in ("transformer", "lstm"):
        return nn.functional.cross_entropy(run(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    return run(**batch).loss


def train(output: Path, family: str, way: Way, steps: int = 2, **plan: Any) -> Path:
    """Train with the probe and return the folder of the dump."""
    before = torch.get_num_threads()
    torch.set_num_threads(way.threads)
    try:
        model = build(family, way).to(way.dtype).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=way.fused)
        torch.manual_seed(1)
        run = torch.compile(model) if way.compiled else model
        data = batches(family, way.dtype)
        with trainprobe.watch(model, optimizer, output=output, console=False, **plan) as probe:
            for _ in range(steps):
                with probe.step():
                    optimizer.zero_grad()
                    for _ in range(2):
                        with torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
                            loss = loss_of(run, family, next(data))
                        (loss / 2).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
        return output
    finally:
        torch.set_num_threads(before)


FAMILIES = (*_LANGUAGE, "vit", "whisper", "transformer", "lstm")


def pairs() -> Iterator[tuple[str, str, tuple[Way, Way]]]:
    """Yield the name, the family and both ways of each pair."""
    for family in FAMILIES:
        for name, ways in WAYS.items():
            if name != "eager attention" or family in _FUSED_ATTENTION:
                yield f"{family}: {name}", family, ways
