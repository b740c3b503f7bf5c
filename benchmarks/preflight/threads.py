"""Faults of public threads as small programs; `place` is the factor, or what else the thread is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.preflight.case import Case, Trial

V, WIDTH, TIME = 23, 12, 10
THREADS: list[Case] = []
Make = Callable[[bool], Trial]


def thread(name: str, broken: str, place: str) -> Callable[[Make], Make]:
    """List a function as the program of a thread."""

    def listed(make: Make) -> Make:
        THREADS.append(Case(name, broken, make, place))
        return make

    return listed


class Text(nn.Module):
    """A language model with one head of attention. apart: whether packed documents are kept from each other."""

    def __init__(self, apart: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(V, WIDTH), nn.Embedding(TIME * 2, WIDTH)
        self.qkv, self.mix, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V)
        self.apart = apart

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits [rows, time, V]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        number = (position_ids == 0).cumsum(1)
        seen = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().bool().expand(len(input_ids), -1, -1)
        seen = seen & (number.unsqueeze(1) == number.unsqueeze(2)) if self.apart else seen
        x = self.embed(input_ids) + self.place(position_ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.head(x + torch.tanh(self.mix(x)))


def answers(*lengths: int) -> dict[str, Tensor]:
    """Return rows of which so many of the last tokens are learnt, [rows, time]."""
    tokens = torch.randint(1, V, (len(lengths), TIME), generator=torch.Generator().manual_seed(4))
    learnt = torch.arange(TIME) >= TIME - torch.tensor(lengths).unsqueeze(1)
    return {"input_ids": tokens, "labels": torch.where(learnt, tokens, -100)}


def each(model: Any, batch: Any) -> Tensor:
    """Return the loss of each token, 0 where it is not learnt, [rows, time - 1]."""
    logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def learnt(batch: Any) -> int:
    """Return how many tokens are learnt."""
    return int((batch["labels"][:, 1:] != -100).sum())


def mean(model: Any, batch: Any) -> Tensor:
    """The mean over all tokens that are learnt."""
    return each(model, batch).sum() / learnt(batch)


def accumulated(weight: Callable[[Any, list[Any]], float], told: Callable[[list[Tensor]], Tensor] | None = None) -> Any:
    """Return a step that multiplies the sum of each micro-batch's losses by a number. told: the loss that is reported."""

    def step(model: Any, micros: list[Any]) -> Tensor | None:
        parts = [each(model, micro).sum() * weight(micro, micros) for micro in micros]
        for part in parts:
            part.backward()
        return None if told is None else told([part.detach() for part in parts])

    return step


def right(micro: Any, micros: list[Any]) -> float:
    """The weight of a mean over the tokens of all micro-batches."""
    return 1 / sum(map(learnt, micros))


def trial(wrong: Callable[[Any, list[Any]], float], broken: bool, *lengths: int, micro_batches: int = 2) -> Trial:
    return Trial(
        mean, Text(), answers(*lengths), {"step": accumulated(wrong if broken else right), "micro_batches": micro_batches}
    )


@thread("pytorch/torchtitan#2972", "split", "factor 24, the 24 targets")
def sums_divided_behind_the_backward(broken: bool) -> Trial:
    return trial(lambda micro, micros: 1.0, broken, 9, 3, 7, 5)


@thread("modelscope/twinkle#292", "split", "2, 0.667 times")
def token_means_weighted_by_samples(broken: bool) -> Trial:
    return trial(lambda micro, micros: 1 / learnt(micro) / len(micros), broken, 1, 3)


@thread("allenai/open-instruct#1728", "split", "0.556, 5 times")
def mean_of_each_micro_batch(broken: bool) -> Trial:
    return trial(lambda micro, micros: 1 / learnt(micro) / len(micros), broken, 9, 1)


@thread("huggingface/transformers#34191", "split", "factor 4, the 4 micro-batches")
def loss_of_its_own_that_the_trainer_does_not_divide(broken: bool) -> Trial:
    return trial(lambda micro, micros: right(micro, micros) * len(micros), broken, 9, 2, 6, 4, micro_batches=4)


@thread("ml-explore/mlx-lm#1544", "split", "count alike, in the whole batch they count by targets")
def means_divided_by_the_number_of_micro_batches(broken: bool) -> Trial:
    return trial(lambda micro, micros: 1 / learnt(micro) / len(micros), broken, 9, 2, 6, 4, micro_batches=4)


@thread("modelscope/ms-swift#10117", "split", "factor 1/4")
def divided_once_more_by_the_trainer(broken: bool) -> Trial:
    return trial(lambda micro, micros: right(micro, micros) / len(micros), broken, 9, 2, 6, 4, micro_batches=4)


@thread("huggingface/trl#4935", "split", "factor 2")
def mean_of_micro_batches_not_divided(broken: bool) -> Trial:
    return trial(lambda micro, micros: 1 / learnt(micro), broken, 5, 4, 5, 4)


@thread("pytorch/torchtitan#1732", "split", "0.5, 1 times")
def gradients_scaled_at_each_accumulation(broken: bool) -> Trial:
    def step(model: Any, micros: list[Any]) -> None:
        for micro in micros:
            mean(model, micro).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= len(micros) if broken else 1.0
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 1.0 if broken else len(micros)

    return Trial(mean, Text(), answers(5, 4, 5, 4), {"step": step, "micro_batches": 2})


@thread("karpathy/nanoGPT#207", "split", "that of the last micro-batch alone")
def last_loss_reported(broken: bool) -> Trial:
    step = accumulated(right, lambda parts: parts[-1] if broken else torch.stack(parts).sum())
    return Trial(mean, Text(), answers(9, 3, 7, 5), {"step": step, "micro_batches": 2})


@thread("huggingface/transformers#47394", "causality", "shifted twice")
def labels_shifted_by_loop_and_loss(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        by = 2 if broken else 1
        logits, labels = model(batch["input_ids"])[:, :-by], batch["labels"][:, by:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Trial(loss, Text(), answers(10, 10, 10))


@thread("huggingface/nanoVLM#204", "causality", "document")
def positions_begin_again_and_nothing_else(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(batch["input_ids"], batch["position_ids"])[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    batch = {**answers(10, 10, 10), "position_ids": torch.arange(TIME).remainder(6).repeat(3, 1)}
    return Trial(loss, Text(apart=not broken), batch)


@thread("NovaSky-AI/SkyRL#462", "padding", "factor 0.75")
def mean_over_padded_tokens(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        losses, mask = each(model, batch), batch["attention_mask"][:, 1:]
        return (losses * mask).sum() / (losses.numel() if broken else mask.sum())

    batch = answers(10, 10, 10)
    mask = torch.arange(TIME) < torch.tensor([10, 8, 5]).unsqueeze(1)
    tokens = torch.where(mask, batch["input_ids"], 0)
    return Trial(
        loss,
        Text(),
        {"input_ids": tokens, "attention_mask": mask.long(), "labels": torch.where(mask, tokens, -100)},
    )
