"""The verbs report, judge, top and csv2tb on a real run's folder, as a person calls them."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from watched_training import watched_training

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.top_command import spark


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands") / "my-run"
    watched_training(folder, ["jsonl", "csv"], steps=60)
    return folder


def test_judge_prints_the_findings_and_returns_one(run, capsys):
    assert main(["judge", str(run)]) == 1
    out = capsys.readouterr().out
    assert "error   nonfinite (step 50, rank 0)" in out
    assert "60 steps of 1 rank, 11 rules: 1 error" in out


@pytest.fixture(scope="module")
def audited(tmp_path_factory) -> Path:
    """The folder of a run whose optimizer lacks a layer: only the audit sees that, and a rule that the layer does not move."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(list(model.parameters())[2:], lr=0.1)
    plan = {"level": "off", "monitor": True, "audit": {"every": 2}, "console": False}
    with trainprobe.watch(model, optimizer, plan, output=folder) as probe:
        for _ in range(12):  # `frozen` comes at step 10
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    return folder


def test_judge_shows_what_the_audit_recorded_and_returns_one(audited, capsys):
    assert main(["judge", str(audited)]) == 1
    first, *_ = capsys.readouterr().out.splitlines()
    where = "(step 0, rank 0, also at 5 later steps until step 10)"
    assert first.startswith(f"error   ownership {where} [recorded]: the optimizer owns 4 of 6")


