"""Each verdict against what can be worked out otherwise: shares of targets, a slope in float64, ln V, lr times |g|²."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import log
from pathlib import Path

import jsonschema
import orjson
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import trainprobe
from trainprobe.errors import UsageError

V, D = 11, 8
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/preflight.schema.json").read_text())


class Text(nn.Module):
    """A causal language model: a running mean of embeddings."""

    def __init__(self, ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.ahead = ahead

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        x = torch.tanh(self.mix(x))
        return self.head(x + (x.cumsum(1) if not self.ahead else x.sum(1, keepdim=True)))


def text(rows=4, time=9, pad=True):
    tokens = torch.randint(1, V, (rows, time), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row in range(rows if pad else 0):
        mask[row, time - row :] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def next_token(model, batch, shift=1):
    logits, labels = model(batch["input_ids"], batch["attention_mask"])[:, : -shift or None], batch["labels"][:, shift:]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def line(name, *args, **options):
    report = trainprobe.preflight(*args, only=[name], seconds=600, **options)
    jsonschema.validate(orjson.loads(orjson.dumps(report.as_json())), SCHEMA)
    assert [found.name for found in report.lines] == [name]
    return report.lines[0]


def test_split_equal_weights_are_off_by_the_share_of_targets():
    batch = text()
    counts = [int((batch["labels"][rows, 1:] != -100).sum()) for rows in (slice(0, 2), slice(2, 4))]
    found = line("split", next_token, Text(), batch, micro_batches=2)
    assert found.status == "BROKEN" and "targets" in found.text and "alike" in found.text
    for place, count in enumerate(counts):
        assert found.figures[f"factor_{place}"] == pytest.approx(0.5 * sum(counts) / count, rel=1e-4)
    assert line("split", next_token, Text(), batch).status == "holds"  # of one micro-batch nothing is averaged
    assert line("split", next_token, Text(), text(pad=False), micro_batches=4).status == "holds"


@pytest.mark.parametrize("ignored", [-1, 0])
def test_the_label_that_the_loss_leaves_out_is_learnt_from_its_call(ignored):
    def loss(model, batch):
        logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=ignored)

    batch = text()
    hidden = batch["attention_mask"] == 0
    batch["labels"] = batch["labels"].masked_fill(hidden, ignored)
    assert line("padding", loss, Text(), batch).status == "holds"
    assert line("rows", loss, Text(), batch).status == "holds"
    assert f"{float(hidden.double().mean()):.0%} of the targets ignored" in line("input", loss, Text(), batch).text
    found = line("split", loss, Text(), batch, micro_batches=2)
    assert found.status == "BROKEN" and "targets" in found.text


@pytest.mark.parametrize(("factor", "told"), [(1.0, "factor 2"), (0.25, "factor 1/2"), (1.5, "factor 3")])
def test_split_a_common_factor_is_named(factor, told):
    def step(model, micros):
        for micro in micros:
            (next_token(model, micro) * factor).backward()

    found = line("split", next_token, Text(), text(pad=False), step=step, micro_batches=2)
    assert found.status == "BROKEN" and told in found.text


def test_split_a_reported_loss_of_its_own():
    def step(model, micros):
        parts = [next_token(model, micro) / len(micros) for micro in micros]
        sum(parts).backward()
        return parts[-1]

    found = line("split", next_token, Text(), text(pad=False), step=step, micro_batches=2)
    assert found.status == "BROKEN" and "last micro-batch" in found.text


def test_padding_the_factor_of_a_mean_over_all_positions():
    def loss(model, batch):
        logits, labels = model(batch["input_ids"], batch["attention_mask"])[:, :-1], batch["labels"][:, 1:]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()

    found = line("padding", loss, Text(), text())
    assert found.status == "BROKEN" and f"factor {8 / 11:.4g}" in found.text  # of 8 predictions a row to 11
    assert line("padding", next_token, Text(), text()).status == "holds"


def test_padding_a_mask_that_is_not_used():
    class Blind(Text):
        def forward(self, input_ids, attention_mask=None):
            return super().forward(input_ids)

    batch = text()
    flipped = {name: x.flip(1) for name, x in batch.items()}  # padding on the left comes before what sees it
    found = line("padding", next_token, Blind(), flipped)
    assert found.status == "BROKEN" and "mask is 0" in found.text and "first in mix" not in found.text
    assert line("padding", next_token, Blind(), batch).status == "holds"  # nothing sees it on the right


@pytest.mark.parametrize(("shift", "told"), [(0, "itself"), (2, "twice")])
def test_causality_the_shift_is_read_off_the_gradient(shift, told):
    found = line("causality", lambda m, b: next_token(m, b, shift), Text(), text(pad=False))
    assert found.status == "BROKEN" and told in found.text and found.figures["shift"] == shift
    assert line("causality", next_token, Text(), text()).status == "holds"


def test_causality_the_module_that_looks_ahead_is_named():
    found = line("causality", next_token, Text(ahead=True), text())
    assert found.status == "BROKEN" and "first in head" in found.text


def test_causality_packed_documents():
    class Packed(Text):
        """Begins its running mean again with each document, or does not."""

        def __init__(self, apart):
            super().__init__()
            self.apart = apart

        def forward(self, input_ids, position_ids):
            x = torch.tanh(self.mix(self.embed(input_ids)))
            number = (position_ids == 0).cumsum(1)
            same = (number.unsqueeze(1) == number.unsqueeze(2)) | (not self.apart)
            return self.head(x + (same.tril().to(x.dtype) @ x))

    tokens = text(pad=False)["input_ids"]
    batch = {"input_ids": tokens, "position_ids": torch.arange(9).remainder(5).repeat(4, 1), "labels": tokens}

    def loss(model, b):
        return cross_entropy(model(b["input_ids"], b["position_ids"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten())

    assert "packed documents" in line("causality", loss, Packed(apart=True), batch).text
    found = line("causality", loss, Packed(apart=False), batch)
    assert found.status == "BROKEN" and "document" in found.text


def points(rows=6):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def network(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), *between, nn.Tanh(), nn.Linear(7, 3))


def classified(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def test_rows_independent_batch_norm_and_contrastive():
    assert line("rows", classified, network(), points()).status == "holds"
    found = line("rows", classified, network(nn.BatchNorm1d(7)), points())
    assert found.status == "by design" and "batch norm (1)" in found.text
    assert line("rows", classified, network(nn.BatchNorm1d(7)).eval(), points()).status == "holds"

    def contrastive(model, batch):
        a, b = (normalize(model(x), dim=1) for x in batch)
        return cross_entropy(a @ b.T, torch.arange(len(a)))

    assert line("rows", contrastive, network(), (points()[0], points()[0] + 0.1)).status == "by design"


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_rows_that_change_each_other_and_an_order_that_matters():
    found = line("rows", classified, network(Centred()), points())
    assert found.status == "BROKEN" and "first in 1" in found.text

    def ordered(model, batch):
        each = cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (each * torch.arange(1.0, 7.0)).sum() / 21

    model, batch = network(), points()
    each = cross_entropy(model(batch[0]), batch[1], reduction="none").double()
    weights = torch.arange(1.0, 7.0).double()
    found = line("rows", ordered, model, batch)
    assert found.status == "BROKEN"
    assert found.figures["factor"] == pytest.approx(float((each * weights.flip(0)).sum() / (each * weights).sum()), rel=1e-4)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Lossy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x):
        return Halved.apply(self.inner(x))


def test_gradient_the_measured_slope_is_that_of_the_right_backward():
    model = network(Lossy())
    found = line("gradient", classified, model, points())
    assert found.status == "BROKEN"
    assert found.figures["autograd"] / found.figures["measured"] == pytest.approx(0.5, rel=1e-3)
    assert "1.inner" in found.text or "along 0." in found.text
    assert line("gradient", classified, network(), points()).status == "holds"
    assert line("gradient", classified, network(nn.Dropout(0.5), nn.ReLU()), points()).status == "holds"


class SmallUNet(nn.Module):
    """Four times half the size, and back."""

    def __init__(self, width):
        super().__init__()
        self.inc, self.out = self.block(3, width), nn.Conv2d(width, 2, 1)
        self.down = nn.ModuleList([self.block(width, width) for _ in range(4)])
        self.up = nn.ModuleList([self.block(2 * width, width) for _ in range(4)])

    def block(self, *widths):
        sizes = [*widths, widths[-1]]
        layers = [(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(sizes)]
        return nn.Sequential(*(layer for three in layers for layer in three))

    def forward(self, x):
        seen = [self.inc(x)]
        for down in self.down:
            seen.append(down(nn.functional.max_pool2d(seen[-1], 2)))
        x = seen.pop()
        for up in self.up:
            x = up(torch.cat([seen.pop(), nn.functional.interpolate(x, scale_factor=2)], 1))
        return self.out(x)


@pytest.mark.parametrize(("width", "seed"), [(8, 0), (16, 4), (16, 12)])
def test_gradient_of_a_loss_that_is_bent_within_any_coarse_step(width, seed):
    """As of a U-Net on two small pictures: batch norms over two values are nearly steps."""
    torch.manual_seed(seed)
    model = SmallUNet(width)
    batch = (torch.rand(2, 3, 16, 16) > 0.5).float() * 0.3, torch.randint(0, 2, (2, 16, 16))
    (found,) = trainprobe.preflight(
        lambda m, b: cross_entropy(m(b[0]), b[1]), model, batch, only=["gradient"], seconds=600
    ).lines
    assert found.status in ("holds", "not applicable"), found.text


def test_gradient_a_straight_through_estimator_is_told():
    class Rounded(nn.Module):
        def forward(self, x):
            return x + (torch.round(x * 4) / 4 - x).detach()

    found = line("gradient", classified, network(Rounded()), points())
    assert found.status in ("by design", "not applicable")


def test_start_a_uniform_prediction():
    found = line("start", classified, network(), points())
    assert found.status == "holds" and found.figures["uniform"] == pytest.approx(log(3))
    model, batch = network(), points()
    assert found.figures["loss"] == pytest.approx(float(classified(model, batch)), rel=1e-5)
    nn.init.normal_(model[-1].weight, std=60)
    assert "too large" in line("start", classified, model, batch).text


def test_start_parameters():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.extra = network(), nn.Linear(2, 2)

        def forward(self, x):
            return self.net(x)

    model = Forgetful()
    found = line("start", classified, model, points())
    assert found.status == "BROKEN" and "extra.weight and 1 more: its module is never called" in found.text
    model.extra.requires_grad_(False)
    assert line("start", classified, model, points()).status == "holds"
    optimizer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    assert "no optimizer holds net.0.weight" in line("start", classified, model, points(), optimizer=optimizer).text


def test_start_an_optimizer_that_wraps_another_holds_what_that_one_does():
    """As Accelerate's does, which has no parameter groups of its own."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model, batch = network(), points()
    wrapped = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    report = trainprobe.preflight(classified, model, batch, optimizer=wrapped, only=["start", "update"], seconds=600)
    assert [line.status for line in report.lines] == ["holds", "holds"], str(report)


