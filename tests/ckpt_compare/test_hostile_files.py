"""Broken and hostile files under the whole command: one sentence, no traceback, never `identical`, little time and memory."""

import json
import os
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.numpy import save_file

from trainprobe.cli import main

SECONDS, BYTES = 10, 1 << 30


def safetensors(path, header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape=(4,), offsets=(0, 16), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "no object": [],
    "an entry that is no object": {"w": 3},
    "no offsets": {"w": {"dtype": "F32", "shape": [4]}},
    "a dtype that is a list": {"w": {**entry(), "dtype": ["F32"]}},
    "a negative dimension": {"w": entry((-4,))},
    "a dimension that is a text": {"w": {**entry(), "shape": ["4"]}},
    "a dimension that is true": {"w": {**entry(), "shape": [True, 4]}},
    "a negative offset": {"w": entry(offsets=(-16, 0))},
    "offsets that overlap": {"v": entry(), "w": entry()},
    "a hole between arrays": {"v": entry((1,), (0, 4)), "w": entry((1,), (8, 12))},
    "bytes behind the last array": {"w": entry((2,), (0, 8))},
    "offsets past the end": {"w": entry((400,), (0, 1600))},
    "a huge shape": {"w": entry((2**62, 2**62), (0, 16))},
    "a huge shape without elements": {"w": entry((0, 2**62, 2**62), (0, 0))},
    "a fractional dimension": {"w": entry((4.0,))},
    "nesting": b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "metadata that is a list": {"__metadata__": [1], "w": entry()},
    "an unknown number format": {"w": entry(dtype="F7")},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_header_that_does_not_fit_is_a_sentence(name, tmp_path, capsys):
    safetensors(tmp_path / "a.safetensors", HEADERS[name])
    assert main(["ckpt-compare", *[str(tmp_path / "a.safetensors")] * 2]) == 3
    said = capsys.readouterr()
    assert "a.safetensors" in said.out + said.err
    assert "Traceback" not in said.err


SHAPE = [1] * 70  # torch has such tensors, NumPy has none of more than 64 dimensions


def many_dimensions(path, kind, number):
    """Write one number of 70 dimensions as each format holds it."""
    value = torch.full(SHAPE, float(number))
    match kind:
        case "safetensors":
            safetensors(path / "x.safetensors", {"w": entry(SHAPE, (0, 4))}, struct.pack("<f", number))
        case "pt":
            torch.save({"w": value}, path / "x.pt")
        case "dcp":
            torch.distributed.checkpoint.save({"w": value}, checkpoint_id=path, no_dist=True)
        case "zarr":
            (path / "w").mkdir()
            (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
            about = {"zarr_format": 2, "shape": SHAPE, "chunks": SHAPE, "dtype": "<f4", "order": "C", "compressor": None}
            (path / "w" / ".zarray").write_text(json.dumps({**about, "fill_value": None, "filters": None}))
            (path / "w" / ".".join("0" * len(SHAPE))).write_bytes(struct.pack("<f", number))
        case _:  # MindSpore's protobuf
            field = lambda key, content: bytes([key << 3 | 2, len(content)]) + content  # noqa: E731
            tensor = b"\x08\x01" * len(SHAPE) + field(2, b"Float32") + field(3, struct.pack("<f", number))
            inner = field(1, b"w") + bytes([2 << 3 | 2, 128 | len(tensor) & 127, len(tensor) >> 7]) + tensor
            (path / "x.ckpt").write_bytes(bytes([1 << 3 | 2, 128 | len(inner) & 127, len(inner) >> 7]) + inner)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "dcp", "zarr", "mindspore"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_tensor_of_more_than_64_dimensions_is_a_sentence_and_not_identical(kind, number, tmp_path, capsys):
    for side, held in (("a", 1), ("b", number)):
        (tmp_path / side).mkdir()
        many_dimensions(tmp_path / side, kind, held)
    sides = [next(p for p in (tmp_path / s).iterdir()) if kind in ("safetensors", "pt") else tmp_path / s for s in "ab"]
    assert main(["ckpt-compare", *map(str, sides)]) == 3
    said = capsys.readouterr()
    assert "a tensor has 70 dimensions, and at most 64 can be read" in said.out + said.err
    assert "Traceback" not in said.err
    assert "identical" not in said.out


def indexed(folder, file):
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "", "\0"])
def test_an_index_that_points_out_of_its_folder_is_not_followed(name, tmp_path, capsys):
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "secret.safetensors")
    indexed(tmp_path / "model", name)
    assert main(["ckpt-compare", *[str(tmp_path / "model")] * 2]) == 3
    assert "leads out of the folder" in capsys.readouterr().err


@pytest.mark.parametrize("pointer", ["latest", "latest_checkpointed_iteration.txt", "latest_universal"])
def test_a_pointer_that_leads_out_of_its_folder_is_not_followed(pointer, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / pointer).write_text("../elsewhere")
    assert main(["ckpt-compare", *[str(tmp_path / "run")] * 2]) == 3
    assert "leads out of the folder" in capsys.readouterr().err


def test_pipes_and_devices_are_neither_waited_for_nor_read(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.pt")
    for path in (tmp_path / "pipe.pt", Path("/dev/zero"), Path("/dev/null")):
        assert main(["ckpt-compare", str(path), str(path)]) == 3
        assert "neither a file nor a folder" in capsys.readouterr().err
    for name in ("model.safetensors", "x.safetensors", "pytorch_model.bin", "mp_rank_00_model_states.pt", ".metadata"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        os.mkfifo(folder / name)
        assert main(["ckpt-compare", str(folder), str(folder)]) == 3


def archive(path, pickled, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("x/data.pkl", pickled)
        made.writestr("x/version", "3\n")


def bombs(folder):
    """Yield files that are small and would take the machine if they were read as they ask to be."""
    archive(folder / "deflated.pt", b"\x80\x02X" + struct.pack("<I", 1 << 29) + b"\0" * (1 << 29) + b".", zipfile.ZIP_DEFLATED)
    archive(folder / "memo.pt", b"\x80\x02}r\xff\xff\xff\x1f.")
    archive(folder / "paths.pt", b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(60)) + b".")
    archive(folder / "nested.pt", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, folder / "repeated.pt")
    ids = torch.zeros(1).as_strided((1 << 20, 1 << 20), (0, 0))
    torch.save({"model": {"w": ids}}, folder / "square.pt")


def test_bombs_cost_ten_seconds_and_a_gigabyte_at_the_most(tmp_path):
    bombs(tmp_path)
    code = """
        import sys, time
        from pathlib import Path
        from trainprobe.cli import main
        code = main(["ckpt-compare", sys.argv[1], sys.argv[1]])
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        print(code, peak, time.process_time())
    """
    for file in sorted(tmp_path.iterdir()):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(file)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (file.name, done.stderr[-2000:])
        exit_code, kilobytes, seconds = done.stdout.split()[-3:]
        assert exit_code == "3", (file.name, done.stdout)
        assert int(kilobytes) * 1024 < BYTES, file.name
        assert float(seconds) < SECONDS, file.name
        assert "Traceback" not in done.stderr, file.name
