"""Pieces of values that the compiled tape gathers: where they lie in memory, and for how long."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.compiled import recording
from trainprobe.engine.storage.dumps.direct_file import BLOCK
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_NAMES, SafetensorsFile
from trainprobe.engine.tape import SAVE, Tape


def gathered(values: list[torch.Tensor]) -> list:
    """Return the chunks into which the tape gathers these values, `x.0`, `x.1` and so on."""
    chunks: list = []
    arena = recording.Arena(SAFETENSORS_NAMES, chunks.append)
    tape = Tape(TorchLibrary(), lambda *_: pytest.fail("a value was not gathered"), arena=arena)
    for i, value in enumerate(values):
        tape.tree(value, SAVE, f"x.{i}")
    arena.flush()
    return chunks


def some_values(number: int, count: int = 16) -> list[torch.Tensor]:
    """Return values of 3 MB each, with a few bytes in between."""
    large = [torch.linspace(number, i, 3 << 18) for i in range(count)]
    return [value for i, each in enumerate(large) for value in (each, torch.full((i + 1,), number, dtype=torch.uint8))]


def bytes_of(values: list[torch.Tensor]) -> list[bytes]:
    return [value.numpy().tobytes() for value in values]


def test_each_chunk_begins_at_a_block_and_goes_to_disk_as_it_lies(tmp_path):
    values = some_values(0)
    chunks = gathered(values)
    assert len(chunks) > 3
    assert [np.frombuffer(chunk.data, np.uint8).ctypes.data % BLOCK for chunk in chunks] == [0] * len(chunks)
    file = SafetensorsFile(tmp_path / "x", held=0)
    assert sum(map(file.add_chunk, chunks)) >= sum(value.nbytes for value in values)
    file.finish()
    with safe_open(tmp_path / "x", "pt") as found:
        assert all(torch.equal(found.get_tensor(f"x.{i}"), value) for i, value in enumerate(values))
    with (tmp_path / "x").open("rb") as found:
        room = int.from_bytes(found.read(8), "little")
        header = json.loads(found.read(room))
    begins = [8 + room + header[chunk.keys()[0]]["data_offsets"][0] for chunk in chunks]
    assert [begin % BLOCK for begin in begins] == [0] * len(chunks)


def test_memory_of_a_chunk_is_not_used_again_while_somebody_looks_at_it():
    seen, expected = [], []
    for number in range(6):
        values = some_values(number, 6)
        for chunk in gathered(values):
            if number % 2:  # of the others nothing is kept, so that their memory may be taken
                seen += [chunk.data[offset : offset + size] for _, _, _, offset, size in chunk.items()]
        expected += bytes_of(values) if number % 2 else []
        gc.collect()
    assert [bytes(view) for view in seen] == expected
