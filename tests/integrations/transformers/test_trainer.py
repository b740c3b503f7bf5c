"""The Hugging Face Trainer in one process: the same bits, the Trainer's own steps, real gradients, and nothing left behind."""

from __future__ import annotations

import json

import pytest
import torch

from tests.integrations.records import steps_of
from tests.matrices import matrix
from trainprobe.errors import PlanError


@pytest.fixture(scope="module", autouse=True)
def transformers(require):
    require("transformers")
    require("accelerate")


EVERYTHING = {"optimizer_state": True, "activations": True, "activation_gradients": True}
SETUPS = {
    "plain": {},
    "accumulated and clipped": {"accumulate": 2, "clip": 0.05},
    "half precision": {"bf16": True},
    "logged": {"clip": 0.05, "logging_strategy": "steps", "logging_steps": 2},
}


def train(folder, *callbacks, **options):
    from tests.integrations.transformers.small_trainer import train

    return train(folder, list(callbacks), **options)


def probe(output, plan=None, **overrides):
    from trainprobe.integrations.transformers import ProbeCallback

    return ProbeCallback(plan, output=output, **overrides)


def steps(output) -> list[int]:
    from tests.integrations.transformers.small_trainer import recorded

    return list(recorded(output))


# ---- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.proves(
    "Hugging Face Trainer",
    {"plain": "single process", "accumulated and clipped": "accumulation and clipping", "half precision": "bf16"},
)
@pytest.mark.parametrize(("setup", "level"), matrix(SETUPS, ["off", "L0", "mix"]))
def test_the_training_has_the_same_bits_with_and_without_the_probe(tmp_path, setup, level):
    from tests.integrations.transformers.small_trainer import bits

    bare = bits(train(tmp_path, **SETUPS[setup]))
    watched = bits(train(tmp_path, probe(tmp_path / "out", {"level": level, "monitor": EVERYTHING}), **SETUPS[setup]))
    assert [name for name in bare if bare[name] != watched[name]] == []


@pytest.mark.proves("Hugging Face Trainer", {"plain": "single process", "accumulated and clipped": "accumulation and clipping"})
@pytest.mark.parametrize("setup", ["plain", "accumulated and clipped"])
def test_numbers_are_those_of_the_same_training_in_plain_torch(tmp_path, setup):
    from tests.integrations.transformers.small_trainer import plain_torch, recorded

    train(tmp_path, probe(tmp_path / "out", {"level": "off", "monitor": {"optimizer_state": True}}), drop=0.0, **SETUPS[setup])
    expected = plain_torch(SETUPS[setup].get("accumulate", 1), SETUPS[setup].get("clip", 0.0))
    found = recorded(tmp_path / "out")
    assert list(found) == [1, 2, 3, 4]
    for step, numbers in enumerate(expected, 1):
        assert {name: found[step][name] for name in numbers} == pytest.approx(numbers, rel=5e-5, abs=1e-9), step


