"""Which layer: ten healthy pairs of engine and trainer, and fifteen faults in one module of the engine.

The engine writes a text with its KV cache, a prefill and then a token at a time; the trainer sees the text in one forward. Both
are tiny random models of transformers: a Llama, a mixture of experts (Qwen 3) and GPT-2. Each records one step with values.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import trainprobe
from benchmarks.rollout.models import VOCABULARY, model_of

PROMPT, NEW = 9, 7
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A pair of runs, and the module that must be named, as a pattern; "" for a healthy pair."""

    name: str
    pattern: str
    engine: Any
    engine_run: Run
    trainer: Any
    trainer_run: Run


def gpt2(seed: int, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """Return a random GPT-2 with peaked answers."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=512, initializer_range=0.15, bos_token_id=0
    )
    made: Any = GPT2LMHeadModel(config)
    made.set_attn_implementation(attention)
    return made.eval().to(dtype)


def made(kind: str, seed: int, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model: llama, moe or gpt2."""
    return gpt2(seed, attention, dtype) if kind == "gpt2" else model_of(kind, seed, attention, dtype, **changes)


def text(seed: int, rows: int = 1, length: int = PROMPT) -> torch.Tensor:
    """Return random tokens, [rows, length]."""
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def decode(model: Any, ids: torch.Tensor, spoil: Callable[[Any, int], None] | None = None, shift: int = 0) -> None:
    """Run a prefill and decode steps over given tokens. spoil: changes the cache before each step. shift: of positions then."""
    out = model(ids[:, :PROMPT], use_cache=True)
    for step in range(ids.shape[1] - PROMPT):
        if spoil is not None:
            spoil(out.past_key_values, step)
        at = torch.tensor([[PROMPT + step + shift]])
        out = model(ids[:, [PROMPT + step]], past_key_values=out.past_key_values, position_ids=at, use_cache=True)


def packed(model: Any, texts: list[torch.Tensor]) -> None:
    """Run several texts as one row, each of which sees itself alone."""
    which = torch.cat([torch.full((t.shape[1],), i) for i, t in enumerate(texts)])
    sees = (which[:, None] == which[None]) & torch.ones(len(which), len(which), dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, *sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
    at = torch.cat([torch.arange(t.shape[1]) for t in texts])[None]
    model(torch.cat(texts, 1), attention_mask=mask, position_ids=at)


class _Fused(torch.nn.Module):
    """Several projections as one, as engines have them."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.cat([part.weight for part in parts]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


def fuse(model: Any, wrong: int | None = None) -> Any:
    """Give a Llama `qkv_proj` in the place of three projections. wrong: the layer whose rows of k and v are exchanged."""
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        sizes = [part.weight.shape[0] for part in parts]
        if number == wrong:
            parts[1:] = parts[:0:-1]
        attention.qkv_proj = _Fused(*parts)
        held: dict[str, torch.Tensor] = {}

        def part(x: torch.Tensor, i: int, owner: Any = attention, held: Any = held, sizes: Any = sizes) -> torch.Tensor:
            held["out"] = owner.qkv_proj(x) if i == 0 else held["out"]
            return held["out"].split(sizes, -1)[i]

        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            delattr(attention, name)
            object.__setattr__(attention, name, partial(part, i=i))
    return model


def changed(model: Any, change: Callable[[Any], None]) -> Any:
    """Return a copy of a model in which something is changed."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        change(found)
    return found


def roll_cache(layer: int) -> Callable[[Any, int], None]:
    """Return what puts the keys of one layer one slot on, at the third decode step; the values stay."""

    def spoil(cache: Any, step: int) -> None:
        if step == 2:
            held = cache.layers[layer]
            held.keys = held.keys.roll(1, 2)

    return spoil


def exchange_experts(model: Any) -> None:
    """Exchange the first two experts of the second layer."""
    experts = model.model.layers[1].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight[:2] = weight[:2].flip(0).clone()


def transpose(model: Any) -> None:
    """Transpose the square weight behind the attention of the third layer."""
    weight = model.model.layers[2].self_attn.o_proj.weight
    weight.copy_(weight.t().clone())


def stale(model: Any) -> None:
    """Let the third layer be a little older."""
    for p in (model.model.layers if hasattr(model, "model") else model.transformer.h)[2].parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(5)) * 0.01)


def scaled_norm(model: Any) -> None:
    """Forget the weight of one normalisation."""
    model.model.layers[1].post_attention_layernorm.weight.mul_(1.05)


