"""One bad batch and a rate that is too high for three steps, live: one incident each, told once, by what began it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainprobe

STEP, STEPS = 150, 200


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def batches():
    """Yield rows that follow a fixed order of 64 tokens, 15 % of them replaced: a loss of about 1.4 is the best there is."""
    drawn, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(5)
    order = torch.randperm(64, generator=drawn)
    while True:
        rows = [torch.randint(0, 64, (8, 1), generator=drawn)]
        for _ in range(16):
            rows.append(order[rows[-1]])
        tokens = torch.cat(rows, 1)
        replaced = torch.rand(tokens.shape, generator=noise) < 0.15
        yield torch.where(replaced, torch.randint(0, 64, tokens.shape, generator=noise), tokens)


def trained(fault: str, folder) -> list:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64)
    model = nn.Sequential(embedding, *(Block(32) for _ in range(4)), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = batches()
    with trainprobe.watch(
        model, optimizer, level="off", monitor=True, audit=True, output=folder, sinks=["memory"], console=False
    ) as probe:
        for step in range(STEPS):
            tokens = next(stream)
            if fault == "batch" and step == STEP:
                tokens = torch.randint(0, 64, (8, 1)).expand(8, 17).contiguous()
            if fault == "rate":
                optimizer.param_groups[0]["lr"] = 0.3 if STEP <= step < STEP + 3 else 3e-3
            with probe.step():
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("lr", optimizer.param_groups[0]["lr"])
    return [finding for finding in probe.findings if finding.severity != "info"]


@pytest.mark.parametrize(("fault", "words"), [("batch", "loss jumped to"), ("rate", "the learning rate")])
def test_an_incident_is_one_finding_that_names_what_began_it(fault, words, tmp_path):
    (found,) = trained(fault, tmp_path / "out")
    assert found.rule == "spike" and found.step == STEP, found
    assert words in found.message
    if fault == "batch":
        assert "gradients" in found.message and "batch" in found.next


def test_the_same_training_without_a_fault_is_quiet(tmp_path):
    assert trained("", tmp_path / "out") == []
