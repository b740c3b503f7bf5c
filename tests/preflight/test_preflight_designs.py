"""What nobody broke and once was called broken: programs of other people, as small models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trainprobe
from tests.preflight.test_preflight_cost import classified, pictures


def test_outputs_for_each_pair_of_rows_are_by_design():
    """As CLIP's similarities are."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(5, 4), nn.Linear(5, 4)

        def forward(self, x):
            return self.one(x) @ self.other(x).t()

    torch.manual_seed(0)
    (found,) = trainprobe.preflight(
        lambda m, x: cross_entropy(m(x), torch.arange(len(x))), Pairs(), pictures()[0], only=["rows"], seconds=600
    ).lines
    assert (found.status, found.text) == ("by design", "the outputs compare rows with each other: one for each pair of them")


@pytest.mark.parametrize("labels", [False, True])
def test_a_loss_that_samples_does_so_in_evaluation_too(labels):
    def loss(model, batch):
        noisy = batch["x"] + torch.randn_like(batch["x"])
        return classified(model, (noisy, batch["labels"])) if labels else (model(noisy) - 1).square().mean()

    x, y = pictures()
    batch = {"x": x, "labels": y} if labels else {"x": x}
    (found,) = trainprobe.preflight(loss, nn.Linear(5, 3), batch, only=["start"], seconds=600).lines
    assert found.status == "by design" and "as training does (randn_like)" in found.text, found


def test_a_gradient_that_only_a_small_step_can_measure_is_right():
    class Sharp(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.out = nn.Parameter(0.02 + 1e-9 * torch.randn(5)), nn.Linear(5, 3)

        def forward(self, x):
            return self.out(nn.functional.layer_norm(x[:, :1] * 0 + self.token, (5,), eps=1e-12))

    torch.manual_seed(0)
    (found,) = trainprobe.preflight(classified, Sharp(), pictures(), only=["gradient"], seconds=600).lines
    assert found.status == "holds", found


def test_edges_of_a_graph_keep_their_rows():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, x, edge_index):
            return self.out(x.index_add(0, edge_index[1], x[edge_index[0]]))

    """Nodes may be alike, as all of mutag_gin.py of PyTorch Geometric are; three lists of edges are no two rows."""
    (x, y), edges = pictures(), torch.tensor([[0, 1, 2, 6, 6], [1, 2, 3, 7, 5]])
    x = x[:4].repeat(2, 1)
    batch = {"x": x, "edge_index": edges, "edge_index_1": edges, "pos_edge_label_index": edges, "y": y}
    report = trainprobe.preflight(
        lambda m, b: cross_entropy(m(b["x"], b["edge_index"]), b["y"]),
        Graph(),
        batch,
        only=["split", "rows", "input"],
        seconds=600,
    )
    assert [(line.status, "edge_index names rows by their numbers" in line.text) for line in report.lines[:2]] == [
        ("not applicable", True)
    ] * 2
    assert (report.lines[2].status, report.lines[2].text) == ("holds", "x used")


def test_padding_that_the_model_has_no_room_for_is_no_answer():
    """As XTransformer has none in its train_copy.py: the answer was "holds: ; not tested"."""

    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.position = nn.Embedding(9, 4), nn.Parameter(torch.randn(6, 4))

        def forward(self, src, mask):
            return ((self.embed(src) + self.position) * mask[..., None]).sum((1, 2))

    batch = {"src": torch.randint(0, 9, (4, 6)), "mask": torch.ones(4, 6).bool()}
    (found,) = trainprobe.preflight(lambda m, b: m(**b).square().mean(), Short(), batch, only=["padding"], seconds=600).lines
    assert (found.status, found.text[:26]) == ("not applicable", "not tested: more padding (")


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_sparse_adjacency_keeps_its_rows(kind):
    """As GCNs have it: pygcn, and gcn2_cora.py of PyTorch Geometric."""
    x, y = pictures()
    dense = (torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    adjacency = dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, x, adjacency):
            return torch.sparse.mm(adjacency, self.out(x))

    report = trainprobe.preflight(
        lambda m, b: cross_entropy(m(b["x"], b["adjacency"]), b["y"]),
        Graph(),
        {"x": x, "adjacency": adjacency, "y": y},
        only=["split", "rows", "gradient", "input"],
        seconds=600,
    )
    assert [(line.name, line.status) for line in report.lines] == [
        ("split", "not applicable"),
        ("rows", "not applicable"),
        ("gradient", "holds"),
        ("input", "holds"),
    ], report
    assert all("adjacency is a sparse matrix" in line.text for line in report.lines[:2]), report