def healthy() -> Iterator[Case]:
    """Yield the pairs that rounding alone tells apart."""
    half = torch.bfloat16
    pairs: list[tuple[str, tuple[str, torch.dtype], tuple[str, torch.dtype]]] = [
        ("llama", ("eager", torch.float32), ("eager", torch.float32)),
        ("llama", ("sdpa", torch.float32), ("eager", torch.float32)),
        ("llama", ("sdpa", half), ("eager", half)),
        ("moe", ("eager", torch.float32), ("sdpa", torch.float32)),
        ("moe", ("sdpa", half), ("sdpa", half)),
        ("gpt2", ("eager", torch.float32), ("sdpa", torch.float32)),
        ("llama", ("eager", half), ("eager", torch.float32)),
    ]
    for seed, (kind, of_engine, of_trainer) in enumerate(pairs):
        engine, trainer = made(kind, seed, *of_engine), made(kind, seed, *of_trainer)
        prompt = text(seed)
        with torch.no_grad():
            whole = engine.generate(prompt, **GREEDY)
        name = f"{kind}, {of_engine[0]} {of_engine[1]} and {of_trainer[0]} {of_trainer[1]}".replace("torch.", "")
        yield Case(
            name, "", engine, lambda e=engine, p=prompt: e.generate(p, **GREEDY), trainer, lambda t=trainer, w=whole: t(w)
        )
    model = made("llama", 7)
    texts = [text(70 + i, length=PROMPT + NEW) for i in range(3)]
    yield Case("llama, packed", "", model, lambda: decode(model, texts[1]), model, lambda: packed(model, texts))
    fused = fuse(copy.deepcopy(model))
    yield Case("llama, fused", "", fused, lambda: decode(fused, texts[1]), model, lambda: model(texts[1]))
    ids = text(8, 2)
    ids[0, :3], mask = 0, torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        both = model.generate(ids, attention_mask=mask, **GREEDY)
    yield Case(
        "llama, padded batch",
        "",
        model,
        lambda: model.generate(ids, attention_mask=mask, **GREEDY),
        model,
        lambda: (model(both[:1, 3:]), model(both[1:])),
    )


def planted() -> Iterator[Case]:
    """Yield the faults of the engine."""
    for kind, seed in (("llama", 20), ("moe", 21), ("gpt2", 22)):
        whole = text(seed, length=PROMPT + NEW)
        model = made(kind, seed)
        block = "model.layers" if kind != "gpt2" else "transformer.h"
        attention = "self_attn" if kind != "gpt2" else "attn"

        def case(name: str, pattern: str, engine: Any, m: Any = model, w: Any = whole, k: str = kind, **given: Any) -> Case:
            return Case(f"{k}, {name}", pattern, engine, lambda: decode(engine, w, **given), m, lambda: m(w))

        yield case("a stale layer", rf"{block}\.2\.", changed(model, stale))
        yield case("a slot of the cache", rf"{block}\.1\.{attention}\.", model, spoil=roll_cache(1))
        if kind != "gpt2":
            yield case("positions one on", r"rotary_emb", model, shift=1)
            other = made(kind, seed, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
            yield case("another RoPE base", r"rotary_emb", other)
        else:
            yield case("positions one on", r"transformer\.wpe", model, shift=1)
        if kind == "llama":
            yield case("a transposed weight", r"layers\.2\.self_attn\.o_proj", changed(model, transpose))
            yield case("k and v in each other's rows", r"layers\.1\.self_attn\.", fuse(copy.deepcopy(model), 1))
        if kind == "moe":
            yield case("experts exchanged", r"layers\.1\.mlp\.experts", changed(model, exchange_experts))
            yield case("a norm's weight", r"layers\.1\.post_attention_layernorm", changed(model, scaled_norm))


def record(folder: Path, model: Any, run: Run) -> None:
    """Record one step of values without gradients."""
    with (
        trainprobe.watch(model, output=str(folder), console=False, record="L0", task="tensor", monitor=False) as probe,
        torch.no_grad(),
        probe.step(),
    ):
        run()


def results() -> Iterator[tuple[Case, Any]]:
    """Yield each case with its verdict."""
    from trainprobe.dump_compare.along_tokens import compare_along_tokens

    for case in (*healthy(), *planted()):
        with tempfile.TemporaryDirectory() as folder:
            record(Path(folder, "engine"), case.engine, case.engine_run)
            record(Path(folder, "trainer"), case.trainer, case.trainer_run)
            yield case, compare_along_tokens(Path(folder, "engine"), Path(folder, "trainer"))[1]


def named(case: Case, sentence: str) -> bool:
    """Return whether the first difference is at the module of a case."""
    first = re.search(r"difference is at (\S+)", sentence)
    return first is not None and re.search(case.pattern, first[1]) is not None
