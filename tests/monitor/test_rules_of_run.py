"""What judges a recorded run later uses the settings of its plan, and says what the plan left out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main
from trainprobe.monitor.rules_of_run import RULES_FILE, rules_of_run


def train(folder, rules, steps=8, **more):
    """Train with a ReLU that is dead from the start, and a loss that the run notes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    section = {"rules": rules} if rules is not None else True
    with trainprobe.watch(model, optimizer, output=folder, level="off", monitor=section, console=False, **more) as probe:
        for _ in range(steps):
            with probe.step():
                optimizer.zero_grad()
                loss = model(torch.randn(6, 4)).square().mean()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
    return [finding.rule for finding in probe.findings]


def judged(folder, capsys, *more):
    capsys.readouterr()
    code = main(["judge", str(folder), *more])
    return code, capsys.readouterr().out


def test_judge_report_and_top_use_the_patience_that_the_run_used(tmp_path, capsys):
    assert "dead" in train(tmp_path / "out", {"dead": {"patience": 5}})
    (tmp_path / "out" / "rank0" / "findings.jsonl").unlink()  # what is found now speaks
    code, text = judged(tmp_path / "out", capsys)
    assert code == 1
    assert "has been zero at 5 collected steps in a row" in text
    main(["top", str(tmp_path / "out"), "--once"])
    assert "has been zero at 5" in " ".join(capsys.readouterr().out.split())
    main(["report", str(tmp_path / "out"), "-o", str(tmp_path / "page.html")])
    assert "has been zero at 5 collected steps in a row" in (tmp_path / "page.html").read_text()


def test_a_rule_that_the_plan_left_out_stays_out_and_is_named(tmp_path, capsys):
    assert train(tmp_path / "out", {"dead": False}, steps=25) == []
    code, text = judged(tmp_path / "out", capsys)
    assert code == 0
    assert "25 steps of 1 rank, 10 rules: nothing found" in text
    assert "Left out, as in the plan of the run: dead" in text
    code, text = judged(tmp_path / "out", capsys, "--rules", "dead")
    assert code == 1 and "Left out" not in text


def test_an_optional_rule_of_the_plan_judges_again_too(tmp_path, capsys):
    train(tmp_path / "out", {"threshold": {"low": -1.0, "high": 1e-9, "slots": ["output"]}})
    assert "threshold" in rules_of_run(tmp_path / "out")[0]
    assert "threshold" in judged(tmp_path / "out", capsys)[1]


@pytest.mark.parametrize("rules", [None, ["nonfinite"], {}])
def test_where_the_plan_sets_no_rule_all_have_their_defaults(tmp_path, capsys, rules):
    """A list says which rules the run itself judges by; what the others find in its log is shown afterwards."""
    train(tmp_path / "out", rules, steps=25)
    assert not (tmp_path / "out" / "rank0" / RULES_FILE).exists()
    code, text = judged(tmp_path / "out", capsys)
    assert code == 1 and "dead" in text and "11 rules" in text


def test_a_plan_that_changes_while_the_run_goes_on_is_kept_as_it_is_now(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=True, console=False) as probe:
        for step in range(4):
            if step == 2:
                probe.change(monitor={"rules": {"spike": {"z": 12.0}}})
            with probe.step():
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert rules_of_run(tmp_path / "out")[0]["spike"].z == 12.0


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9}', '{"format": 1, "rules": {"no such": true}}', "\x00"])
def test_a_file_that_cannot_be_used_leaves_the_defaults(tmp_path, text, capsys):
    train(tmp_path / "out", {"dead": False}, steps=3)
    (tmp_path / "out" / "rank0" / RULES_FILE).write_text(text)
    rules, absent = rules_of_run(tmp_path / "out")
    assert "dead" in rules and absent == ()
    assert judged(tmp_path / "out", capsys)[0] == 0


def test_the_file_is_one_of_plain_settings(tmp_path):
    train(tmp_path / "out", {"spike": {"names": ["loss", "layers.**"], "z": 9}, "dead": True}, steps=2)
    kept = json.loads((tmp_path / "out" / "rank0" / RULES_FILE).read_text())
    assert kept == {"format": 1, "rules": {"spike": {"names": ["loss", "layers.**"], "z": 9}, "dead": True}}


def test_steps_that_an_error_cut_short_are_named_afterwards(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with (
        pytest.raises(ValueError, match="of the program"),
        trainprobe.watch(model, output=tmp_path / "out", level="off", monitor=True, console=False) as probe,
    ):
        for step in range(3):
            with probe.step():
                loss = model(torch.randn(6, 4)).square().mean()
                probe.note("loss", loss)
                if step == 2:
                    raise ValueError("of the program")
    assert "Step 2 was cut short by an error" in judged(tmp_path / "out", capsys)[1]


def test_top_leaves_masks_out_of_what_stands_out_and_writes_no_empty_place(tmp_path, capsys):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()
            self.out = nn.Linear(4, 4)

        def forward(self, x):
            """Hide the upper half of the scores."""
            mask = self.inner(torch.full((4, 4), float("-inf")).triu(1))
            return self.out((x @ x.T + mask).softmax(-1))

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = {"output": tmp_path / "out", "level": "off", "monitor": True, "step": [0, 100], "console": False}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for _ in range(4):
            with probe.step():
                model(torch.randn(4, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    main(["top", str(tmp_path / "out"), "--once"])
    text = capsys.readouterr().out
    assert "inner input.0 norm" not in text or "not finite" not in next(t for t in text.split("\n") if "inner input.0" in t)
    assert "()" not in text


def test_runs_lists_no_key_data_of_reinforcement_learning_and_judge_points_to_a_black_box(tmp_path, capsys):
    train(tmp_path / "run", None, steps=2)
    (tmp_path / "key" / "data" / "reward" / "step0" / "rank0" / "micro_step0").mkdir(parents=True)
    main(["runs", str(tmp_path)])
    text = capsys.readouterr().out
    assert "run" in text and "reward" not in text
    (tmp_path / "killed" / "rank0").mkdir(parents=True)
    (tmp_path / "killed" / "rank0" / "black_box.ring").write_bytes(b"")
    assert main(["judge", str(tmp_path / "killed")]) == 3
    told = capsys.readouterr().err
    assert "black-box" in told and "killed` reads it" in told
    assert main(["black-box", str(tmp_path / "nowhere")]) == 3
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["csv2tb", str(tmp_path / "run")]) == 3
    assert "sinks: [csv]" in capsys.readouterr().err
