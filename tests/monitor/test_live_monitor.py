"""The monitor inside the real probe: what it collects, finds and does."""

import pytest
import torch
from small_training import GPT, batch

import trainprobe
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import StopTraining
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import judge_frames

torch.set_num_threads(1)


def run(folder, monitor, spoil=(), steps=60, level="off"):
    """Train under a probe with a monitor; `spoil`: (step, layers) whose gradients get a NaN. Return the findings."""
    torch.manual_seed(0)
    model = GPT(width=16, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    plan = {"output": folder, "level": level, "sinks": ["parquet"], "monitor": monitor}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(steps):
            probe.begin_step(step)
            optimizer.zero_grad(set_to_none=True)
            tokens = batch(generator)
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            for layer in dict(spoil).get(step, ()):
                model.layers[layer].fc1.weight.grad[3, 3] = float("nan")
            optimizer.step()
            probe.note("loss", loss.detach())
            probe.end_step()
        return list(probe.findings)


@pytest.mark.parametrize("monitor", [True, {"activations": False, "optimizer_state": True}])
def test_a_healthy_run_with_the_default_monitor_has_no_finding(tmp_path, monitor):
    assert run(tmp_path, monitor) == []


def test_of_several_bad_gradients_the_one_nearest_to_the_loss_is_the_origin(tmp_path):
    found = run(tmp_path, {"activations": False}, spoil=[(20, (0, 1, 2))], steps=25)
    assert (found[0].step, found[0].site.name, found[0].site.slot) == (20, "layers.2.fc1.weight", "grad")


def test_what_the_monitor_found_live_is_on_disk_and_found_again_offline(tmp_path):
    found = run(tmp_path, True, spoil=[(20, (1,))], steps=25)
    assert found
    assert read_findings(tmp_path) == found
    assert judge_frames(read_frames(tmp_path), make_rules(None)) == found


def test_a_rule_with_the_action_stop_ends_the_run_and_what_was_collected_is_written(tmp_path):
    with pytest.raises(StopTraining, match="rule 'nonfinite' at step 20"):
        run(tmp_path, {"rules": {"nonfinite": {"actions": ["log", "stop"]}}}, spoil=[(20, (1,))], steps=25)
    assert [frame.step for frame in read_frames(tmp_path)] == list(range(21))
    assert [f.rule for f in read_findings(tmp_path)] == ["nonfinite"]
