"""What is stored is what is compared: a tensor file that contradicts its dump.json is told, and never passes as identical."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import trainprobe
from trainprobe.dump_compare.command import compare_dumps

SUMMARIES = ["statistics", "md5", "both"]


@pytest.fixture(scope="module", params=SUMMARIES)
def dump(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    fields = {"level": "L0", "task": "tensor", "summary": request.param, "sinks": ["dump"], "step": [0], "console": False}
    with trainprobe.watch(model, None, output=folder, **fields) as probe, probe.step(0):
        model(torch.randn(4, 5)).square().mean().backward()
    return folder


def split(file: Path) -> tuple[dict, bytearray]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])


def join(file: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def other(dump: Path, folder: Path) -> Path:
    shutil.copytree(dump, folder)
    return next(folder.rglob("*.safetensors"))


def keys(header: dict) -> list[str]:
    return [key for key, entry in header.items() if isinstance(entry.get("shape"), list) and entry["dtype"] == "F32"]


def test_two_equal_dumps_are_identical(dump, tmp_path):
    other(dump, tmp_path / "same")
    assert compare_dumps(dump, tmp_path / "same")[1].code == 0


def test_a_stored_shape_that_is_not_the_recorded_one_is_told(dump, tmp_path):
    file = other(dump, tmp_path / "changed")
    header, data = split(file)
    key = next(key for key in keys(header) if header[key]["shape"] == [4, 5])
    begin = header[key]["data_offsets"][0]
    header[key] |= {"shape": [0, 5], "data_offsets": [begin, begin]}
    join(file, header, data)
    verdict = compare_dumps(dump, tmp_path / "changed")[1]
    assert verdict.code == 3
    assert any("has the shape [0, 5] in its file and [4, 5] in dump.json" in line for line in verdict.details)


@pytest.mark.parametrize("ulp", [1, 3, 1 << 10])
def test_an_element_that_was_changed_by_units_is_seen_in_every_tensor(dump, ulp, tmp_path):
    """Of each tensor in turn one element becomes its neighbour: no answer is "identical", whatever dump.json says of it."""
    file = other(dump, tmp_path / "changed")
    header, data = split(file)
    for key in keys(header):
        begin, end = header[key]["data_offsets"]
        elements = np.frombuffer(bytes(data[begin:end]), np.uint32).copy()
        elements[elements.size // 2] ^= ulp
        changed = bytearray(data)
        changed[begin:end] = elements.tobytes()
        join(file, header, changed)
        verdict = compare_dumps(dump, tmp_path / "changed")[1]
        assert verdict.code != 0, key
        if "both" in dump.name:
            assert verdict.code in (2, 3)
            assert any("its elements contradict their fingerprint in dump.json" in line for line in verdict.details)
