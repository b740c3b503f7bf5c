"""Policies: an actor with a critic, and PPO in one file, on a small walk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.bugs.open_bench.bug import Watch


class Walk:
    """Many walkers on a line [-1, 1]; each is rewarded for being near the middle, and starts anew after 20 steps at most."""

    def __init__(self, count: int, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.at = torch.rand(count, generator=self.g) * 2 - 1
        self.speed, self.age = torch.zeros(count), torch.randint(0, 20, (count,), generator=self.g)

    def seen(self) -> Tensor:
        return torch.stack([self.at, self.speed, self.at.abs()], 1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        push = (action.float() - 1) * 0.05
        self.speed = 0.9 * self.speed + push + 0.02 * torch.randn(len(self.at), generator=self.g)
        self.at = (self.at + self.speed).clamp(-1, 1)
        self.age += 1
        done = self.age >= 20
        fresh = torch.rand(len(self.at), generator=self.g) * 2 - 1
        reward = 1 - self.at.abs()
        self.at, self.speed = torch.where(done, fresh, self.at), torch.where(done, 0.0, self.speed)
        self.age = torch.where(done, 0, self.age)
        return reward, done.float()


class Agent(nn.Module):
    """CleanRL's agent: a critic and an actor."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 3))

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = torch.distributions.Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def a2c(bug: str, watch: Watch) -> None:
    torch.manual_seed(30)
    walk, agent = Walk(16, 30), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)
    with watch.loop(agent, optimizer) as probe:
        for _update in range(70):
            with probe.step():
                seen, rewards, ends, logs, values, entropy = [], [], [], [], [], []
                for _ in range(5):
                    seen.append(walk.seen())
                    action, log, h, value = agent.get_action_and_value(seen[-1])
                    reward, done = walk.step(action)
                    for kept, new in ((rewards, reward), (ends, done), (logs, log), (values, value), (entropy, h)):
                        kept.append(new)
                with torch.no_grad():
                    following = agent.critic(walk.seen()).squeeze(-1)
                targets = []
                for i in reversed(range(5)):
                    ahead = values[i + 1].squeeze(-1) if i < 4 and bug == "target_not_detached" else following
                    following = rewards[i] + 0.95 * (1 - ends[i]) * ahead
                    targets.insert(0, following)
                target, value = torch.cat(targets), torch.cat(values)
                if bug == "advantage_broadcast":
                    advantage = target - value.detach()
                else:
                    advantage = target.detach() - value.detach().squeeze(-1)
                policy_loss = -(torch.cat(logs) * advantage.detach()).mean()
                value_loss = (target - value.squeeze(-1)).pow(2).mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * torch.cat(entropy).mean()
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                probe.note("loss", loss)
                probe.note("grad_norm", norm)


def ppo(bug: str, watch: Watch) -> None:
    """Each update trains for two epochs on the steps of one rollout; a step of the probe is one of its minibatches."""
    torch.manual_seed(31)
    walk, agent = Walk(32, 31), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    with watch.loop(agent, optimizer) as probe:
        for _update in range(16):
            with torch.no_grad():
                obs, actions, logs, rewards, dones, values = [], [], [], [], [], []
                for _ in range(8):
                    obs.append(walk.seen())
                    action, log, _h, value = agent.get_action_and_value(obs[-1])
                    reward, done = walk.step(action)
                    for kept, new in ((actions, action), (logs, log), (rewards, reward), (dones, done)):
                        kept.append(new)
                    values.append(value.squeeze(-1))
                following, gae, advantages = agent.critic(walk.seen()).squeeze(-1), torch.zeros(32), []
                for t in reversed(range(8)):
                    delta = rewards[t] + 0.95 * following * (1 - dones[t]) - values[t]
                    gae = delta + 0.95 * 0.95 * (1 - dones[t]) * gae
                    advantages.insert(0, gae)
                    following = values[t]
            b_obs, b_actions, b_logs = torch.cat(obs), torch.cat(actions), torch.cat(logs)
            b_advantages = torch.cat(advantages)
            b_returns = b_advantages + torch.cat(values)
            for _epoch in range(2):
                for chosen in torch.randperm(256).split(128):
                    with probe.step():
                        _, new_log, entropy, value = agent.get_action_and_value(b_obs[chosen], b_actions[chosen])
                        old = new_log.detach() if bug == "ratio_always_one" else b_logs[chosen]
                        ratio = (new_log - old).exp()
                        mb = b_advantages[chosen]
                        mb = (mb - mb.mean()) / (mb.std() + 1e-8)
                        policy_loss = torch.max(-mb * ratio, -mb * ratio.clamp(0.8, 1.2)).mean()
                        value_loss = 0.5 * (value.squeeze(-1) - b_returns[chosen]).pow(2).mean()
                        loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
                        optimizer.zero_grad()
                        loss.backward()
                        norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                        optimizer.step()
                        probe.note("loss", loss)
                        probe.note("grad_norm", norm)
                        probe.note("ratio", ratio.mean())
