"""Nothing that was not compared is called the same."""

from __future__ import annotations

import json

from tests.dump_compare.small_runs import run
from trainprobe.cli import main


def compared(a, b, capsys):
    capsys.readouterr()
    code = main(["dump-compare", str(a), str(b)])
    return code, capsys.readouterr().out


def test_two_dumps_without_a_call_were_not_compared(tmp_path, capsys):
    for side in "ab":
        (tmp_path / side / "step0/rank0").mkdir(parents=True)
        empty = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": {}}
        (tmp_path / side / "step0/rank0/dump.json").write_text(json.dumps(empty))
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys)
    assert code == 3, said
    assert said.startswith("nothing was compared: neither dump holds a call")


def test_dumps_of_two_levels_without_a_common_call_were_not_compared(tmp_path, capsys):
    a, b = run(tmp_path / "a", level="L0"), run(tmp_path / "b", level="L1")
    code, said = compared(a, b, capsys)
    assert code == 3, said
    assert said.startswith("nothing was compared: no call of one has a partner in the other")


def test_statistics_against_elements_say_that_statistics_told_it(tmp_path, capsys):
    a, b = run(tmp_path / "a", level="L0"), run(tmp_path / "b", level="L0", task="tensor")
    code, said = compared(a, b, capsys)
    assert code == 0, said
    assert "values are told by statistics alone" in said
    assert "by statistics alone" not in compared(b, b, capsys)[1]
