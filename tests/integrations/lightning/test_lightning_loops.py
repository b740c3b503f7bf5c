"""Trainings of Lightning that end, skip or resume where a plain fit does not: steps on disk are still Lightning's own."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.integrations.records import steps_of

PLAN = {"level": "L0", "monitor": True}


@pytest.fixture(scope="module", autouse=True)
def lightning(require):
    require("lightning.pytorch")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def fit(output, kind: str = "automatic", start: str | None = None, methods: dict | None = None, **options):
    """Train with methods of the module replaced; return what was recorded of each step, and the trainer."""
    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    model = module(kind)
    model.__class__ = type("Module", (type(model),), methods or {})
    run = trainer([ProbeCallback(PLAN, output=output)], **options)
    torch.manual_seed(9)
    run.fit(model, loader(), ckpt_path=start)
    return list(steps_of(output)), run


def micros(step_data) -> list[int]:
    return sorted({call.micro for call in step_data.calls if call.kind == "module"})


def test_a_run_that_is_resumed_after_its_first_step_goes_on(tmp_path):
    _, run = fit(tmp_path / "out", max_steps=1)
    run.save_checkpoint(tmp_path / "one.ckpt")
    collected_steps, _ = fit(tmp_path / "out", start=str(tmp_path / "one.ckpt"), max_steps=3, max_epochs=2)
    assert [step_data.step for step_data in collected_steps] == [0, 1, 2]


def test_a_run_that_crashed_behind_its_checkpoint_comes_by_steps_it_has_dumped_and_goes_on(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    plan = {"level": "L0", "sinks": ["dump"], "output": tmp_path / "out"}
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RuntimeError, match="broke"):
        trainer([ProbeCallback(plan), saving], enable_checkpointing=True).fit(module(crash_at=5), loader())
    probe = ProbeCallback(plan)
    trainer([probe]).fit(module(), loader(), ckpt_path=str(tmp_path / "saved" / "epoch=0-step=4.ckpt"))
    assert {path.name for path in (tmp_path / "out").glob("step*")} == {f"step{step}" for step in range(8)}
    assert [(finding.rule, finding.step) for finding in probe.findings] == [("writer", 4)]


def test_batches_that_no_update_followed_are_marked_as_a_step_that_was_cut_short(tmp_path):
    """Eight batches, an update after each third: two are left."""

    def by_hand(self, loss, batch, index):
        self.manual_backward(loss / 3)
        if index % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    collected_steps, run = fit(tmp_path / "out", "manual", methods={"by_hand": by_hand})
    assert run.global_step == 2
    assert [(step_data.step, step_data.complete, micros(step_data)) for step_data in collected_steps] == [
        (0, True, [0, 1, 2]),
        (1, True, [0, 1, 2]),
        (2, False, [0, 1]),
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_the_program_skips_is_no_micro_batch(tmp_path, accumulate):
    """The first epoch is left at its fourth batch, as `on_train_batch_start` may say."""

    def on_train_batch_start(self, batch, index):
        return -1 if self.trainer.current_epoch == 0 and index == 3 else None

    skipping = {"on_train_batch_start": on_train_batch_start}
    collected_steps, run = fit(tmp_path / "out", methods=skipping, max_epochs=2, accumulate_grad_batches=accumulate)
    assert [step_data.step for step_data in collected_steps] == list(range(run.global_step))
    batches = 3 + 8
    assert sum(len(micros(step_data)) for step_data in collected_steps) == batches
    for step_data in collected_steps:
        assert micros(step_data) == list(range(len(micros(step_data))))
