"""Batches of classes of their own: the lines are those of the same loss that is written with plain tensors."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import trainprobe
from tests.preflight.test_preflight_script import learnt
from trainprobe.errors import UsageError
from trainprobe.preflight.opened import closed, opened
from trainprobe.preflight.training import tested as answers

ONLY = ["split", "rows", "gradient", "start", "determinism", "update", "input"]


@dataclass(frozen=True, slots=True)
class Slots:
    pixels: Tensor
    mask: Tensor
    names: tuple[str, ...] = ("a", "b")


class Nested:
    """As DETR's NestedTensor is."""

    def __init__(self, pixels, mask):
        self.pixels, self.mask, self.device = pixels, mask, pixels.device

    def decompose(self):
        return self.pixels, self.mask


class Stored:
    """As PyTorch Geometric's Data is: the tensors lie deeper, and attributes are looked up there."""

    def __init__(self, pixels, mask):
        self.__dict__["_store"] = SimpleNamespace(_mapping={"pixels": pixels, "mask": mask}, _parent=self)

    def __getattr__(self, name):
        mapping = self.__dict__.get("_store", SimpleNamespace(_mapping={}))._mapping
        if name not in mapping:
            raise AttributeError(name)
        return mapping[name]

    def __setattr__(self, name, value):
        self.__dict__["_store"]._mapping[name] = value


class Items(dict):
    """A mapping that torch knows nothing about."""

    def __init__(self, pixels, mask):
        super().__init__(pixels=pixels, mask=mask)


def encoding(pixels, mask):
    return UserDict({"pixels": pixels, "mask": mask})  # as BatchEncoding of transformers is


class Net(nn.Module):
    def __init__(self, writes=False):
        super().__init__()
        self.body, self.head, self.writes = nn.Linear(4, 6), nn.Linear(6, 3), writes

    def forward(self, given):
        x, mask = (given["pixels"], given["mask"]) if isinstance(given, dict | UserDict) else (given.pixels, given.mask)
        x = relu(self.body(x))
        if self.writes:  # as many examples of graphs do
            given.pixels = x
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp_min(1))


def told(make, coupled=False, writes=False):
    def loop(own):
        model = Net(writes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, mask, y = torch.randn(6, 5, 4), torch.rand(6, 5) > 0.3, torch.randint(0, 3, (6,))
        out = model(make(x, mask))
        loss = cross_entropy(out + (out.mean(0) if coupled else 0), y)
        own.append(loss.detach().clone())
        loss.backward()
        optimizer.step()

    training, optimizers, own = learnt(loop)
    report = answers(training, optimizers, only=ONLY, seconds=600)
    return own, [str(line) for line in report.lines]


def plain(pixels, mask):
    return {"pixels": pixels, "mask": mask}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("make", [Slots, Nested, Stored, Items, encoding])
def test_the_lines_are_those_of_plain_tensors(make, coupled):
    wanted = told(plain, coupled)
    assert wanted[1][-1].startswith("input        holds: pixels used")
    assert wanted[1][1].startswith("rows         by design" if coupled else "rows         holds"), wanted
    assert told(make, coupled) == wanted


@pytest.mark.parametrize("make", [Nested, Stored])
def test_an_object_that_the_model_writes_to_is_what_it_was_before(make):
    assert told(make, writes=True) == told(plain)


class Graph(Nested):
    """A batch of points of several graphs: `batch` is the number of the graph, `near` is there for other models."""

    def __init__(self, pixels, number):
        self.pixels, self.batch, self.near = pixels, number, torch.rand(len(pixels), 4)
        self._slice_dict = {"near": torch.arange(4)}


def test_points_of_graphs_are_no_rows_and_attributes_may_be_left_alone():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, given):
            count = int(given.batch.max()) + 1
            return self.head(torch.zeros(count, 6).index_add(0, given.batch, relu(self.body(given.pixels))))

    def loop(own):
        model = Pooled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        number = torch.arange(4).repeat_interleave(2)[1:]
        own.append(cross_entropy(model(Graph(torch.randn(7, 4), number)), torch.randint(0, 3, (4,))))
        own[-1].backward()
        optimizer.step()

    training, optimizers, _ = learnt(loop)
    lines = {line.name: line for line in answers(training, optimizers, only=ONLY, seconds=600).lines}
    why = "batch says which sample each row belongs to"
    assert (lines["split"].status, lines["split"].text) == ("not applicable", why)
    assert (lines["rows"].status, lines["rows"].text) == ("not applicable", why)
    assert lines["input"].status == "holds" and lines["input"].text.startswith("pixels used, near not used")


