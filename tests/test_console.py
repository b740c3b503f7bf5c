"""What is printed while a program runs that reads no findings: warnings and errors when they come, one line at the end."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from trainprobe import PrecisionDebugger
from trainprobe.cli import main
from trainprobe.engine.core.findings import PRINTED_PER_RULE, Console
from trainprobe.engine.core.records import Finding, Place, Site
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import OF_THE_LOSS, judge_frames


def printed(capfd):
    """Return what was printed since the last look, without the line at the start that says what is watched."""
    return "".join(line for line in capfd.readouterr().err.splitlines(True) if not line.startswith("trainprobe: watching"))


def train(probe, model, steps=3):
    for _ in range(steps):
        with probe.step():
            model(torch.ones(2, 3)).sum().backward()


def train_with_a_nan(folder, at, steps=4, notes=True, **plan):
    """Train some steps, the loss noted, of which the batch of one holds a NaN; return the probe."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, output=folder, **({"level": "off", "monitor": True} | plan)) as probe:
        for i in range(steps):
            with probe.step():
                x = torch.ones(2, 3)
                x[0, 0] = float("nan") if i == at else 1.0
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                if notes:
                    probe.note("loss", loss)
    return probe


def test_an_error_is_printed_when_it_happens_with_step_rank_place_and_what_to_do(capfd, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=True) as probe:
        for i in range(3):
            with probe.step():
                x = torch.full((2, 3), float("nan") if i == 1 else 1.0)
                model(x).sum().backward()
                optimizer.step()
            said = printed(capfd).splitlines()
            if i == 1:
                first, then = said
                assert first.startswith(
                    "trainprobe: error nonfinite (step 1, rank 0): the first NaN of step 1 is in module root"
                )
                assert then == "trainprobe:   next: look at the batch of step 1, and at what prepares it"
            else:
                assert said == []


def test_the_line_at_the_end_says_steps_findings_and_where_to_look_and_repeats_no_finding(capfd, tmp_path):
    train_with_a_nan(tmp_path / "a run", at=5, steps=6)
    *found, end = printed(capfd).splitlines()
    folder = f"'{tmp_path / 'a run'}'"
    read = f"read them with `trainprobe judge {folder}`, or as a page with `trainprobe report {folder}`"
    assert end.startswith(f"trainprobe: 6 steps watched, 1 finding (nonfinite, first at step 5); {read}. ")
    assert len(found) == 2 and "first NaN" in found[0] and "first NaN" not in end


def test_a_healthy_run_says_so_in_one_line_and_names_the_rules_that_it_was_too_short_for(capfd, tmp_path):
    train_with_a_nan(tmp_path / "out", at=None, steps=70)
    missing = "Too few steps for the rules drift (10 more)."
    assert printed(capfd) == f"trainprobe: 70 steps watched, no findings; output in {tmp_path / 'out'}. {missing}\n"
    main(["judge", str(tmp_path / "out")])
    assert capfd.readouterr().out == f"70 steps of 1 rank, 11 rules: nothing found. {missing}\n"


@pytest.mark.parametrize(("rules", "said"), [({}, 1), (dict.fromkeys(OF_THE_LOSS, False), 0)])
def test_a_loss_that_rules_would_judge_and_no_step_recorded_is_said(capfd, tmp_path, rules, said):
    train_with_a_nan(tmp_path / "out", at=None, steps=70, notes=False, monitor={"rules": rules})
    assert printed(capfd).count('Not judged: the loss, which no step recorded (`probe.note("loss", loss)`') == said


def test_a_run_that_every_rule_has_judged_says_no_more(capfd, tmp_path):
    train_with_a_nan(tmp_path / "out", at=None, steps=80)
    assert printed(capfd) == f"trainprobe: 80 steps watched, no findings; output in {tmp_path / 'out'}\n"


def test_a_warning_about_the_tool_that_was_printed_is_not_contradicted_at_the_end(capfd, tmp_path):
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "out", level="off", monitor=True) as probe, probe.step():
        probe.note("loss", "much")
    said = printed(capfd)
    assert "warning probe" in said
    assert "1 step watched, no findings on the training, 2 warnings about the plan or the tool above; output in" in said


def test_a_sentence_of_an_integration_stands_at_the_end_once(capfd, tmp_path):
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "out", level="off", monitor=True) as probe:
        probe.at_end("No update was ever seen.")
        probe.at_end("No update was ever seen.")
        probe.begin_step()
        probe.end_step()
    assert f"output in {tmp_path / 'out'}. No update was ever seen. No update of Linear by" in printed(capfd)


def test_a_rule_that_finds_much_is_printed_a_few_times_and_counted_at_the_end(capfd):
    console = Console()
    for i in range(20):
        console.report(Finding("spike", "warning", "a jump", i, Place(0, 1), Site("parameter", f"layers.{i}.weight", "grad")))
    said = printed(capfd).splitlines()
    assert len(said) == PRINTED_PER_RULE + 1
    assert said[-1] == "trainprobe: further findings of spike are in the run's folder and not printed"


def test_what_two_ranks_find_alike_is_printed_by_one(capfd, tmp_path):
    site = Site("parameter", "weight", "grad")
    for rank in range(2):
        console = Console()
        console.markers = tmp_path
        for step in (4, 5):
            console.report(Finding("replicas", "error", f"seen on rank {rank}", step, Place(rank, 2), site))
        console.report(Finding("nonfinite", "error", "a NaN", 7, Place(rank, 2), Site("module", f"layers.{rank}", "output")))
    said = printed(capfd).splitlines()
    assert [line.partition(":")[2] for line in said] == [
        " error replicas (step 4, rank 0): seen on rank 0",
        " error nonfinite (step 7, rank 0): a NaN",
        " error nonfinite (step 7, rank 1): a NaN",
    ]