def test_a_gradient_that_is_rounding_alone_need_move_nothing():
    """As that of a last bias under a loss of differences."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    anchors, others = pictures()[0], torch.randn(8, 5)

    def loss(model, batch):
        return nn.functional.triplet_margin_loss(model(batch[0]), model(batch[0] + 0.1), model(batch[1]))

    (found,) = trainprobe.preflight(loss, model, (anchors, others), optimizer=optimizer, only=["update"], seconds=600).lines
    assert found.status == "holds", found


@pytest.mark.parametrize(("count", "status"), [(1, "holds"), (None, "BROKEN"), (2, "BROKEN")])
def test_what_would_be_wrong_of_two_micro_batches_is_no_fault_of_one(count, status):
    """As of heads in transformers whose loss is not told the number of items, in its Trainer."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def step(model, micros):
        losses = [classified(model, micro) for micro in micros]
        for loss in losses:
            loss.backward()
        return sum(float(loss) for loss in losses)

    given = {} if count is None else {"micro_batches": count}
    (found,) = trainprobe.preflight(classified, model, pictures(), step=step, only=["split"], seconds=600, **given).lines
    assert found.status == status and "the factor 2, the 2 micro-batches" in found.text, found
    assert found.text.startswith("for one micro-batch a step; ") == (count == 1)


