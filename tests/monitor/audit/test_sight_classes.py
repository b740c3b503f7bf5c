"""Two recorded things against each other: each fault is named by its relation and place, and its healthy twin gets no word."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainprobe
from benchmarks.sight import ranks
from benchmarks.sight.running import alarms, run

VOCAB, TIME = 12, 10
Step = Callable[[int], Tensor | None]


def told(folder, model: nn.Module, step_of: Step, steps: int, optimizer: Any = None) -> dict[str, str]:
    """Train with every step audited; return rule → place of each warning and error."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    with trainprobe.watch(model, optimizer, output=folder / "out", audit={"every": 1}, monitor=False) as probe:
        for step in range(steps):
            with probe.step():
                optimizer.zero_grad()
                loss = step_of(step)
                if loss is not None:
                    loss.backward()
                optimizer.step()
    return {f.rule: f.site.name if f.site else "" for f in probe.findings if f.severity != "info"}


def drawn(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def whole(number: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(number))


class Guess(nn.Module):
    """Guesses a number from columns, and a step where it is told one."""

    def __init__(self, width: int, out: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 1, 16), nn.Tanh(), nn.Linear(16, out))

    def forward(self, columns: Tensor, at: Tensor) -> Tensor:
        return self.net(torch.cat([columns, at.float()[:, None] / 1000], 1))


class Reader(nn.Module):
    """Says for each place of a row which token it guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.tokens(ids))))


class Pair(nn.Module):
    """Reads what was asked and what was said before."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.said, self.head = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, asked: Tensor, said: Tensor) -> Tensor:
        return self.head(self.asked(asked).mean(1, keepdim=True) + self.said(said))


# ---- what is given ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "column", "copy", "decoder"])
def test_the_target_is_not_among_what_the_model_is_given(tmp_path, fault):
    torch.manual_seed(0)
    model = Pair() if fault == "decoder" else Guess(3, 3 if fault == "copy" else 1)

    def step(i: int) -> Tensor:
        x, noise, at = drawn(i, 32, 3), drawn(100 + i, 32, 3), whole(i, 1000, 32)
        if fault == "decoder":
            target = whole(i, VOCAB, 4, 8)
            return functional.cross_entropy(model(whole(50 + i, VOCAB, 4, 8), target).flatten(0, 1), target.flatten())
        if fault == "copy":
            return functional.mse_loss(model(noise, at), noise)
        return functional.mse_loss(model(x, at).squeeze(1), x[:, 1] if fault == "column" else x.sum(1))

    place = {"column": "columns", "copy": "columns", "decoder": "said"}
    assert told(tmp_path, model, step, 2) == ({"copied_targets": place[fault]} if fault else {})


def test_an_autoencoder_and_a_shifted_decoder_are_no_leak(tmp_path):
    torch.manual_seed(0)
    narrow = Guess(24, 24)  # 24 numbers pass through 16

    def encode(i: int) -> Tensor:
        x = drawn(i, 32, 24)
        return functional.mse_loss(narrow(x, whole(i, 1000, 32)), x)

    def copy_out(i: int) -> Tensor:
        target = whole(i, VOCAB, 4, 8)
        said = torch.cat([torch.zeros(4, 1, dtype=torch.long), target[:, :-1]], 1)
        return functional.cross_entropy(pair(target, said).flatten(0, 1), target.flatten())

    pair = Pair()
    assert told(tmp_path / "a", narrow, encode, 2) == {}
    assert "copied_targets" not in told(tmp_path / "b", pair, copy_out, 2)


@pytest.mark.parametrize("fault", ["", "rows", "visible"])
def test_the_places_that_count_teach_something(tmp_path, fault):
    torch.manual_seed(0)
    model = Reader()

    def step(i: int) -> Tensor:
        ids = whole(i, VOCAB - 1, 8, TIME)
        hidden = whole(60 + i, 6, 8, TIME) == 0
        labels = ids if fault == "visible" else ids.masked_fill(~hidden, -100)
        if fault == "rows":
            labels = labels.clone()
            labels[2:] = -100
        return functional.cross_entropy(model(ids.masked_fill(hidden, VOCAB - 1)).flatten(0, 1), labels.flatten())

    assert told(tmp_path, model, step, 2) == ({"counted_targets": "labels"} if fault else {})


