"""Models that one loop trains side by side, each by its own optimizer: all are watched, and what is wrong is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.launch import launch
from tests.integrations.records import recorded
from tests.lockstep import bits_of
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.left_out import told
from trainprobe.integrations.torch_loop import attach_to_script
from trainprobe.monitor.judge_command import judged
from trainprobe.monitor.run_folder import read_frames

STEPS = 24
LONG = 60
OVERFLOW = 10  # a step
CLIP = 0.01
PLAN = {"monitor": True, "audit": {"every": 1}}
Loop = Callable[[str], Iterator[Tensor]]  # with a fault; yields after each round


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def adversaries(fault: str) -> Iterator[Tensor]:
    made, judge, loss = generator(), critic(), nn.BCEWithLogitsLoss()
    stepped = torch.optim.Adam(judge.parameters() if fault == "one model" else made.parameters(), lr=2e-3)
    judging = torch.optim.Adam(judge.parameters(), lr=2e-3)
    for n in range(STEPS):
        real, noise = torch.randn(16, 4) + 2, torch.randn(16, 3)
        stepped.zero_grad()
        fake = made(noise)
        if fault != "warm-up" or n > 4:
            loss(judge(fake), torch.ones(16, 1)).backward()
            stepped.step()
        if fault != "judge is not cleared":
            judging.zero_grad()
        told = loss(judge(real), torch.ones(16, 1)) + loss(judge(fake.detach()), torch.zeros(16, 1))
        told.backward()
        judging.step()
        yield told


def clipped(rate: float, distance: float) -> Iterator[Tensor]:
    """Five updates of a Wasserstein critic, whose weights come to its bounds, for one of the generator."""
    made, judge = nn.Linear(3, 4), critic()
    stepped, judging = torch.optim.RMSprop(made.parameters(), lr=1e-4), torch.optim.RMSprop(judge.parameters(), lr=rate)
    for n in range(LONG):
        judging.zero_grad()
        told = judge(made(torch.randn(16, 3)).detach()).mean() - judge(torch.randn(16, 4) + distance).mean()
        told.backward()
        judging.step()
        for p in judge.parameters():
            p.data.clamp_(-CLIP, CLIP)
        if n % 5 == 0:
            stepped.zero_grad()
            (-judge(made(torch.randn(16, 3))).mean()).backward()
            stepped.step()
        yield told


def clipped_at_once(fault: str) -> Iterator[Tensor]:
    """All weights of its last layer stay at the bounds, though they have a gradient."""
    return clipped(1e-3, 6)


def clipped_in_time(fault: str) -> Iterator[Tensor]:
    """The gradient of a bias becomes zero: what comes from both sides cancels."""
    return clipped(3e-4, 2)


def judge_first(fault: str) -> Iterator[Tensor]:
    """In the first rounds the generator is not trained: what the judge is given there comes once, and twice later on."""
    return adversaries("warm-up")


def actor_and_critics(fault: str) -> Iterator[Tensor]:
    """A delayed actor, two critics under one optimizer, and their targets."""
    actor, critics = nn.Linear(3, 2), [nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(2)]
    targets = [copy.deepcopy(one) for one in critics]
    learning = torch.optim.Adam([*critics[0].parameters(), *critics[1].parameters()], lr=1e-2)
    acting = torch.optim.Adam(actor.parameters(), lr=1e-2)
    for n in range(STEPS):
        seen, done = torch.randn(16, 3), torch.randn(16, 2)
        with torch.no_grad():
            following = torch.cat([torch.randn(16, 3), actor(seen)], 1)
            wanted = seen[:, :1] + 0.9 * torch.minimum(*(one(following) for one in targets))
        first, second = ((one(torch.cat([seen, done], 1)) - wanted).square().mean() for one in critics)
        told = first + second
        if fault != "critics are not cleared":
            learning.zero_grad()
        told.backward()
        learning.step()
        if n % 2 == 0:
            acting.zero_grad()
            (-critics[0](torch.cat([seen, actor(seen)], 1)).mean()).backward()
            acting.step()
        led = [critics[0]] * 2 if fault == "one critic for both targets" else critics
        for target, one in zip(targets, led, strict=True):
            for mine, its in zip(target.parameters(), one.parameters(), strict=True):
                mine.data.copy_(0.1 * its.data + 0.9 * mine.data)
        yield told


def one_loss(fault: str) -> Iterator[Tensor]:
    encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 4)
    both = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (encoder, decoder)]
    for _ in range(STEPS):
        x = torch.randn(16, 4)
        loss = (decoder(torch.tanh(encoder(x))) - x).square().mean()
        for optimizer in both:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in both:
            optimizer.step()
        yield loss


def scaled(scalers: int, fault: str) -> Iterator[Tensor]:
    """The judge first, by one gradient scaler for both or one each; with `overflow`, it is not stepped once."""
    made, judge, loss = generator(), critic(), nn.BCEWithLogitsLoss()
    stepped, judging = (torch.optim.Adam(model.parameters(), lr=2e-3) for model in (made, judge))
    each = [torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + i)) for i in range(scalers)]
    for n in range(STEPS):
        fake = made(torch.randn(16, 3))
        judging.zero_grad()
        told = loss(judge(torch.randn(16, 4) + 2), torch.ones(16, 1)) + loss(judge(fake.detach()), torch.zeros(16, 1))
        told = told * float("inf") if fault == "overflow" and n == OVERFLOW else told
        each[-1].scale(told).backward()
        each[-1].step(judging)
        if scalers > 1:
            each[-1].update()
        stepped.zero_grad()
        fooled = loss(judge(fake), torch.ones(16, 1))
        each[0].scale(fooled).backward()
        each[0].step(stepped)
        each[0].update()
        yield fooled


def one_scaler(fault: str) -> Iterator[Tensor]:
    yield from scaled(1, fault)


def two_scalers(fault: str) -> Iterator[Tensor]:
    yield from scaled(2, fault)


LOOPS: dict[str, tuple[Loop, list[int]]] = {  # each with the numbers of steps of its models
    "adversaries": (adversaries, [STEPS, STEPS]),
    "judge first": (judge_first, [STEPS - 5, STEPS]),
    "clipped at once": (clipped_at_once, [LONG // 5, LONG]),
    "clipped in time": (clipped_in_time, [LONG // 5, LONG]),
    "actor and critics": (actor_and_critics, [STEPS // 2, STEPS]),
    "one loss": (one_loss, [STEPS, STEPS]),
    "one scaler": (one_scaler, [STEPS, STEPS]),
    "two scalers": (two_scalers, [STEPS, STEPS]),
}
FAULTS = {
    "judge is not cleared": (adversaries, {"accumulated_gradients", "cleared_gradients"}),
    "critics are not cleared": (actor_and_critics, {"cleared_gradients"}),
    "one critic for both targets": (actor_and_critics, {"followers"}),
}


def watched(loop: Loop, fault: str, folder: Path | None) -> tuple[list[object], list[Finding]]:
    torch.manual_seed(0)
    probe = attach_to_script({**PLAN, "output": folder / "out"}) if folder is not None else None
    bits: list[object] = [*map(bits_of, loop(fault)), bits_of(torch.get_rng_state())]
    if probe is None:
        return bits, []
    probe.close()
    return bits, [finding for finding in probe.findings if finding.severity != "info"]


@pytest.mark.parametrize("name", LOOPS)
def test_all_models_of_a_healthy_loop_are_watched_in_silence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    loop, steps = LOOPS[name]
    bits, found = watched(loop, "", tmp_path)
    assert found == []
    said = capsys.readouterr().err
    assert "Also trained here" not in said
    assert ("as no optimizer updates it" in said) == (name == "actor and critics")  # the targets
    assert bits == watched(loop, "", None)[0]
    seen = [list(recorded(folder)) for folder in (tmp_path / "out", tmp_path / "out" / "training2")]
    assert sorted(map(len, seen)) == steps


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_model_beside_is_named(fault: str, tmp_path: Path):
    loop, rules = FAULTS[fault]
    assert {finding.rule for finding in watched(loop, fault, tmp_path)[1]} == rules


@pytest.mark.parametrize("fault", ["", "judge is not cleared"])
def test_judge_reads_the_runs_of_all_models_and_others_say_what_they_leave_out(fault: str, tmp_path: Path):
    watched(adversaries, fault, tmp_path)
    answer = judged(tmp_path / "out")
    assert (answer.code, answer.short) == (1 if fault else 0, "")
    named = {one.finding.rule for one in answer.findings if one.finding.message.startswith("training2: ")}
    assert named == (FAULTS[fault][1] if fault else set())
    assert f"training2: {STEPS} steps of 1 rank" in answer.more
    with told() as left:
        assert len(list(read_frames(tmp_path / "out"))) == STEPS
    assert [text.partition("training2 ")[2] for text in left] == [
        "holds another training of this script, which is not looked at here: name that folder"
    ]


def test_each_loss_is_that_of_its_own_model(tmp_path: Path):
    torch.manual_seed(0)
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    told = [float(loss.detach()) for loss in adversaries("")]
    loop.close()
    seen = [step["loss"] for step in recorded(tmp_path / "out" / "training2").values()]
    assert seen[:STEPS] == told


def test_a_loss_of_two_optimizers_is_that_of_both_models(tmp_path: Path):
    torch.manual_seed(0)
    loop = attach_to_script({**PLAN, "output": tmp_path / "out"})
    told = [float(loss.detach()) for loss in one_loss("")]
    loop.close()
    for folder in (tmp_path / "out", tmp_path / "out" / "training2"):
        assert [step["loss"] for step in recorded(folder).values()] == told


@pytest.mark.parametrize("loop", [one_scaler, two_scalers])
def test_a_step_that_one_scaler_skips_is_that_of_its_own_model(loop: Loop, tmp_path: Path):
    torch.manual_seed(0)
    probe = attach_to_script({**PLAN, "output": tmp_path / "out"})
    told = [float(loss.detach()) for loss in loop("overflow")]
    probe.close()
    made, judge = (list(recorded(folder).values()) for folder in (tmp_path / "out", tmp_path / "out" / "training2"))
    assert [step["loss"] for step in made] == told, "the loss that overflowed is the judge's"
    assert [n for n, step in enumerate(judge) if "step_skipped" in step] == [OVERFLOW]
    scales = [[step["loss_scale"] for step in steps[:OVERFLOW]] for steps in (made, judge)]
    assert [set(each) for each in scales] == [{2.0**8}, {2.0**8 if loop is one_scaler else 2.0**9}]


def test_adversaries_on_two_ranks_are_watched_in_silence(tmp_path: Path):
    for printed in launch(Path(__file__).with_name("train_adversaries.py"), 2, str(tmp_path / "out")):
        assert "no findings" in printed or "watched" not in printed
    assert len(recorded(tmp_path / "out")) == len(recorded(tmp_path / "out" / "training2")) == 40


def test_a_generator_whose_optimizer_holds_the_judge_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the line at the end alone: optimizers may take turns over the same parameters on purpose."""
    watched(adversaries, "one model", tmp_path)
    assert "No update of Sequential by an optimizer of torch.optim was seen." in capsys.readouterr().err


def test_what_is_printed_names_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    watched(adversaries, "judge is not cleared", tmp_path)
    said = capsys.readouterr().err
    assert "trainprobe: judge: error cleared_gradients" in said
    assert "trainprobe: made: 24 steps watched" in said
