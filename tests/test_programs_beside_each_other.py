"""A dump holds the program's own calls, whatever else of the tool looks at the same steps."""

from __future__ import annotations

import json

import pytest
import torch

import trainprobe

EVERYTHING = {
    "monitor": {"features": {"attention": True, "weights": True, "dead_units": True, "formats": True}},
    "audit": {"every": 1},
    "black_box": True,
    "config_check": True,
    "op_check": {"step": [1], "ops": ["dropout", "linear", "multi_head_attention_forward"]},
}


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def dumped(folder, level, **sections):
    """Return the calls of each dumped step, with their numbers."""
    torch.manual_seed(0)
    model = Attending()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    plan = {"level": level, "task": "statistics", "step": [1, 2], "output": str(folder), "stacks": False, "console": False}
    with trainprobe.watch(model, optimizer, {**plan, **sections}) as probe:
        for _ in range(4):
            with probe.step():
                tokens = torch.randint(0, 11, (2, 6))
                loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return {step: json.loads((folder / f"step{step}/rank0/dump.json").read_text())["data"] for step in (1, 2)}


def without_checksums(tree):
    """Leave out the fingerprints, which the audit takes of values that are dumped too."""
    if isinstance(tree, dict):
        return {key: without_checksums(item) for key, item in tree.items() if key != "checksum"}
    return [without_checksums(item) for item in tree] if isinstance(tree, list) else tree


def entries(dump):
    """Return the entries of each step in their order."""
    return [(step, name, without_checksums(entry)) for step, calls in dump.items() for name, entry in calls.items()]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_a_dump_is_the_same_whatever_else_looks_at_the_steps(level, tmp_path):
    alone = entries(dumped(tmp_path / "alone", level))
    for program, settings in EVERYTHING.items() if level == "mix" else ():
        assert entries(dumped(tmp_path / program, level, **{program: settings})) == alone, program
    assert entries(dumped(tmp_path / "all", level, **EVERYTHING)) == alone
