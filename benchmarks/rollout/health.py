"""What the rule `rollout` says of GRPO trainings with a planted fault, and of healthy ones.

The trainings are loops of plain PyTorch over a tiny Llama of transformers: sample, reward, centre by prompt, update. Each fault
is one line of such a loop, from the first step or from the middle on.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import trainprobe
from benchmarks.rollout.models import VOCABULARY, model_of

STEPS, BREAKS = 40, 24
PROMPTS, EACH, PROMPT, LONGEST = 4, 4, 4, 16
END = 2
Tensor = torch.Tensor


@dataclass(frozen=True)
class Loop:
    """A training: what a case changes of it."""

    name: str
    fault: str = ""
    """What the first finding of the rule must name; empty for a healthy training."""
    temperature: Callable[[int], float] = lambda step: 1.0
    reward: Callable[[Tensor, Tensor, int], Tensor] = lambda ids, mask, step: _wish(ids, mask)
    logits: Callable[[Tensor, int, int], Tensor] = lambda logits, at, step: logits
    """Changes the logits [rows, vocabulary] that the `at`-th token is sampled from."""
    advantages: Callable[[Tensor, Tensor, int], Tensor] = lambda rewards, groups, step: _centred(rewards, groups)
    mask: Callable[[Tensor, Tensor, int], Tensor] = lambda ids, mask, step: mask
    engine: Callable[[Tensor, int], Tensor] = lambda logprobs, step: logprobs
    head: Callable[[int], float] = lambda step: 1.0
    """What the weights of the last layer are multiplied by, once, at a step."""
    rate: float = 1e-3
    pieces: int = 1
    """Updates for each batch of rollouts."""


def _wish(ids: Tensor, mask: Tensor) -> Tensor:
    """Reward tokens of the lower half of the vocabulary, and an end."""
    return ((ids < VOCABULARY // 2) & mask).sum(1) / mask.sum(1) + 0.5 * (ids == END).any(1)


def _centred(rewards: Tensor, groups: Tensor, *, least: float = 1e-4, scale: bool = True) -> Tensor:
    of_group = rewards.view(-1, EACH)
    spread = of_group.std(1, keepdim=True) + least if scale else 1.0
    return ((of_group - of_group.mean(1, keepdim=True)) / spread).view(-1)


def _since(step: int, changed: Any, before: Any) -> Any:
    return changed if step >= BREAKS else before


def _ends_at(logits: Tensor, at: int, where: int) -> Tensor:
    forced = torch.full_like(logits, -1e4)
    forced[:, END] = 1e4
    return forced if at >= where else logits


def _never_ends(logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[:, END] = -1e4
    return logits


def _says_again(logits: Tensor) -> Tensor:
    logits = torch.zeros_like(logits)
    logits[:, 7] = 8.0
    return logits


def faults() -> list[Loop]:
    """Return the trainings with a fault."""
    return [
        Loop("constant_reward", "rewards", reward=lambda ids, mask, step: torch.ones(len(ids))),
        Loop("reward_breaks", "rewards", reward=lambda ids, mask, step: _since(step, torch.zeros(len(ids)), _wish(ids, mask))),
        Loop(
            "divided_by_noise",
            "equal rewards",
            reward=lambda ids, mask, step: _since(step, 0.7 + 2e-7 * torch.arange(len(ids)), _wish(ids, mask)),
            advantages=lambda r, g, step: _centred(r, g, least=1e-12),
        ),
        Loop(
            "cut_across_prompts",
            "across prompts",
            advantages=lambda r, g, step: _centred(r.view(PROMPTS, EACH).T.reshape(-1), g).view(EACH, PROMPTS).T.reshape(-1),
        ),
        Loop("of_another_row", "across|follow", advantages=lambda r, g, step: _centred(r, g).roll(1)),
        Loop("turned_round", "do not follow", advantages=lambda r, g, step: -_centred(r, g)),
        Loop("advantages_lost", "advantages", advantages=lambda r, g, step: _since(step, torch.zeros_like(r), _centred(r, g))),
        Loop("one_seed", "same tokens", logits=lambda logits, at, step: logits[::EACH].repeat_interleave(EACH, 0) * 1e6),
        Loop("says_again", "repeat", logits=lambda x, at, step: _since(step, _says_again(x), x)),
        Loop("ends_at_once", "short", logits=lambda x, at, step: _since(step, _ends_at(x, at, 0), x)),
        Loop("never_ends", "end", logits=lambda x, at, step: _since(step, _never_ends(x), _ends_at(x, at, 9))),
        Loop("gibberish", "entropy", head=lambda step: 1e-3 if step == BREAKS else 1.0),
        Loop("collapse", "entropy", head=lambda step: 30.0 if step == BREAKS else 1.0),
        Loop("behind_the_end", "behind the end", mask=lambda ids, mask, step: torch.ones_like(mask)),
        Loop("old_engine", "weights", engine=lambda x, step: _since(step, x - 6 * torch.rand_like(x), x)),
        Loop("nothing_counts", "no token", mask=lambda ids, mask, step: _since(step, torch.zeros_like(mask), mask)),
        Loop(
            "reward_nan",
            "is nan",
            reward=lambda ids, mask, step: _since(step, torch.full((len(ids),), torch.nan), _wish(ids, mask)),
            advantages=lambda r, g, step: _centred(r, g).nan_to_num(0.0),
        ),
    ]


def healthy() -> list[Loop]:
    """Return trainings without a fault."""
    half = VOCABULARY // 2
    return [
        Loop("grpo"),
        Loop("not_scaled", advantages=lambda r, g, step: _centred(r, g, scale=False)),
        Loop("of_the_batch", advantages=lambda r, g, step: (r - r.mean()) / (r.std() + 1e-4)),
        Loop("value_baseline", advantages=lambda r, g, step: r - 0.6),
        Loop(
            "leave_one_out",
            advantages=lambda r, g, step: (
                r.view(-1, EACH) - (r.view(-1, EACH).sum(1, keepdim=True) - r.view(-1, EACH)) / 3
            ).view(-1),
        ),
        Loop("binary", reward=lambda ids, mask, step: (ids[:, 0] < half).float()),
        Loop("rare_reward", reward=lambda ids, mask, step: (ids[:, 0] < 16).float()),
        Loop("half_is_solved", reward=lambda ids, mask, step: torch.where(torch.arange(len(ids)) < 8, 1.0, _wish(ids, mask))),
        Loop("penalty", advantages=lambda r, g, step: _centred(r - 0.01 * torch.rand_like(r), g)),
        Loop("all_are_cut", logits=lambda x, at, step: _never_ends(x)),
        Loop("grows_longer", logits=lambda x, at, step: _ends_at(x, at, 3 + step // 4)),
        Loop("grows_shorter", logits=lambda x, at, step: _ends_at(x, at, max(6, 15 - step // 4))),
        Loop("sharpens", logits=lambda x, at, step: x * (1 + step / 20)),
        Loop("temperature", temperature=lambda step: 0.7),
        Loop("off_policy", pieces=2, rate=2e-3),
        Loop("learns_fast", rate=2e-3),
        Loop("engine_in_bf16", engine=lambda x, step: x + 0.02 * torch.randn_like(x)),
        Loop("few_words", logits=lambda x, at, step: x + torch.where(torch.arange(x.shape[1]) < 8, 6.0, 0.0)),
        Loop("clipped_reward", reward=lambda ids, mask, step: _wish(ids, mask).clamp(0.4, 0.9)),
        Loop("large_rewards", reward=lambda ids, mask, step: 1000 * _wish(ids, mask)),
    ]


def run(case: Loop, seed: int = 0) -> list[str]:
    """Train, and return the messages of what the rule `rollout` found, in order."""
    torch.manual_seed(seed)
    model = model_of("llama", seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        plan = {"level": "off", "output": folder, "audit": False, "monitor": True}
        with trainprobe.watch(model, optimizer, plan=plan) as probe:
            for step in range(STEPS):
                with probe.step():
                    _step(case, model, optimizer, probe, step)
        return [finding.message for finding in probe.findings if finding.rule == "rollout"]


def _step(case: Loop, model: Any, optimizer: Any, probe: Any, step: int) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(case.head(step))
    prompts = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(EACH, 0)
    ids, sampled = _sample(case, model, prompts, step)
    ended = (ids == END).cumsum(1) - (ids == END).int()
    mask = case.mask(ids, ended == 0, step)
    groups = torch.arange(PROMPTS).repeat_interleave(EACH)
    rewards = case.reward(ids, ended == 0, step).float()
    advantages = case.advantages(rewards, groups, step)
    with torch.no_grad():
        old, entropy = _score(model, prompts, ids)
    trainprobe.note_rollout(
        probe,
        {
            "prompts": prompts,
            "tokens": ids,
            "mask": mask,
            "rewards": rewards,
            "advantages": advantages,
            "trainer_logprobs": old,
            "engine_logprobs": case.engine(old, step) if case.temperature(step) == 1.0 else sampled,
            "entropy": entropy,
        },
        end_token=END,
    )
    for _ in range(case.pieces):
        logprobs, _ = _score(model, prompts, ids)
        ratio = torch.exp(logprobs - old)
        per_token = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        loss = -(per_token * mask).sum() / mask.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _sample(case: Loop, model: Any, prompts: Tensor, step: int) -> tuple[Tensor, Tensor]:
    ids, scores = prompts, []
    with torch.no_grad():
        for at in range(LONGEST):
            logits = case.logits(model(ids).logits[:, -1] / case.temperature(step), at, step)
            token = torch.multinomial(logits.softmax(-1), 1)
            scores.append(logits.log_softmax(-1).gather(1, token))
            ids = torch.cat([ids, token], 1)
    return ids[:, PROMPT:], torch.cat(scores, 1)


def _score(model: Any, prompts: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(torch.cat([prompts, ids], 1)).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logits.gather(2, ids[..., None])[..., 0], -(logits.exp() * logits).sum(-1).detach()


def results(seed: int = 0) -> Iterator[tuple[Loop, list[str]]]:
    """Run every training; yield it with what was found."""
    for case in [*faults(), *healthy()]:
        yield case, run(case, seed)