@pytest.mark.parametrize("fault", ["", "ignored"])
def test_a_class_is_not_ignored(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)

    def step(i: int) -> Tensor:
        kinds = whole(i, 4, 4, 6, 6) * (whole(i, 3, 4, 6, 6) == 0)
        return functional.cross_entropy(model(drawn(i, 4, 3, 6, 6)), kinds, ignore_index=0 if fault else 255)

    assert told(tmp_path, model, step, 2) == ({"counted_targets": "labels"} if fault else {})


@pytest.mark.parametrize("fault", ["", "converted", "read"])
def test_whole_numbers_keep_their_differences(tmp_path, fault):
    torch.manual_seed(0)
    model = Guess(3)

    def step(i: int) -> Tensor:
        at = whole(i, 1000, 64)
        at = torch.tensor(at.float().numpy()).bfloat16().long() if fault == "read" else at
        x = drawn(i, 64, 3)
        return functional.mse_loss(model(x, at.bfloat16() if fault == "converted" else at).squeeze(1), x.sum(1))

    assert told(tmp_path, model, step, 2) == ({"held_numbers": "at"} if fault else {})


@pytest.mark.parametrize("fault", ["", "byte"])
def test_classes_are_not_cut_off_at_a_byte(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Linear(4, 300)

    def step(i: int) -> Tensor:
        kinds = whole(i, 300, 512)
        return functional.cross_entropy(model(drawn(i, 512, 4)), kinds.to(torch.uint8).long() if fault else kinds)

    assert told(tmp_path, model, step, 2) == ({"held_numbers": "labels"} if fault else {})


@pytest.mark.parametrize("fault", ["", "once"])
def test_what_is_drawn_for_each_row_is_drawn_anew(tmp_path, fault):
    torch.manual_seed(0)
    model = Guess(3)

    def step(i: int) -> Tensor:
        x = drawn(i, 32, 3)
        return functional.mse_loss(model(x, whole(0 if fault else i, 1000, 32)).squeeze(1), x.sum(1))

    assert told(tmp_path, model, step, 5) == ({"unchanging_inputs": "at"} if fault else {})


@pytest.mark.parametrize("fault", ["", "vanishes"])
def test_a_token_does_not_vanish(tmp_path, fault):
    torch.manual_seed(0)
    model = Reader()

    def step(i: int) -> Tensor:
        ids = whole(i, VOCAB, 32, TIME)
        ids[:, -2:] = VOCAB - 1  # padding, which may go
        ids = ids if i < 4 else ids[:, :-2].clamp(min=1) if fault else ids[:, :-2]
        return functional.cross_entropy(model(ids).flatten(0, 1), (ids * 5 % VOCAB).flatten())

    assert told(tmp_path, model, step, 6) == ({"vanished_tokens": "tokens"} if fault else {})


@pytest.mark.parametrize("fault", ["", "anew"])
def test_a_loader_is_not_begun_anew_for_each_step(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(drawn(0, 64, 3)), 8)
    batches = [iter(loader)]

    def step(i: int) -> Tensor:
        if fault:
            batches[0] = iter(loader)
        return (model(next(batches[0])[0]) - 1).square().mean()

    assert told(tmp_path, model, step, 5) == ({"distinct_data": "batch"} if fault else {})


# ---- where the gradient is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "padding", "alone", "prompt"])
def test_the_gradient_is_where_it_belongs(tmp_path, fault):
    torch.manual_seed(0)
    model = Reader()
    at = torch.arange(TIME)

    def step(i: int) -> Tensor:
        lengths = whole(i, 4, 8) + 4
        ids = whole(90 + i, VOCAB - 1, 8, TIME)
        if fault == "prompt":
            ids[:, :4] = whole(30 + i, VOCAB - 1, 2, 4).repeat_interleave(4, 0)
            logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            return -(logp * drawn(i, 8)[:, None]).mean()
        ids = ids.masked_fill(at >= lengths[:, None], VOCAB - 1)
        logits = model(ids)
        if fault == "alone":
            return logits[:, -1].square().mean()
        counted = torch.ones(8, TIME) if fault == "padding" else (at < lengths[:, None]).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), (ids * 5 % VOCAB).flatten(), reduction="none")
        return (losses * counted.flatten()).sum() / counted.sum()

    assert told(tmp_path, model, step, 2) == ({"trained_places": "ids"} if fault else {})


