import numpy as np
import pytest
import torch

from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage import torch_archive
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
