"""`trainprobe parity` runs a script in several layouts, unedited, and says which of them compute the same."""

from __future__ import annotations

import sys

import pytest

from trainprobe.cli import main
from trainprobe.errors import UsageError
from trainprobe.parity.layouts import Layout, read_layouts

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
if "weight" in sys.argv:
    model[2].weight.data.mul_(1.01)
if "fails" in sys.argv:
    sys.exit("no such layout")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
"""


def test_the_matrix_names_the_pairs_that_agree_and_where_the_others_part(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    layouts = ["one=1", "same=1", "other=1 weight", "broken=1 fails"]
    asked = [word for layout in layouts for word in ("-l", layout)]
    code = main(["parity", *asked, "--output", str(output), "--launcher", sys.executable, "--", str(script)])
    said = capsys.readouterr()
    assert code == 3
    table = [line.split() for line in said.out.splitlines()[:4]]
    assert table == [
        ["same", "other", "broken"],
        ["one", "identical", "differ", "incomplete"],
        ["same", "differ", "incomplete"],
        ["other", "incomplete"],
    ]
    assert "A one, B other: the runs part at Module.2.Linear.forward.0 (step 0" in said.out
    assert "broken ended with exit code 1; it printed last:\n  no such layout" in said.err
    assert main(["parity", *asked, "--output", str(output), "--launcher", sys.executable, "--", str(script)]) == 3
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_layout_is_a_name_a_number_of_ranks_and_arguments():
    assert read_layouts(["one=1", "tp2=2 --tp 2 --name 'a b'"]) == [
        Layout("one", 1),
        Layout("tp2", 2, ("--tp", "2", "--name", "a b")),
    ]
    for wrong in (["one=1"], ["one=1", "one=2"], ["one", "two=2"], ["one=1", "two=0"], ["one=1", "two=2 'a"]):
        with pytest.raises(UsageError):
            read_layouts(wrong)
