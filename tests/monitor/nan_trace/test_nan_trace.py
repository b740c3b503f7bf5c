"""`trainprobe nan-trace`: the first NaN or infinity is named, on the rank and in the call that made it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainprobe
from tests.distributed.launch import launch
from trainprobe.cli import main

NAN_ON_ONE_RANK = Path(__file__).with_name("nan_on_one_rank.py")


def traced(folder, capsys):
    """Return (exit code, what the command says as JSON, as text)."""
    code = main(["nan-trace", str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert main(["nan-trace", str(folder)]) == code
    return code, told, capsys.readouterr().out


class Net(nn.Module):
    """Masked attention, then what a test puts behind it."""

    def __init__(self, inner):
        super().__init__()
        self.up, self.inner = nn.Linear(8, 8), inner
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, x, step):
        """Apply them."""
        scores = x @ x.transpose(1, 2) + self.mask
        h = self.up(torch.softmax(scores, -1) @ x)
        return self.inner(h) if step == 2 else h


def train(folder, inner, level="mix", optimizer=None, batch=lambda step, x: x, **plan):
    """Train for four steps; `inner` is what goes wrong in step 2."""
    torch.manual_seed(0)
    model = Net(inner)
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
    plan |= {"output": str(folder), "level": level, "step": [0, 1, 2, 3], "task": "statistics", "console": False}
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        for step in range(4):
            with probe.step():
                loss = model(batch(step, torch.randn(2, 5, 8)), step).square().mean()
                probe.note("loss", loss.item())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def overflow(h):
    """Overflow half precision."""
    return (h.half() * 6e4 + h.half() * 6e4).float()


def all_masked(h):
    """Take the softmax of rows that are masked throughout."""
    return torch.softmax(h.masked_fill(torch.ones_like(h, dtype=torch.bool), float("-inf")), -1)


@pytest.mark.parametrize(
    ("inner", "entry", "what"),
    [
        (lambda h: h / (h - h), "Tensor.div", "NaN or infinity"),
        (lambda h: torch.log(h), "Torch.log", "NaN"),
        (overflow, "Tensor.", "infinity"),
        (all_masked, "Torch.softmax", "NaN"),
        (lambda h: -torch.log(functional.relu(h) * 0), "Torch.log", "infinity"),
        (lambda h: torch.sqrt(h * 0), "Torch.sqrt", "NaN or infinity"),  # finite forward, 0 / 0 in the backward pass
    ],
)
def test_the_op_is_named_whose_inputs_were_finite(tmp_path, capsys, inner, entry, what):
    train(tmp_path / "out", inner)
    code, told, text = traced(tmp_path / "out", capsys)
    assert (code, told["step"], told["first"]["origin"]) == (1, 2, "made")
    assert told["first"]["at"]["name"].startswith(entry), told["first"]
    assert told["first"]["what"] in what
    assert "test_nan_trace.py" in text  # the line of the program that called it
    assert f"the first {told['first']['what']} is of step 2, on rank 0: {entry}" in text


def test_masks_and_constants_are_no_finding(tmp_path, capsys):
    train(tmp_path / "out", lambda h: h)
    code, told, text = traced(tmp_path / "out", capsys)
    assert (code, told) == (0, {"found": False, "steps": 4})
    assert text == "no NaN and no infinity in 4 recorded steps, beside constants and masks\n"


def test_a_batch_that_is_not_finite_is_told_from_a_call_that_makes_it(tmp_path, capsys):
    def spoilt(step, x):
        return x.index_fill(0, torch.tensor([1]), float("nan")) if step == 1 else x

    train(tmp_path / "out", lambda h: h, "L0", batch=spoilt)
    code, told, _ = traced(tmp_path / "out", capsys)
    assert (code, told["step"], told["first"]["origin"]) == (1, 1, "given")
    assert (told["first"]["at"]["name"], told["first"]["at"]["slot"]) == ("root", "input.0")


class Halting(torch.optim.SGD):
    """Divides zero by zero in the update of step 2."""

    updates = 0

    @torch.no_grad()
    def step(self, closure=None):
        """Update."""
        super().step(closure)
        self.updates += 1
        if self.updates == 3:
            p = self.param_groups[0]["params"][0]
            p.add_(torch.zeros_like(p).div(torch.zeros_like(p)))


def test_an_update_that_is_not_finite_is_named_where_it_is_recorded(tmp_path, capsys):
    train(tmp_path / "out", lambda h: h, optimizer=lambda p: Halting(p, 0.1), phases=["forward", "backward", "optimizer"])
    code, told, _ = traced(tmp_path / "out", capsys)
    assert (code, told["step"], told["first"]["at"]["name"], told["first"]["origin"]) == (1, 2, "Tensor.div", "made")


def test_a_weight_that_an_earlier_step_spoilt_is_named_and_not_the_module_that_uses_it(tmp_path, capsys):
    train(tmp_path / "out", lambda h: h, "L0", optimizer=lambda p: Halting(p, 0.1))
    code, told, text = traced(tmp_path / "out", capsys)
    assert (code, told["step"], told["first"]["origin"]) == (1, 3, "given")
    assert told["first"]["entry"] == "parameter up.weight, value"
    assert "the update of an earlier step wrote it" in text


@pytest.mark.parametrize("way", ["in place", "functional"])
def test_the_rank_that_made_it_is_named_and_what_handed_it_to_the_other(tmp_path, capsys, way):
    for level in ("mix", "L0"):
        launch(NAN_ON_ONE_RANK, 2, level, str(tmp_path / level), way)
    code, told, text = traced(tmp_path / "mix", capsys)
    assert (code, told["step"], told["first"]["rank"], told["first"]["at"]["name"]) == (1, 3, 1, "Torch.log")
    assert "rank 0: handed over in step 3 by Distributed.all_reduce.0.forward" in text
    assert told["first"]["entry"].endswith("in blocks.1")
    _judge_and_report_say_the_same(tmp_path / "mix", told, capsys)
    code, told, text = traced(tmp_path / "L0", capsys)
    assert (code, told["step"], told["first"]["rank"], told["first"]["at"]["name"]) == (1, 3, 1, "blocks.1")
    assert "rank 0: from step 4 on, with what step 3 left behind" in text
    code, told, text = traced(tmp_path / "mix" / "step3" / "rank0", capsys)
    assert (code, told["first"]["origin"]) == (1, "handed")
    assert "record all ranks" in text


def _judge_and_report_say_the_same(run, told, capsys):
    """One finding: the op, the step and the rank that made it; the rank that was handed it is named as such."""
    assert main(["judge", str(run), "--json"]) == 1
    (finding,) = [found for line in capsys.readouterr().out.splitlines() if (found := json.loads(line))["rule"] == "nonfinite"]
    assert (finding["step"], finding["place"]["rank"]) == (told["step"], told["first"]["rank"])
    assert finding["site"]["name"] == told["first"]["at"]["name"]
    assert finding["message"].endswith("rank 1 made it, and it reached rank 0")
    page = run.with_suffix(".html")
    assert main(["report", str(run), "-o", str(page)]) == 0
    capsys.readouterr()
    shown = page.read_text()
    assert "rank 1 made it, and it reached rank 0" in shown
    assert "another rank gave it" not in shown


@pytest.mark.parametrize("way", ["in place", "functional"])
def test_a_sum_over_ranks_that_overflows_is_made_by_the_collective(tmp_path, capsys, way):
    launch(NAN_ON_ONE_RANK, 2, "mix", str(tmp_path / "run"), "sum", way)
    code, told, text = traced(tmp_path / "run", capsys)
    assert (code, told["step"], told["first"]["at"]["kind"], told["first"]["origin"]) == (1, 3, "collective", "made")
    assert told["first"]["what"] == "infinity"
    assert "Distributed.all_reduce" in text
    assert "what all ranks gave was finite, the collective made it; rank 1 made one at the same place" in text
    assert main(["judge", str(tmp_path / "run"), "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (finding,) = [each for each in found if each["rule"] == "nonfinite"]
    assert finding["step"] == 3
    assert finding["message"].endswith("no rank gave it, the collective made it")
    code, told, text = traced(tmp_path / "run" / "step3" / "rank0", capsys)
    assert (code, told["first"]["origin"]) == (1, "handed")
    assert "record all ranks" in text


def test_steps_that_only_the_monitor_saw_are_looked_at_too(tmp_path, capsys):
    """The dump has step 3 alone; the NaN is of step 2."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"output": str(tmp_path), "level": "mix", "step": [3], "monitor": {"activations": True}, "console": False}
    with trainprobe.watch(model, optimizer, plan=plan) as probe:
        for step in range(4):
            with probe.step():
                out = model(torch.randn(2, 4))
                (torch.sqrt(out * 0) if step == 2 else out).square().mean().backward()
                optimizer.step()
    assert [path.name for path in tmp_path.glob("step*")] == ["step3"]
    code, told, _ = traced(tmp_path, capsys)
    assert (code, told["step"], told["first"]["at"]["name"]) == (1, 2, "bias")


def test_a_folder_of_several_runs_and_a_folder_of_none_are_refused(tmp_path, capsys):
    assert main(["nan-trace", str(tmp_path)]) == 3
    assert "holds no dump and no run log" in capsys.readouterr().err
