import json
import struct
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.ckpt_compare.storage.mindspore_protobuf import read_values
from trainprobe.ckpt_compare.storage.safetensors_file import read_safetensors
from trainprobe.engine.compare.number_formats import decode
from trainprobe.errors import FormatError


def test_safetensors_come_back_as_the_library_reads_them(tmp_path):
    held = {
        str(d): torch.randn(3, 4).to(d)
        for d in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)
    }
    save_file(held, tmp_path / "x.safetensors")
    found, _ = read_safetensors(tmp_path / "x.safetensors")
    assert all(np.array_equal(decode(found[k].load(), found[k].format), v.double().numpy()) for k, v in held.items())


def test_a_truncated_safetensors_file_is_named_when_its_numbers_are_wanted(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.randn(100, 10)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"x\.safetensors ends at byte"):
        open_checkpoint(path).tensors["w"].pieces[0].source.load()


def test_a_safetensors_header_that_lies_about_a_size_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(FormatError, match="takes 20 bytes, not 8"):
        read_safetensors(tmp_path / "x.safetensors")


def varint(n):
    out = bytearray()
    while True:
        out.append((n & 0x7F) | (0x80 if n > 0x7F else 0))
        n >>= 7
        if not n:
            return bytes(out)


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def value(tag, dims, dtype, data, packed=False):
    """Encode one Value as the protobuf wire format has it."""
    plain = b"".join(varint(1 << 3) + varint(d) for d in dims)
    shape = field(1, b"".join(varint(d) for d in dims)) if packed else plain
    return field(1, field(1, tag.encode()) + field(2, shape + field(2, dtype.encode()) + field(3, data)))


def mindspore_file(tmp_path, *values):
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"".join(values))
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_mindspore_tensor_is_read_from_its_wire_format(tmp_path, packed):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = mindspore_file(tmp_path, value("net.w", [2, 3], "Float32", x.tobytes(), packed))
    assert open_checkpoint(path).tensors["net.w"].pieces[0].source.load().tolist() == x.tolist()


def test_a_mindspore_tensor_that_was_cut_for_its_size_comes_back_as_one(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    path = mindspore_file(tmp_path, *(value("w", [4, 3], "Float32", x[i : i + 2].tobytes()) for i in (0, 2)))
    found = open_checkpoint(path).tensors["w"]
    assert (found.shape, [p.offset for p in found.pieces]) == ((4, 3), [(0, 0), (2, 0)])


def test_mindspore_optimizer_states_are_filed_under_their_parameter(tmp_path):
    x = np.zeros(3, np.float32).tobytes()
    path = mindspore_file(
        tmp_path, value("w", [3], "Float32", x), value("adam_m.w", [3], "Float32", x), value("moment2.w", [3], "Float32", x)
    )
    assert list(open_checkpoint(path).tensors) == ["w", "w#exp_avg", "w#exp_avg_sq"]


def test_a_mindspore_scalar_of_training_is_state_and_no_tensor(tmp_path):
    step = np.array([7], np.int32).tobytes()
    path = mindspore_file(tmp_path, value("w", [1], "Float32", bytes(4)), value("global_step", [0], "Int32", step))
    found = open_checkpoint(path)
    assert (list(found.tensors), found.state["optimizer"]) == (["w"], {"step": 7})


def test_a_mindspore_checksum_that_does_not_fit_is_a_problem_with_the_file_s_name(tmp_path):
    body = value("w", [1], "Float32", bytes(4))
    for crc, count in ((zlib.crc32(body), 0), (zlib.crc32(body) ^ 1, 1)):
        path = mindspore_file(tmp_path, body, b"crc_num" + crc.to_bytes(10, "big"))
        assert len(open_checkpoint(path).problems) == count


def test_an_encrypted_or_truncated_mindspore_file_says_so(tmp_path):
    path = mindspore_file(tmp_path, value("w", [100], "Float32", bytes(400))[:-9])
    with pytest.raises(FormatError, match="truncated or encrypted"):
        read_values(path)


def test_mindspore_safetensors_are_known_by_their_metadata(tmp_path):
    save_file({"moments1.w": torch.ones(2), "w": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "ms"})
    found = open_checkpoint(tmp_path / "x.safetensors")
    assert (found.format, list(found.tensors)) == ("mindspore", ["w#exp_avg", "w"])
