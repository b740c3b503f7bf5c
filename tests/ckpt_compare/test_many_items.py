"""Distributed checkpoints of many small items: alike archives and alike descriptions are read once, with the same result."""

import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt_compare.memory import dense
from tests.ckpt_compare.verdicts import bytes_held, judged
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import dcp_metadata, torch_archive
from trainprobe.ckpt_compare.storage.inert_objects import Stateful
from trainprobe.ckpt_compare.storage.inert_pickle import read_pickle
from trainprobe.ckpt_compare.storage.mapped import mapping
from trainprobe.ckpt_compare.storage.similar_archives import recognised
from trainprobe.errors import FormatError

FORMATS = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]
SHAPES = [(3, 5), (5, 3), (15,), (), (0, 4), (1, 15)]


def save(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def experts(count, shapes=SHAPES, formats=FORMATS):
    chance = torch.Generator().manual_seed(3)
    return {
        f"layers.{i}.weight": (torch.randn(shapes[i % len(shapes)], generator=chance) * 9).to(formats[i % len(formats)])
        for i in range(count)
    }


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()


def test_alike_items_hold_what_torch_wrote(tmp_path):
    """Lengths, shapes and formats are mixed: archives of equal length hold [3, 5] and [5, 3]."""
    state = {k: v if v.dim() or v.dtype != torch.bfloat16 else v.float() for k, v in experts(90).items()}
    found = open_checkpoint(save(state, tmp_path / "x")).tensors
    assert found.keys() == state.keys()
    for name, expected in state.items():
        held = dense(found[name])
        assert (held.shape, held.tobytes()) == (tuple(expected.shape), bits(expected)), name


def test_the_second_archive_of_a_kind_is_recognised(tmp_path, monkeypatch):
    tensors = open_checkpoint(save(experts(6, [(3, 5)], [torch.float32]), tmp_path / "x")).tensors
    opened = []
    whole = torch_archive._zip_load
    monkeypatch.setattr(torch_archive, "_zip_load", lambda *at: opened.append(at) or whole(*at))
    for tensor in tensors.values():
        tensor.pieces[0].source.load()
    assert len(opened) == 1


@pytest.mark.parametrize("place", ["pickle", "directory", "byteorder", "length of the padding"])
def test_an_archive_that_differs_where_the_reader_looks_is_none_of_the_kind(tmp_path, place):
    file = save(experts(2, [(3, 5)], [torch.float32]), tmp_path / "x") / "__0_0.distcp"
    one, two = (t.pieces[0].source for t in open_checkpoint(tmp_path / "x").tensors.values())
    one.load()
    raw = bytearray(file.read_bytes())
    end = two.start + two.form.length
    at = {
        "pickle": raw.index(b"FloatStorage", two.start) + 3,
        "directory": raw.index(b"PK\1\2", two.start) + 42,
        "byteorder": raw.index(b"little", two.start),
        "length of the padding": raw.rindex(b"PK\3\4", two.start, raw.index(b"data/0", two.start)) + 28,
    }[place]
    assert two.start < at < end
    assert recognised(mapping(str(file)), str(file), two.start, two.form.length) is not None
    raw[at] ^= 1
    file.write_bytes(raw)
    assert recognised(mapping(str(file)), str(file), two.start, two.form.length) is None


def test_a_changed_element_beside_alike_items_is_found(tmp_path):
    a, b = experts(40, [(3, 5)], [torch.float32]), experts(40, [(3, 5)], [torch.float32])
    b["layers.31.weight"][2, 4] += 1
    found = judged(save(a, tmp_path / "a"), save(b, tmp_path / "b"))
    assert found.code == 2
    assert found.sentence.startswith("differ: 1 of 40 tensors; worst is layers.31.weight")


def test_a_tensor_of_a_distributed_checkpoint_takes_little_memory(tmp_path):
    count = 3_000
    state = {f"layers.{i // 500}.experts.{i % 500}.weight": torch.full((1, 3), float(i)) for i in range(count)}
    a, b = save(state, tmp_path / "a"), save(state, tmp_path / "b")
    assert bytes_held(a, b) < 800


class Described(Stateful):
    """As the tensors of the metadata: takes its state once."""

    unchanging = True

    def set_state(self, state):
        if hasattr(self, "held"):
            raise FormatError("twice")
        self.held = dict(state)


class Written:
    """Pickles as a dataclass does: class, empty arguments, a dict of attributes."""

    def __init__(self, **held):
        self.__dict__.update(held)


class Unknown:
    """Pickles as an object with attributes that no reader knows."""


NAMES = {f"{__name__}.Written": Described}


def read(data):
    return read_pickle(data, "x", NAMES)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_equal_objects_of_the_metadata_may_be_one(protocol):
    made = [Written(size=(3, 5 + i % 2), kind="a") for i in range(50)]
    found = read(pickle.dumps(made, protocol))
    assert [one.held for one in found] == [{"size": (3, 5 + i % 2), "kind": "a"} for i in range(50)]
    assert len({id(one) for one in found}) < 10 or protocol == 2  # which gives the indices of its memo, so that each is built


def test_objects_that_are_fetched_again_are_not_made_one():
    shared = [Written(size=(3, 5), kind="a") for _ in range(4)]
    found = read(pickle.dumps([*shared, *shared], 4))
    assert [found.index(one) for one in found[4:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_object_and_the_dict_of_its_attributes_may_be_fetched_again(protocol):
    """Both are memoized inside the opcodes that are done at once."""
    one = Unknown()
    one.held = 7
    first, attributes, again = read(pickle.dumps([one, one.__dict__, one], protocol))
    assert again is first
    assert attributes == first.state == {"held": 7}


def test_bytes_that_reach_below_themselves_are_no_object():
    """Between the class and its state the stream adds an entry to the dict below: replayed bytes would leave it out."""
    cls = b"\x8c" + bytes([len(__name__)]) + __name__.encode() + b"\x8c\x07Written\x93"
    sly = b"h\x000" + b"\x8c\x01kK\x01s" + cls + b")\x81}b"  # fetch, drop, set an item, name the class again
    stream = b"\x80\x04]" + cls + b"\x940" + (b"}" + sly + b"\x86a") * 2 + b"."
    found = read(stream)
    assert [entry[0] for entry in found] == [{"k": 1}, {"k": 1}]


def test_an_object_of_the_metadata_takes_its_state_once():
    with pytest.raises(FormatError, match="described twice"):
        state = {"properties": type("P", (), {"dtype": "float32"}), "size": (2,), "chunks": []}
        made = dcp_metadata.Described()
        made.set_state(state)
        made.set_state(state)


def test_chunks_that_are_listed_without_end_are_refused(tmp_path):
    """One list of a thousand chunks that a thousand tensors share: a small file, and a million pieces."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(1000)]
    shared = {f"w{i}": TensorStorageMetadata(TensorProperties(), torch.Size([1000]), chunks) for i in range(1000)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(shared, storage_data={})))
    with pytest.raises(FormatError, match="lists 1,000,000 chunks of tensors, of which at most 0 lie somewhere"):
        dcp_metadata.read(tmp_path / ".metadata")


def test_metadata_without_what_repeats_the_names_is_the_same(tmp_path):
    save({"model": experts(5)}, tmp_path / "x")
    read_whole = dcp_metadata.read(tmp_path / "x" / ".metadata")
    assert [f"model.{name}" for name in experts(5)] == list(read_whole.tensors)
    assert np.all([read_whole.place(key, ()) is not None for key in read_whole.tensors])
