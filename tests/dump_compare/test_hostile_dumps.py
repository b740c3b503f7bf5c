"""Dumps that a broken disk or an enemy changed: an error in a sentence or a comparison, and never "identical"."""

from __future__ import annotations

import pytest

from benchmarks.dump_compare.hostile import MUTATIONS, mutate
from benchmarks.dump_compare.runs import Way, train

PLANS = {"statistics": {"level": "mix", "summary": "both"}, "tensors": {"level": "L0", "task": "tensor"}}
SEEDS = range(4)  # the bench does hundreds


@pytest.fixture(scope="module", params=PLANS)
def dump(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return train(folder, "conv", Way(), step=[0], **PLANS[request.param])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_was_changed_is_refused_or_compared_and_never_called_identical(dump, name, tmp_path):
    """Whatever is no error of the tool is raised here."""
    outcomes = [mutate(dump, tmp_path / "changed", name, seed) for seed in SEEDS]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]
