"""The planted faults, by property. Each function takes whether the fault is there, and returns what a preflight is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from benchmarks.preflight.case import Case, Trial
from benchmarks.preflight.programs import (
    LAYERS,
    PAD,
    WIDTH,
    Block,
    V,
    causal,
    clozes,
    gpt,
    masked,
    of_model,
    of_pairs,
    packed,
    pairs,
    pictures,
    seq2seq,
    texts,
    vision,
)

CASES: list[Case] = []
Make = Callable[[bool], Trial]


def case(broken: str, place: str = "") -> Callable[[Make], Make]:
    """List a function as a case that breaks a property."""

    def listed(make: Make) -> Make:
        CASES.append(Case(make.__name__, broken, make, place))
        return make

    return listed


# ---- split -----------------------------------------------------------------------------------------------------------


def accumulated(weight: Callable[[Any, list[Any]], float], reported: str = "mean", loss: Any = of_model) -> Any:
    """Return a step that accumulates micro-batches, each loss times `weight(micro, all)`."""

    def step(model: Any, micros: list[Any]) -> Tensor:
        total = torch.zeros(())
        for micro in micros:
            part = loss(model, micro) * weight(micro, micros)
            part.backward()
            total = part.detach() if reported == "last" else total + part.detach()
        return total

    return step


def targets(batch: Any) -> float:
    """Return how many tokens are predicted in a batch."""
    return float((batch["labels"][:, 1:] != -100).sum())


def by_tokens(micro: Any, micros: list[Any]) -> float:
    """The right weight of a mean over tokens."""
    return targets(micro) / sum(map(targets, micros))


def split_trial(weight: Any, broken: bool, kind: str = "llama", **other: Any) -> Trial:
    return Trial(
        of_model, causal(kind), texts(), {"step": accumulated(weight if broken else by_tokens, **other), "micro_batches": 2}
    )


@case("split", "targets")
def mean_of_means(broken: bool) -> Trial:
    return split_trial(lambda micro, micros: 1 / len(micros), broken)


@case("split", "targets")
def mean_of_means_told_by_number(broken: bool) -> Trial:
    batch = texts(ragged=broken)
    return Trial(of_model, causal("qwen2"), batch, {"micro_batches": 2})


@case("split", "factor 2")
def sum_not_divided(broken: bool) -> Trial:
    batch = texts(ragged=False)
    weight = (lambda micro, micros: 1.0) if broken else (lambda micro, micros: 1 / len(micros))
    return Trial(of_model, causal("gpt2"), batch, {"step": accumulated(weight), "micro_batches": 2})


@case("split", "factor 1/4")
def divided_twice(broken: bool) -> Trial:
    return split_trial(lambda micro, micros: by_tokens(micro, micros) / 4, broken, "gpt_neox")


@case("split", "rows")
def weighed_by_rows(broken: bool) -> Trial:
    trial = split_trial(lambda micro, micros: len(micro["labels"]) / sum(len(m["labels"]) for m in micros), broken, "mistral")
    return Trial(trial.loss, trial.model, texts(rows=5), trial.options)


@case("split", "tokens")
def weighed_by_all_tokens(broken: bool) -> Trial:
    def area(batch: Any) -> float:
        return float(batch["attention_mask"].sum())

    return split_trial(lambda micro, micros: area(micro) * 1.5 / sum(map(area, micros)), broken, "phi")


@case("split", "last")
def only_last_loss_reported(broken: bool) -> Trial:
    return Trial(
        of_model,
        causal("opt", dropout=0.0),
        texts(),
        {"step": accumulated(by_tokens, "last" if broken else "mean"), "micro_batches": 2},
    )


@case("split", "factor")
def zeroed_between_micro_batches(broken: bool) -> Trial:
    def step(model: Any, micros: list[Any]) -> Tensor:
        total = torch.zeros(())
        for micro in micros:
            if broken:
                model.zero_grad()
            part = of_model(model, micro) * by_tokens(micro, micros)
            part.backward()
            total += part.detach()
        return total

    return Trial(of_model, causal("stablelm"), texts(), {"step": step, "micro_batches": 2})


# ---- padding ---------------------------------------------------------------------------------------------------------


def behind_padding() -> dict[str, Tensor]:
    """Return a batch that is padded on the left; the first token of a row is no target, as padding would predict it."""
    batch = texts(left=True)
    first = batch["attention_mask"].cumsum(1) == 1
    return {**batch, "labels": torch.where(first, -100, batch["labels"])}


@case("padding")
def mask_not_passed(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        given = {k: v for k, v in batch.items() if k != "attention_mask" or not broken}
        return model(**given).loss

    return Trial(loss, masked(), clozes())


@case("padding")
def mask_not_passed_left(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        given = {k: v for k, v in batch.items() if k != "attention_mask" or not broken}
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return model(**given, position_ids=positions).loss

    return Trial(loss, causal("qwen2"), behind_padding())


@case("padding")
def padding_counts(broken: bool) -> Trial:
    batch = texts()
    if broken:
        batch["labels"] = batch["input_ids"].clone()
    return Trial(of_model, causal("llama"), batch)


@case("padding")
def positions_from_the_left(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        positions = None if broken else (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return model(**batch, position_ids=positions).loss

    return Trial(loss, causal("gpt2"), behind_padding())


@case("padding")
def divided_by_all_positions(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        each = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
        return each.sum() / (labels.numel() if broken else (labels != -100).sum())

    return Trial(loss, causal("mistral"), texts())


@case("padding")
def row_without_targets(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        each = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).sum(1)
        return (each.sum(1) / (counts if broken else counts.clamp(min=1))).mean()

    return Trial(loss, causal("llama"), texts())


class Pooled(nn.Module):
    """A classifier on the mean of the hidden states of an encoder."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.masks = masked().bert, nn.Linear(WIDTH, 3), masks

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if not self.masks:
            return self.head(hidden.mean(1))
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


