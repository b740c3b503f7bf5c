"""What a resume forgot, told from two saved states."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainprobe.again.conditions.resume import compared, held_by, judge
from trainprobe.cli import main


class Training:
    """Has weights, buffers, two moments, a schedule, a random state and a position in the data."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.position = self.steps = 0
        self.data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))

    def train(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            x = self.data[self.position : self.position + 4]
            self.position, self.steps = self.position + 4, self.steps + 1
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}
        more = {"scheduler": self.scheduler.state_dict(), "rng": {"torch": torch.get_rng_state()}}
        return copy.deepcopy({**held, **more, "sampler": {"position": self.position}})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.position, self.steps = state["sampler"]["position"], state["step"]
        torch.set_rng_state(state["rng"]["torch"])


def drop(state: dict[str, Any], part: str) -> None:
    if part == "weights":
        state["model"]["3.weight"] = torch.ones(2, 8)
    elif part == "buffers":
        state["model"] = {name: t for name, t in state["model"].items() if "running" not in name}
    elif part == "moments":
        for one in state["optimizer"]["state"].values():
            one["exp_avg"].zero_()
    elif part == "step counters":
        for one in state["optimizer"]["state"].values():
            one["step"].zero_()
    elif part == "learning rates":
        state["optimizer"]["param_groups"][0]["lr"] = 0.01
    elif part == "data position":
        state["sampler"]["position"] = 0
    elif part == "random states":
        state["rng"]["torch"] = torch.Generator().manual_seed(9).get_state()


def resumed(folder: Path, part: str) -> tuple[Path, Path]:
    torch.manual_seed(0)
    straight = Training()
    state = straight.train(3)
    torch.save(straight.train(1), folder / "straight.pt")
    torch.manual_seed(1)
    again = Training()
    drop(state, part)
    again.load(state)
    torch.save(again.train(1), folder / "resumed.pt")
    return folder / "straight.pt", folder / "resumed.pt"


@pytest.mark.parametrize(
    "part", ["weights", "buffers", "moments", "step counters", "learning rates", "data position", "random states"]
)
def test_what_was_not_brought_back_is_named(tmp_path: Path, part: str) -> None:
    verdict = judge(held_by(compared(*resumed(tmp_path, part))))
    assert verdict.code == 2
    assert verdict.sentence.startswith(f"the resume is wrong: {part}: ")
    assert verdict.details[0].startswith(f"{part}: ")


def test_a_right_resume_is_right_in_what_was_seen_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight, again = resumed(tmp_path, "")
    assert main(["resume-check", str(straight), str(again), "--json", str(tmp_path / "answer.json")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the resume is right in all that was judged: ")
    assert "not judged, as it is in neither state: loss scale" in said
    assert "not judged, as it is in neither state: averaged weights" in said
    assert '"code": 0' in (tmp_path / "answer.json").read_text()


def test_states_that_hold_weights_alone_leave_all_else_unjudged(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    verdict = judge(held_by(compared(tmp_path / "a.pt", tmp_path / "b.pt")))
    assert verdict.code == 0
    assert sum(line.startswith("not judged") for line in verdict.details) == 8


@pytest.mark.parametrize(("section", "kind"), [("scheduler", "learning rates"), ("rng", "random states"), ("optimizer", "")])
def test_a_section_that_the_resumed_run_does_not_have_is_lost(tmp_path: Path, section: str, kind: str) -> None:
    straight, again = resumed(tmp_path, "")
    state = torch.load(again)
    del state[section]
    torch.save(state, again)
    verdict = judge(held_by(compared(straight, again)))
    assert verdict.code == 2
    assert verdict.sentence.startswith(f"the resume is wrong: {kind or 'step counters'}: ")
    assert any("not in the resumed state" in line for line in verdict.details)


def test_weights_are_not_blamed_for_data_that_no_state_tells_of(tmp_path: Path) -> None:
    """The sampler began anew, as after Accelerate's `load_state` without `skip_first_batches`: all weights differ then."""
    states = resumed(tmp_path, "data position")
    for path in states:
        torch.save({name: part for name, part in torch.load(path).items() if name != "sampler"}, path)
    verdict = judge(held_by(compared(*states)))
    assert verdict.code == 2
    assert "weights, or the data position, which neither state holds: save right after the resume" in verdict.sentence


def test_names_of_a_family_that_the_model_is_not_of_are_no_error(tmp_path: Path) -> None:
    """Its fused weight has no three equal parts."""
    for name, moved in (("a.pt", 0), ("b.pt", 0), ("c.pt", 1)):
        weights = {"transformer.h.0.attn.c_attn.weight": torch.ones(50, 40), "transformer.wte.weight": torch.ones(65, 32)}
        weights["transformer.wte.weight"][0] += moved
        torch.save({"model": weights, "iter_num": 5}, tmp_path / name)
    assert judge(held_by(compared(tmp_path / "a.pt", tmp_path / "b.pt"))).code == 0
    assert "weights: 1 of 2 differ" in judge(held_by(compared(tmp_path / "a.pt", tmp_path / "c.pt"))).details[0]


def test_an_argument_that_differs_is_said_and_not_judged(tmp_path: Path) -> None:
    for depth, name in enumerate(("a.pt", "b.pt")):
        torch.save({"model": {"w": torch.ones(3)}, "odd": {"depth": depth}}, tmp_path / name)
    verdict = judge(held_by(compared(tmp_path / "a.pt", tmp_path / "b.pt")))
    assert verdict.code == 3
    assert "not judged, as it is of no known kind: args odd.depth: 0 against 1" in verdict.details


def test_where_a_run_began_and_what_it_wrote_to_are_no_state(tmp_path: Path) -> None:
    """As nanoGPT's `init_from`, and its `best_val_loss`, a tensor of one element that other batches make another."""
    for name, began, best in (("a.pt", "scratch", 4.25), ("b.pt", "resume", 4.5)):
        config = {"init_from": began, "out_dir": name, "lr": 0.1}
        torch.save({"model": {"w": torch.ones(3)}, "config": config, "best_val_loss": torch.tensor(best)}, tmp_path / name)
    verdict = judge(held_by(compared(tmp_path / "a.pt", tmp_path / "b.pt")))
    assert [d for d in verdict.details if "no known kind" in d] == [
        "not judged, as it is of no known kind: args best_val_loss: 4.25 against 4.5"
    ]


def test_a_hostile_state_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return random.seed, (5,)

    random.seed(1)
    before = random.getstate()
    torch.save({"model": {"w": torch.ones(2)}, "sampler": Evil()}, tmp_path / "a.pt")
    judge(held_by(compared(tmp_path / "a.pt", tmp_path / "a.pt")))
    assert random.getstate() == before
