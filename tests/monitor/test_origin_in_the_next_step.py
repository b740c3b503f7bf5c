"""A NaN under the default plan: the next step's forward pass is looked at, and names the module and the user's line."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import trainprobe
from tests.lockstep import differences, train
from tests.zoo import load
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames

AT = 3


class Divides(nn.Module):
    """Divides by the spread of its input. wrong: whether that is taken to be 0."""

    wrong = False

    def forward(self, x):
        spread = x.std(-1, keepdim=True)
        return (x - x) / (spread * 0) if self.wrong else x / spread


class Coarse(nn.Module):
    """Works in float16. factor: what it multiplies by."""

    factor = 1.0

    def forward(self, x):
        return (x.half() * self.factor).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.coarse, self.last = nn.Linear(8, 16), Divides(), Coarse(), nn.Linear(16, 3)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(self.coarse(x))


def steps(place, lasts=True, skips=True, watch=None):
    """Train seven steps with a NaN planted at step 3, and at later ones; return the weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer) if watch else trainprobe.engine.unobserved.watch() as probe:
        for i in range(7):
            x, sick = torch.randn(4, 8), i >= AT if lasts else i == AT
            model.norm.wrong = sick and place == "module"
            model.coarse.factor = 1e6 if sick and place == "float16" else 1.0
            if sick and place == "data":
                x[2, 1] = float("nan")
            with probe.step():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                probe.note("loss", loss)
                loss.backward()
                if not skips or loss.isfinite():
                    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def found(folder, place, **how):
    return steps(place, watch=lambda model, optimizer: trainprobe.watch(model, optimizer, output=folder), **how)


@pytest.mark.parametrize(
    ("place", "name", "words", "line"),
    [
        ("module", "norm", "module norm, output", "x = self.norm(self.first(x))"),
        ("float16", "coarse", "module coarse, output", "return self.last(self.coarse(x))"),
        ("data", "root", "module root, input.0", "loss = model(x).square().mean()"),
    ],
)
def test_the_next_step_names_module_and_line_and_no_bit_changes(tmp_path, capsys, place, name, words, line):
    watched = found(tmp_path / "out", place)
    printed = [text for text in capsys.readouterr().err.splitlines() if "error nonfinite" in text]
    assert len(printed) == 2
    assert f"(step {AT}, rank 0)" in printed[0] and f"(step {AT + 1}, rank 0)" in printed[1]
    assert words in printed[1] and printed[1].partition(f"called at {__file__}:")[2].endswith(f": {line}"), printed[1]
    assert all(map(torch.equal, watched, steps(place)))
    judged = [f for f in judge_frames(read_frames(tmp_path / "out"), make_rules(["nonfinite"])) if f.severity == "error"]
    assert [(f.step, f.site.name) for f in judged] == [(AT, "loss"), (AT + 1, name)]


def test_a_nan_that_does_not_come_again_is_told_once_with_how_to_find_it(tmp_path, capsys):
    found(tmp_path / "out", "module", lasts=False)
    told = capsys.readouterr().err
    assert told.count("error nonfinite") == 1
    assert f"repeat step {AT} with `record: mix, step: [{AT}], output: again`. Then `trainprobe nan-trace again`" in told


def test_where_the_update_wrote_it_into_the_weights_the_origin_is_said_to_be_gone(tmp_path, capsys):
    found(tmp_path / "out", "module", lasts=False, skips=False)
    told = capsys.readouterr().err
    assert told.count("error nonfinite") == 1
    assert "the update wrote it into the weights, so later steps cannot show its origin" in told


def test_a_training_has_the_same_bits_where_every_forward_pass_is_asked_for(tmp_path):
    case = load("residual_gpt")

    @contextmanager
    def watch(model, optimizer):
        with trainprobe.watch(model, optimizer, output=tmp_path / "out") as probe:
            probe.taps.forward_at.update(range(0, 100, 2))
            yield probe

    assert differences(train(case), train(case, watch=watch)) == []
    seen = {frame.step for frame in read_frames(tmp_path / "out") for a in frame.table.addresses if a.kind == "module"}
    assert seen
