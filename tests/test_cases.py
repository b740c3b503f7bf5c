"""Inputs on which the tool was once wrong, by their names: most stand where the rest of their kind is tested, others here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.cli import main

TESTS = Path(__file__).parent
CASES = {f"c{n:02}" for n in range(1, 13)} | {f"p{n:02}" for n in range(1, 11)}


def test_each_case_has_a_test_that_names_it():
    named = " ".join(
        sentence for file in TESTS.rglob("test_*.py") for sentence in re.findall(r"\bCases? [^\"]*", file.read_text("utf-8"))
    )
    assert set(re.findall(r"\b[cp]\d\d\b", named)) == CASES


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> torch.Tensor:
    """Train one step in float16 with scaled gradients."""
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(16, 8)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def added_up(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Any) -> torch.Tensor:
    """Train one step of four micro-batches whose gradients are added up in buffers of the loop's own."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    reported = torch.zeros(())
    for k in range(4):
        probe.moment("micro", k)
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean() / 4
        loss.backward()
        reported += loss.detach()
        for kept, p in zip(total, model.parameters(), strict=True):
            assert p.grad is not None
            kept.add_(p.grad)
    for kept, p in zip(total, model.parameters(), strict=True):
        p.grad = kept
    optimizer.step()
    return reported


@pytest.mark.parametrize("loop", ["scaler", "buffers", "one of two is lost"])
def test_scaled_gradients_and_own_buffers_are_no_finding(loop: str, tmp_path: Path) -> None:
    """Case c03, and the fault that it was taken for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with trainprobe.watch(model, optimizer, monitor=True, audit=True, output=tmp_path, console=False) as probe:
        for _ in range(60):
            with probe.step():
                if loop == "scaler":
                    loss = scaled(model, optimizer, scaler)
                elif loop == "buffers":
                    loss = added_up(model, optimizer, probe)
                else:
                    loss = model(torch.randn(16, 8)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.zero_grad()
                    loss = model(torch.randn(16, 8)).square().mean()
                    loss.backward()
                    optimizer.step()
                probe.note("loss", loss)
    found = {f.rule for f in probe.findings if f.severity in ("warning", "error")}
    assert found == ({"cleared_gradients"} if loop == "one of two is lost" else set())


def test_a_torchscript_file_is_identical_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case p08: lists of whole numbers are no running code. Another weight differs all the same."""
    torch.manual_seed(0)
    first = nn.Conv1d(2, 4, 3, padding=1)
    model = nn.Sequential(first, nn.ReLU())
    torch.jit.script(model).save(str(tmp_path / "a.pt"))
    assert main(["ckpt-compare", str(tmp_path / "a.pt"), str(tmp_path / "a.pt")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("identical: 2 weights tensors (28 elements)")
    assert said.err == ""
    with torch.no_grad():
        first.weight[0, 0, 0] += 1
    torch.jit.script(model).save(str(tmp_path / "b.pt"))
    assert main(["ckpt-compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 2
