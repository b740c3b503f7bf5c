"""The series of a batch of rollouts against NumPy, and what the rule `rollout` says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import trainprobe
from benchmarks.rollout.health import faults, healthy, run
from trainprobe.errors import UsageError
from trainprobe.monitor.rules import rollout as rule
from trainprobe.rollout.health import note_rollout, rollout_numbers

PROMPTS, EACH, LENGTH, END = 3, 4, 24, 2


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = PROMPTS * EACH
    tokens = torch.randint(3, 6, (n, LENGTH), generator=generator)
    tokens[: n // 2, 18] = END
    ends = (tokens == END).cumsum(1) - (tokens == END).int()
    rewards = torch.rand(n, generator=generator)
    of_group = rewards.view(PROMPTS, EACH)
    return {
        "prompts": torch.arange(PROMPTS).repeat_interleave(EACH)[:, None].expand(n, 3),
        "tokens": tokens,
        "mask": ends == 0,
        "rewards": rewards,
        "advantages": ((of_group - of_group.mean(1, keepdim=True)) / of_group.std(1, keepdim=True)).view(-1),
        "trainer_logprobs": -torch.rand(n, LENGTH, generator=generator),
        "engine_logprobs": -torch.rand(n, LENGTH, generator=generator),
        "entropy": torch.rand(n, LENGTH, generator=generator),
    }


def numbers(given: dict[str, torch.Tensor], **kwargs: object) -> dict[str, float]:
    return {name: float(x) for name, x in rollout_numbers(given, **kwargs).items()}  # type: ignore[arg-type]


def test_each_series_is_what_numpy_makes_of_the_batch():
    given = batch()
    got = numbers(given, end_token=END)
    tokens, mask = given["tokens"].numpy(), given["mask"].numpy()
    assert got["length"] == mask.sum(1).mean()
    again = whole = 0
    for row, counted in zip(tokens, mask, strict=True):
        grams = [tuple(row[i : i + 4]) for i in range(LENGTH - 3) if counted[i : i + 4].all()]
        again, whole = again + len(grams) - len(set(grams)), whole + len(grams)
    assert again > 0
    assert got["repeated"] == pytest.approx(again / whole)
    assert got["ended"] == (tokens == END).any(1).mean()
    assert got["behind_end"] == 0
    ratio = (given["trainer_logprobs"].double() - given["engine_logprobs"].double()).numpy()[mask]
    assert got["gap"] == pytest.approx(np.abs(ratio).mean())
    assert got["weight_max"] == pytest.approx(math.exp(ratio.max()))
    weight = np.exp(ratio)
    assert got["effective_share"] == pytest.approx(weight.sum() ** 2 / (weight**2).sum() / len(weight))
    assert got["logprob"] == pytest.approx(given["trainer_logprobs"].double().numpy()[mask].mean())
    assert got["entropy"] == pytest.approx(given["entropy"].double().numpy()[mask].mean())
    rewards = given["rewards"].double().numpy()
    assert (got["reward"], got["reward_spread"]) == (pytest.approx(rewards.mean()), pytest.approx(rewards.std()))
    assert got["advantage"] == pytest.approx(np.sqrt((given["advantages"].double().numpy() ** 2).mean()))
    assert (got["flat_groups"], got["against_reward"], got["alike"]) == (0, 0, 0)
    assert got["off_centre"] < rule.NONE


def test_groups_are_known_by_prompts_by_names_and_by_their_size():
    given = batch()
    given["rewards"] = torch.where(torch.arange(len(given["rewards"])) < EACH, 0.5, given["rewards"])
    by_prompt = numbers(given)
    assert by_prompt["flat_groups"] == pytest.approx(1 / PROMPTS)
    names = [f"prompt {i // EACH}" for i in range(PROMPTS * EACH)]
    without = {key: x for key, x in given.items() if key != "prompts"}
    assert numbers(without | {"uid": names}) == by_prompt  # type: ignore[operator]
    assert numbers(without, group_size=EACH) == by_prompt
    assert "flat_groups" not in numbers(without)
    order = torch.randperm(PROMPTS * EACH)
    shuffled = numbers({key: x[order] for key, x in given.items()})
    assert {k: v for k, v in shuffled.items() if k != "off_blocks"} == pytest.approx(
        {k: v for k, v in by_prompt.items() if k != "off_blocks"}, abs=1e-7
    )


def test_names_of_other_trainers_are_known():
    given = batch()
    theirs = {
        "prompt_ids": given["prompts"],
        "responses": given["tokens"],
        "response_mask": given["mask"].long(),
        "token_level_scores": given["rewards"][:, None] * (torch.arange(LENGTH) == LENGTH - 1),
        "advantages": given["advantages"][:, None].expand(-1, LENGTH),
        "old_log_probs": given["trainer_logprobs"],
        "rollout_log_probs": given["engine_logprobs"],
        "entropys": None,
    }
    ours = numbers({key: x for key, x in given.items() if key != "entropy"})
    assert numbers(theirs) == pytest.approx(ours, abs=1e-7)  # type: ignore[arg-type]


def test_what_areal_leaves_behind_its_advantages_is_one_dictionary_a_prompt_with_all_but_the_tokens_a_place_earlier():
    given, longest = batch(), 5 + LENGTH

    def earlier(x):
        return torch.nn.functional.pad(x, (5, 0)).roll(-1, 1)

    mask = earlier(given["mask"].float())
    whole = {
        "input_ids": torch.cat([torch.ones(PROMPTS * EACH, 5, dtype=torch.long), given["tokens"]], 1),
        "loss_mask": mask,
        "rewards": given["rewards"],
        "advantages": given["advantages"][:, None] * mask,
        "prox_logp": earlier(given["trainer_logprobs"]),
        "logprobs": earlier(given["engine_logprobs"]),
        "kl_rewards": torch.zeros_like(mask),
    }
    cuts = [longest - i for i in range(PROMPTS)]  # each prompt is padded to its own length
    each = [{k: x[EACH * i : EACH * i + EACH] for k, x in whole.items()} for i in range(PROMPTS)]
    short = [{k: x if x.dim() < 2 else x[:, :n] for k, x in group.items()} for group, n in zip(each, cuts, strict=True)]
    for group in short:
        group["loss_mask"] = group["loss_mask"].clone()
        group["loss_mask"][:, -1] = 0
    counted = torch.arange(LENGTH) < torch.tensor(cuts).repeat_interleave(EACH)[:, None] - 5
    ours = {k: x for k, x in given.items() if k != "entropy"}
    assert numbers(whole, group_size=EACH, end_token=END) == pytest.approx(numbers(ours, end_token=END), abs=1e-6)  # type: ignore[arg-type]
    expected = numbers(ours | {"mask": given["mask"] & counted}, end_token=END)
    assert numbers(short, group_size=EACH, end_token=END) == pytest.approx(expected, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reword": torch.ones(3)}, "no name that is known"),
        ({"rewards": torch.ones(3), "advantages": torch.ones(4)}, "different numbers of rollouts"),
        ({"tokens": torch.ones(3, 4), "mask": torch.ones(3, 5)}, "different shapes"),
        ({"tokens": torch.ones(12)}, "different shapes"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_its_names(given, words):
    with pytest.raises(UsageError, match=words):
        rollout_numbers(given)


def test_lists_of_sequences_and_whole_texts_are_taken_as_slime_and_openrlhf_have_them():
    given = batch()
    lengths = [7 + i for i in range(PROMPTS * EACH)]
    names = ("tokens", "mask", "trainer_logprobs", "engine_logprobs")
    cut = {**given, "mask": given["mask"] & (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])}
    expected = numbers(cut | {name: cut[name] * cut["mask"] for name in names[2:]}, end_token=END)
    prompts = [torch.arange(5)] * len(lengths)
    ragged = {
        "tokens": [torch.cat([p, row[:n]]) for p, row, n in zip(prompts, given["tokens"], lengths, strict=True)],
        "loss_masks": [row[:n].long() for row, n in zip(given["mask"], lengths, strict=True)],
        "log_probs": [row[:n] for row, n in zip(given["trainer_logprobs"], lengths, strict=True)],
        "rollout_log_probs": [row[:n] for row, n in zip(given["engine_logprobs"], lengths, strict=True)],
        "rewards": given["rewards"].tolist(),
        "advantages": [x.expand(n) for x, n in zip(given["advantages"], lengths, strict=True)],
    }
    got = numbers(ragged, group_size=EACH, end_token=END)  # type: ignore[arg-type]
    assert got == pytest.approx({name: x for name, x in expected.items() if name != "entropy"}, abs=1e-6)

    @dataclass
    class Experience:
        sequences: torch.Tensor
        action_mask: torch.Tensor
        action_log_probs: torch.Tensor
        rewards: torch.Tensor
        prompts: list[str]
        base_action_log_probs: None = None

    whole = Experience(
        torch.cat([given["prompts"], given["tokens"]], 1),
        given["mask"],
        given["trainer_logprobs"],
        given["rewards"],
        [f"prompt {i // EACH}" for i in range(PROMPTS * EACH)],
    )
    ours = {name: given[name] for name in ("tokens", "mask", "trainer_logprobs", "rewards", "prompts")}
    assert numbers(whole) == pytest.approx(numbers(ours))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("counted", [True, False])
def test_no_series_is_undefined_for_want_of_something_to_count(rows, each, counted):
    given = {name: x[:rows] for name, x in batch().items() if name != "prompts"}
    given |= {"rewards": torch.ones(rows), "mask": given["mask"] & counted}
    got = numbers(given, group_size=each, end_token=END)
    assert all(math.isfinite(x) for x in got.values()), got
    assert got["against_reward"] == 0


def test_a_step_that_is_not_collected_reads_nothing(tmp_path):
    model = torch.nn.Linear(2, 2)
    with trainprobe.watch(model, plan={"level": "off", "output": str(tmp_path), "step": [0], "monitor": True}) as probe:
        for _ in range(2):
            with probe.step():
                collected = probe.tape is not None
                if collected:
                    note_rollout(probe, batch())
                else:
                    note_rollout(probe, {"not": "read"})
                model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("name", ["cut_across_prompts", "says_again"])
def test_a_fault_of_a_training_is_named(name):
    case = next(case for case in faults() if case.name == name)
    assert case.fault in run(case)[0]


def test_a_healthy_training_has_no_finding():
    assert run(healthy()[0]) == []


def test_rewards_that_are_all_equal_turn_no_pair_round():
    given = batch()
    given["rewards"] = torch.full_like(given["rewards"], 0.5)
    given["advantages"] = torch.zeros_like(given["advantages"])
    got = numbers(given)
    assert (got["flat_groups"], got["against_reward"]) == (1, 0)
    assert all(math.isfinite(number) for number in got.values())
