"""Programs that learn from rewards and preferences."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import Causal, mlp, stream, text

VOCAB = 16


class ActorCritic(nn.Module):
    """A policy over four actions and a value, from a state of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(8, 32, 4, act=nn.Tanh), mlp(8, 32, 1, act=nn.Tanh)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


def ppo(bug: str) -> None:
    """Clipped policy gradients: a rollout of 128 states serves two epochs of two mini-batches."""
    torch.manual_seed(0)
    draw, model = stream(10), ActorCritic()
    worth = torch.randn(8, 4, generator=stream(11))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS // 4):
            states = torch.randn(128, 8, generator=draw)
            with torch.no_grad():
                logits, values = model(states)
                actions = torch.multinomial(logits.softmax(-1), 1, generator=draw).squeeze(-1)
                old = logits.log_softmax(-1).gather(-1, actions[:, None]).squeeze(-1)
            rewards = (states @ worth).gather(-1, actions[:, None]).squeeze(-1)
            advantages = rewards - values
            if bug == "advantages_over_one_value":
                rows = advantages[:, None]
                advantages = ((rows - rows.mean(1, keepdim=True)) / (rows.std(1, False, keepdim=True) + 1e-8)).squeeze(1)
            else:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            for part in (*torch.arange(128).chunk(2), *torch.arange(128).chunk(2)):
                with probe.step():
                    logits, values = model(states[part])
                    logp = logits.log_softmax(-1).gather(-1, actions[part, None]).squeeze(-1)
                    before = logp.detach() if bug == "ratio_always_one" else old[part]
                    ratio = (logp - before).exp()
                    gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
                    value_loss = functional.mse_loss(values, rewards[part])
                    loss = -gain.mean() + 0.5 * value_loss
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)
                    probe.note("value_loss", value_loss)
                    probe.note("ratio", ratio.mean())
                    probe.note("clip_fraction", ((ratio - 1).abs() > 0.2).float().mean())


def sampled(model: nn.Module, prompts: Tensor, length: int, draw: torch.Generator) -> Tensor:
    """Return prompts with `length` sampled tokens behind them."""
    ids = prompts
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=draw)], 1)
    return ids


def logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log probability of each token but the first, [batch, time - 1]."""
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def grpo(bug: str) -> None:
    """Group-relative policy gradients: four answers a prompt, judged against each other."""
    torch.manual_seed(0)
    draw, model, group, length = stream(12), Causal(VOCAB, 10), 4, 5
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            prompts = text(8, 4, VOCAB, draw)
            ids = sampled(model, prompts.repeat_interleave(group, 0), length, draw)
            answers = ids[:, 4:]
            rewards = (answers % 2 == 0).float().mean(1) + (ids[:, 0] / VOCAB)  # prompts differ in what can be had
            grouped = rewards.view(-1, group)
            axis = 0 if bug == "groups_across_prompts" else 1
            centred = (grouped - grouped.mean(axis, keepdim=True)) / (grouped.std(axis, keepdim=True) + 1e-4)
            advantages = centred.reshape(-1)
            with probe.step():
                logp = logprobs(model, ids)
                counted = torch.ones_like(logp)
                if bug != "prompt_is_rewarded":
                    counted[:, :3] = 0
                loss = -(logp * advantages[:, None] * counted).sum() / counted.sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("reward", rewards.mean())


def dqn(bug: str) -> None:
    """Values of actions, from a replay buffer and a slow target network."""
    torch.manual_seed(0)
    draw, online = stream(13), mlp(6, 32, 3)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 3e-3)
    worth = torch.randn(6, 3, generator=stream(14))
    states, following = torch.randn(512, 6, generator=draw), torch.randn(512, 6, generator=draw)
    actions = torch.randint(0, 3, (512,), generator=draw)
    rewards = (states @ worth).gather(1, actions[:, None]).squeeze(1)
    with trainprobe.watch(online, optimizer) as probe:
        for _ in range(STEPS):
            part = torch.randint(0, 512, (64,), generator=draw)
            with probe.step():
                with torch.no_grad():
                    wanted = rewards[part] + 0.9 * target(following[part]).max(1).values
                value = online(states[part]).gather(1, actions[part, None]).squeeze(1)
                loss = functional.smooth_l1_loss(value, wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                if bug == "rate_inverted":
                    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                        slow.data.mul_(0.01).add_(fast.data, alpha=0.99)
                elif bug == "target_copies_itself":
                    target.load_state_dict(target.state_dict())
                else:
                    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                        slow.data.mul_(0.99).add_(fast.data, alpha=0.01)


def dpo(bug: str) -> None:
    """Direct preferences, against a frozen reference."""
    torch.manual_seed(0)
    draw, policy = stream(15), Causal(VOCAB, 12, dropout=0.1)
    reference = copy.deepcopy(policy).requires_grad_(False)
    if bug != "reference_drops_out":
        reference.eval()
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    prompts = text(64, 5, VOCAB, draw)
    with trainprobe.watch(policy, optimizer) as probe:
        for _ in range(STEPS):
            prompt = prompts[torch.randint(0, 64, (16,), generator=draw)]
            better = torch.cat([prompt, torch.randint(0, 8, (16, 6), generator=draw)], 1)
            worse = torch.cat([prompt, torch.randint(8, 16, (16, 6), generator=draw)], 1)
            with probe.step():
                with torch.no_grad():
                    base = [logprobs(reference, ids)[:, 4:].sum(1) for ids in (better, worse)]
                own = [logprobs(policy, ids)[:, 4:].sum(1) for ids in (better, worse)]
                margin = (own[0] - base[0]) - (own[1] - base[1])
                loss = -functional.logsigmoid(0.1 * margin).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("margin", margin.mean())


class Judge(Causal):
    """A language model whose head gives one number a position."""

    def __init__(self) -> None:
        super().__init__(VOCAB + 1, 16)
        self.head = nn.Linear(32, 1, bias=False)


def reward_model(bug: str) -> None:
    """Learns which of two padded answers is better, by the value at the end of each."""
    torch.manual_seed(0)
    draw, model = stream(16), Judge()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    at = torch.arange(16)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            lengths = torch.randint(6, 14, (2, 16), generator=draw)
            pair = torch.randint(0, 8, (2, 16, 16), generator=draw) + torch.tensor([0, 6])[:, None, None]
            pair = pair.masked_fill(at >= lengths[:, :, None], VOCAB)
            with probe.step():
                values = model(pair.flatten(0, 1)).squeeze(-1).unflatten(0, (2, 16))
                last = torch.full_like(lengths, 15) if bug == "reward_at_the_padding" else lengths - 1
                scores = values.gather(2, last[:, :, None]).squeeze(2)
                loss = -functional.logsigmoid(scores[0] - scores[1]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