@case("padding")
def mean_pooled_with_padding(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    torch.manual_seed(0)
    batch = texts()
    batch["labels"] = torch.tensor([0, 1, 2, 1])
    return Trial(loss, Pooled(not broken), batch)


# ---- causality -------------------------------------------------------------------------------------------------------


@case("causality", "blocks.0")
def not_causal(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Block(causal=not broken)), pairs())


@case("causality")
def mean_over_time(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(between=(lambda x: x - x.mean(1, keepdim=True)) if broken else None), pairs())


@case("causality", "twice")
def shifted_twice(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        labels = batch["labels"]
        if broken:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss

    return Trial(loss, causal("llama"), texts())


@case("causality", "itself")
def not_shifted(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits, labels = model(batch["input_ids"]), batch["labels"]
        if not broken:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    return Trial(loss, gpt(), texts(ragged=False))


@case("causality", "document")
def documents_see_each_other(broken: bool) -> Trial:
    batch = packed()
    if broken:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return Trial(of_model, causal("llama", use_cache=False), batch)


class Convolved(nn.Module):
    """A language model of convolutions over time."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed, self.causal = nn.Embedding(V, WIDTH), causal
        self.conv, self.head = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, V)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        x = nn.functional.pad(x, (2, 0) if self.causal else (1, 1))
        return self.head(torch.relu(self.conv(x)).transpose(1, 2))


@case("causality", "conv")
def convolution_sees_ahead(broken: bool) -> Trial:
    torch.manual_seed(0)
    return Trial(of_pairs, Convolved(not broken), pairs())


class Recurrent(nn.Module):
    """A language model of an LSTM."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH // (2 if both else 1), batch_first=True, bidirectional=both)
        self.head = nn.Linear(WIDTH, V)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


@case("causality", "lstm")
def recurrent_both_ways(broken: bool) -> Trial:
    torch.manual_seed(0)
    return Trial(of_pairs, Recurrent(broken), pairs())


# ---- rows ------------------------------------------------------------------------------------------------------------


@case("rows")
def mean_over_rows(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(between=(lambda x: x - x.mean(0, keepdim=True)) if broken else None), pairs())


@case("rows", "mix")
def attention_over_rows(broken: bool) -> Trial:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, WIDTH)
            self.mix = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=not broken)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mix(self.first(x)).mean(1))

    torch.manual_seed(0)
    batch = torch.randn(5, 7, 8), torch.tensor([0, 1, 2, 0, 1])
    return Trial(lambda model, b: cross_entropy(model(b[0]), b[1]), Encoder(), batch)