def test_a_list_of_samples_has_no_rows_to_turn():
    """As detection has: pictures and boxes of each, of different sizes."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(3, 5, 3)

        def forward(self, images, targets):
            found = zip(images, targets, strict=True)
            return sum(
                (self.net(x[None]).amax((2, 3)) - t["boxes"].mean()).square().mean() * (1 + len(t["boxes"])) for x, t in found
            )

    torch.manual_seed(0)
    images = [torch.rand(3, 12, 9), torch.rand(3, 8, 8)]
    targets = [
        {"boxes": torch.rand(2, 4), "labels": torch.tensor([1, 2])},
        {"boxes": torch.rand(1, 4), "labels": torch.tensor([3])},
    ]
    report = trainprobe.preflight(lambda m, b: m(*b), Detector(), (images, targets), only=["split", "rows"], seconds=600)
    why = "boxes has a tensor for each row, of different lengths"
    assert [(line.status, line.text) for line in report.lines] == [("not applicable", why)] * 2


class Translator(nn.Module):
    """An encoder and a decoder in time, whose logits are flattened, as in attention-is-all-you-need-pytorch."""

    def __init__(self):
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(13, 8), nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, source, target):
        return self.head(self.target(target).cumsum(1) + self.source(source).mean(1, keepdim=True)).view(-1, 13)


def smoothed(logits, labels):
    """Cross entropy with smoothed labels, written by hand; 0 is padding."""
    marks = torch.zeros_like(logits).scatter(1, labels.view(-1, 1), 1)
    marks = marks * 0.9 + (1 - marks) * 0.1 / 12
    return -(marks * logits.log_softmax(1)).sum(1).masked_select(labels != 0).sum()


@pytest.mark.parametrize("kind", ["smoothed", "plain"])
@pytest.mark.parametrize("own", [False, True])
def test_the_target_that_a_decoder_is_given_is_found_behind_flattened_logits(kind, own):
    """The source has the length of the target: it is not taken for what the decoder reads."""
    torch.manual_seed(0)
    source, whole = torch.randint(1, 13, (4, 7)), torch.randint(1, 13, (4, 8))
    batch = {"src_seq": source, "trg_seq": whole[:, 1:] if own else whole[:, :-1], "gold": whole[:, 1:]}

    def loss(model, batch):
        logits, gold = model(batch["src_seq"], batch["trg_seq"]), batch["gold"].reshape(-1)
        return smoothed(logits, gold) if kind == "smoothed" else cross_entropy(logits, gold)

    (found,) = trainprobe.preflight(loss, Translator(), batch, only=["causality"], seconds=600).lines
    assert found.status == ("BROKEN" if own else "holds"), found
    assert ("is the token itself: labels are not shifted" if own else "later tokens change nothing before") in found.text


def test_an_autoencoder_of_text_predicts_its_own_tokens():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

        def forward(self, x):
            x = self.embed(x)
            return self.head(x + x.roll(-1, 1) + x.roll(1, 1)).view(-1, 13)

    torch.manual_seed(0)
    x = torch.randint(0, 13, (4, 7))
    (found,) = trainprobe.preflight(
        lambda m, x: cross_entropy(m(x), x.reshape(-1)), Around(), x, only=["causality"], seconds=600
    ).lines
    assert found.status == "not applicable", found


@pytest.mark.parametrize(("divided", "uneven", "status"), [
    (True, False, "holds"), (False, False, "BROKEN"), (False, True, "not applicable"),
])  # fmt: skip
def test_micro_batches_that_draw_random_numbers(divided, uneven, status):
    """As masked autoencoders draw which patches are hidden. The factor is that of the accumulation."""

    def loss(model, batch):
        return (model(batch * (torch.rand_like(batch) > 0.4)) - batch).square().mean()

    def step(model, parts):
        for part in parts:
            (loss(model, part) / (len(parts) if divided else 1)).backward()

    torch.manual_seed(0)
    (found,) = trainprobe.preflight(
        loss, nn.Linear(5, 5), torch.randn(7 if uneven else 8, 5), step=step, micro_batches=4, only=["split"], seconds=600
    ).lines
    assert found.status == status, found
    assert status != "BROKEN" or "that of the batch times the factor 4, the 4 micro-batches" in found.text


@pytest.mark.parametrize(("std", "told"), [(1.2, "the logits are large"), (60, "the logits are too large")])
def test_logits_that_a_foreign_model_may_begin_with_are_no_fault(std, told):
    """MNASNet of torchvision begins at 12.6, of 1,000 classes, which a uniform prediction gives 6.9."""
    torch.manual_seed(0)
    model = nn.Linear(5, 20)
    nn.init.normal_(model.weight, std=std)
    x, y = torch.randn(64, 5), torch.randint(0, 20, (64,))
    (found,) = trainprobe.preflight(lambda m, b: cross_entropy(m(b[0]), b[1]), model, (x, y), only=["start"], seconds=600).lines
    assert told in found.text and found.status == ("holds" if std == 1.2 else "BROKEN"), found


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_that_is_true_where_padding_is_hides_no_tokens(padded):
    """As fairseq's and those of torch's attention are."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 3)

        def forward(self, x, padding_mask):
            kept = ~padding_mask.unsqueeze(2)
            return self.head((self.embed(x) * kept).sum(1) / kept.sum(1))

    torch.manual_seed(0)
    x, lengths = torch.randint(1, 13, (4, 7)), torch.tensor([7, 5, 3, 6] if padded else [7, 7, 7, 7])
    mask = torch.arange(7) >= lengths.unsqueeze(1)
    batch = {"x": x.masked_fill(mask, 0), "padding_mask": mask, "y": torch.randint(0, 3, (4,))}
    report = trainprobe.preflight(
        lambda m, b: cross_entropy(m(b["x"], b["padding_mask"]), b["y"]), Around(), batch, only=["padding", "rows"], seconds=600
    )
    assert [line.status for line in report.lines] == ["not applicable", "holds"], report