def test_what_is_recorded_and_found_again_is_one_entry_with_both_origins(audited, capsys):
    assert main(["judge", str(audited), "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(f["rule"], f["origin"], f["count"], f["last_step"]) for f in told] == [
        ("ownership", "recorded", 6, 10),
        ("movement", "recorded", 6, 10),
        ("frozen", "both", 1, None),
    ]


def test_a_finding_names_all_parameters_of_which_its_message_names_some(audited):
    found = {f.rule: f for f in read_findings(audited)}
    assert "0.weight and 1 more" in found["ownership"].message
    assert {rule: f.names for rule, f in found.items()} == dict.fromkeys(
        ("ownership", "movement", "frozen"), ("0.weight", "0.bias")
    )


def test_judge_with_chosen_rules_leaves_the_audit_out(audited, capsys):
    assert main(["judge", str(audited), "--rules", "nonfinite"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["judge", str(audited), "--rules", "spike"]) == 3  # which needs more steps than there are
    assert "nothing of this run was judged" in capsys.readouterr().out


def test_judge_shows_recorded_findings_where_there_is_no_log_of_steps(audited, tmp_path, capsys):
    (tmp_path / "rank0").mkdir()
    (found,) = audited.rglob("findings.jsonl")
    (tmp_path / "rank0" / "findings.jsonl").write_bytes(found.read_bytes())
    assert main(["judge", str(tmp_path)]) == 1
    assert "ownership" in capsys.readouterr().out


def test_top_shows_what_the_audit_recorded_cause_first(audited, capsys):
    assert main(["top", str(audited), "--once"]) == 0
    out = capsys.readouterr().out
    assert 0 < out.index("ownership") < out.index("frozen")


def test_judge_with_chosen_rules_that_find_nothing_returns_zero(run, capsys):
    assert main(["judge", str(run), "--rules", "plateau,loss_scale"]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_judge_takes_settings_from_a_file_and_prints_json(run, tmp_path, capsys):
    (tmp_path / "rules.yaml").write_text("rules:\n  spike: {warmup: 20, ratio: 30}\n")
    assert main(["judge", str(run), "--rules", str(tmp_path / "rules.yaml"), "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ("spike", 40) in [(f["rule"], f["step"]) for f in found]


def test_judge_of_an_unknown_rule_is_an_error_that_guesses(run, capsys):
    assert main(["judge", str(run), "--rules", "spikes"]) == 3
    assert "did you mean 'spike'" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"spike: [", b"\xff\xfe\xff"])
def test_judge_with_rules_that_are_no_yaml_gives_three_and_names_the_file(run, tmp_path, capsys, content):
    (tmp_path / "rules.yaml").write_bytes(content)
    assert main(["judge", str(run), "--rules", str(tmp_path / "rules.yaml")]) == 3
    said = capsys.readouterr().err
    assert (
        re.match(rf"trainprobe: --rules {tmp_path / 'rules.yaml'} is (no YAML: |not UTF-8)", said) and "Traceback" not in said
    )


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_judge_of_a_log_without_a_step_is_no_pass(run, tmp_path, capsys, more):
    (tmp_path / "rank0").mkdir()
    (log,) = run.rglob("records.jsonl")  # and a run that was killed while it wrote its first line
    (tmp_path / "rank0" / "records.jsonl").write_bytes(log.read_bytes()[:100])
    assert main(["judge", str(tmp_path), *more]) == 3
    assert "holds no step that could be judged" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["judge", "report", "top"])
def test_a_folder_without_a_run_is_named_with_all_that_was_looked_for(command, tmp_path, capsys):
    folder = tmp_path / "alone" / "here"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("nothing of a run")
    assert main([command, str(folder)]) == 3
    said = capsys.readouterr().err
    assert f"{folder} holds no run: no metrics-*.parquet, no records.jsonl, no dump (step{{N}}/rank{{R}}/), no CSV file" in said
    assert "`trainprobe runs DIR` lists the runs under DIR" in said


@pytest.mark.parametrize("command", ["judge", "report", "top"])
@pytest.mark.parametrize("wrong", ["", "empty", "absent/deeper"])
def test_runs_near_a_folder_without_one_are_named(run, command, wrong, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name in ("first", "second"):
        shutil.copytree(run, tmp_path / name)
    assert main([command, str(tmp_path / wrong)]) == 3
    said = capsys.readouterr().err
    assert "first, second" in said and f"`trainprobe runs {tmp_path}` lists them" in said


def test_runs_in_a_folder_beside_are_named_without_their_ranks(run, tmp_path, capsys):
    (tmp_path / "here").mkdir()
    shutil.copytree(run, tmp_path / "project" / "first")
    assert main(["judge", str(tmp_path / "here")]) == 3
    assert f"Runs in {tmp_path}: {Path('project', 'first')} (" in capsys.readouterr().err


def test_top_shows_step_loss_findings_and_what_stands_out(run, capsys):
    assert main(["top", str(run), "--once"]) == 0
    out = capsys.readouterr().out
    assert "last step 59" in out
    assert "loss" in out
    assert "nonfinite" in out


def test_report_writes_a_page_with_the_findings_of_the_rules(run, tmp_path, capsys):
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert "<title>my-run · trainprobe</title>" in text
    assert '"rule":"nonfinite"' in text
    assert '"name":"gradients"' in text


def test_the_rows_of_gradients_stand_in_the_order_of_the_model(run, tmp_path):
    from trainprobe.monitor.report.from_run import collect_histories, view_of
    from trainprobe.monitor.run_folder import read_frames

    histories = {}
    for _ in collect_histories(read_frames(run), histories):
        pass
    view = view_of("x", histories, {})
    rows = {m.name: list(m.rows) for m in view.metrics if m.statistic == "norm"}
    shared = [row for row in rows["parameters"] if row in rows["gradients"]]
    assert [row for row in rows["gradients"] if row in shared] == shared


def test_csv2tb_writes_event_files_that_tensorboard_reads(run, tmp_path, require, capsys):
    require("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["csv2tb", str(run), "-o", str(tmp_path / "tb")]) == 0
    events = EventAccumulator(str(tmp_path / "tb" / "rank0"), size_guidance={"scalars": 0})
    events.Reload()
    losses = events.Scalars("scalars/loss")
    assert [e.step for e in losses] == list(range(60))
    assert any("/grad/norm" in tag for tag in events.Tags()["scalars"])


def test_csv2tb_reads_the_wide_files_of_the_existing_monitor(tmp_path, require):
    require("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "Nov20_10-00-00-rank3-0a1b2c3d"
    folder.mkdir()
    rows = "".join(f'0,layers.0.weight,{s},{s + 0.5},"[4, 4]",torch.float32\n' for s in range(3))
    (folder / "grad_reduced_0-2.csv").write_text("vpp_stage,name,step,norm,shape,dtype\n" + rows)
    assert main(["csv2tb", str(tmp_path)]) == 0
    events = EventAccumulator(str(tmp_path / "tensorboard" / "rank3"))
    events.Reload()
    assert [e.value for e in events.Scalars("gradients/layers.0.weight/grad/norm")] == [0.5, 1.5, 2.5]


def test_a_line_of_bars_shows_a_nan_as_a_cross():
    import numpy as np

    assert spark(np.array([0.0, 1.0, math.nan])) == "▁█×"


def test_judge_reads_a_full_dump_and_names_the_op_that_made_the_nan(tmp_path, capsys):
    import torch

    import trainprobe

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with trainprobe.watch(model, None, {"output": tmp_path / "dump", "level": "mix", "stacks": False}) as probe:
        for step in range(2):
            with probe.step(step):
                hidden = model(torch.ones(2, 4))
                (torch.sqrt(hidden - 1e3 if step else hidden.abs()).sum() + hidden.sum()).backward()
    assert main(["judge", str(tmp_path / "dump"), "--rules", "nonfinite"]) == 1
    assert "the first NaN of step 1 is in op Torch.sqrt, output" in capsys.readouterr().out
