"""What a step computes with, under the default plan: each planted bug is found, and each healthy twin raises no alarm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import trainprobe

STEPS = 48  # the default audits 0, 1, 23, 24, 46 and 47


def found(tmp_path: Path, model, step_of, *, steps=STEPS, data=None, note=None, **plan):
    """Train under the default audit; step_of(number or batch) returns a loss. Return (rule, step, place, message)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(data) if data is not None else iter(range(steps))
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=plan or True, output=tmp_path / "out") as probe:
        for number, batch in enumerate(batches):
            with probe.step():
                optimizer.zero_grad()
                loss = step_of(batch)
                if loss is not None:
                    loss.backward()
                    optimizer.step()
                if note is not None:
                    note(probe, number)
    told = [f for f in probe.findings if f.severity != "info"]
    return [(f.rule, f.step, f.site.name if f.site else "", f.message) for f in told]


def drawn(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def whole(number, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(number))


# ---- loss functions ----------------------------------------------------------------------------------------------


def speech(longest):
    """Return a model and a CTC loss over 10 frames, with transcripts of up to `longest` letters, some of them that long."""
    model = nn.Linear(6, 12)

    def loss(number):
        logs = model(drawn(number, 10, 8, 6)).log_softmax(-1)
        lengths = torch.full((8,), 3)
        lengths[:3] = longest
        given = torch.full((8,), 10), lengths
        return functional.ctc_loss(logs, whole(number, 11, 8, 14) + 1, *given, zero_infinity=True)

    return model, loss


def test_transcripts_that_do_not_fit_are_found(tmp_path):
    ((rule, step, place, message),) = found(tmp_path, *speech(14), steps=2)
    assert (rule, step, place) == ("loss_inputs", 1, "ctc_loss")
    assert "3 of 8 transcripts" in message


@pytest.mark.parametrize("as_lists", [False, True])
def test_transcripts_that_fit_are_no_finding(tmp_path, as_lists):
    model, loss = speech(10)
    if as_lists:

        def loss(number):
            logs = model(drawn(number, 10, 8, 6)).log_softmax(-1)
            return functional.ctc_loss(logs, whole(number, 11, 8, 14) + 1, [10] * 8, [4] * 8)

    assert found(tmp_path, model, loss, steps=2) == []


def contrast(mask):
    model = nn.Linear(6, 5)

    def loss(number):
        x = drawn(number, 8, 6)
        z = functional.normalize(model(torch.cat([x, x + 0.1])), dim=1)
        similar = z @ z.T / 0.2
        if mask:
            similar = similar.masked_fill(torch.eye(16, dtype=torch.bool), float("-inf"))
        return functional.cross_entropy(similar, torch.arange(16).roll(8))

    return model, loss


def test_a_sample_that_is_compared_with_itself_is_found(tmp_path):
    ((rule, step, _, message),) = found(tmp_path, *contrast(mask=False), steps=2)
    assert (rule, step) == ("self_comparison", 0)
    assert "5 in all 16 rows" in message


def test_masked_similarities_pairs_of_two_views_and_as_many_classes_as_rows_are_no_finding(tmp_path):
    assert found(tmp_path / "a", *contrast(mask=True), steps=2) == []
    model = nn.Linear(6, 16)

    def pairs(number):  # as of pictures and texts: the targets are the diagonal
        a, b = (functional.normalize(model(drawn(number, 16, 6) + i), dim=1) for i in (0, 0.1))
        return functional.cross_entropy(a @ b.T / 0.2, torch.arange(16))

    def classes(number):
        return functional.cross_entropy(model(drawn(number, 16, 6)) * (number > 0), whole(number, 16, 16))

    assert found(tmp_path / "b", model, pairs, steps=2) == []
    assert found(tmp_path / "c", model, classes, steps=2) == []


def distilled(said):
    """A student beside a teacher that stands still; said(teacher's, student's) is what is compared with the teacher."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"teacher": nn.Linear(6, 4), "student": nn.Linear(6, 4)})
    model["teacher"].requires_grad_(False)

    def loss(number):
        x = drawn(number, 32, 6)
        taught, out = model["teacher"](x), model["student"](x)
        closeness = functional.kl_div(said(taught, out).log_softmax(-1), taught.softmax(-1), reduction="batchmean")
        return functional.cross_entropy(out, whole(number, 4, 32)) + closeness

    return model, loss


@pytest.mark.filterwarnings("ignore:reduction")
def test_a_teacher_that_is_compared_with_itself_is_found(tmp_path):
    ((rule, step, place, message),) = found(tmp_path, *distilled(lambda taught, out: taught), steps=25)
    assert (rule, step, place) == ("self_comparison", 24, "kl_div")
    assert "has no gradient" in message


def test_a_student_and_a_measure_without_a_gradient_are_no_finding(tmp_path):
    model, loss = distilled(lambda taught, out: out)

    def measured(number):
        functional.mse_loss(model["student"](drawn(number, 8, 6)).detach(), drawn(number, 8, 4))  # for the eye
        return loss(number)

    assert found(tmp_path, model, measured, steps=25) == []


# ---- data --------------------------------------------------------------------------------------------------------


def texts(pad, ignored):
    """Texts that end with token 1, their labels ignored where `ignored(tokens, mask)` says; the model predicts the next one."""
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids)

    language = Language()

    def loss(number):
        ids, mask = whole(number, 30, 6, 12) + 2, torch.ones(6, 12, dtype=torch.long)
        for row, length in enumerate((12, 11, 9, 8, 7, 6)):
            ids[row, length - 1] = 1
            ids[row, length:], mask[row, length:] = pad, 0
        labels = ids.masked_fill(ignored(ids, mask), -100)
        return functional.cross_entropy(language(ids, mask)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return language, loss


def test_an_end_that_is_padding_too_and_never_a_target_is_found(tmp_path):
    ((rule, step, place, message),) = found(tmp_path, *texts(1, lambda ids, mask: ids == 1), steps=2)
    assert (rule, step, place) == ("end_token", 1, "labels")
    assert "token 1 pads" in message and "6 places" in message


@pytest.mark.parametrize(
    ("pad", "ignored"),
    [(0, lambda ids, mask: ids == 0), (1, lambda ids, mask: mask == 0)],
    ids=["a token of its own", "ignored by the mask"],
)
def test_an_end_that_is_learned_is_no_finding(tmp_path, pad, ignored):
    assert found(tmp_path, *texts(pad, ignored), steps=2) == []


class Attends(nn.Module):
    """An encoder over padded tokens; token 0 pads."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens, mask):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=mask).mean(1))


def padded(hide):
    torch.manual_seed(2)
    model = Attends()

    def loss(number):
        tokens = whole(number, 23, 8, 9) + 1
        tokens[2:] *= torch.arange(9) < whole(number, 5, 6, 1) + 3
        return functional.cross_entropy(model(tokens, hide(tokens)), torch.arange(8) % 2)

    return model, loss


def only_padding(tokens):
    mask = tokens != 0
    mask[mask.all(1)] = False  # what is not padded is seen as a whole
    return mask


def test_an_inverted_mask_is_found(tmp_path):
    ((rule, step, place, message),) = found(tmp_path, *padded(only_padding), steps=2)
    assert (rule, step, place) == ("padding_masks", 0, "encoder")
    assert "each of the 6 rows" in message


@pytest.mark.parametrize("hide", [lambda tokens: tokens == 0, lambda tokens: tokens < 0, lambda tokens: tokens < 9])
def test_masks_of_padding_of_nothing_and_of_more_are_no_finding(tmp_path, hide):
    assert found(tmp_path, *padded(hide), steps=2) == []


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.inner = nn.LSTM(6, 8, **options) if kind == "LSTM" else nn.MultiheadAttention(6, 2, **options)
        self.kind, self.head = kind, nn.Linear(8 if kind == "LSTM" else 6, 3)

    def forward(self, x, last=True):
        out = self.inner(x)[0] if self.kind == "LSTM" else self.inner(x, x, x)[0]
        return self.head(out[:, -1] if last else out)


@pytest.mark.parametrize("kind", ["LSTM", "MultiheadAttention"])
def test_a_batch_that_is_taken_for_time_is_found(tmp_path, kind):
    model = Recurrent(kind)

    def loss(number):
        return functional.cross_entropy(model(drawn(number, 16, 5, 6)), whole(number, 3, 16))

    ((rule, step, place, message),) = found(tmp_path, model, loss, steps=2)
    assert (rule, step, place) == ("batch_dimension", 1, "inner")
    assert "takes [16, 5, 6] for 5 rows of 16 time steps" in message


@pytest.mark.parametrize("kind", ["LSTM", "MultiheadAttention"])
def test_layers_that_fit_their_data_are_no_finding(tmp_path, kind):
    first, second = Recurrent(kind, batch_first=True), Recurrent(kind)

    def rows(number):
        return functional.cross_entropy(first(drawn(number, 16, 5, 6)), whole(number, 3, 16))

    def time_first(number):  # a target of each row
        return functional.cross_entropy(second(drawn(number, 5, 16, 6), last=False)[-1], whole(number, 3, 16))

    def of_each_moment(number):
        out = second(drawn(number, 16, 5, 6), last=False)
        return functional.cross_entropy(out.flatten(0, 1), whole(number, 3, 80)) + functional.mse_loss(out, out.detach() * 2)

    def one_text(number):  # a target of each word of a single text, as taggers have them
        return functional.cross_entropy(second(drawn(number, 16, 1, 6)), whole(number, 3, 16))

    class Sentences(nn.Module):
        """Texts of two sentences with as many words as there are texts."""

        def __init__(self):
            super().__init__()
            self.words, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.words(x.flatten(0, 1))[0][:, -1].view(8, 2, 4).mean(1))

    third = Sentences()

    def of_sentences(number):
        return functional.cross_entropy(third(drawn(number, 8, 2, 8, 6)), whole(number, 3, 8))

    assert found(tmp_path / "folded", third, of_sentences, steps=2) == []
    for i, (model, loss) in enumerate([(first, rows), (second, time_first), (second, of_each_moment), (second, one_text)]):
        assert found(tmp_path / str(i), model, loss, steps=2) == []


