"""Tiny random models of transformers, what they sample, and how two engines score the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY, LAYERS = 128, 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.15,
    "max_position_embeddings": 512,
}  # fmt: skip
Table = dict[str, Any]


def model_of(kind: str, seed: int, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a random model with peaked answers. kind: llama or moe. changes: of its config."""
    torch.manual_seed(seed)
    if kind == "llama":
        made: Any = LlamaForCausalLM(LlamaConfig(**_SIZES | changes))
    else:
        sizes: Any = _SIZES | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2} | changes
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    with torch.no_grad():
        made.lm_head.weight.mul_(3.0)
    made.set_attn_implementation(attention)
    return made.eval().to(dtype)


@dataclass(frozen=True)
class Rollout:
    """Sampled sequences: their prompts and responses, ragged, and what the sampler said of each token of the responses."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    said: list[torch.Tensor]


def sampled(model: Any, seed: int, rows: int = 48, **options: Any) -> Rollout:
    """Let `generate` write responses with its KV cache. options: of `generate`. said: of its processed scores."""
    torch.manual_seed(seed + 100)
    lengths = [int(n) for n in torch.randint(4, 24, (rows,))]
    ends = [int(n) for n in torch.randint(12, 64, (rows,))]
    prompts = [torch.randint(2, VOCABULARY, (n,)) for n in lengths]
    width = max(lengths)
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, 1
    given = {"do_sample": True, "top_k": 0, "max_new_tokens": max(ends), "eos_token_id": None, "pad_token_id": 0} | options
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **given)
    new = out.sequences[:, width:]
    scores = torch.stack(out.scores, 1).float().log_softmax(-1).gather(-1, new[..., None])[..., 0]
    return Rollout(prompts, [new[i, : ends[i]] for i in range(rows)], [scores[i, : ends[i]] for i in range(rows)])


def logits_of(model: Any, rollout: Rollout) -> list[torch.Tensor]:
    """Return the logits for each token of the responses, float32, each sequence by itself."""
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
            logits = model(torch.cat([prompt, response])[None]).logits[0].float()
            found.append(logits[len(prompt) - 1 : -1])
    return found


def scored(model: Any, rollout: Rollout, temperature: float = 1.0) -> list[torch.Tensor]:
    """Return the log-probability of each token of the responses."""
    both = zip(logits_of(model, rollout), rollout.responses, strict=True)
    return [(x / temperature).log_softmax(-1).gather(-1, r[:, None])[:, 0] for x, r in both]


def entropies(model: Any, rollout: Rollout) -> list[torch.Tensor]:
    """Return the entropy at each token of the responses, in nats."""
    return [-(x.log_softmax(-1).exp() * x.log_softmax(-1)).sum(-1) for x in logits_of(model, rollout)]


def padded_scores(model: Any, rollout: Rollout, rows: int, *, masked: bool = True) -> list[torch.Tensor]:
    """Score micro-batches of so many rows, padded on the left. masked: padding is hidden and positions count from the text."""
    found: list[torch.Tensor] = []
    for begin in range(0, len(rollout.prompts), rows):
        texts = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.responses, strict=True)][begin : begin + rows]
        width = max(map(len, texts))
        ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width, dtype=torch.long)
        for i, text in enumerate(texts):
            ids[i, width - len(text) :], mask[i, width - len(text) :] = text, 1
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if masked else {}
        with torch.no_grad():
            logits = model(ids, **given).logits.float()
        for i, response in enumerate(rollout.responses[begin : begin + rows]):
            n = len(response)
            found.append(logits[i, width - n - 1 : width - 1].log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return found


def packed_scores(model: Any, rollout: Rollout, rows: int, *, apart: bool) -> list[torch.Tensor]:
    """Score so many rows as one sequence. apart: each text sees itself alone, and its positions count from 0."""
    found: list[torch.Tensor] = []
    for begin in range(0, len(rollout.prompts), rows):
        texts = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.responses, strict=True)][begin : begin + rows]
        which = torch.cat([torch.full((len(t),), i) for i, t in enumerate(texts)])
        total = len(which)
        given: Table = {}
        if apart:
            sees = (which[:, None] == which[None]) & torch.ones(total, total, dtype=torch.bool).tril()
            mask = torch.zeros(1, 1, total, total, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)
            given = {"attention_mask": mask, "position_ids": torch.cat([torch.arange(len(t)) for t in texts])[None]}
        with torch.no_grad():
            logits = model(torch.cat(texts)[None], **given).logits[0].float()
        end = 0
        for text, response in zip(texts, rollout.responses[begin : begin + rows], strict=True):
            end += len(text)
            part = logits[end - len(response) - 1 : end - 1].log_softmax(-1)
            found.append(part.gather(-1, response[:, None])[:, 0])
    return found


def decoded(
    model: Any, rollout: Rollout, spoil: Callable[[torch.Tensor, int], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Score token by token with a KV cache, behind a prefill of the prompt. spoil: changes a cached tensor before each step."""
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for prompt, response in zip(rollout.prompts, rollout.responses, strict=True):
            out = model(prompt[None], use_cache=True)
            rows = [out.logits[0, -1].float()]
            for step, token in enumerate(response[:-1]):
                if spoil is not None:
                    for layer in out.past_key_values.layers:
                        layer.keys, layer.values = spoil(layer.keys, step), spoil(layer.values, step)
                at = torch.tensor([len(prompt) + step])
                out = model(token[None, None], past_key_values=out.past_key_values, position_ids=at[None], use_cache=True)
                rows.append(out.logits[0, -1].float())
            found.append(torch.stack(rows).log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return found


def as_table(rollout: Rollout, trainer: list[torch.Tensor], engine: list[torch.Tensor], **columns: Any) -> Table:
    """Return padded columns as a loop writes them: responses alone, padding on the right."""
    rows, width = len(rollout.responses), max(map(len, rollout.responses))
    table: Table = {"tokens": np.zeros((rows, width), np.int64), "mask": np.zeros((rows, width), np.int8)}
    table |= {name: np.zeros((rows, width), np.float32) for name in ("trainer_logprobs", "engine_logprobs")}
    for i, response in enumerate(rollout.responses):
        n = len(response)
        table["tokens"][i, :n], table["mask"][i, :n] = response.numpy(), 1
        table["trainer_logprobs"][i, : len(trainer[i])] = trainer[i].numpy()
        table["engine_logprobs"][i, :n] = engine[i].numpy()
    for name, values in columns.items():
        if isinstance(values, list):
            table[name] = np.zeros((rows, width), np.float32)
            for i, row in enumerate(values):
                table[name][i, : len(row)] = row.numpy()
        else:
            table[name] = values
    return table


def with_prompts(rollout: Rollout, prompts: list[torch.Tensor]) -> Rollout:
    """Return the same responses behind other prompts."""
    return replace(rollout, prompts=prompts)
