"""What is told beside a verdict: sizes by depth, dead units, clipping, schedules, a row as text; each against arithmetic."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from tests.preflight.test_preflight_cost import Counted, Text, classified, pictures, text
from tests.preflight.test_preflight_properties import line


def test_sizes_by_depth_are_those_of_a_stack_that_doubles():
    """Each layer doubles what it is given: the last output is 8 times the first.

    The gradient of layer i is 2^(3-i), from what is behind it, times its input, of size 2^i: the same for all.
    """
    model = nn.Sequential(nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(4))), nn.Linear(5, 3))
    for layer in model[0]:
        layer.weight.data = 2 * torch.eye(5)
    model[1].weight.data /= 16
    found = line("start", classified, model, pictures())
    sizes, gradients = map(float, re.findall(r"by the factor (\S+), gradients on their way back by (\S+)$", found.text)[0])
    assert "the 4 layers 0.0 to 0.3 (Linear)" in found.text and (sizes, gradients) == pytest.approx((8, 1), rel=1e-3)


@pytest.mark.parametrize(("between", "gain", "told"), [
    (nn.Sigmoid, 1.0, "BROKEN"),
    (nn.Sigmoid, 60.0, "BROKEN"),
    (nn.Tanh, 1.0, "holds"),
    (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Tanh()), 0.02, "holds"),
])  # fmt: skip
def test_gradients_that_vanish_by_depth_are_broken(between, gain, told):
    """Batch norm scales what is small in training; its evaluation at the start does not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), between()) for _ in range(8)), nn.Linear(5, 3))
    for layer in model[:8]:
        nn.init.orthogonal_(layer[0].weight, gain=gain)
    found = line("start", classified, model, pictures())
    assert found.status == told and "over the 8 layers 0 to 7" in found.text, found


def test_dead_units_are_counted():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = pictures()
    model[0].weight.data.zero_()
    model[0].bias.data = torch.tensor([1.0, 1, 1, 1, 1, 1, -1, -1])
    assert "25% of the units of 1 are dead on this batch" in line("start", classified, model, (x, y)).text
    model[0].bias.data.fill_(-1)
    model[0].weight.requires_grad_(False), model[0].bias.requires_grad_(False)
    found = line("start", classified, model, (x, y))
    assert found.status == "BROKEN" and "all units of 1 are dead" in found.text


def test_dropout_that_is_off_what_is_frozen_and_what_decays():
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Dropout(0.1), nn.Linear(7, 3))
    model[2].eval()
    model[0].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    told = line("start", classified, model, pictures(), optimizer=torch.optim.AdamW(trained)).text
    assert "1 dropout off (2 is in evaluation mode)" in told and "1 parameter frozen (0.weight)" in told
    assert "weight decay is on norms and biases, too: 0.bias and 3 more" in told
    apart = torch.optim.AdamW([{"params": [p for p in trained if p.dim() > 1]},
                               {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}])  # fmt: skip
    model[2].train()
    model[0].weight.requires_grad_(True)
    apart.add_param_group({"params": [model[0].weight]})
    assert line("start", classified, model, pictures(), optimizer=apart).text.endswith("evaluation is repeatable")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.RMSprop,
    torch.optim.Adafactor,
    torch.optim.NAdam,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("warm", [False, True])
def test_the_step_of_an_optimizer_is_that_of_float64_and_one_that_is_changed_is_not(kind, warm):
    model = network()
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(2 * warm):  # with moments that are there already
        optimizer.zero_grad()
        classified(model, pictures()).backward()
        optimizer.step()
    assert line("update", classified, model, pictures(), optimizer=optimizer).status == "holds"
    optimizer.register_step_post_hook(lambda *_: model[0].weight.data.mul_(0.999))
    found = line("update", classified, model, pictures(), optimizer=optimizer)
    assert found.status == "BROKEN" and "the step of 0.weight is not what its optimizer does in float64" in found.text


