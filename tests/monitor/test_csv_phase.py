"""The tidy CSV tells the phase, so that judging it names the same origin as the live run; files without it are read too."""

import csv
import io

import pytest
import torch
from small_training import GPT, batch

import trainprobe
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.sinks import csv as csv_sink
from trainprobe.errors import FormatError
from trainprobe.monitor.metric_files import read_metrics
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames

torch.set_num_threads(1)
NAN = float("nan")
MONITOR = {
    "activation_gradients": True,
    "optimizer_state": True,
    "update": True,
    "gradients": {"unclipped": True},
    "rules": {"nonfinite": True, "spike": False},
}


def spoil(model, optimizer, where):
    """Put one NaN where the test says."""
    with torch.no_grad():
        if where == "parameter":
            model.layers[2].fc1.weight[0, 0] = NAN
        if where == "moment":
            optimizer.state[model.layers[1].fc2.weight]["exp_avg"][0, 0] = NAN
        if where in ("gradient", "two gradients"):
            model.layers[1].fc1.weight.grad[3, 3] = NAN
        if where == "two gradients":
            model.layers[3].proj.weight.grad[0, 0] = NAN


MOMENT = {"parameter": "forward", "moment": "forward", "gradient": "update", "two gradients": "update", "loss": "", "none": ""}


def run(folder, where, steps=4, **sinks):
    """Train under the monitor, spoil step 2, return the findings of the rule nonfinite."""
    torch.manual_seed(0)
    model = GPT(width=16, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    plan = {"output": folder, "level": "off", "sinks": ["csv"], "monitor": MONITOR, **sinks}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(steps):
            with probe.step(step):
                optimizer.zero_grad(set_to_none=True)
                tokens = batch(generator)
                if step == 2 and MOMENT[where] == "forward":
                    spoil(model, optimizer, where)
                loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                (loss * (NAN if where == "loss" and step == 2 else 1)).backward()
                if step == 2 and MOMENT[where] == "update":
                    spoil(model, optimizer, where)
                torch.nn.utils.clip_grad_norm_(model.layers[0].parameters(), 1.0)
                optimizer.step()
                probe.note("loss", loss.detach())
        return [(f.rule, f.step, f.site) for f in probe.findings if f.rule == "nonfinite"]


@pytest.mark.parametrize("where", MOMENT)
def test_judging_the_csv_names_the_origin_that_the_live_run_named(tmp_path, where):
    live = run(tmp_path, where)
    offline = [(f.rule, f.step, f.site) for f in judge_frames(read_frames(tmp_path), make_rules(MONITOR["rules"]))]
    offline = [found for found in offline if found[0] == "nonfinite"]
    assert bool(live) == (where != "none")
    assert offline == live


@pytest.mark.parametrize("layout", [{"csv_layout": "wide"}, {"sinks": ["msprobe_csv"]}, {"sinks": ["msprobe_second_csv"]}])
def test_a_gradient_that_the_update_wrote_into_the_weights_is_named_in_files_of_the_other_layouts_too(tmp_path, layout):
    run(tmp_path, "gradient", **layout)
    found = [f for f in judge_frames(read_frames(tmp_path), make_rules(["nonfinite"])) if f.rule == "nonfinite"]
    assert [(f.step, f.site.name, f.site.slot) for f in found] == [(2, "layers.1.fc1.weight", "grad")]
    assert "earlier step" not in found[0].message


def test_every_record_is_read_back_with_its_phase(tmp_path):
    sink = csv_sink.open(tmp_path, plan_for(tmp_path, sinks=["csv"]), Place())
    sink.write(small_step(3))
    sink.close()
    (step,) = read_metrics(tmp_path)
    wanted = [(r.site.kind, r.site.name, r.site.slot, r.step.phase) for r in small_step(3).records()]
    assert [(r.site.kind, r.site.name, r.site.slot, r.step.phase) for r in step.records] == wanted


def without_phase(path):
    rows = list(csv.reader(io.StringIO(path.read_text())))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(row[:-1] for row in rows)
    path.write_text(text.getvalue())


def test_a_file_without_phases_is_read_and_goes_on_as_it_began(tmp_path):
    plan = plan_for(tmp_path, sinks=["csv"], on_existing="continue")
    for step in range(2):
        sink = csv_sink.open(tmp_path, plan, Place())
        sink.write(small_step(step))
        sink.close()
        if step == 0:
            without_phase(tmp_path / "rank0/metrics.csv")
    rows = list(csv.reader((tmp_path / "rank0/metrics.csv").open(newline="")))
    assert {len(row) for row in rows} == {11}
    assert [step.step for step in read_metrics(tmp_path)] == [0, 1]
    assert {r.step.phase for r in next(read_metrics(tmp_path)).records} == {"forward", "backward", "step"}


def test_a_phase_that_there_is_not_is_an_error_with_file_and_line(tmp_path):
    sink = csv_sink.open(tmp_path, plan_for(tmp_path, sinks=["csv"]), Place())
    sink.write(small_step(0))
    sink.close()
    path = tmp_path / "rank0/metrics.csv"
    path.write_text(path.read_text().replace("backward", "sideways"))
    with pytest.raises(FormatError, match=r"metrics.csv, line \d+: 'sideways' is not a phase"):
        list(read_metrics(tmp_path))
