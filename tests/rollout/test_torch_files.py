"""Files of torch.save are read as they were written, and as data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainprobe.cli import main
from trainprobe.errors import FormatError, UnsafeFile
from trainprobe.rollout.torch_files import read_torch_file

LENGTHS = (5, 3, 8)


def sequences(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(n, generator=generator) for n in LENGTHS]


def slime(**changes: object) -> dict[str, object]:
    """Return what slime's `save_debug_train_data` writes of one rank."""
    rows = {
        "tokens": [torch.arange(4 + n) for n in LENGTHS],  # prompt and response
        "response_lengths": list(LENGTHS),
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in LENGTHS],
        "rewards": [0.0, 1.0, 0.5],
        "log_probs": sequences(),
        "rollout_log_probs": sequences(1),
    }
    return {"rollout_id": 7, "rank": 0, "rollout_data": rows | changes}


def test_the_training_data_of_slime_is_read_as_it_was_saved(tmp_path):
    torch.save(slime(), tmp_path / "7_0.pt")
    scored = read_torch_file(tmp_path / "7_0.pt")
    assert scored.trainer.tolist() == torch.cat(sequences()).double().tolist()
    assert scored.engine.tolist() == torch.cat(sequences(1)).double().tolist()
    assert scored.lengths.tolist() == list(LENGTHS)
    assert scored.tokens is not None
    assert scored.tokens.tolist() == [4 + i for n in LENGTHS for i in range(n)]


@pytest.mark.parametrize("old", [True, False])
def test_samples_in_lists_and_tensors_of_16_bits_are_read(tmp_path, old):
    rows = [
        {"log_probs": a.bfloat16(), "rollout_log_probs": b.tolist(), "weight_version": "3", "text": None}
        for a, b in zip(sequences(), sequences(1), strict=True)
    ]
    torch.save({"samples": rows}, tmp_path / "it.pt", _use_new_zipfile_serialization=not old)
    scored = read_torch_file(tmp_path / "it.pt")
    assert scored.trainer.tolist() == torch.cat(sequences()).bfloat16().double().tolist()
    assert scored.engine.tolist() == torch.cat(sequences(1)).double().tolist()


def test_one_tensor_a_column_is_judged_by_the_command(tmp_path, capsys):
    logprobs = -torch.rand(4, 16)
    torch.save({"log_probs": logprobs, "rollout_log_probs": logprobs.clone()}, tmp_path / "it.pt")
    assert main(["rollout-compare", str(tmp_path / "it.pt")]) == 0
    assert "64" in capsys.readouterr().out


class Runs:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    "saved",
    [
        {"log_probs": Runs(), "rollout_log_probs": torch.zeros(3)},
        {"log_probs": [Runs()], "rollout_log_probs": [torch.zeros(3)]},
        {"log_probs": ["a"], "rollout_log_probs": [1.0]},
        {"log_probs": np.zeros(3), "rollout_log_probs": torch.zeros(3)},
        {"log_probs": torch.zeros(3).expand(1 << 28, 3), "rollout_log_probs": torch.zeros(3)},
        {"weights": torch.zeros(3)},
        torch.zeros(3),
        [],
    ],
)
def test_what_is_no_column_is_refused_and_nothing_runs(tmp_path, capsys, saved):
    torch.save(saved, tmp_path / "it.pt")
    with pytest.raises((FormatError, UnsafeFile)):
        read_torch_file(tmp_path / "it.pt")
    assert main(["rollout-compare", str(tmp_path / "it.pt")]) == 3
    said = capsys.readouterr()
    assert "this ran" not in said.out + said.err
    assert "fault of trainprobe" not in said.err