def pictures(scale):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))

    def loss(number):
        return functional.cross_entropy(model(scale(whole(number, 256, 8, 1, 8, 8))), whole(number, 3, 8))

    return model, loss


def test_bytes_that_are_divided_twice_are_found(tmp_path):
    ((rule, step, place, message),) = found(tmp_path, *pictures(lambda x: x.float() / 255 / 255), steps=2)
    assert (rule, step, place) == ("input_scale", 0, "batch")
    assert "divided by 255 twice" in message


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: x.float() / 255,
        lambda x: x.float() / 255 * 2 - 1,
        lambda x: x.float(),
        lambda x: x.float() * 0,
        lambda x: torch.rand(x.shape) / 255,
        lambda x: (x < 128).float() / 255,
    ],
    ids=["once", "around zero", "never", "black", "small", "black and white"],
)
def test_other_inputs_are_no_finding(tmp_path, scale):
    assert found(tmp_path, *pictures(scale), steps=2) == []


def by_class(shuffle, classes=4, rows=128):
    g = torch.Generator().manual_seed(3)
    labels = torch.arange(rows) * classes // rows
    return DataLoader(TensorDataset(torch.randn(rows, 6, generator=g), labels), 8, shuffle=shuffle, generator=g)


def epochs(loader, steps=STEPS):
    seen = 0
    while seen < steps:
        for batch in loader:
            if seen < steps:
                yield batch
            seen += 1


