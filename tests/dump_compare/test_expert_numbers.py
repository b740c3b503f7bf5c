"""Experts that are split by hand and numbered on each rank are compared with those of the whole model."""

from __future__ import annotations

import pytest

from tests.distributed.launch import launch
from tests.dump_compare import train_experts
from trainprobe.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    launch(train_experts.__file__, 1, str(folder / "whole"))
    for change in ("", "told", "fault"):
        launch(train_experts.__file__, 2, str(folder / f"split{change}"), change)
    return folder


@pytest.mark.parametrize("split", ["split", "splittold"])
@pytest.mark.parametrize("whole_first", [True, False])
def test_a_healthy_pair_agrees(split, whole_first, runs, capsys):
    folders = [str(runs / "whole"), str(runs / split)]
    assert main(["dump-compare", *(folders if whole_first else folders[::-1])]) in (0, 1)
    assert "numbers its 2 experts from 0: they were counted over the 2 ranks of" in capsys.readouterr().out


def test_a_changed_expert_is_named_by_its_number_in_the_whole(runs, capsys):
    assert main(["dump-compare", str(runs / "whole"), str(runs / "splitfault")]) == 2
    assert "the first difference is at Parameter.experts.3.weight (step 0): the weights differ" in capsys.readouterr().out
