import copyreg
import io
import sys
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt_compare.verdicts import judged
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.cli import main
from trainprobe.engine.compare.number_formats import decode
from trainprobe.errors import FormatError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32,
]  # fmt: skip


def values(source):
    return decode(source.load(), source.format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_format_comes_back_bit_for_bit(tmp_path, dtype):
    x = (
        (torch.randn(3, 5) * 3).to(dtype)
        if dtype not in (torch.uint16, torch.uint32)
        else torch.arange(15).reshape(3, 5).to(dtype)
    )
    torch.save({"x": x}, tmp_path / "x.pt")
    found = torch_archive.load(str(tmp_path / "x.pt"))["x"]
    assert found.format.name == str(dtype).removeprefix("torch.")
    assert np.ascontiguousarray(found.load()).tobytes() == bytes(x.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "before 1.6"])
def test_views_transposes_and_shared_storages_come_back_as_they_were(tmp_path, modern):
    base = torch.arange(24.0).reshape(4, 6)
    held = {"base": base, "t": base.t(), "view": base[1:3, ::2], "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    torch.save(held, tmp_path / "x.pt", _use_new_zipfile_serialization=modern)
    found = torch_archive.load(str(tmp_path / "x.pt"))
    assert all(np.array_equal(found[k].load(), v.numpy()) for k, v in held.items())


def test_parameters_and_buffers_of_a_state_dict_are_found(tmp_path):
    net = torch.nn.BatchNorm1d(4)
    torch.save(net.state_dict(), tmp_path / "x.pt")
    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == list(net.state_dict())


def test_a_pickled_parameter_is_read_as_its_tensor(tmp_path):
    torch.save({"p": torch.nn.Parameter(torch.ones(3))}, tmp_path / "x.pt")
    assert torch_archive.load(str(tmp_path / "x.pt"))["p"].load().tolist() == [1.0, 1.0, 1.0]


def saved(path, held, modern=True):
    torch.save(held, path, _use_new_zipfile_serialization=modern)
    return path


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_a_view_that_is_computed_when_it_is_read_is_not_its_bytes(tmp_path, view, modern):
    """Its bytes are those of the tensor that it is a view of."""
    x = torch.randn(4, dtype=torch.complex64)
    a = saved(tmp_path / "a.pt", {"x": x, "y": torch.ones(2)}, modern)
    b = saved(tmp_path / "b.pt", {"x": view(x), "y": torch.ones(2)}, modern)
    verdict = judged(a, b)
    assert verdict.code == 3
    assert "resolve_conj" in verdict.sentence


def test_another_complex_number_is_named(tmp_path):
    x = torch.randn(8, 8, dtype=torch.complex64)
    a = saved(tmp_path / "a.pt", {"x": x, "y": torch.ones(2)})
    for name, other in (("conj", x.conj().resolve_conj()), ("rows", x.flip(0)), ("one", x + torch.eye(8) * 1j)):
        verdict = judged(a, saved(tmp_path / f"{name}.pt", {"x": other, "y": torch.ones(2)}))
        assert verdict.code == 2
        assert "x" in verdict.sentence


def test_a_tensor_that_was_on_an_ascend_device_is_read(tmp_path, monkeypatch):
    """torch_npu reduces a tensor of a device to its copy on the host, with the number of the format beside it."""

    def _rebuild_npu_tensor(storage, offset, size, stride, requires_grad, hooks, npu_storage_format):
        raise NotImplementedError

    module = types.ModuleType("torch_npu.utils.storage")
    module._rebuild_npu_tensor = _rebuild_npu_tensor
    _rebuild_npu_tensor.__module__, _rebuild_npu_tensor.__qualname__ = module.__name__, "_rebuild_npu_tensor"
    for name in ("torch_npu", "torch_npu.utils", "torch_npu.utils.storage"):
        monkeypatch.setitem(sys.modules, name, module)
    held = {"w": torch.randn(4, 6), "t": torch.randn(4, 6).t(), "b": torch.randn(4).bfloat16()}
    host = saved(tmp_path / "host.pt", held)
    monkeypatch.setattr(
        torch.Tensor,
        "__reduce_ex__",
        lambda x, _: (
            _rebuild_npu_tensor,
            (x._typed_storage(), x.storage_offset(), tuple(x.size()), x.stride(), x.requires_grad, {}, 29),
        ),
    )
    device = saved(tmp_path / "device.pt", held)
    other = saved(tmp_path / "other.pt", held | {"b": held["b"] * 2})
    assert judged(host, device).code == 0
    assert judged(host, other).code == 2


class Wrapped:
    def __init__(self, inner):
        self.inner = inner


class Holder(Wrapped):
    """Its tensor is an argument of the function that makes it again, beside attributes."""

    def __reduce_ex__(self, protocol):
        return copyreg.__newobj__, (Holder, self.inner), {"kind": torch.ones(2)}


class OfStorage(Wrapped):
    def __reduce_ex__(self, protocol):
        return Wrapped, (self.inner._typed_storage(), 3)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda x: Holder(x), 2),
        (lambda x: OfStorage(x), 3),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.qint8), 3),
        (lambda x: torch.sparse_coo_tensor([[0, 1], [1, 0]], x[0, :2], (2, 2)), 3),
    ],
    ids=["arguments beside attributes", "a storage", "quantised", "sparse"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_inside_what_is_not_known_is_never_left_out(tmp_path, make, code):
    x = torch.randn(4, 4)
    a, b = (saved(tmp_path / f"{i}.pt", {"y": torch.ones(2), "x": make(v)}) for i, v in enumerate((x, x + 1)))
    assert judged(a, b).code == code
    found = open_checkpoint(a)
    assert "y" in found.tensors  # what cannot be read costs itself alone


BESIDE = {  # what stands among the tensors of a model, and another value of it
    "a number": ("temperature", 3.0, 5.0),
    "a list": ("sizes", [1, 2], [1, 3]),
    "an array": ("table", np.arange(4.0), np.arange(4.0) + 1),
    "a big-endian array": ("table", np.arange(4, dtype=">i4"), np.arange(4, dtype=">i4") + 1),
    "a number of NumPy": ("scale", np.float32(3), np.float32(4)),
    "what a layer adds": ("layer._extra_state", {"scale": 2.0}, {"scale": 4.0}),
    "bytes of a layer of FP8": ("layer._extra_state", io.BytesIO(b"abc"), io.BytesIO(b"abd")),
}


@pytest.mark.parametrize("wrap", [lambda held: held, lambda held: {"model": held, "epoch": 3}], ids=["alone", "beside others"])
@pytest.mark.parametrize(("name", "one", "other"), BESIDE.values(), ids=BESIDE)
def test_what_is_no_tensor_of_a_model_is_compared_too(tmp_path, name, one, other, wrap):
    weights = {"layer.weight": torch.ones(3, 2)}
    a, again, b = (saved(tmp_path / f"{i}.pt", wrap(weights | {name: value})) for i, value in enumerate((one, one, other)))
    assert judged(a, again).code == 0
    verdict = judged(a, b)
    assert verdict.code == 2
    assert name in verdict.sentence


@pytest.mark.parametrize(("name", "value"), [("temperature", 3.0), ("layer._extra_state", io.BytesIO(b"abc"))])
def test_what_one_side_alone_has_beside_its_tensors_is_said(tmp_path, capsys, name, value):
    weights = {"layer.weight": torch.ones(3, 2)}
    a, b = saved(tmp_path / "a.pt", weights | {name: value}), saved(tmp_path / "b.pt", weights)
    extra = name.endswith("_extra_state")  # which some versions of a library write, and others do not
    for command, code, where in (([a, b], 3, "A"), ([b, a], 3, "B"), ([a, b, "--ignore", name], 0, "")):
        assert main(["ckpt-compare", *map(str, command)]) == (0 if extra else code)
        said = capsys.readouterr().out
        assert (f"{name} (" in said and f"is in {where} alone" in said) == bool(where), said


def test_an_average_of_weights_that_stands_in_the_place_of_the_model_is_named_either_way(tmp_path):
    generator = torch.Generator().manual_seed(0)
    model, average = ({f"blocks.{i}.w": torch.randn(8, 8, generator=generator) for i in range(4)} for _ in range(2))
    both = saved(tmp_path / "both.pt", {"state_dict": model, "state_dict_ema": average, "epoch": 3})
    one, other = saved(tmp_path / "one.pt", model), saved(tmp_path / "other.pt", {"state_dict": average, "epoch": 3})
    assert judged(one, both).sentence.startswith("incomplete: 4 tensors of state_dict_ema only in B")
    assert judged(both, other).sentence.startswith("differ: w of B holds w (state_dict_ema) of A (4 tensors)")
    assert judged(other, both).sentence.startswith("differ: w of A holds w (state_dict_ema) of B (4 tensors)")


def written_dcp(folder, held):
    dcp_saved(folder, {"model": held, "epoch": 3})


def written_bare_dcp(folder, held):
    dcp_saved(folder, {**held, "epoch": 3})


def dcp_saved(folder, held):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(held, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def written_bin(folder, held):
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 2}')
    saved(folder / "pytorch_model.bin", held)


def written_deepspeed(folder, held):
    folder.mkdir()
    shapes = [{name: value.shape for name, value in held.items() if torch.is_tensor(value)}]
    more = {"ds_version": "0.19", "dp_world_size": 1, "buffer_names": [], "param_shapes": shapes}
    saved(folder / "mp_rank_00_model_states.pt", {"module": held, **more})


@pytest.mark.parametrize("write", [written_dcp, written_bare_dcp, written_bin, written_deepspeed])
@pytest.mark.parametrize(("name", "one", "other"), [BESIDE["a number"], BESIDE["bytes of a layer of FP8"]])
def test_each_format_compares_what_is_no_tensor_of_a_model(tmp_path, name, one, other, write):
    weights = {"layer.weight": torch.ones(3, 2)}
    for folder, value in (("a", one), ("again", one), ("b", other)):
        write(tmp_path / folder, weights | {name: value})
    assert judged(tmp_path / "a", tmp_path / "again").code == 0
    verdict = judged(tmp_path / "a", tmp_path / "b")
    assert verdict.code == 2
    assert name in verdict.sentence


def test_what_a_script_keeps_beside_a_model_is_no_difference_of_weights(tmp_path):
    held = {"generator": {"layer.weight": torch.ones(3, 2)}, "args": {"lr": 1.0}, "epoch": 1}
    a, b = saved(tmp_path / "a.pt", held), saved(tmp_path / "b.pt", held | {"args": {"lr": 2.0}, "epoch": 2})
    assert judged(a, b).code == 0


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_by_name_and_never_passes(tmp_path, keep, modern):
    path = tmp_path / "x.pt"
    torch.save({"model": {"w": torch.randn(200, 50)}}, path, _use_new_zipfile_serialization=modern)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(FormatError, match=r"x\.pt"):
        found = open_checkpoint(path, "plain_torch")
        next(iter(found.tensors.values())).pieces[0].source.load()


def test_what_torch_did_not_write_is_not_taken_for_it(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"something else entirely")
    with pytest.raises(FormatError, match="no checkpoint in a known format"):
        open_checkpoint(path)
