"""`trainprobe parity` runs a script in several layouts, unedited, and says which of them compute the same."""

from __future__ import annotations

import sys

import pytest

from trainprobe.again.conditions.layouts import ScriptLayout, read_layouts
from trainprobe.cli import main
from trainprobe.errors import UsageError

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

OF_RANKS = """
import os
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
samples = torch.randn(8, 4).chunk(dist.get_world_size())[dist.get_rank()]
if "frozen" in sys.argv:
    model[2].bias.requires_grad_(False)
parallel = torch.nn.parallel.DistributedDataParallel(model)
if "wrong" in sys.argv and dist.get_rank() == 1:
    model[2].weight.data.mul_(1.01)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
parallel(samples).mean().backward()
optimizer.step()
dist.destroy_process_group()
"""


def test_the_verdict_names_the_pairs_that_agree_and_where_the_others_part(tmp_path, capsys):
    script, output = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    layouts = ["one=1", "same=1", "other=1 weight", "broken=1 fails"]
    asked = [word for layout in layouts for word in ("-l", layout)]
    code = main(["parity", *asked, "--output", str(output), "--launcher", sys.executable, "--", str(script)])
    said = capsys.readouterr()
    assert code == 3
    pairs = [line.removeprefix("  • ") for line in said.out.splitlines()]
    assert pairs[0] == "A one, B broken: not comparable or incomplete: broken ended with exit code 1"
    assert pairs[1].startswith("A one, B same: identical")
    assert [pair.split(":")[0] for pair in pairs[3:]] == ["A same, B other", "A same, B broken", "A other, B broken"]
    assert "A one, B other: differ: the first difference is at Module.2.Linear.forward.0 (step 0" in said.out
    assert "broken ended with exit code 1; it printed last:\n  no such layout" in said.err
    assert main(["parity", *asked, "--output", str(output), "--launcher", sys.executable, "--", str(script)]) == 3
    assert "nothing is overwritten" in capsys.readouterr().err


@pytest.mark.slow
def test_layouts_of_several_ranks_are_started_and_joined(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(OF_RANKS)
    layouts = [word for layout in ("one=1", "two=2", "spoiled=2 wrong", "less=2 frozen") for word in ("-l", layout)]
    assert main(["parity", *layouts, "--output", str(tmp_path / "out"), "--", str(script)]) == 3
    said = capsys.readouterr()
    told = dict(line.removeprefix("  • ").split(": ", 1) for line in said.out.splitlines())
    assert told["A one, B two"].startswith("equal within rounding"), said
    assert next(iter(told)) == "A one, B less" and told["A two, B less"].startswith("differ"), said
    for pair in ("A one, B spoiled", "A two, B spoiled"):
        first = told[pair]
        assert "2.weight" in first or "Module.2.Linear" in first
        assert "rank 1" in first
    for layout, side in (("one", "A"), ("less", "B")):  # one process without the gradient that the other layout has
        others = str(tmp_path / "out" / ("less" if layout == "one" else "one"))
        assert main(["dump-compare", str(tmp_path / "out" / layout), others]) == 3
        assert f"parameters whose gradients are in {side} alone: 1; the first is 2.bias" in capsys.readouterr().out


def test_a_layout_is_a_name_a_number_of_ranks_and_arguments():
    assert read_layouts(["one=1", "tp2=2 --tp 2 --name 'a b'"]) == [
        ScriptLayout("one", 1),
        ScriptLayout("tp2", 2, ("--tp", "2", "--name", "a b")),
    ]
    for wrong in (["one=1"], ["one=1", "one=2"], ["one", "two=2"], ["one=1", "two=0"], ["one=1", "two=2 'a"]):
        with pytest.raises(UsageError):
            read_layouts(wrong)
