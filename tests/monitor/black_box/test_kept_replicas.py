"""A dump of several ranks that kept tensors, one bit of one of them flipped: element and bit are named."""

import pytest
import torch

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.core.records import Place
from trainprobe.errors import FormatError
from trainprobe.monitor.black_box.kept_replicas import kept_differences


def rank_of_a_run(folder, rank, world, flip=None, dtype=torch.float32):
    """Train one step as one rank, keep all tensors; `flip`: (row, column, bit) of a weight, by its bits in memory."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4).to(dtype)
    if flip is not None:
        row, column, bit = flip
        words = model.weight.data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        words[row, column] ^= 1 << bit
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"task": "tensor", "sinks": ["dump"], "data": ["parameters"], "phases": ["forward"]}
    with trainprobe.Probe(plan, output=folder, place=Place(rank, world), on_existing="continue") as probe:
        probe.open(model, optimizer)
        with probe.step(3):
            model(torch.ones(2, 6, dtype=dtype)).sum().backward()


def test_the_rank_element_and_bit_are_named(tmp_path, capsys):
    for rank in range(3):
        rank_of_a_run(tmp_path, rank, 3, flip=(2, 5, 27) if rank == 0 else None)
    (found,) = kept_differences(tmp_path)
    assert (found.step, found.rank, found.against, found.count) == (3, 0, 1, 1)
    assert (found.flips[0].index, found.flips[0].bits, found.flips[0].part) == ((2, 5), (27,), "exponent")
    assert main(["black-box", str(tmp_path), "--flipped"]) == 1
    assert "1 element differs on rank 0 from rank 1; [2][5]: bit 27 (exponent)" in capsys.readouterr().out
    assert list(kept_differences(tmp_path / "step3")) == [found]


def test_a_bit_of_bfloat16_has_its_number_in_bfloat16(tmp_path):
    for rank in range(2):
        rank_of_a_run(tmp_path, rank, 2, flip=(1, 0, 6) if rank == 1 else None, dtype=torch.bfloat16)
    (found,) = kept_differences(tmp_path)
    assert (found.rank, found.flips[0].index, found.flips[0].bits, found.flips[0].part) == (1, (1, 0), (6,), "mantissa")


def test_equal_replicas_and_folders_without_tensors(tmp_path, capsys):
    for rank in range(2):
        rank_of_a_run(tmp_path / "same", rank, 2)
    assert main(["black-box", str(tmp_path / "same"), "--flipped"]) == 0
    assert "the same bits on all ranks" in capsys.readouterr().out
    rank_of_a_run(tmp_path / "one", 0, 1)
    with pytest.raises(FormatError, match="holds tensors of two ranks"):
        list(kept_differences(tmp_path / "one"))