def test_start_evaluation_that_draws():
    class Always(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, training=True)

    found = line("start", classified, network(Always()), points())
    assert found.status == "BROKEN" and "first in 1" in found.text
    assert line("start", classified, network(nn.Dropout(0.5)), points()).status == "holds"


def test_a_loss_that_is_not_finite():
    report = trainprobe.preflight(lambda m, b: classified(m, b) * float("nan"), network(), points())
    assert [found.name for found in report.broken] == ["start"] and report.verdict.code == 2


def test_rows_of_which_the_model_is_given_several_are_not_judged():
    """As the points along the rays of a field: the loop made them before the model, and what it made is no row."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = {"points": torch.randn(24, 5), "depths": torch.rand(6, 4), "rays": torch.rand(6, 3), "target": torch.rand(6)}

    def rendered(m, b):
        weights = (m(b["points"]).reshape(6, 4) * b["depths"]).softmax(-1)
        return ((weights * b["depths"]).sum(-1) - b["target"]).square().mean()

    found = trainprobe.preflight(rendered, model, batch, only=["rows", "input"], seconds=600)
    why = "points has 24 rows, 4 for each of the batch"
    assert [(line.status, line.text) for line in found.lines] == [("not applicable", why)] * 2


def test_gradients_that_are_all_zero_are_told_and_nothing_is_called_sound():
    """As of a field whose densities are all below zero: the picture is white whatever the weights are."""
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, -50.0)

    def white(m, batch):
        return (m(batch[0]).sum(1) - batch[1]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = trainprobe.preflight(white, model, (torch.rand(6, 5), torch.rand(6)), optimizer=optimizer, seconds=600)
    told = {line.name: (line.status, line.text) for line in report.lines}
    assert told["start"] == ("BROKEN", "the gradients of all 2 parameters are zero on this batch: nothing is trained")
    assert {status for name, (status, _) in told.items() if name not in ("start", "determinism")} == {"not applicable"}


def test_determinism():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    assert line("determinism", classified, network(nn.Dropout(0.5)), points()).status == "holds"
    found = line("determinism", classified, network(Counting()), points())
    assert found.status == "BROKEN" and found.text.endswith("first in 1, by aten.add.Tensor")

    class Uneven(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.mul(1 + next(calls) * 1e-3)

    class InBackward(nn.Module):
        def forward(self, x):
            return Uneven.apply(x)

    calls = iter(range(100))
    found = line("determinism", classified, network(InBackward()), points())
    assert found.status == "BROKEN" and found.text.endswith("all modules agree, by aten.mul.Tensor")


def test_precision():
    def under(model, batch, upcast=True):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[0])
        logits = logits.float() if upcast else logits
        return -(logits.gather(1, batch[1].unsqueeze(1)).squeeze(1) - logits.exp().sum(1).log()).mean()

    assert line("precision", classified, network(), points()).status == "not applicable"
    found = line("precision", under, network(), points())
    assert found.status == "holds" and 0 < found.figures["gap"] < 0.05
    found = line("precision", lambda m, b: under(m, b, upcast=False), network(), points())
    assert found.status == "BROKEN" and "computed in bfloat16" in found.text


def test_update_the_first_order_change_is_minus_rate_times_the_squared_gradient():
    model, batch = network(), points()
    classified(model, batch).backward()
    squared = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters())
    model.zero_grad()
    found = line("update", classified, model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    assert found.status == "holds" and found.figures["predicted"] == pytest.approx(-1e-3 * squared, rel=1e-3)
    assert found.figures["change"] == pytest.approx(found.figures["predicted"], rel=0.05)
    uphill = torch.optim.SGD(model.parameters(), lr=1e-3, maximize=True)
    assert "uphill" in line("update", classified, model, batch, optimizer=uphill).text
    stale = torch.optim.SGD(network().parameters(), lr=1e-3)
    found = line("update", classified, model, batch, optimizer=stale)
    assert found.status == "BROKEN"


def test_input():
    assert line("input", classified, network(), points()).status == "holds"
    found = line("input", lambda m, b: classified(m, (b[0] * 0, b[1])), network(), points())
    assert found.status == "BROKEN" and "not used" in found.text
    x, y = points()
    twice = x.clone()
    twice[4] = x[1]
    assert "rows 1 and 4" in line("input", classified, network(), (twice, y)).text


def test_a_step_that_draws_random_numbers_is_not_blamed_for_them():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) * self.training

    report = trainprobe.preflight(classified, network(Noise()), points(), seconds=600)
    assert report.broken == []
    assert re.search("randn_like", {found.name: found.text for found in report.lines}["rows"])


def test_the_budget_and_the_selection():
    report = trainprobe.preflight(classified, network(), points(), seconds=0, skip=["update"])
    assert {found.status for found in report.lines} == {"not reached"} and len(report.lines) == 9
    assert report.verdict.code == 3 and "not reached: split" in report.verdict.sentence
    with pytest.raises(UsageError, match=r"no property 'splt'.*did you mean 'split'"):
        trainprobe.preflight(classified, network(), points(), only=["splt"])


def test_what_has_no_meaning_is_refused():
    with pytest.raises(UsageError, match="scalar"):
        trainprobe.preflight(lambda m, b: m(b[0]), network(), points())
    with pytest.raises(UsageError, match="not a torch"):
        trainprobe.preflight(classified, object(), points())
    with pytest.raises(UsageError, match="without a tensor"):
        trainprobe.preflight(classified, network(), ["a", 1])
    with pytest.raises(UsageError, match="no parameter"):
        trainprobe.preflight(classified, network().requires_grad_(False), points())


class Averaged(Text):
    """Holds an average of its own weights, as training tasks of timm do; or a layer that nobody calls."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.average = nn.ModuleDict({name: nn.Linear(D, D) for name in ("mix",)})
        if copied:
            self.average["mix"].load_state_dict(self.mix.state_dict())


