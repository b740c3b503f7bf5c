"""zarr arrays as the library itself writes them, alone and as Megatron's zarr backend lays them out."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.ckpt_compare.memory import dense
from tests.ckpt_compare.verdicts import compared, judged
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.storage.zarr_array import read_zarr
from trainprobe.errors import FormatError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("shape", "chunks"), [((7, 5), (3, 2)), ((4,), (4,)), ((2, 3, 4), (1, 3, 4)), ((6,), (4,))])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_an_array_comes_back_as_zarr_wrote_it(tmp_path, require, shape, chunks, order, dtype):
    zarr = require("zarr")
    values = RNG.integers(-9, 9, shape).astype(dtype)
    array = zarr.create(shape, chunks=chunks, dtype=dtype, order=order, compressor=None, store=str(tmp_path / "a"))
    array[...] = values
    assert np.array_equal(dense(read_zarr(tmp_path / "a", "a", [])).view(dtype), values)


@pytest.mark.parametrize("compressor", ["Blosc", "Zlib"])
def test_a_compressed_array_comes_back_as_zarr_wrote_it(tmp_path, require, compressor):
    zarr = require("zarr")
    codec = getattr(require("numcodecs"), compressor)()
    values = RNG.standard_normal((9, 4)).astype(np.float32)
    zarr.create((9, 4), chunks=(4, 4), dtype="float32", compressor=codec, store=str(tmp_path / "a"))[...] = values
    assert np.array_equal(dense(read_zarr(tmp_path / "a", "a", [])).view(np.float32), values)


def test_a_chunk_of_zeros_that_was_not_stored_is_zeros(tmp_path, require):
    zarr = require("zarr")
    array = zarr.create((4, 4), chunks=(2, 4), dtype="float32", compressor=None, store=str(tmp_path / "a"), fill_value=0)
    array[2:] = 1.0
    assert not (tmp_path / "a" / "0.0").exists()
    assert dense(read_zarr(tmp_path / "a", "a", [])).view(np.float32).sum() == 8.0


def test_a_zarray_that_is_no_json_is_refused_by_name(tmp_path):
    (tmp_path / ".zarray").write_text("{")
    with pytest.raises(FormatError, match=r"\.zarray cannot be read"):
        read_zarr(tmp_path, "a", [])


def as_zarr(zarr, source, target) -> None:
    """Write a torch_dist checkpoint anew as megatron-core 0.12's zarr strategy lays it out, with zarr itself.

    That strategy: `zarr.create(global_shape, dtype, store=folder/key, chunks=local shape, compressor=None, fill_value=None,
    write_empty_chunks=True)`, then each rank writes its slice; bfloat16 keeps its name in `.zarray`; `common.pt` as ever.
    """
    from trainprobe.ckpt_compare.formats import torch_dcp

    target.mkdir(parents=True)
    shutil.copy(source / "common.pt", target)
    (target / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    for key, tensor in torch_dcp.read_metadata(source).tensors.items():
        first = tensor.pieces[0]
        half = tensor.format.name == "bfloat16"
        array = zarr.create(
            tensor.shape, dtype="int16" if half else tensor.format.name, store=str(target / key), chunks=first.shape,
            compressor=None, fill_value=None, write_empty_chunks=True,
        )  # fmt: skip
        for piece in tensor.pieces:
            array[piece.rectangle.within((0,) * len(tensor.shape))] = piece.source.load().view(array.dtype)
        if half:
            meta = json.loads((target / key / ".zarray").read_text())
            (target / key / ".zarray").write_text(json.dumps({**meta, "dtype": "bfloat16"}))


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize(("layout", "other"), [("tp2", "legacy_pp2"), ("half2", "legacy_half1")])
def test_a_megatron_checkpoint_in_zarr_is_identical_to_other_layouts(megatron, require, tmp_path, layout, other):
    as_zarr(require("zarr"), megatron(f"dist_{layout}") / "iter_0000002", tmp_path / "z")
    assert recognise(tmp_path / "z") == "megatron_dist"
    found = compared(megatron(other), tmp_path / "z")
    assert [(r.key, r.verdict) for r in found.rows if r.verdict != "identical"] == []
    assert len(found.rows) > 100
    assert not found.faults


@pytest.mark.slow
@pytest.mark.frameworks
def test_a_lost_chunk_is_named(megatron, require, tmp_path):
    as_zarr(require("zarr"), megatron("dist_tp2") / "iter_0000002", tmp_path / "z")
    (tmp_path / "z" / "decoder.layers.mlp.linear_fc2.weight" / "1.0.1").unlink()
    found = judged(megatron("dist_tp1"), tmp_path / "z")
    assert found.code == 3
    assert any("linear_fc2.weight/1.0.1" in d for d in found.details)
    assert len(open_checkpoint(tmp_path / "z").problems) == 1
