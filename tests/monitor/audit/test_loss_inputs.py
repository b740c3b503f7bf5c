"""What loss functions are given, under the default plan: planted faults are found, and healthy twins raise no alarm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import trainprobe

STEPS = 26  # the default audits 0, 1, 23 and 24


class Language(nn.Module):
    """A small language model over 32 tokens; the second argument is an attention mask."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, wide)
        self.mix = nn.GRU(wide, wide, batch_first=True)
        self.head = nn.Linear(wide, 32)

    def forward(self, input_ids, attention_mask=None):
        """Return logits [batch, time, 32]."""
        return self.head(self.mix(self.embed(input_ids))[0])


def found(tmp_path, model, step_of, *, steps=STEPS, micro=1, **plan):
    """Train under the default audit; step_of(micro-batch number) returns a loss. Return (rule, message) of what was found."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    section = plan or True
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=section, output=tmp_path / "out") as probe:
        for step in range(steps):
            with probe.step():
                optimizer.zero_grad()
                for i in range(micro):
                    step_of(step * micro + i).backward()
                optimizer.step()
    return [(f.rule, f.message) for f in probe.findings if f.severity != "info"]


def tokens(number, time=9):
    return torch.randint(1, 32, (4, time), generator=torch.Generator().manual_seed(number))


def language_loss(model, shift, *, keep=True):
    """Targets `shift` places further, with logits cut to those that have one."""

    def loss(number):
        ids = tokens(number)
        logits = model(ids)
        if keep:  # as transformers does: the labels are padded, so that each position has one
            ahead = functional.pad(ids, (0, shift), value=-100)[:, shift:]
            labels = functional.pad(ids, (-shift, 0), value=-100)[:, :9] if shift < 0 else ahead
            return cross_entropy(logits.flatten(0, 1), labels.reshape(-1))
        return cross_entropy(logits[:, : 9 - shift].flatten(0, 1), ids[:, shift:].flatten())

    return loss


@pytest.mark.parametrize("keep", [True, False])
def test_the_next_token_is_a_target_without_a_finding(tmp_path, keep):
    model = Language()
    assert found(tmp_path, model, language_loss(model, 1, keep=keep)) == []


@pytest.mark.parametrize(
    ("shift", "words"), [(0, "are the input tokens themselves"), (2, "two places further"), (-1, "one place before")]
)
def test_labels_that_are_shifted_wrongly_are_found(tmp_path, shift, words):
    model = Language()
    rule, message = found(tmp_path, model, language_loss(model, shift), steps=1)[0]
    assert rule == "shifted_targets"
    assert words in message
    assert "assuming" in message


@pytest.mark.parametrize("twice", [True, False])
def test_labels_that_are_shifted_twice_are_found_where_rows_end_in_padding(tmp_path, twice):
    """The data's own shift ends each row with an end token, at which the token two places further is padding."""
    model = Language()

    def loss(number):
        ids, mask = tokens(number, 12), torch.ones(4, 12, dtype=torch.long)
        labels = functional.pad(ids, (0, 1), value=1)[:, 1:].clone()
        for row, end in enumerate((12, 11, 10, 9)):
            labels[row, end - 1 :] = -100
            labels[row, end - 1] = 1
            ids[row, end:], mask[row, end:] = 0, 0
        logits = model(ids, mask)
        wrong = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return wrong if twice else cross_entropy(logits.flatten(0, 1), labels.flatten())

    told = found(tmp_path, model, loss, steps=1)
    assert [rule for rule, _ in told] == ["shifted_targets"] * twice
    assert not twice or "34 of 38 targets of cross_entropy are the input token two places further" in told[0][1]


def test_labels_along_the_first_dimension_are_understood(tmp_path):
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))

    def loss(shift):
        def step_of(number):
            text = tokens(number, 12).T.contiguous()  # [time, batch]
            return cross_entropy(model(text[:-2]).flatten(0, 1), text[shift : shift + 10].reshape(-1))

        return step_of

    assert found(tmp_path / "a", model, loss(1)) == []
    assert found(tmp_path / "b", model, loss(0), steps=1)[0][0] == "shifted_targets"


