"""`trainprobe again` says of a script whether one of its steps computes the same twice; what did not run twice is no answer."""

from __future__ import annotations

import json

import pytest

from trainprobe.cli import main

SCRIPT = """
import os, sys, torch

if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
NOISY = "noisy" in sys.argv and os.environ.get("RANK", "1") == "1"

class Noisy(torch.nn.Linear):
    def forward(self, x):
        noise = torch.rand(x.shape, generator=GENERATOR) if NOISY else 0.0
        return super().forward(x + noise)

GENERATOR = torch.Generator()
torch.manual_seed(0)
model = torch.nn.Sequential(Noisy(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("words", "step", "code", "said"),
    [
        ([], 2, 0, "identical: forward and backward of step 2 ran twice on 1 rank, with the same bits"),
        (["noisy"], 2, 2, "not deterministic: Torch.rand of 0, output: 6 different outcomes in 6 runs of the same step"),
        ([], 7, 3, "not comparable: step 7 was not reached"),
    ],
)
def test_one_step_of_a_script_runs_twice(tmp_path, capsys, words, step, code, said):
    script, answer, page = (tmp_path / name for name in ("train.py", "answer.json", "answer.html"))
    script.write_text(SCRIPT)
    asked = ["again", "--step", str(step), "--json", str(answer), "--html", str(page), "--", str(script), *words]
    assert main(asked) == code
    assert said in capsys.readouterr().out
    assert said in json.loads(answer.read_text())["sentence"]
    assert said in page.read_text()


def test_a_script_that_fails_is_no_answer(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no data')")
    assert main(["again", "--", str(script)]) == 3
    assert "the script ended with exit code 1; it printed last:\n  no data" in capsys.readouterr().err


def test_an_option_behind_what_it_belongs_to_is_no_script(tmp_path, capsys):
    assert main(["golden", "record", str(tmp_path / "golden.txt"), "--steps", "1", "--", "train.py"]) == 3
    assert (
        "--steps is given in the place of the script: options come first, as in `trainprobe golden" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_other_ranks_are_asked(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["again", "--step", "2", "--ranks", "2", "--", str(script), "noisy"]) == 2
    said = capsys.readouterr().out
    assert "not deterministic: Torch.rand of 0, output" in said
    assert "the same bits in both runs: rank 0" in said