@pytest.mark.parametrize("masked", [False, True])
def test_an_encoder_that_is_told_of_no_padding_trains_it(tmp_path, masked):
    """As diffusers' train_dreambooth.py trains its text encoder: the U-Net attends to the padding of the prompts."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = CLIPTextModel(CLIPTextConfig(vocab_size=VOCAB, max_position_embeddings=TIME, **sizes))

    def step(i: int) -> Tensor:
        lengths = whole(i, 4, 8) + 4
        ids = whole(90 + i, VOCAB - 1, 8, TIME)
        ids = ids.masked_fill(torch.arange(TIME) >= lengths[:, None], VOCAB - 1)
        mask = (ids != VOCAB - 1).long() if masked else None
        return encoder(input_ids=ids, attention_mask=mask).last_hidden_state.pow(3).mean()

    assert told(tmp_path, encoder, step, 2) == ({"trained_places": "input_ids"} if masked else {})


@pytest.mark.parametrize("fault", ["", "overwritten"])
def test_an_update_uses_what_each_backward_pass_brought(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def step(i: int) -> None:
        first, second = model(drawn(i, 16, 3)).square().mean(0)
        first.backward(retain_graph=True)
        kept = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        second.backward()
        for p, grad in zip(model.parameters(), kept, strict=True):
            p.grad = grad if fault else p.grad + grad

    assert told(tmp_path, model, step, 2) == ({"accumulated_gradients": "weight"} if fault else {})


@pytest.mark.parametrize("fault", ["", "bfloat16", "float16", "autocast", "signs"])
def test_a_gradient_is_not_rounded_on_its_way(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    def step(i: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=fault == "autocast"):
            loss = model(drawn(i, 16, 6)).float().square().mean()
        loss.backward()
        for p in model.parameters():
            if fault in ("bfloat16", "float16"):
                p.grad = p.grad.to(getattr(torch, fault)).float()
            if fault == "signs":
                p.grad.sign_()

    found = told(tmp_path, model, step, 2)
    assert found == ({"rounded_gradients": "0.weight"} if fault in ("bfloat16", "float16") else {})


class Routed(nn.Module):
    """Two experts and the logits of their router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        said = torch.stack([expert(x) for expert in self.experts], 1)
        return (said * logits.softmax(-1)[:, :, None]).sum(1), logits


def routed(folder, fault: str) -> dict[str, str]:
    """Train a mixture with a balance of its experts; the shares of the first come and go with the data."""
    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with trainprobe.watch(model, optimizer, output=folder / "out", audit={"every": 1}, monitor=False) as probe:
        for i in range(6):
            x = drawn(i, 64, 6) + (i % 3)
            with probe.step():
                said, logits = model(x)
                share = logits.softmax(-1)
                share = share.float().softmax(-1) if fault == "twice" else share.softmax(0) if fault == "across" else share
                balance = 2 * share.mean(0).square().sum()
                term = balance if fault != "detached" else balance.detach()
                loss = functional.cross_entropy(said, x.argmax(1) % 3) + 0.05 * term
                loss = loss + 1.0 if fault == "constant" else loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("balance", float(balance.detach()) if fault == "constant" else term)
    return {f.rule: f.site.name for f in probe.findings if f.severity != "info"}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", {}),
        ("across", {}),  # over the batch, behind one over the experts
        ("constant", {}),
        ("twice", {"normalised_twice": "router.bias"}),
        ("detached", {"terms_without_gradient": "balance"}),
    ],
)
def test_the_balance_of_experts_trains_them(tmp_path, fault, found):
    assert routed(tmp_path, fault) == found


