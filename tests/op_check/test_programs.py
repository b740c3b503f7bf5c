"""Whole programs of kinds that other tests do not have: no right one is accused, and no call of theirs is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trainprobe
from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check
from trainprobe.op_check.dump import DumpChecked, check_dump, rank_folders
from trainprobe.op_check.recorded import RecordedRank

Step = Callable[[], None]


def judged(folder: Path, model: nn.Module, step: Step, steps: int = 2) -> DumpChecked:
    """Return the verdicts on all calls of some steps, each of which must be counted."""
    settings: dict[str, Any] = {"level": "mix", "task": "tensor", "output": str(folder), "console": False}
    with trainprobe.watch(model, step=[*range(steps)], sinks=["dump"], **settings) as probe:
        for _ in range(steps):
            with probe.step():
                step()
    folders = rank_folders(folder)
    found = check_dump(folders)
    recorded = sum(c.kind == "op" for _, _, at in folders for c in RecordedRank.read(at).step_data.calls)
    assert sum(1 + row.equal for row in found.rows if row.unit is None or not row.unit.of_inputs) >= recorded > 0
    return found


def outcomes(found: DumpChecked) -> set[str]:
    return {row.worst.outcome for row in found.rows}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**24])
def test_what_grad_scaler_runs_is_judged(tmp_path: Path, scale: float, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)  # pyright: ignore[reportPrivateImportUsage]
    x = torch.randn(4, 8)

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    found = judged(tmp_path, model, step)
    assert outcomes(found) <= {"exact", "rounding", "mode"}  # a CPU adds up a norm's bias gradient in 16 bits
    assert any("_amp_update_scale" in row.entry for row in found.rows)


def test_gradients_of_results_of_which_one_is_made_of_the_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(4, 8)

    def step() -> None:
        hidden, _ = cell(torch.randn(2, 4), (torch.zeros(2, 8), torch.zeros(2, 8)))
        hidden.sum().backward()

    found = judged(tmp_path, cell, step)
    assert outcomes(found) <= {"exact", "rounding", "not checked"}
    assert any(row.worst.outcome == "rounding" for row in found.rows if "LSTMCell" in row.entry)


def scale_update(tracker: int, scale: float) -> Case:
    given = (torch.tensor(8.0), torch.tensor(3, dtype=torch.int32), torch.tensor(0.0), 2.0, 0.5, 4)
    written = {"1": [torch.tensor(tracker, dtype=torch.int32)]}
    return Case("Torch._amp_update_scale_", given, {}, [torch.tensor(scale)], written=written)


def test_what_is_written_beside_a_result_is_judged() -> None:
    assert check(scale_update(0, 16.0)).worst.outcome == "exact"
    assert check(scale_update(4, 16.0)).worst.outcome == "bug"
    assert check(scale_update(0, 8.0)).worst.outcome == "bug"
    torch.manual_seed(0)
    weight, index = torch.randn(5, 8) * 4, torch.tensor([0, 3])
    after = weight.clone()
    y = F.embedding(index, after, max_norm=1.0)
    case = Case("Functional.embedding", (index, weight), {"max_norm": 1.0}, [y], written={"1": [after]})
    assert check(case).worst.outcome in ("exact", "rounding")
    case.written = {"1": [torch.where(torch.arange(5).unsqueeze(1) == 3, weight, after)]}
    assert check(case).worst.outcome == "bug"


def test_a_call_without_tensors_is_no_operator(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)

    def step() -> None:
        assert torch.device("cpu").type == "cpu"
        model(torch.ones(1, 3)).sum().backward()

    assert outcomes(judged(tmp_path, model, step)) == {"exact", "rounding"}


def test_compare_with_cpu_counts_the_steps_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 3)
    with trainprobe.CompareWithCPU() as compare:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            compare.step()
    said = capsys.readouterr().out
    assert "op_check: 2 steps judged" in said
    assert "WARNING" not in said


def channel_dropout(x: torch.Tensor, y: torch.Tensor) -> str:
    return check(Case("Functional.dropout2d", (x, 0.3), {}, [y])).worst.outcome


def test_dropped_channels_are_judged_by_what_holds_for_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 60, 3, 3)
    y = F.dropout2d(x, 0.3)
    assert channel_dropout(x, y) == "unspecified"
    assert channel_dropout(x, y * 1.001) == "bug"
    assert channel_dropout(x, F.dropout(x, 0.3)) == "bug"
    assert channel_dropout(x, F.dropout2d(x, 0.6) * (0.4 / 0.7)) == "bug"
    for call in ("dropout2d", "dropout", "rrelu"):
        wrong = y.clone()
        wrong[0, 0, 0, 0] = torch.nan
        assert check(Case(f"Functional.{call}", (x, 0.3), {}, [wrong])).worst.outcome == "bug"


def test_a_nan_among_equal_elements_is_no_choice() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8).relu().requires_grad_()
    y = F.max_pool2d(x, 2)
    g = torch.randn_like(y)
    (result,) = torch.autograd.grad(y, x, g)
    result[0, 0, 0, 0] = torch.nan
    case = Case("Functional.max_pool2d", (x.detach(), 2), {}, [y.detach()], [g], [result], [True], of_inputs=True)
    assert check(case, backward=True).worst.outcome == "bug"


def test_a_wrong_element_is_found_where_memory_is_in_another_order() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    y = F.silu(x)
    assert check(Case("Functional.silu", (x,), {}, [y])).worst.outcome == "rounding"
    wrong = y.clone()
    wrong[1, 3, 2, 2] *= 1.01
    found = check(Case("Functional.silu", (x,), {}, [wrong])).worst
    assert (found.outcome, found.at) == ("bug", (1, 3, 2, 2))


@pytest.mark.parametrize("shapes", [((9, 4), (3, 4, 5)), ((5, 9), (9, 4)), ((3, 6, 4), (4, 9))])
def test_grouped_products_are_judged(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape) for shape in shapes)
    ends = torch.tensor([2, 6, 9], dtype=torch.int32)
    spans = [slice(0, 2), slice(2, 6), slice(6, 9)]
    if a.ndim == b.ndim:
        y = torch.stack([a[:, s] @ b[s] for s in spans])
    elif a.ndim == 2:
        y = torch.cat([a[s] @ b[i] for i, s in enumerate(spans)])
    else:
        y = torch.cat([a[i] @ b[:, s] for i, s in enumerate(spans)], 1)
    assert check(Case("Torch._grouped_mm", (a, b), {"offs": ends}, [y])).worst.outcome in ("exact", "rounding")
    y[..., -1, -1] = 0
    assert check(Case("Torch._grouped_mm", (a, b), {"offs": ends}, [y])).worst.outcome == "bug"
