"""Programs of two gloo ranks, which exchange by hand as many do without a wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import Causal, clusters, mlp, stream, text


def average_gradients(model: nn.Module) -> None:
    """Put the mean over ranks in place of each gradient."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def replicas(bug: str) -> None:
    """Data parallel by hand, which goes on from the state of an earlier run."""
    rank = dist.get_rank()
    torch.manual_seed(rank if bug == "weights_never_equal" else 0)
    model = mlp(12, 32, 5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    before = stream(59)
    for _ in range(10):  # the earlier run, equal on all ranks
        x, y = clusters(32, before)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if bug == "moments_on_first_rank_only" and rank > 0:
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    if bug == "counters_apart" and rank > 0:
        for state in optimizer.state.values():
            state["step"].fill_(1)
    draw = stream(60 + rank)
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            count = 24 + 16 * ((rank + step) % 2)
            x, y = clusters(count, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y, reduction="sum")
                optimizer.zero_grad()
                loss.backward()
                counts = torch.tensor(float(len(x)))
                if bug != "divided_by_own_count":
                    dist.all_reduce(counts)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= counts
                optimizer.step()
                probe.note("loss", loss.detach() / len(x))


def fresh(bug: str) -> None:
    """Data parallel by hand from the first step on, where norms and their biases begin equal whatever the seed."""
    torch.manual_seed(dist.get_rank() if bug == "weights_never_equal" else 0)
    model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 5))
    optimizer, draw = torch.optim.AdamW(model.parameters(), 1e-3), stream(62 + dist.get_rank())
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                average_gradients(model)
                optimizer.step()


def readers(bug: str) -> None:
    """Data parallel by hand; each rank reads its half of the data."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1 + rank)  # what is dropped differs between ranks
    data = TensorDataset(*clusters(32 * STEPS, stream(61)))
    sampler = None if bug == "ranks_read_the_same" else DistributedSampler(data, shuffle=False)
    with trainprobe.watch(model, optimizer) as probe:
        for _, (points, kinds) in zip(range(STEPS), DataLoader(data, 16, sampler=sampler), strict=False):
            with probe.step():
                loss = functional.cross_entropy(model(points), kinds)
                optimizer.zero_grad()
                loss.backward()
                average_gradients(model)
                optimizer.step()
                probe.note("loss", loss)


def actor(bug: str) -> None:
    """Policy gradients on two ranks whose worlds pay differently; advantages are standardised over both."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    draw, policy = stream(62 + rank), mlp(8, 32, 4, act=nn.Tanh)
    worth = torch.randn(8, 4, generator=stream(64))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    with trainprobe.watch(policy, optimizer) as probe:
        for _ in range(STEPS):
            states = torch.randn(64, 8, generator=draw)
            with torch.no_grad():
                actions = torch.multinomial(policy(states).softmax(-1), 1, generator=draw)
            rewards = (1 + 3 * rank) * (states @ worth).gather(1, actions).squeeze(1) + 2.0 * rank
            if bug == "advantages_by_rank":
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            else:
                moments = torch.stack([rewards.mean(), rewards.square().mean()])
                dist.all_reduce(moments)
                mean, square = moments / dist.get_world_size()
                advantages = (rewards - mean) / ((square - mean * mean).sqrt() + 1e-8)
            with probe.step():
                logp = policy(states).log_softmax(-1).gather(1, actions).squeeze(1)
                loss = -(logp * advantages).mean()
                optimizer.zero_grad()
                loss.backward()
                average_gradients(policy)
                optimizer.step()
                probe.note("loss", loss)
                probe.note("reward", rewards.mean())


def tokens(bug: str) -> None:
    """A language model on two ranks with rows of unequal lengths; the loss is the mean over all tokens."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    draw, model = stream(65 + rank), Causal(24, 24)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(8, 25, 24, draw)
            lengths = torch.randint(4, 24, (8,), generator=draw) if rank else torch.full((8,), 24)
            labels = ids[:, 1:].masked_fill(torch.arange(24) >= lengths[:, None], -100)
            with probe.step():
                losses = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum")
                count = (labels != -100).sum()
                if bug != "mean_of_rank_means":
                    dist.all_reduce(count)
                    count = count / dist.get_world_size()
                loss = losses / count
                optimizer.zero_grad()
                loss.backward()
                average_gradients(model)
                optimizer.step()
                probe.note("loss", loss)


class TwoViews(nn.Module):
    """Embeds two views of a point."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.caption = mlp(12, 48, 16), mlp(12, 48, 16)

    def forward(self, image: Tensor, caption: Tensor) -> tuple[Tensor, Tensor]:
        return functional.normalize(self.image(image), dim=-1), functional.normalize(self.caption(caption), dim=-1)


def contrast(bug: str) -> None:
    """Pairs of views, told from those of both ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    draw, model = stream(67 + rank), TwoViews()
    turn = torch.randn(12, 12, generator=stream(69)) / 12**0.5
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            image = torch.randn(16, 12, generator=draw)
            with probe.step():
                a, b = model(image, image @ turn)
                if bug == "gathered_without_gradient":
                    seen = [torch.empty_like(b) for _ in range(2)]
                    dist.all_gather(seen, b)
                    seen[rank] = b
                else:
                    seen = list(all_gather(b))
                loss = functional.cross_entropy(10 * a @ torch.cat(seen).T, torch.arange(16) + 16 * rank)
                optimizer.zero_grad()
                loss.backward()
                average_gradients(model)
                optimizer.step()
                probe.note("loss", loss)


class Standardised(nn.Module):
    """Standardises over the batch of all ranks, by hand."""

    def __init__(self, differentiable: bool) -> None:
        super().__init__()
        self.differentiable = differentiable

    def forward(self, x: Tensor) -> Tensor:
        moments = torch.stack([x.mean(0), x.square().mean(0)])
        if self.differentiable:
            moments = all_reduce(moments)
        else:
            moments = moments.detach().clone()
            dist.all_reduce(moments)
        mean, square = moments / dist.get_world_size()
        return (x - mean) / (square - mean * mean + 1e-5).sqrt()


def normalised(bug: str) -> None:
    """Data parallel, with batch statistics of both ranks."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    draw = stream(70 + rank)
    model = nn.Sequential(nn.Linear(12, 32), Standardised(bug != "statistics_without_gradient"), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                average_gradients(model)
                optimizer.step()
                probe.note("loss", loss)


class Halves(nn.Module):
    """A layer of which each rank holds half of the outputs, and one of which each holds half of the inputs."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.summed = summed
        self.enter, self.columns, self.rows, self.leave = (
            nn.Linear(12, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        entered = torch.relu(self.enter(x))
        half = torch.relu(self.columns(Summed.apply(entered) if self.summed else entered))
        return self.leave(Added.apply(self.rows(half)))


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Added(torch.autograd.Function):
    """The sum over ranks, whose gradient is passed on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def halves(bug: str) -> None:
    """Tensor parallel by hand: both ranks see the same data, and `enter` and `leave` are equal on both."""
    torch.manual_seed(0)
    draw, model = stream(72), Halves(summed=bug != "input_gradient_not_summed")
    if dist.get_rank():
        with torch.no_grad():
            for layer in (model.columns, model.rows):
                layer.weight.copy_(torch.randn(16, 16, generator=stream(73)) / 4)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
