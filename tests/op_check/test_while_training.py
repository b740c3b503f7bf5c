"""Operators judged while a training runs: `op_check` in a plan, `CompareWithCPU`, `NanInfTracker`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import trainprobe
from trainprobe.errors import PlanError, StopTraining, UsageError

STEPS = 4


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.wide, self.head, self.drop = nn.Linear(16, 32), nn.Linear(32, 20), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.wide(self.norm(self.embed(x)))).view(2, 6, 4, 8).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).reshape(2, 6, 32)
        return self.head(self.drop((h + 1.0).mul_(2.0)))


Step = Callable[[], AbstractContextManager[Any]]


def train(steps: Callable[[nn.Module, Any], AbstractContextManager[Step]], kind: type[nn.Module] = Small) -> list[torch.Tensor]:
    """Train a few steps; return the weights, the gradients of the last step and the random state."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with steps(model, optimizer) as step:
        for _ in range(STEPS):
            x = torch.randint(0, 20, (2, 6))
            with step():
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
                optimizer.step()
    return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


@contextmanager
def bare(model: nn.Module, optimizer: Any) -> Generator[Step]:
    yield nullcontext


def classic(front: Any) -> Callable[[nn.Module, Any], AbstractContextManager[Step]]:
    """Train under `CompareWithCPU` or `NanInfTracker`."""

    @contextmanager
    def steps(model: nn.Module, optimizer: Any) -> Generator[Step]:
        trainprobe.open_module_tracker(model)

        @contextmanager
        def step() -> Generator[None]:
            yield
            compare.step()

        with front as compare:
            yield step

    return steps


