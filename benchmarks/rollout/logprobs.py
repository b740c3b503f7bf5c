"""Eleven planted causes of differing log-probabilities, and ten healthy pairs of engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.rollout.models import (
    Rollout,
    Table,
    as_table,
    decoded,
    entropies,
    model_of,
    packed_scores,
    padded_scores,
    sampled,
    scored,
    with_prompts,
)

KINDS = ("llama", "moe")  # of even and of odd seeds


class Case(NamedTuple):
    """name: of the cause, as the verdict has it; empty of a healthy pair. dtype: what the file says both sides compute in."""

    name: str
    variant: str
    table: Table
    dtype: str = "float32"


@cache
def healthy_rollout(kind: str, seed: int) -> Rollout:
    """Return what a model samples at temperature 1."""
    return sampled(model_of(kind, seed), seed)


def _model(seed: int, **changes: Any) -> Any:
    return model_of(KINDS[seed % 2], seed, **changes)


def _temperature(seed: int) -> Case:
    temperature = (0.7, 1.3)[seed % 2]
    model = _model(seed)
    rollout = sampled(model, seed, temperature=temperature)
    extra = {"entropy": entropies(model, rollout)} if seed % 2 == 0 else {}
    return Case("temperature", f"T {temperature}", as_table(rollout, scored(model, rollout), rollout.said, **extra))


def _truncation(seed: int) -> Case:
    model = _model(seed)
    options: dict[str, Any] = {"top_p": 0.9} if seed % 2 == 0 else {"top_k": 10}
    rollout = sampled(model, seed, **options)
    return Case("truncation", ("top-p 0.9", "top-k 10")[seed % 2], as_table(rollout, scored(model, rollout), rollout.said))


def _shift(seed: int) -> Case:
    rollout = healthy_rollout(KINDS[seed % 2], seed)
    table = as_table(rollout, scored(_model(seed), rollout), rollout.said)
    if seed % 2 == 0:  # the trainer's scores stand one place to the right
        table["trainer_logprobs"] = np.roll(table["trainer_logprobs"], 1, axis=1)
        return Case("shift", "scores", table)
    begin = [n - 1 for n in map(len, rollout.prompts)]  # the mask begins at the last token of the prompt, and ends early
    width = max(len(p) + len(r) for p, r in zip(rollout.prompts, rollout.responses, strict=True))
    whole: Table = {n: np.zeros((len(begin), width), a.dtype) for n, a in table.items()}
    full = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.responses, strict=True)]
    with torch.no_grad():
        for i, text in enumerate(full):
            n, end = len(rollout.responses[i]), len(text)
            whole["tokens"][i, :end] = text.numpy()
            whole["mask"][i, begin[i] : end - 1] = 1
            logits = _model(seed)(text[None]).logits[0].log_softmax(-1)
            whole["trainer_logprobs"][i, 1:end] = logits[:-1].gather(-1, text[1:, None])[:, 0].numpy()
            whole["engine_logprobs"][i, end - n : end] = rollout.said[i].numpy()  # zero at the prompt
    return Case("shift", "mask", whole)


def _padding(seed: int) -> Case:
    rollout, model = healthy_rollout(KINDS[seed % 2], seed), _model(seed)
    width = max(map(len, rollout.responses))
    padded = [torch.cat([r, torch.zeros(width - len(r), dtype=torch.long)]) for r in rollout.responses]
    trainer = scored(model, replace(rollout, responses=padded))  # it scores the padding as well
    table = as_table(rollout, [torch.zeros(0)] * len(padded), rollout.said)
    table["trainer_logprobs"][:], table["mask"][:] = torch.stack(trainer).numpy(), 1
    return Case("padding", "engine has zeros", table)


def _stale(seed: int) -> Case:
    rollout, model = healthy_rollout(KINDS[seed % 2], seed), _model(seed)
    older, noise = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    by_age = [scored(model, rollout)]
    for _ in range(3):
        with torch.no_grad():
            for p in older.parameters():
                p.add_(torch.randn(p.shape, generator=noise) * p.std() * (0.004 if p.dim() > 1 else 0))
        by_age.append(scored(older, rollout))
    age = np.arange(len(rollout.prompts)) % 4
    engine = [by_age[a][i] for i, a in enumerate(age)]
    return Case("stale", "0 to 3 versions", as_table(rollout, by_age[0], engine, version=10 - age))


def _sum(seed: int) -> Case:
    rollout = healthy_rollout(KINDS[seed % 2], seed)
    trainer = scored(model_of(KINDS[seed % 2], seed, dtype=torch.bfloat16), rollout)
    table = as_table(rollout, trainer, rollout.said)
    gap = ((table["trainer_logprobs"] - table["engine_logprobs"]) * table["mask"]).sum(1)
    return Case("sum for mean", "bfloat16", table | {"sequence_weights": np.exp(gap)}, "bfloat16")


def _packing(seed: int) -> Case:
    rollout, model = healthy_rollout(KINDS[seed % 2], seed), _model(seed)
    found = packed_scores(model, rollout, 4, apart=False) if seed % 2 == 0 else padded_scores(model, rollout, 4, masked=False)
    micro = np.arange(len(rollout.prompts)) // 4
    return Case("packing", ("packed", "padded")[seed % 2], as_table(rollout, found, rollout.said, micro_batch=micro))


def _flips(seed: int) -> Case:
    model, other = model_of("moe", seed), model_of("moe", seed)
    rollout = healthy_rollout("moe", seed)
    noise, chosen = torch.Generator().manual_seed(seed), {"trainer": [], "engine": []}

    def of(side: str, amount: float) -> Callable[..., object]:
        def hook(module: object, given: object, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits = out[0].float()
            probabilities = logits if torch.all(logits >= 0) else logits.softmax(-1)
            moved = (probabilities.log() + amount * torch.randn(logits.shape, generator=noise)).softmax(-1)
            value, index = moved.topk(2, dim=-1)
            own = probabilities.topk(2, dim=-1).indices
            same = (index.sort(-1).values == own.sort(-1).values).all(-1, keepdim=True)
            chosen[side].append(index)
            value = value / value.sum(-1, keepdim=True)
            return (out[0], torch.where(same, out[1], value), torch.where(same, out[2], index))

        return hook

    for layer in (1, 2):
        model.model.layers[layer].mlp.gate.register_forward_hook(of("trainer", 0.0))
        other.model.layers[layer].mlp.gate.register_forward_hook(of("engine", 0.03))
    trainer, engine = scored(model, rollout), scored(other, rollout)
    table = as_table(rollout, trainer, engine)
    if seed % 2 == 0:
        for side, indices in chosen.items():
            table[f"{side}_experts"] = np.zeros((*table["tokens"].shape, 4), np.int16)
            for i, response in enumerate(rollout.responses):
                both = [index[-len(response) - 1 : -1].sort(-1).values for index in indices[2 * i : 2 * i + 2]]
                table[f"{side}_experts"][i, : len(response)] = torch.cat(both, -1).numpy()
    return Case("router flips", "with experts" if seed % 2 == 0 else "without experts", table)


def _drift(seed: int) -> Case:
    rollout, model = healthy_rollout(KINDS[seed % 2], seed), _model(seed)
    noise = torch.Generator().manual_seed(seed)

    def rounded_again(cached: torch.Tensor, step: int) -> torch.Tensor:
        return cached * (1 + 2e-3 * torch.randn(cached.shape, generator=noise))

    def window(cached: torch.Tensor, step: int) -> torch.Tensor:
        cached = cached.clone()
        cached[:, :, : max(0, cached.shape[2] - 28)] = 0  # older entries are overwritten
        return cached

    engine = decoded(model, rollout, (rounded_again, window)[seed % 2])
    return Case("drift", ("rounded each step", "overwritten")[seed % 2], as_table(rollout, scored(model, rollout), engine))


def _context(seed: int) -> Case:
    rollout, model = healthy_rollout(KINDS[seed % 2], seed), _model(seed)
    if seed % 2 == 0:
        trainer = scored(model_of("llama", seed, rope_parameters={"rope_type": "default", "rope_theta": 500.0}), rollout)
    else:
        system = torch.tensor([5, 77, 31, 9])
        trainer = scored(model, with_prompts(rollout, [torch.cat([system, p]) for p in rollout.prompts]))
    return Case("context", ("RoPE base", "chat template")[seed % 2], as_table(rollout, trainer, rollout.said))


def _precision(seed: int) -> Case:
    rollout = healthy_rollout(KINDS[seed % 2], seed)
    if seed % 2 == 0:
        low = model_of("llama", seed, dtype=torch.bfloat16)
        return Case("precision", "bfloat16 engine", as_table(rollout, scored(_model(seed), rollout), scored(low, rollout)))
    engine = [row.bfloat16().float() for row in rollout.said]
    return Case("precision", "logged as bfloat16", as_table(rollout, scored(_model(seed), rollout), engine))


PLANTED = (*(_temperature, _truncation, _shift, _padding, _stale, _sum, _packing, _flips, _drift, _context, _precision),)


def planted(first: int = 0) -> Iterator[Case]:
    """Yield each cause with two seeds. first: the even one."""
    for make in PLANTED:
        for seed in (first, first + 1):
            yield make(seed)


def healthy(seed: int = 2) -> Iterator[Case]:
    """Yield ten pairs of engines that differ by rounding alone."""
    half = torch.bfloat16
    for kind in KINDS:
        rollout, model = healthy_rollout(kind, seed), model_of(kind, seed)
        fused, low = model_of(kind, seed, "sdpa"), model_of(kind, seed, dtype=half)
        exact, coarse = scored(model, rollout), scored(low, rollout)
        yield Case("", f"{kind}: eager, fused", as_table(rollout, exact, scored(fused, rollout)))
        yield Case(
            "", f"{kind}: KV cache, packed", as_table(rollout, packed_scores(model, rollout, 4, apart=True), rollout.said)
        )
        entropy = entropies(model, rollout)
        yield Case("", f"{kind}: float32, bfloat16", as_table(rollout, exact, coarse, entropy=entropy), "bfloat16")
        cached = decoded(low, rollout)
        together = packed_scores(model_of(kind, seed, "sdpa", half), rollout, 4, apart=True)
        yield Case("", f"{kind}: KV cache, packed, bfloat16", as_table(rollout, together, cached), "bfloat16")
        micro = np.arange(len(rollout.prompts)) // 8
        version = 3 - np.arange(len(rollout.prompts)) % 3
        batches = as_table(rollout, padded_scores(model, rollout, 8), exact, micro_batch=micro, version=version)
        yield Case("", f"{kind}: batches of 8 and 1", batches)
