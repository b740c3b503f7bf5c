"""Lightning in one process: the same bits, Lightning's own steps, real gradients, and nothing left behind."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.records import steps_of
from trainprobe.errors import OutputError, PlanError


@pytest.fixture(scope="module", autouse=True)
def lightning(require):
    require("lightning.pytorch")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


EVERYTHING = {"optimizer_state": True, "activations": True, "activation_gradients": True}
SETUPS = {
    "automatic": ("automatic", {}),
    "accumulated and clipped": ("automatic", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "clipped by value": ("automatic", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual": ("manual", {}),
    "two optimizers": ("two optimizers", {}),
    "half precision": ("automatic", {"precision": "bf16-mixed"}),
}


def fit(output: Path | None, setup: str = "automatic", plan: dict | None = None, callbacks: list | None = None, **more):
    from tests.integrations.lightning.small_lightning import bits, loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    kind, options = SETUPS[setup]
    about = {name: more.pop(name) for name in ("nan_at", "crash_at", "drop", "namespace") if name in more}
    probe = [ProbeCallback(plan, output=output)] if output else []
    space = {"namespace": about["namespace"]} if "namespace" in about else {}
    run = trainer([*probe, *(callbacks or [])], **space, **options, **{k: v for k, v in more.items() if k != "ckpt_path"})
    model = module(kind, **about)
    torch.manual_seed(9)
    run.fit(model, loader(), **{k: v for k, v in more.items() if k == "ckpt_path"})
    return run, model, bits(model, run), probe[0] if probe else None


def steps(output: Path) -> list[int]:
    from tests.integrations.lightning.small_lightning import recorded

    return list(recorded(output))


# ---- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.proves(
    "Lightning",
    {
        "automatic": "automatic optimization",
        "accumulated and clipped": "accumulation and clipping",
        "clipped by value": "clipping by value",
        "manual": "manual optimization",
        "two optimizers": "two optimizers",
        "half precision": "bf16-mixed",
    },
)
@pytest.mark.parametrize("level", ["off", "L0", "mix"])
@pytest.mark.parametrize("setup", SETUPS)
def test_the_training_has_the_same_bits_with_and_without_the_probe(tmp_path, setup, level):
    bare = fit(None, setup)[2]
    watched = fit(tmp_path / "out", setup, {"level": level, "monitor": EVERYTHING})[2]
    assert [name for name in bare if bare[name] != watched[name]] == []


@pytest.mark.proves(
    "Lightning", {"automatic": "automatic optimization", "accumulated and clipped": "accumulation and clipping"}
)
@pytest.mark.parametrize("setup", ["automatic", "accumulated and clipped"])
def test_numbers_are_those_of_the_same_training_in_plain_torch(tmp_path, setup):
    from tests.integrations.lightning.small_lightning import CLIP, batches, plain_torch, recorded

    fit(tmp_path / "out", setup, {"level": "off", "monitor": {"optimizer_state": True}}, drop=0.0)
    clipped = setup != "automatic"
    expected = plain_torch(2 if clipped else 1, CLIP if clipped else None, [batches()])
    found = recorded(tmp_path / "out")
    assert list(found) == list(range(len(expected)))
    for step, numbers in enumerate(expected):
        if not clipped:
            numbers = {name: value for name, value in numbers.items() if "unclipped" not in name}
        numbers = {name: value for name, value in numbers.items() if " rank" not in name}
        assert {name: found[step][name] for name in numbers} == pytest.approx(numbers, rel=2e-5, abs=1e-9), step


def test_gradients_are_told_apart_before_and_after_clipping_with_the_norm_that_was_reported(tmp_path):
    from tests.integrations.lightning.small_lightning import recorded

    fit(tmp_path / "out", "accumulated and clipped")
    for numbers in recorded(tmp_path / "out").values():
        whole = {
            slot: sum(v**2 for k, v in numbers.items() if k.endswith(f" {slot}")) ** 0.5 for slot in ("grad", "grad_unclipped")
        }
        assert whole["grad_unclipped"] == pytest.approx(numbers["grad_norm"], rel=1e-5)
        assert whole["grad"] == pytest.approx(min(0.05, numbers["grad_norm"]), rel=1e-4)


def test_parameters_of_two_optimizers_are_each_seen_before_and_after_their_own_update(tmp_path):
    from tests.integrations.lightning.small_lightning import recorded

    fit(tmp_path / "out", "two optimizers")
    numbers = list(recorded(tmp_path / "out").values())
    for now, then in itertools.pairwise(numbers):
        for name in [name for name in now if name.endswith(" value_after")]:
            assert now[name] == then[name.removesuffix("_after")], name
            assert now[name] != now[name.removesuffix("_after")], name


def test_the_steps_are_those_of_global_step_also_with_two_optimizers(tmp_path):
    fit(tmp_path / "one", "accumulated and clipped")
    fit(tmp_path / "two", "two optimizers")
    assert steps(tmp_path / "one") == [0, 1, 2, 3]
    assert steps(tmp_path / "two") == [0, 2, 4, 6, 8, 10, 12, 14]


def test_micro_batches_are_told_apart(tmp_path):
    fit(tmp_path / "out", "accumulated and clipped", {"level": "off", "monitor": {"activations": True}})
    for step_data in steps_of(tmp_path / "out"):
        assert {call.micro for call in step_data.calls if call.kind == "module" and call.name == "net.first"} == {0, 1}


def test_validation_between_micro_batches_is_not_recorded(tmp_path):
    from tests.integrations.lightning.small_lightning import bits, loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 1}
    found = []
    for callbacks in ([], [ProbeCallback(output=tmp_path / "out", level="L0")]):
        model, run = module(), trainer(callbacks, **options)
        torch.manual_seed(9)
        run.fit(model, loader(), val_dataloaders=loader(rank=1, count=2))
        found.append(bits(model, run))
    assert found[0] == found[1]
    for step_data in steps_of(tmp_path / "out"):
        forwards = [call for call in step_data.calls if call.phase == "forward" and call.name == "net.first"]
        assert len(forwards) == 2, "one for each micro-batch and none for validation"


def test_validate_alone_records_nothing_and_leaves_nothing_behind(tmp_path):
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    run = trainer([ProbeCallback(output=tmp_path / "out", level="L0")])
    call = torch.nn.Module._call_impl
    run.validate(module(), loader(), verbose=False)
    assert not (tmp_path / "out").exists() and torch.nn.Module._call_impl is call


@pytest.mark.proves("Lightning", "validate and a second fit")
def test_validate_between_two_fits_changes_and_records_nothing(tmp_path):
    from tests.integrations.lightning.small_lightning import bits, loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    found = []
    for callbacks in ([], [ProbeCallback(output=tmp_path / "out", level="L0")]):
        model, run = module(), trainer(callbacks)
        torch.manual_seed(9)
        run.fit(model, loader())
        run.validate(model, loader(rank=1, count=2), verbose=False)
        run.fit_loop.max_epochs = 2
        run.fit(model, loader())
        found.append(bits(model, run))
    assert found[0] == found[1]
    assert steps(tmp_path / "out") == list(range(16))


@pytest.mark.proves("Lightning", "torch.compile")
@pytest.mark.parametrize("how", ["the module", "a part of it", "a part in place"])
def test_a_compiled_module_trains_to_the_same_bits(tmp_path, how):
    from tests.integrations.lightning.small_lightning import bits, loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    found = []
    for callbacks in ([], [ProbeCallback({"step": "every 2"}, output=tmp_path / "out", level="L0", monitor=EVERYTHING)]):
        torch._dynamo.reset()
        model, run = module(quiet=True), trainer(callbacks)
        whole = model
        if how == "the module":
            whole = torch.compile(model, backend="aot_eager")
        elif how == "a part of it":
            model.net.second = torch.compile(model.net.second, backend="aot_eager")
        else:
            model.net.compile(backend="aot_eager")
        torch.manual_seed(9)
        run.fit(whole, loader())
        found.append(bits(model, run))
    assert found[0] == found[1]
    assert steps(tmp_path / "out") == list(range(8))


@pytest.mark.parametrize("setup", ["automatic", "accumulated and clipped", "manual", "half precision"])
def test_the_audit_changes_no_bit_and_finds_nothing_in_a_healthy_training(tmp_path, setup):
    bare = fit(None, setup)[2]
    _, _, watched, probe = fit(tmp_path / "out", setup, {"level": "off", "monitor": True, "audit": {"every": 1}})
    assert watched == bare
    assert probe.findings == []


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_nan_in_one_layer_is_found_at_its_step_and_named(tmp_path):
    probe = fit(tmp_path / "out", "accumulated and clipped", nan_at=5)[3]
    first = next(finding for finding in probe.findings if finding.rule == "nonfinite")
    assert (first.step, first.place.rank, first.site.name) == (2, 0, "net.second.weight")


@pytest.mark.proves("Lightning", "a crash")
def test_a_crash_passes_through_and_what_was_seen_of_the_step_is_on_disk(tmp_path):
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    call = torch.nn.Module._call_impl
    with pytest.raises(RuntimeError, match="the training broke"):
        trainer([ProbeCallback(output=tmp_path / "out", level="L0")], accumulate_grad_batches=2).fit(
            module(crash_at=5), loader()
        )
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [(0, True), (1, True), (2, False)]
    assert torch.nn.Module._call_impl is call


def test_an_error_of_another_callback_leaves_the_last_steps_in_the_black_box(tmp_path):
    from lightning.pytorch import Callback

    from trainprobe.monitor.black_box.black_box_command import find_boxes, read_box

    class Fails(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("the disk with the checkpoints is gone")

    with pytest.raises(KeyError, match="checkpoints"):
        fit(tmp_path, plan={"level": "off", "monitor": True, "black_box": True}, callbacks=[Fails()])
    (path,) = find_boxes(tmp_path)
    head, steps = read_box(path)
    assert head["why"] == "KeyError ended the training after step 2"
    assert [(step["reel"]["step"], step["reel"]["complete"]) for step in steps] == [(0, True), (1, True), (2, True)]


def test_a_rule_that_stops_ends_the_training(tmp_path):
    plan = {"level": "off", "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}}}
    run, _, _, probe = fit(tmp_path / "out", plan=plan, nan_at=3)
    assert (run.global_step, run.interrupted) == (4, False)
    assert any(finding.rule == "nonfinite" for finding in probe.findings)


def test_a_plan_that_cannot_be_carried_out_is_refused_before_training(tmp_path):
    from trainprobe.integrations.lightning import ProbeCallback

    with pytest.raises(PlanError, match="levle"):
        ProbeCallback({"levle": "L0"})
    with pytest.raises(PlanError, match=r"net\.frist"):
        fit(tmp_path / "out", plan={"level": "L0", "modules": ["net.frist"]})


# ---- more than one ---------------------------------------------------------------------------------------------------


@pytest.mark.proves("Lightning", "several callbacks")
def test_two_callbacks_work_beside_each_other_and_leave_nothing_behind(tmp_path):
    from torch.nn.utils import clip_grad

    from trainprobe.integrations.lightning import ProbeCallback

    def places():
        return [torch.nn.Module._call_impl, clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grad_value_]

    before, bare = places(), fit(None, "accumulated and clipped")[2]
    two = [
        ProbeCallback({"level": "mix", "step": "every 2"}, output=tmp_path / "one"),
        ProbeCallback({"level": "L0", "monitor": EVERYTHING}, output=tmp_path / "two"),
    ]
    model = fit(None, "accumulated and clipped", callbacks=two)
    assert model[2] == bare
    assert (steps(tmp_path / "one"), steps(tmp_path / "two")) == ([0, 2], [0, 1, 2, 3])
    assert places() == before
    assert pickle.dumps(model[1].net.state_dict())
    assert all(not m._forward_hooks and not m._backward_hooks for m in model[1].modules())


def test_two_callbacks_that_write_to_one_place_are_refused(tmp_path):
    from trainprobe.integrations.lightning import ProbeCallback

    with pytest.raises((OutputError, RuntimeError)):
        fit(tmp_path / "out", callbacks=[ProbeCallback(output=tmp_path / "out")])


def test_one_callback_added_twice_is_refused_by_lightning_before_training(tmp_path):
    from tests.integrations.lightning.small_lightning import trainer
    from trainprobe.integrations.lightning import ProbeCallback

    twice = ProbeCallback(output=tmp_path / "out")
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        trainer([twice, twice])


@pytest.mark.proves("Lightning", "validate and a second fit")
def test_a_second_fit_of_the_same_trainer_goes_on_with_its_steps(tmp_path):
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    run, model = trainer([ProbeCallback(output=tmp_path / "out")]), module()
    run.fit(model, loader())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    assert steps(tmp_path / "out") == list(range(16))


def test_a_callback_is_copied_and_pickled_as_what_it_was_made_of(tmp_path):
    from trainprobe.integrations.lightning import ProbeCallback

    made = ProbeCallback({"level": "L0"}, output=tmp_path)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (type(twin), twin.session.plan) == (type(made), made.session.plan)


# ---- checkpoints and loggers -----------------------------------------------------------------------------------------


@pytest.mark.proves("Lightning", "resume")
def test_a_resumed_training_goes_on_with_its_steps_and_with_what_the_rules_remember(tmp_path):
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    def one(folder: str, epochs: int, start: str | None = None):
        probe = ProbeCallback({"level": "off", "monitor": True}, output=tmp_path / folder)
        run = trainer([probe], max_epochs=epochs)
        torch.manual_seed(9)
        run.fit(module(drop=0.0), loader(), ckpt_path=start)
        run.save_checkpoint(tmp_path / f"{folder}-{epochs}.ckpt")
        return probe.state_dict()

    whole = one("whole", 2)
    one("parts", 1)
    again = one("parts", 2, str(tmp_path / "parts-1.ckpt"))
    assert steps(tmp_path / "parts") == list(range(16))
    assert again["rules"] == whole["rules"]
    saved = torch.load(tmp_path / "parts-2.ckpt", weights_only=True)["callbacks"]
    assert [entry["rules"] for key, entry in saved.items() if key.startswith("ProbeCallback")] == [whole["rules"]]


@pytest.mark.proves("Lightning", "loggers")
def test_the_users_loggers_get_scalars_and_findings(tmp_path, require):
    require("tensorboard")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")]
    fit(tmp_path / "out", "accumulated and clipped", logger=loggers, log_every_n_steps=1, nan_at=5)
    text = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert "trainprobe/findings" in text.splitlines()[0]
    assert "trainprobe/grad_norm" in text.splitlines()[0]
    events = EventAccumulator(str(next((tmp_path / "tb").rglob("version_0"))))
    events.Reload()
    assert {"trainprobe/findings", "trainprobe/grad_norm"} <= set(events.Tags()["scalars"])
    assert "trainprobe/findings/text_summary" in events.Tags()["tensors"]


def test_tensorboard_files_stand_beside_those_of_the_logger_and_hold_each_step(tmp_path, require):
    require("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from trainprobe.engine.storage.dumps.log import read_log
    from trainprobe.engine.storage.tagged_numbers import numbers_of

    def tags(folder: Path, join: bool) -> dict[str, list[tuple[int, float]]]:
        logger = TensorBoardLogger(tmp_path / "tb", name=folder.name)
        fit(folder, "accumulated and clipped", logger=logger, plan={"sinks": ["parquet", "tensorboard"], "join_runs": join})
        assert (folder / "tensorboard").exists() != join
        events = EventAccumulator(str(Path(logger.log_dir) / "trainprobe/rank0" if join else folder / "tensorboard/rank0"))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    beside, apart = tags(tmp_path / "beside", True), tags(tmp_path / "apart", False)
    assert beside == apart
    recorded = {step.step: dict(numbers_of(step)) for step in read_log(tmp_path / "beside")}
    assert beside["scalars/loss"] == [(step, pytest.approx(numbers["scalars/loss"])) for step, numbers in recorded.items()]


# ---- either Lightning ------------------------------------------------------------------------------------------------

OLD = """
import sys, torch, pytorch_lightning
sys.path.insert(0, {root!r})
from tests.integrations.lightning.small_lightning import loader, module, trainer
from trainprobe.integrations.lightning import ProbeCallback
probe = ProbeCallback(output={output!r})
assert isinstance(probe, pytorch_lightning.Callback) and isinstance(probe, ProbeCallback)
run = trainer([probe], "pytorch_lightning")
run.fit(module(namespace="pytorch_lightning"), loader())
assert run.global_step == 8 and "lightning.pytorch" not in sys.modules
"""


@pytest.mark.proves("Lightning", "pytorch_lightning")
def test_the_older_namespace_is_served_without_importing_the_other(tmp_path, require):
    root = str(Path(__file__).parents[3])
    if subprocess.run([sys.executable, "-c", "import pytorch_lightning"], capture_output=True, timeout=100).returncode:
        pytest.skip("needs pytorch_lightning")
    script = OLD.format(root=root, output=str(tmp_path / "out"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert steps(tmp_path / "out") == list(range(8))
