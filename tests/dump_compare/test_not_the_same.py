"""Nothing that was not compared is called the same."""

from __future__ import annotations

import json

from tests.dump_compare.small_runs import run
from trainprobe.cli import main


def compared(a, b, capsys):
    capsys.readouterr()
    code = main(["dump-compare", str(a), str(b)])
    return code, capsys.readouterr().out


def write(folder, data=None, **more):
    folder.mkdir(parents=True)
    dump = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "data": data or {}, **more}
    (folder / "dump.json").write_text(json.dumps(dump))


def test_two_dumps_without_a_call_were_not_compared(tmp_path, capsys):
    for side in "ab":
        write(tmp_path / side / "step0/rank0")
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


def test_another_argument_is_named_where_nothing_else_can_be_compared(tmp_path, capsys):
    a, b = run(tmp_path / "a", "gelu", level="L1", summary="checksum"), run(tmp_path / "b", level="L1")
    code, said = compared(a, b, capsys)
    assert code == 3, said
    named = (
        "2 calls have another plain argument, first: approximate is 'tanh' in A and 'none' in B of Functional.gelu.1.forward"
    )
    assert named in said.splitlines()[0], said


def test_another_argument_is_said_where_the_results_are_equal(tmp_path, capsys):
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "requires_grad": False}
    leaf |= {"Max": 1.0, "Min": -1.0, "Mean": 0.1, "Norm": 2.0}
    for side, most in (("a", 5.0), ("b", 7.0)):
        entry = {"input_args": [leaf], "input_kwargs": {"max": {"type": "float", "value": most}}, "output": [leaf]}
        write(tmp_path / side / "step0/rank0", {"Torch.clamp.0.forward": entry})
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys)
    assert code == 0, said
    assert "1 call has another plain argument: max is 5.0 in A and 7.0 in B of Torch.clamp.0.forward" in said, said
    assert "all 1 calls agree in all that the dumps hold of their tensors" in said, said
    assert "plain argument" not in compared(tmp_path / "a", tmp_path / "a", capsys)[1]


def test_a_rank_that_both_dumps_lack_in_one_step_was_not_compared(tmp_path, capsys):
    numbers = {"Max": 1.0, "Min": 1.0, "Mean": 1.0, "Norm": 2.0}
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "requires_grad": False, **numbers}
    data = {"Functional.relu.0.forward": {"input_args": [leaf], "input_kwargs": {}, "output": [leaf]}}
    for side in "ab":
        for place in ("step0/rank0", "step0/rank1", "step1/rank0"):
            place_text = {"rank": int(place[-1]), "world_size": 2, "axes": {}}
            write(tmp_path / side / place, data, trainprobe={"format": 1, "step": int(place[4]), "place": place_text})
    code, said = compared(tmp_path / "a", tmp_path / "b", capsys)
    assert code == 3, said
    assert "step 1: rank 1 is in neither" in said, said
    one_rank = tmp_path / "a/step0/rank0", tmp_path / "b/step0/rank0"
    code, said = compared(*one_rank, capsys)
    assert code == 0, said
    assert "1 of the 2 ranks of A's run were compared" in said, said