def test_start_an_average_of_the_weights_is_no_lost_layer():
    assert line("start", next_token, Averaged(True), text()).status == "holds"
    found = line("start", next_token, Averaged(False), text())
    assert found.status == "BROKEN" and "average.mix.weight" in found.text and "never called" in found.text


class Sampling(nn.Module):
    """An autoencoder that samples its code, as the one of Kingma and Welling does."""

    def __init__(self, dropped: bool = False) -> None:
        super().__init__()
        self.encode, self.decode, self.dropped = nn.Linear(6, 8), nn.Linear(4, 6), dropped

    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, -1)
        mean = nn.functional.dropout(mean, 0.5, training=True) if self.dropped else mean
        return self.decode(mean + torch.randn_like(scale) * scale.exp()) if not self.dropped else self.decode(mean)


def test_start_sampling_in_evaluation_is_by_design_and_dropout_is_not():
    def loss(model, x):
        return (model(x) - x).square().mean()

    found = line("start", loss, Sampling(), torch.randn(8, 6))
    assert found.status == "by design" and "randn_like" in found.text and "in encode" not in found.text
    assert line("start", loss, Sampling(dropped=True), torch.randn(8, 6)).status == "BROKEN"


def test_rows_of_marks_between_0_and_1_are_tested():
    def loss(model, batch):
        return nn.functional.binary_cross_entropy(model(batch["images"]).sigmoid(), batch["real"])

    batch = {"images": torch.randn(8, 6), "real": torch.ones(8, 1)}
    assert line("rows", loss, nn.Linear(6, 1), batch).status == "holds"
