"""Counts of steps and settings of optimizers: read in the format that they have, and told of each parameter."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt_compare.verdicts import judged
from trainprobe.errors import FormatError


def trained(counts=(5, 5), as_step=torch.tensor, **group):
    """Return a model's state and that of its Adam, whose parameters have been stepped so many times."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for number, count in enumerate(counts):
        state["state"][number]["step"] = as_step(count)
    state["param_groups"][0] |= group
    return {"model": model.state_dict(), "optimizer": state}


def as_file(folder, name, state):
    torch.save(state, folder / f"{name}.pt")
    return folder / f"{name}.pt"


def as_distributed(folder, name, state):
    names = list(state["model"])
    by_name = {"state": {names[number]: held for number, held in state["optimizer"]["state"].items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": state["model"], "optim": by_name}, checkpoint_id=folder / name, no_dist=True)
    return folder / name


@pytest.mark.parametrize("write", [as_file, as_distributed])
@pytest.mark.parametrize("other", [(7, 5), (5, 5), (7, 7)])
def test_the_counts_of_one_side_belong_to_other_parameters(tmp_path, write, other):
    """Both sides hold the counts 5 and 7 in the first case."""
    a, b = write(tmp_path, "a", trained((5, 7))), write(tmp_path, "b", trained(other))
    found = judged(a, b)
    assert found.code == 2 and "step is '5 of 1 parameters (" in found.sentence, found.sentence
    assert judged(a, write(tmp_path, "c", trained((5, 7)))).code == 0


@pytest.mark.parametrize("write", [as_file, as_distributed])
@pytest.mark.parametrize("fmt", [torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_a_count_is_the_number_that_its_format_says(tmp_path, write, fmt):
    a = write(tmp_path, "a", trained((96, 96)))
    b = write(tmp_path, "b", trained((96, 96), lambda count: torch.tensor(count, dtype=fmt)))
    assert judged(a, b).code == 0
    assert "step is 96 in A and 97 in B" in judged(a, write(tmp_path, "c", trained((97, 97)))).sentence


def test_a_setting_of_several_numbers_is_compared_whole(tmp_path):
    a, b = (as_file(tmp_path, name, trained(betas=torch.tensor([0.9, last]))) for name, last in (("a", 0.95), ("b", 0.99)))
    found = judged(a, b)
    assert found.code == 2 and "betas" in found.sentence


@pytest.mark.parametrize("count", [torch.tensor([]), torch.tensor([5.0, 6.0]), "five", None])
def test_what_is_no_count_is_told_and_is_never_identical(tmp_path, count):
    file = as_file(tmp_path, "a", trained(as_step=lambda _: count))
    with pytest.raises(FormatError, match=r"the step count of \S+ in a\.pt: optimizer is .*: expected (a|one) number"):
        judged(file, file)