def test_a_second_head_may_predict_the_token_behind_the_next(tmp_path):
    model = Language()
    heads = [language_loss(model, 1), language_loss(model, 2)]
    assert found(tmp_path, model, lambda number: heads[0](number) + 0.3 * heads[1](number)) == []


def test_masked_tokens_that_are_restored_are_no_finding(tmp_path):
    model = Language()

    def loss(number):
        ids = tokens(number)
        chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)) < 0.3
        return cross_entropy(model(ids.masked_fill(chosen, 0)).flatten(0, 1), ids.masked_fill(~chosen, -100).flatten())

    assert found(tmp_path, model, loss) == []


@pytest.mark.parametrize("ignored", [True, False])
def test_targets_where_the_mask_is_zero_are_found_unless_they_are_ignored(tmp_path, ignored):
    model = Language()

    def loss(number):
        ids, mask = tokens(number), torch.ones(4, 9, dtype=torch.long)
        ids[1:, 5:], mask[1:, 5:] = 0, 0
        labels = ids.masked_fill(mask == 0, -100) if ignored else ids
        return cross_entropy(model(ids, mask)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    told = found(tmp_path, model, loss)
    assert [rule for rule, _ in told] == ([] if ignored else ["shifted_targets"])
    assert ignored or "12 of 32 targets" in told[0][1]


def ragged(model, weigh, *, ragged=True):
    """Four micro-batches whose masked prompts have other lengths."""

    def loss(number):
        ids = tokens(number)
        kept = [[7, 2, 5, 4], [4, 4, 4, 4]][not ragged][number % 4]
        labels = ids[:, 1:].clone()
        labels[:, : 8 - kept] = -100
        logits = model(ids)[:, :-1].flatten(0, 1)
        if weigh == "tokens":
            return cross_entropy(logits, labels.flatten(), reduction="sum") / (18 * 4)
        if weigh == "own tokens":
            return cross_entropy(logits, labels.flatten(), reduction="sum") / (labels != -100).sum() / 4
        return cross_entropy(logits, labels.flatten()) / 4

    return loss


@pytest.mark.parametrize("weigh", ["means", "own tokens"])
def test_means_over_ragged_micro_batches_that_are_averaged_are_found(tmp_path, weigh):
    model = Language()
    told = found(tmp_path, model, ragged(model, weigh), micro=4)
    assert [rule for rule, _ in told] == ["weighed_targets"]
    assert "28, 8, 20, 16 targets" in told[0][1]


def test_losses_that_are_divided_by_all_targets_and_equal_micro_batches_are_no_finding(tmp_path):
    model = Language()
    assert found(tmp_path / "a", model, ragged(model, "tokens"), micro=4) == []
    assert found(tmp_path / "b", model, ragged(model, "means", ragged=False), micro=4) == []


def numbers(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def classes(number):
    return torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(number))


def x(number):
    return numbers(number, 64, 6)


FITTING = {
    "logits": lambda m, i: functional.cross_entropy(m(x(i)), classes(i)),
    "a head that begins as zeros": lambda m, i: functional.cross_entropy(m(x(i)) * min(i, 1), classes(i)),
    "a module": lambda m, i: nn.CrossEntropyLoss()(m(x(i)), classes(i)),
    "log-probabilities": lambda m, i: functional.nll_loss(m(x(i)).log_softmax(-1), classes(i)),
    "logits of one class": lambda m, i: functional.binary_cross_entropy_with_logits(m(x(i))[:, 0], (classes(i) > 2).float()),
    "probabilities": lambda m, i: functional.binary_cross_entropy(m(x(i)).sigmoid()[:, 0], (classes(i) > 2).float()),
    "a regression": lambda m, i: functional.mse_loss(m(x(i))[:, :1], 2 * x(i)[:, :1]),
    "one row for all": lambda m, i: functional.l1_loss(m(x(i)), torch.zeros(5).expand(64, 5)),
    "divergence": lambda m, i: functional.kl_div(m(x(i)).log_softmax(-1), numbers(i, 64, 5).softmax(-1)),
    "divergence of logarithms": lambda m, i: functional.kl_div(
        m(x(i)).log_softmax(-1), numbers(i, 64, 5).log_softmax(-1), log_target=True
    ),
}
UNFITTING = {
    "softmax twice": (lambda m, i: cross_entropy(m(x(i)).softmax(-1), classes(i)), "cross_entropy"),
    "softmax twice in a module": (lambda m, i: nn.CrossEntropyLoss()(m(x(i)).softmax(-1), classes(i)), "cross_entropy"),
    "an activation on logits": (lambda m, i: cross_entropy(m(x(i)).relu(), classes(i)), "cross_entropy"),
    "no logarithm": (lambda m, i: functional.nll_loss(m(x(i)).softmax(-1), classes(i)), "nll_loss"),
    "logits for nll": (lambda m, i: functional.nll_loss(m(x(i)), classes(i)), "nll_loss"),
    "sigmoid twice": (
        lambda m, i: functional.binary_cross_entropy_with_logits(m(x(i)).sigmoid()[:, 0], (classes(i) > 2).float()),
        "binary_cross_entropy_with_logits",
    ),
    "targets of bytes": (
        lambda m, i: functional.binary_cross_entropy_with_logits(m(x(i))[:, 0], classes(i).float()),
        "binary_cross_entropy_with_logits",
    ),
    "an outer difference": (lambda m, i: functional.mse_loss(m(x(i))[:, :1], x(i)[:, 0]), "mse_loss"),
    "divergence of probabilities": (
        lambda m, i: functional.kl_div(m(x(i)).softmax(-1), numbers(i, 64, 5).softmax(-1)),
        "kl_div",
    ),
    "a target of logarithms": (
        lambda m, i: functional.kl_div(m(x(i)).log_softmax(-1), numbers(i, 64, 5).log_softmax(-1)),
        "kl_div",
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction")
@pytest.mark.parametrize("name", UNFITTING)
def test_inputs_that_do_not_fit_their_loss_are_found(tmp_path, name):
    torch.manual_seed(1)
    model = nn.Linear(6, 5)
    loss, kind = UNFITTING[name]
    (rule, message), *more = found(tmp_path, model, lambda i: loss(model, i))
    assert (rule, more) == ("loss_inputs", [])
    assert kind in message


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", FITTING)
def test_inputs_that_fit_their_loss_are_no_finding(tmp_path, name):
    torch.manual_seed(1)
    model = nn.Linear(6, 5)
    assert found(tmp_path, model, lambda i: FITTING[name](model, i)) == []


def test_losses_change_no_bit_and_are_seen_only_in_audited_steps(tmp_path):
    def train(folder):
        torch.manual_seed(4)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = torch._C._nn.cross_entropy_loss
        with trainprobe.watch(model, optimizer, level="off", audit=folder, output=tmp_path / "out", sinks=[]) as probe:
            for step in range(3):
                with probe.step():
                    assert (torch._C._nn.cross_entropy_loss is not before) == (bool(folder) and step < 2)
                    optimizer.zero_grad()
                    language_loss(model, 1)(step).backward()
                    optimizer.step()
        assert torch._C._nn.cross_entropy_loss is before
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, train(True), train(None)))


def test_metrics_and_losses_within_transforms_are_left_out(tmp_path):
    model = nn.Linear(6, 5)

    def loss(number):
        with torch.no_grad():
            cross_entropy(model(x(number)).softmax(-1), classes(number))
        torch.func.vmap(lambda row: functional.mse_loss(row[:1], row))(x(number))
        return cross_entropy(model(x(number)), classes(number))

    assert found(tmp_path, model, loss, steps=2) == []