def watched(folder: Path, found: list[Any], **plan: Any) -> Callable[[nn.Module, Any], AbstractContextManager[Step]]:
    """Train under `watch`; `found` gets the probe."""

    @contextmanager
    def steps(model: nn.Module, optimizer: Any) -> Generator[Step]:
        with trainprobe.watch(model, optimizer, output=folder, level="off", sinks=[], console=False, **plan) as probe:
            found.append(probe)
            yield probe.step

    return steps


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def wrong_gelu() -> Iterator[None]:
    """GELU's CPU kernel, replaced by the approximation x·σ(1.702 x)."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("gelu", lambda x, *, approximate="none": x * torch.sigmoid(1.702 * x), "CPU")
    try:
        yield
    finally:
        library._destroy()


def test_judged_steps_change_no_bit_and_name_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert same(train(bare), train(classic(trainprobe.CompareWithCPU(start_step=1, end_step=3, verbose=True))))
    lines = capsys.readouterr().out.splitlines()
    calls = [line for line in lines if line.startswith("step ")]
    assert {line.split()[1] for line in calls} == {"1", "2"}
    assert not [line for line in lines if line.startswith("[")]
    assert any(line.startswith("step 1 wide Functional.linear.0 (forward) succeeds: ") for line in calls)
    assert any(line.startswith("step 2 drop Functional.dropout.0 (backward) succeeds: exact") for line in calls)
    assert any(line.startswith("step 2 root Tensor.mul_.0 (forward) succeeds: exact") for line in calls), "what it was before"
    assert any(line.startswith("step 1 optimizer Tensor.addcdiv_") for line in calls)
    assert (
        "    inputs float32[2, 6, 16] on cpu, float32[32, 16] on cpu, float32[32] on cpu; outputs float32[2, 6, 32] on cpu"
        in lines
    )
    assert lines[-1].startswith("op_check: 2 steps judged, ")


def test_a_wrong_kernel_is_found_with_its_module(wrong_gelu: None, tmp_path: Path) -> None:
    found: list[Any] = []
    with_it = train(watched(tmp_path, found, op_check={"step": [1, "3"]}))
    assert same(train(bare), with_it)
    errors = [f for f in found[0].findings if f.rule == "op_check"]
    assert [(f.severity, f.step) for f in errors if "gelu" in f.message] == [("error", 1), ("error", 3)]
    assert {"Functional.gelu.0" in f.message for f in errors} == {True}, "nothing else is accused"
    log = (tmp_path / "rank0" / "op_check.txt").read_text(encoding="utf-8")
    assert "[ERROR] step 1 root Functional.gelu.0 (forward) fails: Functional.gelu.0.forward in root is a bug" in log
    assert log.count("[ERROR]") == 2
    assert not list(tmp_path.glob("step*")), "nothing else is written"
    assert found[0].sentences[-1].startswith("op_check: 2 steps judged, ")


def test_the_first_bug_stops_the_training_and_can_be_replayed(
    wrong_gelu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StopTraining, match=r"Functional\.gelu\.0\.forward in root is a bug.* the call was written: python "):
        train(
            classic(trainprobe.CompareWithCPU(dump_error_data=True, should_log_to_file=True, output_dir=tmp_path, start_step=2))
        )
    log = (tmp_path / "compare_result.txt").read_text(encoding="utf-8")
    assert "step 2 root Functional.gelu.0 (forward) fails" in log
    assert "step 3" not in log
    (script,) = tmp_path.glob("*.py")
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script))
    assert "recorded, result 0: bug" in capsys.readouterr().out


def test_a_tolerance_replaces_the_bound(wrong_gelu: None, capsys: pytest.CaptureFixture[str]) -> None:
    def verdicts(**options: Any) -> str:
        train(classic(trainprobe.CompareWithCPU(target_list=["gelu"], end_step=1, **options)))
        return next(line for line in capsys.readouterr().out.splitlines() if "(forward)" in line)

    assert "fails" in verdicts()
    assert "fails" in verdicts(atol=1e-4)
    assert "succeeds: rounding, within atol=0.1 and rtol=0.001" in verdicts(atol=0.1)


def test_operators_are_chosen_by_the_names_that_users_write(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"target_list": ["torch.ops.aten.addmm", "layer_norm", "softmx"], "target_op": ["Functional.gelu"]}
    train(classic(trainprobe.CompareWithCPU(**asked, white_list=["layer_norm", "norm"], end_step=1)))
    lines = capsys.readouterr().out.splitlines()
    calls = {line.split()[3].rpartition(".")[0] for line in lines[:-1]}
    assert calls == {"Functional.linear", "Functional.gelu", "Module.wide.Linear", "Module.head.Linear"}
    assert "no operator is called 'softmx'" in lines[-1]
    assert "'norm'" in lines[-1]


def test_only_chosen_modules_and_ranks_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(watched(tmp_path, [], op_check={"step": [0], "modules": ["wide", "head"]}))
    log = (tmp_path / "rank0" / "op_check.txt").read_text(encoding="utf-8").splitlines()
    assert {line.split()[2] for line in log} == {"wide", "head"}
    train(classic(trainprobe.CompareWithCPU(enable_ranks=[1, 2])))
    assert "no rank of the plan's rank [1, 2] is there: the run has rank 0 alone" in capsys.readouterr().out
    train(classic(trainprobe.CompareWithCPU(enabled=False)))
    assert capsys.readouterr().out == ""


def test_steps_that_are_not_chosen_have_nothing_installed(tmp_path: Path) -> None:
    seen: list[int] = []

    class Looks(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(torch._C._len_torch_function_stack())
            return out

    train(watched(tmp_path, [], op_check={"step": [1]}), Looks)
    assert [n > 0 for n in seen] == [False, True, False, False]


def test_a_fault_of_the_judge_costs_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("trainprobe.op_check.training.check_rank", fails)
    found: list[Any] = []
    assert same(train(bare), train(watched(tmp_path, found, op_check={"step": ["all"]}, monitor=True, on_error="continue")))
    notes = [f.message for f in found[0].findings if "planted" in f.message]
    assert len(notes) == 1
    assert notes[0].startswith("op_check failed and is left out from here on, everything else goes on")
    assert found[0].collected == STEPS, "the monitor goes on"


def test_what_there_was_no_room_for_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    train(classic(trainprobe.CompareWithCPU(end_step=1, max_bytes=4096)))
    lines = capsys.readouterr().out.splitlines()
    assert any("has not been tested: the values of the step take more than 4096 bytes: raise" in line for line in lines)
    assert "not checked for the most part because the values of the step take more" in lines[-1]


def test_what_writes_through_a_view_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    class Writes(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mul_(2.0)  # what a linear layer gives for three dimensions is a view

    assert same(train(bare, Writes), train(classic(trainprobe.CompareWithCPU(end_step=1)), Writes))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.partition(": ")[2] for line in lines] == [
        "it writes through a view, and the gradient is recorded at that view",
        "the gradient of its result is not recorded",
    ]


def test_the_operator_that_made_nan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Divides(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out + (out.detach() * 0).log() * 0

    assert same(train(bare), train(classic(trainprobe.NanInfTracker(end_step=2))))
    assert capsys.readouterr().out == ""
    with pytest.raises(
        StopTraining, match=r"first operator .*: step 0 root Tensor\.log\.0 \(forward\): inputs finite; outputs \d+ Inf"
    ):
        train(classic(trainprobe.NanInfTracker(dump_error_data=True, should_log_to_file=True, output_dir=tmp_path)), Divides)
    log = (tmp_path / "nan_inf_report.txt").read_text(encoding="utf-8").splitlines()
    assert log[1].startswith("[WARNING] step 0 root Tensor.log.0 (forward): inputs finite; outputs ")


def test_settings_that_cannot_be_used_are_errors() -> None:
    with pytest.raises(PlanError, match="op_check: atol and rtol replace the bound together"):
        trainprobe.Probe(op_check={"atol": 1.0})
    with pytest.raises(PlanError, match="unknown key 'steps' — did you mean 'step'"):
        trainprobe.Probe(op_check={"steps": 1})
    with pytest.raises(UsageError, match="end_step=3 does not come after start_step=5"):
        trainprobe.CompareWithCPU(start_step=5, end_step=3)


def test_a_healthy_training_of_transformers_has_no_bug_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainprobe.watch(model, optimizer, output=tmp_path, level="off", console=False, op_check=True) as probe, probe.step():
        x = torch.randint(0, 40, (2, 7))
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
    assert not [f.message for f in probe.findings if f.rule == "op_check"]
    log = (tmp_path / "rank0" / "op_check.txt").read_text(encoding="utf-8")
    assert log.count(" succeeds: ") > 100
