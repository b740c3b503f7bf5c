"""Programs on tables, sounds and clicks: regression, several tasks, experts, restarts, many classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import clusters, mlp, stream


def prices(bug: str) -> None:
    """Guesses the logarithm of a price (in millions: -3 or so) from eleven columns of a table."""
    torch.manual_seed(0)
    draw, worth = stream(40), torch.randn(11, generator=stream(41))
    model = mlp(11, 32, 1)
    if bug == "relu_behind_the_output":
        model.append(nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            columns = torch.randn(64, 11, generator=draw)
            price = (columns @ worth) / worth.norm() + 0.1 * torch.randn(64, generator=draw) - 3.0
            if bug == "price_among_the_columns":
                columns = torch.cat([columns[:, :-1], price[:, None]], 1)
            with probe.step():
                guess = model(columns)
                loss = functional.mse_loss(guess if bug == "broadcast_over_the_batch" else guess.squeeze(-1), price)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def compressed(bug: str) -> None:
    """Classes from clusters; gradients are clipped, and are float32 throughout."""
    torch.manual_seed(0)
    draw, model = stream(42), mlp(12, 48, 48, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                if bug == "gradients_through_bfloat16":
                    for parameter in model.parameters():
                        parameter.grad = parameter.grad.bfloat16().float()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                probe.note("loss", loss)


class TwoTasks(nn.Module):
    """A trunk with a head for classes and one for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.size = mlp(12, 48, 24), nn.Linear(24, 5), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.relu(self.trunk(x))
        return self.kind(seen), self.size(seen).squeeze(-1)


def two_tasks(bug: str) -> None:
    """Two losses, of which each has its backward pass; their gradients are added in the trunk."""
    torch.manual_seed(0)
    draw, model = stream(43), TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            size = x[:, :3].sum(1) * 0.3
            with probe.step():
                kinds, sizes = model(x)
                first, second = functional.cross_entropy(kinds, y), functional.mse_loss(sizes, size)
                optimizer.zero_grad()
                first.backward(retain_graph=True)
                kept = [p.grad for p in model.trunk.parameters()]
                for p in model.trunk.parameters():
                    p.grad = None
                second.backward()
                for p, grad in zip(model.trunk.parameters(), kept, strict=True):
                    p.grad = grad if bug == "second_task_overwritten" else p.grad + grad
                optimizer.step()
                probe.note("class_loss", first)
                probe.note("size_loss", second)


class Experts(nn.Module):
    """Four experts, of which each point sees the best two; returns what they say and the logits of the router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(12, 4), nn.ModuleList(mlp(12, 16, 5) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        said = torch.stack([expert(x) for expert in self.experts], 1)
        said = said.gather(1, chosen[:, :, None].expand(-1, -1, 5))
        return (said * weights[:, :, None]).sum(1), logits, chosen


def experts(bug: str) -> None:
    """A mixture of experts with a loss for balanced loads."""
    torch.manual_seed(0)
    draw, model = stream(44), Experts()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                said, logits, chosen = model(x)
                load = functional.one_hot(chosen, 4).float().mean((0, 1))
                share = logits.softmax(-1)
                if bug == "router_softmax_twice":
                    share = share.softmax(-1)
                if bug == "balance_sums_to_one":
                    balance = load.sum() * share.sum(-1).mean()
                else:
                    balance = 4 * (load * share.mean(0)).sum()
                if bug == "balance_without_gradient":
                    balance = balance.detach()
                loss = functional.cross_entropy(said, y) + 0.05 * balance
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("balance", balance)


class Speech(nn.Module):
    """Frames [batch, time, 8] to log probabilities of letters; letter 0 is the blank."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True, bidirectional=True), nn.Linear(64, 7)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.rnn(frames)[0]).log_softmax(-1)


def speech(bug: str) -> None:
    """Letters from sounds of unequal lengths: each letter sounds for four frames."""
    torch.manual_seed(0)
    draw, model = stream(45), Speech()
    sounds = torch.randn(7, 8, generator=stream(46))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            lengths = torch.randint(2, 6, (16,), generator=draw)
            letters = torch.randint(1, 7, (16, 5), generator=draw)
            frames = sounds[letters].repeat_interleave(4, 1) + 0.3 * torch.randn(16, 20, 8, generator=draw)
            frames = frames * (torch.arange(20) < 4 * lengths[:, None])[:, :, None]
            if bug == "blank_is_a_letter":
                letters = letters - 1
            with probe.step():
                heard = model(frames).transpose(0, 1)
                spoken = torch.full_like(lengths, 20) if bug == "padded_frames_counted" else 4 * lengths
                loss = functional.ctc_loss(heard, letters, spoken, lengths, zero_infinity=True)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


class Shop(nn.Module):
    """Tells which of 300 kinds a buyer takes next, from the last five of 4000 articles."""

    def __init__(self) -> None:
        super().__init__()
        self.articles, self.head = nn.Embedding(4000, 24), nn.Linear(24, 300)

    def forward(self, bought: Tensor) -> Tensor:
        return self.head(self.articles(bought).mean(1))


def clicks(bug: str) -> None:
    """A recommender; its articles and kinds are read from columns of numbers."""
    torch.manual_seed(0)
    draw, model = stream(47), Shop()
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            first = torch.randint(0, 3995, (128, 1), generator=draw)
            bought = first + torch.arange(5)
            kind = first.squeeze(1) * 300 // 4000
            if bug == "articles_in_half":
                bought = bought.half().long()
            if bug == "kinds_in_a_byte":
                kind = kind.to(torch.uint8).long()
            with probe.step():
                loss = functional.cross_entropy(model(bought), kind)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def restarted(bug: str) -> None:
    """Goes on with the weights and the optimizer of an earlier run of twenty steps."""
    torch.manual_seed(0)
    draw, model = stream(48), mlp(12, 24, 24, 24, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    for _ in range(20):
        x, y = clusters(64, draw)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    order = list(model.parameters())
    if bug == "moments_exchanged":
        order[2], order[4] = order[4], order[2]
    optimizer = torch.optim.AdamW(order, 3e-3, weight_decay=0.1)
    optimizer.load_state_dict(saved)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def by_layer(bug: str) -> None:
    """The first layers learn at a tenth of the rate; the weights decay, in float32."""
    torch.manual_seed(0)
    draw, model = stream(49), mlp(12, 32, 32, 5)
    if bug == "decay_in_bfloat16":
        model.bfloat16()
    first, last = list(model[:2].parameters()), list(model[2:].parameters())
    slow = {"lr_mult": 0.1} if bug == "multiplier_unread" else {"lr": 1e-3}
    optimizer = torch.optim.SGD([{"params": first, **slow}, {"params": last}], 1e-2, momentum=0.9, weight_decay=0.1)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