@case("rows", "order")
def weighed_by_place(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        each = cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"], reduction="none")
        weights = torch.arange(1.0, len(each) + 1) if broken else torch.ones(len(each))
        return (each * weights).sum() / weights.sum()

    return Trial(loss, vision("vit"), pictures())


@case("rows")
def scaled_by_largest(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        pixels = batch["pixel_values"]
        largest = pixels.abs().amax() if broken else pixels.abs().amax((1, 2, 3), keepdim=True)
        return model(pixel_values=pixels / largest, labels=batch["labels"]).loss

    return Trial(loss, vision("vit"), pictures())


@case("rows", "order")
def labels_of_other_rows(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(pixel_values=batch["pixel_values"]).logits
        labels = batch["labels"]
        if broken:
            labels = labels.sort().values
        return cross_entropy(logits, labels)

    return Trial(loss, vision("vit"), pictures())


# ---- gradient --------------------------------------------------------------------------------------------------------


class Detached(nn.Module):
    """A layer beside which a branch is added, with its graph or without."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.side, self.broken = Block(), nn.Linear(WIDTH, WIDTH), broken

    def forward(self, x: Tensor) -> Tensor:
        branch = torch.tanh(self.side(x))
        return self.inner(x) + (branch.detach() if self.broken else branch)


@case("gradient", "side")
def branch_detached(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Detached(broken)), pairs(), {"skip": ["start"]})


class Squared(torch.autograd.Function):
    """Squared ReLU with a backward written by hand, which lacks its factor 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.relu(x) ** 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.relu(ctx.saved_tensors[0])


class Activated(nn.Module):
    """A perceptron with the activation of `Squared`."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 64), SquaredReLU(broken), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class SquaredReLU(nn.Module):
    """The activation as a module."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x) if self.broken else torch.relu(x) ** 2


@case("gradient", "up")
def custom_backward(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Activated(broken)), pairs())


@case("gradient", "model.embed_tokens")
def embeddings_under_no_grad(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        embeds = model.get_input_embeddings()(batch["input_ids"])
        rest = {k: v for k, v in batch.items() if k != "input_ids"}
        return model(inputs_embeds=embeds.detach() if broken else embeds, **rest).loss

    return Trial(loss, causal("llama"), texts(), {"skip": ["start"]})


@case("gradient", "head")
def gradient_hooked(broken: bool) -> Trial:
    model = gpt()
    if broken:
        model.head.weight.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    return Trial(of_pairs, model, pairs())


@case("gradient")
def probabilities_detached(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(pixel_values=batch["pixel_values"]).logits
        each = cross_entropy(logits, batch["labels"], reduction="none")
        certainty = torch.exp(-each)
        return ((1 - (certainty.detach() if broken else certainty)) ** 2 * each).mean()

    return Trial(loss, vision("vit"), pictures())


# ---- start -----------------------------------------------------------------------------------------------------------


@case("start", "tied")
def weights_untied(broken: bool) -> Trial:
    model = causal("gpt2")
    if broken:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return Trial(of_model, model, texts())


@case("start", "extra")
def layer_never_used(broken: bool) -> Trial:
    model = gpt()
    if broken:
        model.extra = nn.Linear(WIDTH, WIDTH)
    return Trial(of_pairs, model, pairs())


@case("start", "head.weight")
def outside_of_the_optimizer(broken: bool) -> Trial:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    if broken:
        model.head = nn.Linear(WIDTH, V, bias=False)
        nn.init.normal_(model.head.weight, std=0.02)
    elif not broken:
        optimizer = torch.optim.AdamW(model.parameters())
    return Trial(of_pairs, model, pairs(), {"optimizer": optimizer})


class AlwaysDropped(nn.Module):
    """A layer whose dropout does not know of evaluation."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.broken = Block(), broken

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.inner(x), 0.1, training=self.training or self.broken)


@case("start", "evaluation")
def dropout_in_evaluation(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: AlwaysDropped(broken)), pairs())


@case("start", "uniform")
def logits_too_large(broken: bool) -> Trial:
    model = gpt()
    if broken:
        nn.init.normal_(model.head.weight, std=1.5)
    return Trial(of_pairs, model, pairs())


@case("start", "two optimizers")
def in_two_optimizers(broken: bool) -> Trial:
    model = gpt()
    first = torch.optim.AdamW([p for name, p in model.named_parameters() if "head" not in name])
    second = torch.optim.SGD(model.parameters() if broken else model.head.parameters(), lr=0.1)
    return Trial(of_pairs, model, pairs(), {"optimizer": [first, second]})


# ---- determinism -----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer that knows how often it was called."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.calls, self.broken = Block(), 0, broken

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls if self.broken else 1.01)


@case("determinism", "blocks.0")
def call_counter(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Counting(broken)), pairs())


class Noisy(nn.Module):
    """A layer that adds noise, from a generator of its own or from the global one."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner = Block()
        self.generator = torch.Generator() if broken else None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * torch.randn(x.shape, generator=self.generator) * self.training


@case("determinism", "blocks.0")
def generator_of_its_own(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Noisy(broken)), pairs())


class Remembering(nn.Module):
    """A layer that mixes in what it was given before."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.inner, self.broken = Block(), broken
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if self.broken and self.last is not None and self.last.shape == out.shape:
            mixed, self.last = out + 0.1 * self.last, out.detach()
            return mixed
        self.last = out.detach()
        return out


@case("determinism", "blocks.0")
def state_between_calls(broken: bool) -> Trial:
    return Trial(of_pairs, gpt(block=lambda: Remembering(broken)), pairs())


# ---- precision -------------------------------------------------------------------------------------------------------


@case("precision", "bfloat16")
def loss_in_sixteen_bits(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        tokens, wanted = batch
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        logits = logits if broken else logits.float()
        each = logits.gather(2, wanted.unsqueeze(2)).squeeze(2) - logits.exp().sum(2).log()
        return -each.mean().float()

    return Trial(loss, gpt(), pairs())


@case("precision", "float16")
def gradients_underflow(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        tokens, wanted = batch
        with torch.autocast("cpu", torch.float16 if broken else torch.bfloat16):
            logits = model(tokens)
        each = cross_entropy(logits.float().view(-1, V), wanted.view(-1), reduction="none")
        return each.mean() * 1e-4

    return Trial(loss, gpt(), pairs())


# ---- update ----------------------------------------------------------------------------------------------------------


def with_optimizer(change: Callable[[Any], Any], broken: bool, healthy: Callable[[Any], Any] | None = None) -> Trial:
    model = gpt()
    make = change if broken else healthy or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    return Trial(of_pairs, model, pairs(), {"optimizer": make(model)})


@case("update", "uphill")
def maximised(broken: bool) -> Trial:
    return with_optimizer(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, maximize=True), broken)


@case("update", "rises")
def rate_too_large(broken: bool) -> Trial:
    return with_optimizer(
        lambda m: torch.optim.SGD(m.parameters(), lr=300.0), broken, lambda m: torch.optim.SGD(m.parameters(), 0.1)
    )


@case("update", "head.weight")
def group_without_rate(broken: bool) -> Trial:
    def make(model: Any) -> Any:
        rest = [p for name, p in model.named_parameters() if "head" not in name]
        return torch.optim.AdamW(
            [{"params": rest}, {"params": model.head.parameters(), "lr": 0.0 if broken else 1e-3}], lr=1e-3
        )

    return with_optimizer(make, True)


class Forgetful(torch.optim.SGD):
    """An optimizer that updates copies, as after a cast."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    copy.copy(p.data).clone().add_(p.grad, alpha=-group["lr"])


@case("update", "move")
def copies_updated(broken: bool) -> Trial:
    return with_optimizer(lambda m: Forgetful(m.parameters(), lr=0.1), broken)


# ---- input -----------------------------------------------------------------------------------------------------------


@case("input", "pixel_values")
def pictures_zeroed(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        pixels = batch["pixel_values"] * (0.0 if broken else 1.0)
        return model(pixel_values=pixels, labels=batch["labels"]).loss

    return Trial(loss, vision("vit"), pictures())


@case("input", "same")
def rows_repeated(broken: bool) -> Trial:
    tokens, wanted = pairs()
    if broken:
        tokens, wanted = tokens[[0, 1, 0, 1]], wanted[[0, 1, 0, 1]]
    return Trial(of_pairs, gpt(), (tokens, wanted))


@case("input", "input_ids")
def first_token_only(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        tokens = torch.where(batch["attention_mask"].bool() & (not broken), batch["input_ids"], PAD)
        return model(input_ids=tokens, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss

    return Trial(loss, causal("llama", num_hidden_layers=LAYERS), texts())


# ---- of other people's packages, written after the first fifty were tested --------------------------------------------


@case("start", "lora")
def optimizer_before_the_adapter(broken: bool) -> Trial:
    import peft

    base = causal("qwen3")
    old = list(base.parameters())
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    own = [p for p in model.parameters() if p.requires_grad]
    return Trial(of_model, model, texts(), {"optimizer": torch.optim.AdamW(old if broken else own, lr=1e-3)})


@case("causality")
def decoder_given_its_targets(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        labels = batch["labels"]
        start = torch.full_like(labels[:, :1], 2)
        given = labels if broken else torch.cat([start, labels[:, :-1]], dim=1)
        out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=given.clamp_min(0))
        return cross_entropy(out.logits.flatten(0, 1), labels.flatten())

    batch = texts()
    return Trial(loss, seq2seq("bart"), {**batch, "labels": batch["labels"][:, :9].contiguous()})


@case("rows")
def pictures_normed_by_the_batch(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        pixels = batch["pixel_values"]
        scale = pixels.std() if broken else pixels.flatten(1).std(dim=1).view(-1, 1, 1, 1)
        return model(pixel_values=(pixels / scale), labels=batch["labels"]).loss

    return Trial(loss, vision("vit"), pictures())


@case("padding", "left")
def absolute_positions_behind_padding(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        mask = batch["attention_mask"]
        behind = mask.cumsum(1) - 1
        positions = torch.arange(mask.shape[1]).expand_as(mask) if broken else behind.clamp_min(0)
        labels = torch.where(behind > 0, batch["labels"], -100)
        return model(batch["input_ids"], attention_mask=mask, position_ids=positions, labels=labels).loss

    return Trial(loss, causal("gpt2"), texts(left=True))


@case("padding")
def router_loss_over_padding(broken: bool) -> Trial:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    def loss(model: Any, batch: Any) -> Tensor:
        out = model(**batch, output_router_logits=True)
        balance = load_balancing_loss_func(out.router_logits, 4, 2, None if broken else batch["attention_mask"])
        return out.loss + 0.5 * balance

    return Trial(loss, causal("mixtral", router_aux_loss_coef=0.0), texts())


@case("update", "uphill")
def maximized(broken: bool) -> Trial:
    model = causal("bloom")
    return Trial(of_model, model, texts(), {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, maximize=broken)})


@case("determinism")
def noise_of_its_own_generator(broken: bool) -> Trial:
    import numpy

    def loss(model: Any, batch: Any) -> Tensor:
        source = numpy.random.default_rng(None if broken else 0)
        x = model.get_input_embeddings()(batch["input_ids"])
        noise = torch.from_numpy(source.standard_normal(x.shape[-1])).to(x.dtype) * 0.05
        return model(inputs_embeds=x + noise, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss

    return Trial(loss, causal("gpt_neox"), texts())


@case("gradient")
def half_of_the_stream_detached(broken: bool) -> Trial:
    model = causal("phi3")

    def between(module: Any, args: Any, output: Any) -> Any:
        return 0.5 * output + 0.5 * (output.detach() if broken else output)

    model.model.norm.register_forward_hook(between)
    return Trial(of_model, model, texts())


@case("split", "factor 3")
def three_parts_summed(broken: bool) -> Trial:
    def step(model: Any, micros: list[Any]) -> None:
        for micro in micros:
            (of_model(model, micro) / (1 if broken else len(micros))).backward()

    batch = texts(rows=6, ragged=False)
    batch = {**batch, "labels": batch["labels"][:, :9].contiguous()}
    return Trial(of_model, seq2seq("t5"), batch, {"step": step, "micro_batches": 3})


@case("precision", "bfloat16")
def capped_logits_in_bfloat16(broken: bool) -> Trial:
    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            capped = 30 * torch.tanh(logits / 30)
            capped = capped.bfloat16() if broken else capped.float()
            target = batch["labels"][:, 1:]
            log_z = capped.exp().sum(-1).log()
            losses = log_z - capped.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            return (losses * (target != -100)).sum() / (target != -100).sum()

    return Trial(loss, causal("gemma2"), texts())