def test_what_the_trainer_reports_is_kept_as_it_reports_it_at_the_step_it_names(tmp_path):
    from tests.integrations.transformers.small_trainer import recorded

    run = train(tmp_path, probe(tmp_path / "out"), **SETUPS["logged"])
    found = recorded(tmp_path / "out")
    logs = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        numbers = found[entry["step"]]
        assert numbers["reported/loss"] == pytest.approx(entry["loss"])
        assert numbers["reported/lr"] == pytest.approx(entry["learning_rate"])
        assert numbers["reported/grad_norm"] == pytest.approx(entry["grad_norm"])
        assert numbers["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-5)
        assert numbers["lr"] == pytest.approx(entry["learning_rate"])
    assert "reported/loss" not in found[1] and "loss" in found[1]


@pytest.mark.proves("Hugging Face Trainer", "evaluation")
def test_micro_batches_are_told_apart_and_evaluation_is_not_recorded(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    train(tmp_path, probe(tmp_path / "out", level="L0"), accumulate=2, **options)
    for step_data in steps_of(tmp_path / "out"):
        forwards = [call for call in step_data.calls if call.phase == "forward" and call.name == "first"]
        assert [call.micro for call in forwards] == [0, 1]


@pytest.mark.proves("Hugging Face Trainer", "torch.compile")
def test_a_compiled_model_trains_to_the_same_bits(tmp_path):
    from tests.integrations.transformers.small_trainer import bits

    found = []
    for callbacks in ((), (probe(tmp_path / "out", level="L0", monitor=EVERYTHING),)):
        torch._dynamo.reset()
        found.append(bits(train(tmp_path, *callbacks, torch_compile=True, torch_compile_backend="aot_eager")))
    assert found[0] == found[1]
    assert steps(tmp_path / "out") == [1, 2, 3, 4]


@pytest.mark.parametrize("setup", SETUPS)
def test_the_audit_changes_no_bit_and_finds_nothing_in_a_healthy_training(tmp_path, setup):
    from tests.integrations.transformers.small_trainer import bits

    bare = bits(train(tmp_path, **SETUPS[setup]))
    auditor = probe(tmp_path / "out", {"level": "off", "monitor": True, "audit": {"every": 1}})
    assert bits(train(tmp_path, auditor, **SETUPS[setup])) == bare
    assert auditor.findings == []


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_nan_in_one_layer_is_found_at_its_step_and_named(tmp_path, caplog):
    sick = probe(tmp_path / "out")
    train(tmp_path, sick, accumulate=2, clip=0.05, nan_at=5)
    first = next(finding for finding in sick.findings if finding.rule == "nonfinite")
    assert (first.step, first.place.rank, first.site.name) == (3, 0, "second.weight")


@pytest.mark.proves("Hugging Face Trainer", "a crash")
def test_a_crash_passes_through_and_nothing_is_left_installed(tmp_path):
    from tests.integrations.transformers.small_trainer import trainer

    call = torch.nn.Module._call_impl
    run = trainer(tmp_path, [probe(tmp_path / "out", level="L0")], accumulate=2, crash_at=5)
    with pytest.raises(RuntimeError, match="the training broke"):
        run.train()
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [(step_data.step, step_data.complete) for step_data in collected_steps] == [(1, True), (2, True), (3, False)]
    assert torch.nn.Module._call_impl is call and "training_step" not in vars(run)


def test_a_rule_that_stops_ends_the_training(tmp_path):
    plan = {"level": "off", "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}}}
    assert train(tmp_path, probe(tmp_path / "out", plan), nan_at=1).state.global_step == 2


def test_a_plan_that_cannot_be_carried_out_is_refused_before_training(tmp_path):
    with pytest.raises(PlanError, match="levle"):
        probe(tmp_path, {"levle": "L0"})
    with pytest.raises(PlanError, match=r"frist"):
        train(tmp_path, probe(tmp_path / "out", {"level": "L0", "modules": ["frist"]}))


# ---- more than one ---------------------------------------------------------------------------------------------------


@pytest.mark.proves("Hugging Face Trainer", "several callbacks")
def test_two_callbacks_work_beside_each_other_and_leave_nothing_behind(tmp_path):
    from torch.nn.utils import clip_grad

    from tests.integrations.transformers.small_trainer import bits

    def places():
        return [torch.nn.Module._call_impl, clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grad_value_]

    before, bare = places(), bits(train(tmp_path, accumulate=2, clip=0.05))
    one = probe(tmp_path / "one", {"level": "mix", "step": "every 2"})
    two = probe(tmp_path / "two", {"level": "L0", "monitor": EVERYTHING})
    run = train(tmp_path, one, two, accumulate=2, clip=0.05)
    assert bits(run) == bare
    assert (steps(tmp_path / "one"), steps(tmp_path / "two")) == ([2, 4], [1, 2, 3, 4])
    assert places() == before and "training_step" not in vars(run)


def test_a_callback_that_is_added_twice_works_once(tmp_path):
    from tests.integrations.transformers.small_trainer import bits, recorded

    twice = probe(tmp_path / "out", level="L0")
    assert bits(train(tmp_path, twice, twice, accumulate=2)) == bits(train(tmp_path, accumulate=2))
    assert steps(tmp_path / "out") == [1, 2, 3, 4]
    train(tmp_path, probe(tmp_path / "once", level="L0"), accumulate=2)
    assert recorded(tmp_path / "once") == recorded(tmp_path / "out")


@pytest.mark.proves("Hugging Face Trainer", "a second train")
def test_training_again_with_the_same_callback_goes_on_in_the_same_place(tmp_path):
    again = probe(tmp_path / "out")
    train(tmp_path, again)
    train(tmp_path, again)
    assert [step_data.step for step_data in steps_of(tmp_path / "out")].count(1) == 2


# ---- checkpoints and loggers -----------------------------------------------------------------------------------------


@pytest.mark.proves("Hugging Face Trainer", "resume")
@pytest.mark.parametrize("restores", [False, True])
def test_a_resumed_training_goes_on_with_its_steps_and_with_what_the_rules_remember(tmp_path, restores):
    from tests.integrations.transformers.small_trainer import trainer

    saving = {"save_strategy": "steps", "save_steps": 2, "drop": 0.0, "restore_callback_states_from_checkpoint": restores}
    whole = probe(tmp_path / "whole")
    train(tmp_path / "a", whole, **saving)
    run = trainer(tmp_path / "b", [probe(tmp_path / "parts")], **saving)
    run.train()
    (tmp_path / "parts").rename(tmp_path / "first")
    again = probe(tmp_path / "parts")
    run = trainer(tmp_path / "b", [again], **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert steps(tmp_path / "parts") == [3, 4]
    state = json.loads((tmp_path / "b" / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert state["ProbeCallback"]["attributes"]["remembered"]["rules"] == whole.remembered["rules"]


def test_a_checkpoint_that_was_saved_without_the_callback_can_be_resumed_and_saved_with_it(tmp_path):
    from tests.integrations.transformers.small_trainer import trainer

    saving = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, **saving)
    run = trainer(tmp_path, [probe(tmp_path / "out")], **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(tmp_path / "out") == [3, 4]


@pytest.mark.proves("Hugging Face Trainer", "report_to")
def test_the_reporters_get_a_few_scalars(tmp_path, require):
    require("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, probe(tmp_path / "out"), logging_strategy="steps", logging_steps=1, report_to=["tensorboard"])
    written = max(tmp_path.rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_size)
    events = EventAccumulator(str(written.parent))
    events.Reload()
    assert {"train/trainprobe/findings", "train/trainprobe/grad_norm"} <= set(events.Tags()["scalars"])


def test_tensorboard_files_stand_beside_those_of_the_reporter_in_each_training(tmp_path, require):
    require("tensorboard")
    from tests.integrations.transformers.small_trainer import trainer
    from trainprobe.integrations.transformers import ProbeCallback

    plan = {"sinks": ["parquet", "tensorboard"], "console": False}
    reported = {"report_to": ["tensorboard"], "logging_strategy": "steps", "logging_steps": 1}
    run = trainer(tmp_path, [ProbeCallback(plan, output=tmp_path / "out")], **reported)
    for trainings in (1, 2):  # between them the reporter has no writer
        run.train()
        (folder,) = {path.parent for path in tmp_path.rglob("*tfevents*") if path.parent.name == "rank0"}
        assert folder.parent.name == "trainprobe" and list(folder.parent.parent.glob("*tfevents*"))
        assert len(list(folder.iterdir())) == trainings


# ---- what programs do with a Trainer besides -------------------------------------------------------------------------


def test_what_a_program_logs_in_the_middle_of_a_step_does_not_end_it(tmp_path):
    """As losses of TRL and of many own `compute_loss` do."""
    from tests.integrations.transformers.small_trainer import Sequential, recorded, trainer

    class Logging(Sequential):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.log({"share": float(loss.detach())})
            return loss

    run = trainer(tmp_path, [probe(tmp_path / "out")], drop=0.0, logging_strategy="steps", logging_steps=2)
    run.__class__ = Logging
    run.train()
    train(tmp_path, probe(tmp_path / "plain"), drop=0.0, logging_strategy="steps", logging_steps=2)
    assert recorded(tmp_path / "out") == recorded(tmp_path / "plain")
    assert not any("trainprobe/findings" in entry for entry in run.state.log_history if "share" in entry)


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_step_whose_log_another_callback_takes_back_holds_no_evaluation_and_not_the_next_step(tmp_path, evaluates):
    from transformers import TrainerCallback

    class Silent(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_log = False

    options = {"logging_strategy": "steps", "logging_steps": 1, "eval_steps": 1}
    watch = probe(tmp_path / "out", {"level": "L0"})
    train(tmp_path, watch, Silent(), eval_strategy="steps" if evaluates else "no", **options)
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [step_data.step for step_data in collected_steps] == [1, 2, 3, 4]
    for step_data in collected_steps:
        assert [call.phase for call in step_data.calls if call.kind == "module" and call.name == "first"] == [
            "forward",
            "backward",
        ]


def test_a_training_step_that_the_program_has_put_on_the_trainer_stays_there(tmp_path):
    from tests.integrations.transformers.small_trainer import trainer

    run = trainer(tmp_path, [probe(tmp_path / "one"), probe(tmp_path / "two")])
    original, seen = run.training_step, []

    def training_step(*args, **kwargs):
        seen.append(run.state.global_step)
        return original(*args, **kwargs)

    run.training_step = training_step
    run.train()
    assert seen == [0, 1, 2, 3]
    assert vars(run)["training_step"] is training_step
    assert steps(tmp_path / "one") == steps(tmp_path / "two") == [1, 2, 3, 4]


def test_a_callback_that_is_given_to_a_second_trainer_watches_that_one(tmp_path):
    watch = probe(tmp_path / "out")
    train(tmp_path, watch, accumulate=2)
    run = train(tmp_path, watch, accumulate=2)
    assert watch.trainer is run
    collected_steps = list(steps_of(tmp_path / "out"))
    assert [step_data.step for step_data in collected_steps] == [1, 2, 3, 4] * 2
    assert [step_data.scalars["loss"] for step_data in collected_steps[:4]] == [
        step_data.scalars["loss"] for step_data in collected_steps[4:]
    ]