# ---- copies, groups, the trivial answer ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "drops"])
def test_a_reference_does_not_drop_out(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    reference = copy.deepcopy(model).requires_grad_(False).train(bool(fault))

    def step(i: int) -> Tensor:
        x = drawn(i, 16, 3)
        with torch.no_grad():
            base = reference(x)
        return (model(x) - base - 1).square().mean()

    assert told(tmp_path, model, step, 5) == ({"followers": "0.weight"} if fault else {})


@pytest.mark.parametrize("fault", ["", "overwritten", "unread"])
def test_groups_learn_at_the_rates_that_they_were_made_with(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    slow = {"lr_mult": 0.1} if fault == "unread" else {"lr": 1e-3, "lr_mult": 0.1}
    groups = [{"params": list(model[0].parameters()), **slow}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(groups, 1e-2)

    def step(i: int) -> Tensor:
        for group in optimizer.param_groups if fault == "overwritten" else ():
            group["lr"] = 1e-2 / (1 + i)
        return (model(drawn(i, 16, 3)) - 1).square().mean()

    assert told(tmp_path, model, step, 5, optimizer) == ({"rates_of_groups": "lr"} if fault else {})


@pytest.mark.parametrize("fault", ["", "exchanged", "fresh"])
def test_moments_belong_to_the_parameter_that_they_are_of(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.ReLU())), nn.Linear(12, 2))

    def step(i: int) -> Tensor:
        x = drawn(i, 64, 12)
        return functional.cross_entropy(model(x), (x[:, 0] > 0).long())

    order = list(model.parameters())
    optimizer = torch.optim.AdamW(order, 3e-3)
    for i in range(20):
        optimizer.zero_grad()
        step(100 + i).backward()
        optimizer.step()
    if fault == "exchanged":
        order[2], order[4] = order[4], order[2]
    saved, optimizer = optimizer.state_dict(), torch.optim.AdamW(order, 3e-3)
    if fault != "fresh":
        optimizer.load_state_dict(saved)
    assert told(tmp_path, model, step, 1, optimizer) == ({"moments_exchanged": "4.weight"} if fault == "exchanged" else {})


@pytest.mark.parametrize("fault", ["clamped", "unit rows", "halved", "clamped elsewhere"])
def test_weights_that_a_loop_holds_within_bounds_are_no_corruption(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.no_grad()
    def held(*_: Any) -> None:
        for i, p in enumerate(model.parameters()):
            if fault in ("halved", "unit rows"):
                p.div_(2 if fault == "halved" else p.norm(dim=-1, keepdim=True))
                continue
            p.clamp_(-0.05 * (1 + i * (fault != "clamped")), 0.05)

    with trainprobe.watch(model, optimizer, output=tmp_path / "out", audit={"every": 1}, monitor=False) as probe:
        for i in range(2):
            with probe.step():
                optimizer.zero_grad()
                (model(drawn(i, 16, 3)) - 1).square().mean().backward()
                optimizer.step()
                held()
    found = [f.message for f in probe.findings]
    assert bool(found) is (fault not in ("clamped", "unit rows")), found


@pytest.mark.parametrize("slow", [1e-5, 3e-2])
def test_each_parameter_group_is_judged_by_its_own_lost_updates(tmp_path, slow):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3)).bfloat16()
    groups = [{"params": list(model[0].parameters()), "lr": slow}, {"params": list(model[2].parameters())}]
    optimizer = torch.optim.SGD(groups, 0.3)

    def step(i: int) -> Tensor:
        return (model(drawn(0, 32, 3).bfloat16()).float() - 5).square().mean()

    found = told(tmp_path, model, step, 2, optimizer)
    assert found == ({"rounded_updates": "0.weight"} if slow < 1e-2 else {})


@pytest.mark.parametrize("fault", ["", "shuffled"])
def test_a_classifier_is_better_than_the_shares_of_its_classes(tmp_path, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def step(i: int) -> Tensor:
        x = drawn(i, 256, 3)
        kinds = x.argmax(1)
        return functional.cross_entropy(model(x), kinds[torch.randperm(256)] if fault else kinds)

    assert told(tmp_path, model, step, 30) == ({"trivial_answer": "loss"} if fault else {})


# ---- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "fault", "rule"),
    [
        (ranks.replicas, "weights_never_equal", "replicas"),
        (ranks.fresh, "weights_never_equal", "replicas"),
        (ranks.fresh, "", ""),
        (ranks.tokens, "mean_of_rank_means", "weighed_targets"),
        (ranks.tokens, "", ""),
        (ranks.normalised, "statistics_without_gradient", "reduced_statistics"),
        (ranks.normalised, "", ""),
        (ranks.halves, "", ""),  # a bias that begins equal beside a matrix that does not is no replica
    ],
)
def test_what_is_equal_or_summed_over_ranks(monkeypatch, program, fault, rule):
    monkeypatch.setattr(ranks, "STEPS", 2)
    assert {finding["rule"] for finding in alarms(run(program, fault, ranks=2))} == ({rule} if rule else set())