def test_data_that_are_sorted_by_class_are_found(tmp_path):
    model = nn.Linear(6, 4)
    (first, *_) = found(tmp_path, model, lambda b: functional.cross_entropy(model(b[0]), b[1]), data=epochs(by_class(False)))
    rule, step, place, message = first
    assert (rule, step, place) == ("shuffled_data", 24, "targets")
    assert "one class (0, 0, 1, 2)" in message


def test_shuffled_data_one_class_and_two_halves_of_a_step_are_no_finding(tmp_path):
    model = nn.Linear(6, 4)

    def plain(batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    def two_halves(batch):  # as an adversary sees them: what is real, and what is not
        return plain((batch[0], torch.zeros_like(batch[1]))) + plain((-batch[0], torch.ones_like(batch[1])))

    def alternately(batch):
        return plain((batch[0], batch[1] * 0))

    assert found(tmp_path / "a", model, plain, data=epochs(by_class(True))) == []
    assert found(tmp_path / "b", model, two_halves, data=epochs(by_class(False))) == []
    assert found(tmp_path / "c", model, alternately, data=epochs(by_class(False))) == []


class Crops(TensorDataset):
    """Rows that are drawn by NumPy in the worker."""

    def __getitem__(self, index):
        return torch.from_numpy(np.random.randn(6).astype("float32")), torch.tensor(index % 3)


class Alike(TensorDataset):
    """Rows of ones."""

    def __init__(self):
        super().__init__(torch.arange(28))

    def __getitem__(self, index):
        return torch.ones(6), torch.tensor(0)


class Stream(IterableDataset):
    """Rows of numbers; each worker reads its share, or all of them."""

    def __init__(self, shared):
        self.shared = shared

    def __iter__(self):
        worker = get_worker_info()
        for i in range(400):
            if not self.shared or i % worker.num_workers == worker.id:
                yield drawn(i, 6), torch.tensor(i % 3)


def seed_alike(_worker):
    np.random.seed(0)


def seed_apart(_worker):
    np.random.seed(torch.initial_seed() % 2**32)


WORKERS = {
    "seeds alike": lambda: DataLoader(
        Crops(torch.arange(400)), 6, num_workers=2, worker_init_fn=seed_alike, multiprocessing_context="fork"
    ),
    "a stream that is not shared out": lambda: DataLoader(Stream(False), 6, num_workers=2, multiprocessing_context="fork"),
}
APART = {
    "seeds apart": lambda: DataLoader(
        Crops(torch.arange(400)), 6, num_workers=2, worker_init_fn=seed_apart, multiprocessing_context="fork"
    ),
    "a stream that is shared out": lambda: DataLoader(Stream(True), 6, num_workers=2, multiprocessing_context="fork"),
}


def trained_on(loader):
    """A training on the first batches of a loader; the targets are no part of what the model is called with."""
    model = nn.Linear(6, 3)

    def data():
        for _, batch in zip(range(STEPS), loader(), strict=False):
            yield batch

    return model, lambda batch: functional.cross_entropy(model(batch[0]), batch[1]), data()


@pytest.mark.parametrize("name", WORKERS)
def test_workers_that_give_the_same_are_found(tmp_path, name):
    model, loss, data = trained_on(WORKERS[name])
    ((rule, step, place, message),) = found(tmp_path, model, loss, data=data)
    assert (rule, place) == ("distinct_data", "batch") and step in (24, 47)
    assert "2 workers" in message


@pytest.mark.parametrize("name", APART)
def test_workers_that_give_different_data_are_no_finding(tmp_path, name):
    model, loss, data = trained_on(APART[name])
    assert found(tmp_path, model, loss, data=data) == []


def test_rows_that_are_all_alike_are_no_finding(tmp_path):
    def loader():  # the last batch of each epoch is smaller
        return epochs(DataLoader(Alike(), 6, num_workers=2, multiprocessing_context="fork"))

    model, loss, data = trained_on(loader)
    assert found(tmp_path, model, loss, data=data) == []


def test_a_batch_that_is_trained_on_twice_on_purpose_is_no_finding(tmp_path):
    model, loss, data = trained_on(APART["seeds apart"])
    assert found(tmp_path, model, loss, data=(batch for batch in data for _ in range(2))) == []


# ---- modes, state, arithmetic --------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, again, reentrant=False):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3)
        self.again, self.reentrant = again, reentrant

    def forward(self, x):
        if self.reentrant:
            x = x.requires_grad_()
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant) if self.again else self.body(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_that_a_checkpoint_moves_twice_are_found(tmp_path, reentrant):
    model = Normalised(True, reentrant)
    ((rule, step, place, _),) = found(tmp_path, model, lambda i: model(drawn(i, 9, 6)).square().mean(), steps=2)
    assert (rule, step, place) == ("statistics_once", 0, "body.1")


@pytest.mark.parametrize("how", ["no checkpoint", "evaluation mode", "not tracked"])
def test_statistics_that_move_once_or_not_are_no_finding(tmp_path, how):
    model = Normalised(how != "no checkpoint")
    if how == "evaluation mode":
        model.body[1].eval()
    if how == "not tracked":
        model.body[1] = nn.BatchNorm1d(8, track_running_stats=False)
    assert found(tmp_path, model, lambda i: model(drawn(i, 9, 6)).square().mean(), steps=2) == []


def broken(at, skip):
    model = Normalised(False)

    def loss(number):
        x = drawn(number, 9, 6)
        if number == at:
            x[0, 0] = float("nan")
        if skip(x):
            return None
        out = model(x).square().mean()
        return out if torch.isfinite(out) else None

    return model, loss


def test_statistics_that_a_skipped_batch_spoilt_are_found(tmp_path):
    (first, *_) = found(tmp_path, *broken(5, lambda x: False))
    assert first[:3] == ("finite_buffers", 23, "body.1.running_mean")


def test_a_batch_that_is_skipped_before_the_forward_is_no_finding(tmp_path):
    assert found(tmp_path, *broken(5, lambda x: not torch.isfinite(x).all())) == []


def regression(difference):
    model = nn.Linear(6, 1)
    return model, lambda i: difference(model(drawn(i, 16, 6)), drawn(i, 16, 6).sum(1)).square().mean()


@pytest.mark.parametrize(
    "difference",
    [lambda p, y: p - y, lambda p, y: y - torch.cat([p[:8], p[8:]]), lambda p, y: (p - p.detach() + 1) * y],
    ids=["target", "from the target", "product"],
)
def test_predictions_that_meet_every_target_are_found(tmp_path, difference):
    ((rule, step, _, message),) = found(tmp_path, *regression(difference), steps=2)
    assert (rule, step) == ("outer_products", 1)
    assert "test_sight.py line" in message and "[16, 16]" in message


@pytest.mark.parametrize(
    "difference",
    [
        lambda p, y: p.squeeze(-1) - y,
        lambda p, y: p - y[:, None],
        lambda p, y: p[:, 0] - p[:, 0][:, None] - (y - y.view(-1, 1)),  # all pairs on purpose
        lambda p, y: p.repeat(1, 16) * y,
        lambda p, y: p[:8] - y,
    ],
    ids=["squeezed", "a column", "pairs", "a matrix", "other sizes"],
)
def test_other_arithmetic_is_no_finding(tmp_path, difference):
    assert found(tmp_path, *regression(difference), steps=2) == []


def ratio(old):
    model = nn.Linear(6, 3)
    kept = {}

    def loss(number):
        x, chosen = drawn(number, 16, 6), whole(number, 3, 16)
        logs = model(x).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        kept["ratio"] = (logs - old(logs)).exp().mean()
        return -((logs - old(logs)).exp() * drawn(number, 16)).mean()

    return model, loss, kept


def test_a_ratio_that_is_always_one_is_found(tmp_path):
    model, loss, kept = ratio(lambda logs: logs.detach())
    ((rule, step, place, message),) = found(tmp_path, model, loss, note=lambda probe, _: probe.note("ratio", kept["ratio"]))
    assert (rule, step, place) == ("unchanging_scalars", 47, "ratio")
    assert "on which it depends" in message


def test_a_temperature_that_comes_to_its_limit_is_no_finding(tmp_path):
    model = nn.ModuleDict({"head": nn.Linear(6, 3)})
    model.scale = nn.Parameter(torch.tensor(2.0))

    def loss(number):
        return model["head"](drawn(number, 16, 6)).square().mean() - 5 * model.scale

    def note(probe, number):
        probe.note("logit_scale", (model.scale * min(1.0, 0.5 + number / 40)).clamp(max=1.9))

    assert found(tmp_path, model, loss, note=note, steps=142) == []


def test_a_ratio_that_moves_and_constants_that_are_reported_are_no_finding(tmp_path):
    model, loss, kept = ratio(lambda logs: logs.detach() - 0.01 * logs.detach().abs())

    def note(probe, _):
        probe.note("ratio", kept["ratio"])
        probe.note("epsilon", 0.2)
        probe.note("temperature", torch.tensor(0.07))

    assert found(tmp_path, model, loss, note=note) == []


# ---- what it leaves alone ------------------------------------------------------------------------------------------


def test_operators_are_torchs_own_beside_audited_steps_and_after_the_run(tmp_path):
    own = {name: getattr(torch.Tensor, name) for name in ("__sub__", "__mul__", "__add__", "__truediv__")}
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    init = torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__
    with trainprobe.watch(model, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for step in range(3):
            with probe.step():
                same = all(getattr(torch.Tensor, name) is f for name, f in own.items())
                assert same == (step > 1)
                model(drawn(step, 4, 6)).mean().backward()
                optimizer.step()
    assert all(name not in vars(torch.Tensor) and getattr(torch.Tensor, name) is f for name, f in own.items())
    assert torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__ is init


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_of_odd_kinds_are_left_out_and_end_nothing(tmp_path):
    model = nn.Linear(6, 1)

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, other):
            return self.inner(x)

    reads = Reads()

    def loss(number):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        assert (nested + nested).dim() == 2
        sparse = torch.eye(4).to_sparse()
        assert (sparse + sparse).is_sparse
        complex_loss = functional.l1_loss(torch.ones(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64))
        return reads(drawn(number, 4, 6), nested).square().mean() + complex_loss + reads(drawn(number, 4, 6), sparse).mean()

    optimizer = torch.optim.SGD(reads.parameters(), lr=0.1)
    with trainprobe.watch(reads, optimizer, level="off", sinks=[], audit=True, output=tmp_path / "out") as probe:
        for number in range(2):
            with probe.step():
                optimizer.zero_grad()
                loss(number).backward()
                optimizer.step()
        assert probe.guard.tripped is None
