"""Two ranks that collect into new memory: equal runs are equal, a fault is named, and no file holds what was there before."""

from __future__ import annotations

import math
import re
import warnings

import pytest

from tests.distributed import train_into_memory
from tests.distributed.launch import launch
from trainprobe.cli import main

LEVELS = ["L0", "L1", "mix"]


@pytest.fixture(scope="module", params=[(kind, level) for kind in ("fsdp2", "hand") for level in LEVELS], ids="-".join)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("-".join(request.param))
    launch(train_into_memory.__file__, 2, str(folder), *request.param)
    return folder


def test_equal_runs_are_equal_and_the_page_is_written_without_a_warning(runs, capsys):
    """Case p10."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["dump-compare", str(runs / "one"), str(runs / "other"), "--html", str(runs / "page.html")]) == 0
    assert "agree in all that the dumps hold" in capsys.readouterr().out


def test_another_shard_of_one_rank_is_named(runs, capsys):
    assert main(["dump-compare", str(runs / "one"), str(runs / "faulty")]) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert "all_gather_copy_in" not in first or "input.0" in first  # the other input is the memory that is to be filled


def test_no_dump_holds_what_was_there_before(runs):
    for path in [*runs.glob("one/step1/*/dump.json"), *runs.glob("other/step1/*/dump.json")]:
        largest = [
            float(text) for text in re.findall(r'"Max": ([^,]+)', path.read_text()) if text not in ("true", "false", "null")
        ]
        assert largest
        assert not [x for x in largest if math.isnan(x) or abs(x) > 1e6]
