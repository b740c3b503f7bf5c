"""The hash of a function changes with what it computes, and with nothing else."""

from __future__ import annotations

import importlib

import pytest

from trainprobe.config_check.capture.code_hash import TOP, code_hashes
from trainprobe.config_check.capture.randomness import _frame
from trainprobe.config_check.capture.sources import is_own

TEXT = """
import torch
RATE = 0.1

class Block(torch.nn.Module):
    width = 4

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def loader(data):
    return make(data, num_workers=2, batch_size=8)

def load(path="data/lines.txt"):
    with open("/data/a/corpus.txt") as file:
        return [line for line in file if line]
"""


def changed(old: str, new: str) -> set[str]:
    assert old in TEXT
    before, after = code_hashes(TEXT), code_hashes(TEXT.replace(old, new))
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x + self.down", "# the residual\n        return x + self.down"),
        ("torch.relu(self.up(x))", "torch.relu(\n            (self.up(x)),\n        )"),
        ("def forward(self, x):", 'def forward(self, x):\n        """Return x and more."""\n        print("forward", x.shape)'),
        ("RATE = 0.1", 'import logging\nlog = None\nlog.info("here")\nRATE = 0.1'.replace("log = None\n", "")),
        ("with open", 'self.log.debug("%s", 1)\n    with open'),
        ('"/data/a/corpus.txt"', "'/mnt/elsewhere/corpus.txt'"),
        ("RATE = 0.1", "RATE = 1e-1"),
        ("num_workers=2", "num_workers=4"),
        ("num_workers=2", "num_workers=2, log_every_n_steps=5"),
    ],
)
def test_comments_layout_output_and_paths_do_not_count(old, new):
    assert changed(old, new) == set()


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("x + self.down", "x - self.down", "Block.forward"),
        ("torch.relu(self.up(x))", "torch.relu(self.up(x), True)", "Block.forward"),
        ("width = 4", "width = 5", "Block"),
        ("batch_size=8", "batch_size=4", "loader"),
        ("num_workers=2, ", "num_workers=count(), ", "loader"),
        ("torch.nn.Module", "torch.nn.Sequential", TOP),
        ("RATE = 0.1", "RATE = 0.2", TOP),
        ("if line]", "if not line]", "load"),
        ('path="data/lines.txt"', 'path="lines"', "load"),
        ("    def forward", "    @torch.no_grad()\n    def forward", "Block.forward"),
        ("import torch\n", "import torch\nfrom math import *\n", TOP),
    ],
)
def test_what_is_computed_counts_and_is_named_by_its_function(old, new, name):
    assert changed(old, new) == {name}


def test_the_order_of_definitions_does_not_count():
    one, two = "def a():\n    return 1\n", "def b():\n    return 2\n"
    assert code_hashes(one + two) == code_hashes(two + one)


def test_a_function_that_changes_places_with_another_counts():
    assert code_hashes("def a():\n    return 1\ndef b():\n    return 2\n") != code_hashes(
        "def b():\n    return 1\ndef a():\n    return 2\n"
    )


def test_what_is_not_python_is_refused():
    with pytest.raises(SyntaxError):
        code_hashes("def a(:")


@pytest.mark.parametrize("installed", [False, True])
def test_a_package_in_a_folder_of_installed_packages_is_not_the_program_s_own(installed, tmp_path, monkeypatch):
    name = f"made_models_{installed}".lower()
    (tmp_path / name).mkdir()
    for file in ("__init__.py", "llama.py"):
        (tmp_path / name / file).write_text("")
    if installed:  # as `pip install --target` leaves it
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_own(importlib.import_module(name)) is not installed
    assert is_own(importlib.import_module(f"{name}.llama")) is not installed


def test_a_frame_in_a_folder_of_installed_packages_is_named_from_its_package_on(tmp_path):
    """`pip install --target` puts the same package under another path on each machine."""
    for target, installed in (("one", True), ("two", True), ("own", False)):
        (tmp_path / target / "pkg" / "nn").mkdir(parents=True)
        if installed:
            (tmp_path / target / "pkg-1.0.dist-info").mkdir()
    frames = [
        _frame(f"File {tmp_path / target / 'pkg' / 'nn' / 'drop.py'}, line 3, in forward, \n x = drop(x)")
        for target in ("one", "two", "own")
    ]
    assert frames[0] == frames[1]
    assert [(frame["file"], frame["installed"]) for frame in frames[1:]] == [("pkg/nn/drop.py", True), ("nn/drop.py", False)]