def test_a_step_that_never_came_and_an_op_that_never_ran_are_said_when_the_block_ends(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(
        model, output=tmp_path / "out", level="L1", step=["0-1", 500], ops=["**linear", "Functional.lienar"]
    ) as probe:
        train(probe, model)
        assert printed(capfd) == ""
    *said, end = printed(capfd).splitlines()
    assert len(said) == 2
    assert end.startswith("trainprobe: 3 steps, 2 of them watched, nothing judged")
    assert all(line.startswith("trainprobe: the plan's ") for line in said)
    assert "did you mean" in "".join(line for line in said if "lienar" in line)
    assert "500 was never reached" in "".join(said)


def test_steps_in_which_nothing_was_seen_are_said_once(capfd, tmp_path):
    other = torch.nn.Linear(3, 1)
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "out", record="L0") as probe:
        train(probe, other, steps=5)
    assert [f.step for f in probe.findings if f.rule == "probe"] == [0]
    line, _ = printed(capfd).splitlines()
    assert "step 0 was collected and nothing was seen" in line


def test_a_run_that_fails_is_told_of_its_plan_too(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with (
        pytest.raises(RuntimeError, match="broke"),
        trainprobe.watch(model, output=tmp_path / "out", step=[9]) as probe,
    ):
        train(probe, model)
        raise RuntimeError("broke")
    assert "9 was never reached" in printed(capfd)


def test_a_debugger_says_it_when_it_is_closed(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    debugger = PrecisionDebugger(dump_path=tmp_path / "out", level="L0", step=[7])
    debugger.start(model)
    model(torch.ones(2, 3)).sum().backward()
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    assert "7 was never reached" in printed(capfd)


def test_a_plan_that_came_true_is_worth_the_line_at_the_end_alone(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(model, output=tmp_path / "out", step=["0-2"]) as probe:
        train(probe, model)
    said = "3 steps watched, nothing judged (monitor=True and audit=True judge the steps)"
    assert printed(capfd) == f"trainprobe: {said}; output in {tmp_path / 'out'}\n"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "watching gradients, parameters and scalars at every step; the audit (2 parameters on this rank); writing to "),
        (
            {"record": "L1", "step": [3]},
            "watching a dump of L1 with statistics of step 3 (2 parameters on this rank); writing to ",
        ),
        ({"op_check": {"step": [9]}}, "watching operators (2 parameters on this rank); writing to "),
        ({"record": "nothing"}, "nothing is recorded or judged, as the plan says"),
    ],
)
def test_the_first_line_says_what_is_watched(plan, said, capfd, tmp_path):
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "out", **plan):
        first, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith(f"trainprobe: {said}")
    assert ("it costs about" in first) == (not plan)


def test_a_silent_plan_prints_nothing_whatever_is_found(capfd, tmp_path):
    probe = train_with_a_nan(tmp_path / "out", at=1, console=False)
    assert [f.rule for f in probe.findings] == ["nonfinite"]
    assert printed(capfd) == ""


def test_ranks_that_are_not_there_are_said(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    with trainprobe.watch(model, output=tmp_path / "out", record="L0", rank=[5, "7-9"]) as probe:
        train(probe, model)
    assert "no rank of the plan's rank [5, '7-9'] is there: the run has rank 0 alone" in printed(capfd)


def test_patterns_of_tensors_and_details_that_matched_nothing_are_said(capfd, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    details = [
        {"match": ["0"], "statistics": ["max"]},
        {"match": ["0.weight"], "task": "tensor"},
        {"match": ["layers.*"], "task": "tensor"},
    ]
    with trainprobe.watch(
        model, output=tmp_path / "out", tensors=["1", "Functional.linear", "8"], details=details, level="mix"
    ) as probe:
        train(probe, model)
    *said, _ = printed(capfd).splitlines()
    assert [line.partition(" matched")[0] for line in said] == [
        "trainprobe: the plan's tensors pattern '8'",
        "trainprobe: the plan's details pattern 'layers.*'",
    ]


def test_the_parameters_of_the_model_itself_are_known_by_their_own_names(capfd, tmp_path):
    model = torch.nn.Linear(3, 1)
    details = [{"match": ["weight"], "task": "tensor"}, {"match": ["wieght"], "task": "tensor"}]
    with trainprobe.watch(model, output=tmp_path / "out", details=details) as probe:
        train(probe, model)
    line, _ = printed(capfd).splitlines()
    assert "'wieght' matched no module, parameter or op" in line


def test_a_nan_that_stays_is_counted_and_not_repeated(capfd, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", level="off", monitor=True) as probe:
        for i in range(9):
            with probe.step():
                optimizer.zero_grad()
                model(torch.full((2, 3), float("nan") if i == 2 else 1.0)).sum().backward()
                optimizer.step()  # the weights are NaN from now on
    said = printed(capfd).splitlines()
    assert len(said) == 3
    assert "1 finding (nonfinite, first at step 2)" in said[-1]
    (finding,) = probe.findings
    assert (finding.count, finding.last_step) == (7, 8)
    assert read_findings(tmp_path / "out") == [finding]
    assert [f.count for f in judge_frames(read_frames(tmp_path / "out"), make_rules(None))] == [7]


def test_a_next_names_the_folder_of_the_run(tmp_path, capfd):
    monitor = {"rules": {"threshold": {"limit": 1e-9}}}
    with trainprobe.watch(torch.nn.Linear(3, 1), output=tmp_path / "a run", level="off", monitor=monitor) as probe:
        train(probe, torch.nn.Linear(3, 1), steps=1)
        with probe.step():
            probe.note("loss", 2.0)
    assert f"`trainprobe report '{tmp_path / 'a run'}'`" in printed(capfd)
