"""`ProbeCallback(preflight=True)`: the test comes before the first update, and the training that follows has the same bits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

V = 13


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def trainer_of_transformers(folder, preflight):
    import transformers

    from trainprobe.integrations.transformers import ProbeCallback

    seed()
    config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2)
    rows = [
        {"input_ids": x, "labels": x.masked_fill(torch.arange(8) > 2 + i % 4, -100)}
        for i, x in enumerate(torch.randint(0, V, (16, 8)))
    ]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, report_to="none",
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    callback = ProbeCallback(preflight=preflight, output=str(folder / f"probe{preflight}"), on_error="raise")
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    logged = [{k: v for k, v in row.items() if k in ("loss", "grad_norm")} for row in trainer.state.log_history]
    return callback, model, logged


def trainer_of_lightning(folder, preflight, crashes=()):
    """crashes: numbers of the calls of the training step that fail."""
    import lightning

    from trainprobe.integrations.lightning import ProbeCallback

    calls = []

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))
            self.seen = []

        def training_step(self, batch):
            calls.append(1)
            if len(calls) in crashes:
                raise RuntimeError("planted")
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_epoch=True, on_step=False)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((float(outputs["loss"]), batch[0].sum().item()))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    seed()
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
    model = Network()
    callback = ProbeCallback(preflight=preflight, output=str(folder / f"probe{preflight}"), on_error="raise")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return callback, model, [*model.seen, trainer.callback_metrics["loss"].item()]


@pytest.mark.parametrize("train", [trainer_of_transformers, trainer_of_lightning])
def test_the_training_that_follows_has_the_same_bits(tmp_path, capfd, train):
    ended = []
    for preflight in (False, True):
        callback, model, logged = train(tmp_path, preflight)
        ended.append(([t.tolist() for t in model.state_dict().values()], logged, states()))
        assert (callback.preflight.report is not None) == preflight
    assert ended[0] == ended[1]
    report = callback.preflight.report
    assert {line.name: line.status for line in report.lines}["split"] in ("holds", "by design"), str(report)
    assert report.broken == [] and report.verdict.sentence in capfd.readouterr().err


@pytest.mark.parametrize("crashes", [range(7, 9), range(5, 12)])
def test_the_same_where_properties_crash(tmp_path, crashes):
    """The first two calls are the training's own, and so are the last two; those between are of the preflight."""
    ended = []
    for preflight in (False, True):
        callback, model, logged = trainer_of_lightning(tmp_path, preflight, crashes if preflight else ())
        ended.append(([t.tolist() for t in model.state_dict().values()], logged, states()))
    assert ended[0] == ended[1]
    crashed = [line.name for line in callback.preflight.report.lines if "planted" in line.text]
    assert crashed[0] == "split" and len(crashed) == (1 if len(crashes) == 2 else 6), callback.preflight.report
