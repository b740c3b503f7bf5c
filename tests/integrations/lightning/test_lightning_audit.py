"""The audit of Lightning trainings: silent on healthy ones, whatever the optimization, and right about planted faults."""

from __future__ import annotations

import pytest

from tests.integrations.lightning.test_lightning import SETUPS, fit, lightning

assert lightning  # the fixture of these tests too: it skips without Lightning and keeps it quiet
AUDITED = {"level": "off", "sinks": [], "audit": {"every": 1}}


def rules(findings) -> list[str]:
    return [finding.rule for finding in findings]


@pytest.mark.parametrize("setup", SETUPS)
def test_a_healthy_training_raises_no_alarm(tmp_path, setup):
    assert [f.message for f in fit(tmp_path / "out", setup, AUDITED)[3].findings] == []


def test_a_weight_that_is_written_to_between_two_updates_is_named(tmp_path):
    from lightning.pytorch import Callback

    class Writes(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 3:
                module.net.second.weight.data[0, 0] += 1e-4

    (first, *_) = fit(tmp_path / "out", "two optimizers", AUDITED, [Writes()])[3].findings
    assert (first.rule, first.step, first.site.name) == ("untouched_between_steps", 8, "net.second.weight")


def test_with_two_optimizers_each_is_held_to_its_own_norm_and_its_own_gradients(tmp_path):
    """The second one's gradients are not cleared from the third batch on, and then clipped unevenly."""
    from lightning.pytorch import Callback

    class Spoils(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 2:
                module.optimizers()[1].zero_grad = lambda *args, **kwargs: None

        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step >= 9 and optimizer is trainer.optimizers[1]:
                module.other.first.weight.grad.mul_(3)

    found = fit(tmp_path / "out", "two optimizers", AUDITED, [Spoils()])[3].findings
    assert (found[0].rule, found[0].step) == ("cleared_gradients", 4)
    assert found[0].site.name.startswith("other.")
    assert ("clipping", 8, "other.first.weight") in [(f.rule, f.step, f.site.name) for f in found]
