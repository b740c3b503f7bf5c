"""One plan file, one callback: dump, monitor, audit and the capture of the configuration, each read back."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from tests.integrations.one_plan import assert_all_outputs, plan_file


def write_to(parameter: torch.Tensor) -> None:
    """What no update did, and the audit must therefore name."""
    with torch.no_grad():
        parameter.view(-1)[0] += 1e-3


@pytest.mark.proves("Lightning", "all four outputs of one plan")
def test_the_callback_of_lightning_does_all_that_the_plan_says(tmp_path, require):
    require("lightning.pytorch")
    from lightning.pytorch import Callback

    from tests.integrations.lightning.small_lightning import loader, module, trainer
    from trainprobe.integrations.lightning import ProbeCallback

    class Writes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
            if index == 4:
                write_to(pl_module.net.second.weight)

    trainer([ProbeCallback(plan_file(tmp_path, dumped=2)), Writes()]).fit(module(), loader())
    assert_all_outputs(tmp_path, dumped=2, steps=list(range(8)), layer="net.second", written=(5, "net.second.weight"))


@pytest.mark.proves("Hugging Face Trainer", "all four outputs of one plan")
def test_the_callback_of_the_trainer_does_all_that_the_plan_says(tmp_path, require):
    require("transformers")
    require("accelerate")
    from transformers import TrainerCallback

    from tests.integrations.transformers.small_trainer import train
    from trainprobe.integrations.transformers import ProbeCallback

    class Writes(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                write_to(model.second.weight)

    train(tmp_path / "hf", [ProbeCallback(plan_file(tmp_path, dumped=2)), Writes()])
    assert_all_outputs(tmp_path, dumped=2, steps=[1, 2, 3, 4], layer="second", written=(4, "second.weight"))


@pytest.mark.proves("PyTorch", "all four outputs of one plan")
def test_the_context_of_a_plain_loop_does_all_that_the_plan_says(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, plan=plan_file(tmp_path, dumped=2)) as probe:
        for step in range(6):
            with probe.step(step):
                optimizer.zero_grad()
                model(torch.randn(5, 4)).square().mean().backward()
                optimizer.step()
            if step == 3:
                write_to(model[2].weight)
    assert_all_outputs(tmp_path, dumped=2, steps=list(range(6)), layer="2", written=(4, "2.weight"))