def test_weights_whose_dtype_rounds_the_update_away_are_counted():
    model = nn.Linear(5, 3, bias=False).bfloat16()
    model.weight.data = torch.ones(3, 5, dtype=torch.bfloat16) * torch.tensor([1e-3, 1, 1, 1, 1], dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # an eps of bfloat16 is 8e-3 of 1, and 8e-6 of 1e-3
    x, y = pictures()
    found = line("update", lambda m, b: classified(m, (b[0].bfloat16(), b[1])), model, (x, y), optimizer=optimizer)
    assert found.status == "holds" and "80% of the weights do not move" in found.text, found


def test_gradients_that_were_clipped_and_the_rates_of_the_schedule():
    model, (x, y) = network(), pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10), lr_scheduler.ConstantLR(optimizer, 0.5, 1000)], [10]
    )
    before = optimizer.param_groups[0]["lr"], str(schedule.state_dict()), str(schedule._schedulers[0].state_dict())
    classified(model, (x, y)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    found = line("update", classified, model, (x, y), optimizer=optimizer)
    assert f"gradients are clipped to the norm 0.05, from about {norm:.3g}" in found.text
    told = re.search(r"learning rates of SequentialLR: (.*)", found.text)[1]
    rates = {int(step): float(rate) for rate, step in re.findall(r"(\S+) in step (\d+)", told)}
    assert (optimizer.param_groups[0]["lr"], str(schedule.state_dict()), str(schedule._schedulers[0].state_dict())) == before
    expected = []
    for _ in range(1000):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == {step: pytest.approx(expected[step - 1], rel=5e-3) for step in (1, 2, 5, 10, 100, 1000)}


def test_a_loss_scale_that_is_too_large_for_float16_is_told():
    model, (x, y), scaler = network(), pictures(), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    classified(model, (x, y)).backward()
    times = max(float(p.grad.abs().max()) for p in model.parameters()) * 2**20 / 65504
    model.zero_grad()
    told = line("update", classified, model, (x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).text
    assert f"with the loss scale 1.04858e+06 the largest gradient is {times:.2g} times what float16 holds" in told
    del scaler


def test_a_row_of_padding_alone_and_one_without_targets_are_told_apart():
    def loss(mean_by):
        def mean(model, batch):
            logits, labels = model(batch["input_ids"], batch["attention_mask"])[:, :-1], batch["labels"][:, 1:]
            each = cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
            return (each / mean_by(batch)).sum() if mean_by(batch).dim() else each.sum() / mean_by(batch)

        return mean

    by_mask = line("padding", loss(lambda batch: batch["attention_mask"].sum(1)), Text(), text())
    assert by_mask.status == "BROKEN" and "a row of padding alone makes the loss nan" in by_mask.text, by_mask
    by_target = line("padding", loss(lambda batch: (batch["labels"][:, 1:] != -100).sum(1)), Text(), text())
    assert by_target.status == "BROKEN" and "a row whose labels are all ignored makes the loss nan" in by_target.text
    assert "a row of padding without targets" in line("padding", Counted(), Text(), text()).text


@pytest.mark.frameworks
def test_the_first_row_is_shown_as_text(require):
    require("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(11)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    batch = text()
    batch["labels"][0, :7] = -100
    row = " ".join(f"w{i}" for i in batch["input_ids"][0].tolist())
    found = line("input", Counted(), Text(), batch)
    assert f"'{row}', learnt is '{' '.join(row.split()[7:])}'" in found.text, found
    assert tokenizer is not None  # alive until here


def test_a_loader_that_does_not_shuffle_is_told():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pictures()), batch_size=8)
    assert "no loader shuffles" in line("input", classified, network(), next(iter(loader))).text
    loader = [loader, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pictures()), batch_size=8, shuffle=True)]
    assert "no loader shuffles" not in line("input", classified, network(), pictures()).text


def test_the_layer_whose_gradients_autocast_changes_most_is_named():
    class Narrow(nn.Module):
        def forward(self, x):
            return (x * 64 + 4096).to(torch.bfloat16).float() / 64 - 64  # cancels

    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Narrow(), nn.Linear(7, 3))

    def loss(m, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return classified(m, batch)

    model[2].forward = lambda x: (
        (x * 64 + 4096) / 64 - 64 if not torch.is_autocast_enabled("cpu") else Narrow.forward(model[2], x)
    )
    found = line("precision", loss, model, pictures())
    assert found.status == "BROKEN" and re.search(r"most in \d\.(weight|bias)", found.text), found


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("early", [False, True])
def test_a_schedule_that_steps_before_the_first_update_is_told(kind, early):
    model = nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if early:
        schedule.step()
    found = line("update", classified, model, pictures(), optimizer=optimizer)
    assert found.status == "holds" and f"rates of StepLR: {0.05 if early else 0.1} in step 1" in found.text
    assert ("StepLR has stepped before the first update: its first rate is skipped" in found.text) == early
    assert schedule.last_epoch == early