def test_a_planted_fault_is_named_behind_an_object():
    """The largest value of all rows scales each of them."""

    class Scaled(Net):
        def forward(self, given):
            return super().forward({"pixels": given.pixels / given.pixels.amax(), "mask": given.mask})

    def loss(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    batch = Nested(torch.rand(6, 5, 4), torch.ones(6, 5)), torch.randint(0, 3, (6,))
    before = batch[0].pixels.clone()
    (found,) = trainprobe.preflight(loss, Scaled(), batch, only=["rows"]).lines
    assert found.status == "BROKEN" and "changes the outputs of other rows" in found.text
    assert torch.equal(batch[0].pixels, before)


def test_a_batch_of_a_tokenizer_keeps_its_class(require):
    transformers = require("transformers")

    def loss(model, batch):
        assert type(batch) is transformers.BatchEncoding
        return cross_entropy(model[1](model[0](batch.input_ids).mean(1)), batch["labels"])

    torch.manual_seed(0)
    batch = transformers.BatchEncoding({"input_ids": torch.randint(0, 9, (6, 5)), "labels": torch.randint(0, 3, (6,))})
    report = trainprobe.preflight(loss, nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 3)]), batch, only=["rows", "input"])
    assert [line.status for line in report.lines] == ["holds"] * 2 and "input_ids used" in str(report), report


def test_an_object_is_copied_with_what_holds_tensors_alone():
    names, inner = [None, None], SimpleNamespace(y=torch.ones(2))
    held = SimpleNamespace(x=torch.zeros(3), names=names, inner=[inner], lock=Lock(), again=None)
    held.again = held.inner
    node = opened({"held": held})["held"]
    assert node.names == ["x", "y"]
    other = closed(node.with_parts([torch.ones(3), torch.full((2,), 5.0)]))
    assert other.x.sum() == 3 and other.inner[0].y.sum() == 10 and other.again is other.inner
    assert other.names is names and other.lock is held.lock
    assert held.x.sum() == 0 and inner.y.sum() == 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x, lengths=None):
        x, lengths = (x.pixels, x.mask) if isinstance(x, Nested) else (x, lengths)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.net(packed)[1][-1])


@pytest.mark.parametrize("form", ["tensor", "list", "tuple", "object"])
def test_a_list_of_lengths_has_rows(form):
    def loop(own):
        model, lengths = Recurrent(), [7, 5, 3, 2, 6]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(5, 7, 4), torch.randint(0, 3, (5,))
        held = {"tensor": torch.tensor(lengths), "tuple": tuple(lengths)}.get(form, lengths)
        own.append(cross_entropy(model(Nested(x, held)) if form == "object" else model(x, held), y))
        own[-1].backward()
        optimizer.step()

    training, optimizers, _ = learnt(loop)
    lines = answers(training, optimizers, only=["split", "rows", "input"], seconds=600).lines
    assert [line.status for line in lines] == ["holds"] * 3, lines


def test_a_list_that_is_none_of_rows_breaks_nothing():
    """A height and a width, of a batch of two."""

    class Sized(nn.Linear):
        def forward(self, x, size):
            return super().forward(x[:, : size[0]].mean(1) + x[:, : size[1]].amax(1))

    def loss(model, batch):
        return cross_entropy(model(batch["x"], batch["size"]), batch["y"])

    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 5, 4), "size": [3, 5], "y": torch.tensor([0, 2])}
    (found,) = trainprobe.preflight(loss, Sized(4, 3), batch, only=["rows"]).lines
    assert found.text == "size may have an element for each row, and is no tensor", found


class Alone(Nested):
    def __deepcopy__(self, memo):
        raise TypeError("no copy")


class Large(Nested):
    """As one that a whole memory of replays comes along with, of which not all was looked at."""

    def __init__(self, pixels, mask):
        super().__init__(pixels, mask)
        self.memory = [object() for _ in range(30_000)]


@pytest.mark.parametrize("kind", [Alone, Large])
def test_an_object_that_has_no_copy_or_is_too_large_is_refused(kind):
    with pytest.raises(UsageError, match=f"given a {kind.__name__}, which hides its tensors"):
        told(kind)
