"""An update that a bad row would spoil is left out, on all ranks or on none; every other run keeps its bits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import trainprobe
from tests.distributed.launch import launch
from tests.traces import left_behind, traces
from trainprobe.errors import PlanError, StopTraining
from trainprobe.integrations import torch_loop
from trainprobe.monitor.run_folder import read_frames

SCRIPT = Path(__file__).with_name("train_skipping.py")
STEPS, BAD, ROW = 74, 70, 5
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
Spoil = Callable[[int, torch.Tensor, torch.Tensor], None]


def nothing(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
    pass


def a_row(step: int, x: torch.Tensor, y: torch.Tensor, by: float = 300.0, at: int = BAD) -> None:
    if step == at:
        x[ROW] *= by
        y[ROW] = x[ROW, :4].argmin()


class Training:
    """A small training on one rank. left_out: steps whose update the loop leaves out by itself."""

    def __init__(self, kind: Callable[..., Any] = ADAMW, spoil: Spoil = a_row) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.optimizer = kind(self.model.parameters())
        self.spoil = spoil
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer)

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :4].argmax(1)
        self.spoil(step, x, y)
        return cross_entropy(self.model(x), y)

    def step(self, step: int, left_out: tuple[int, ...] = ()) -> None:
        loss = self.loss(step)
        self.optimizer.zero_grad()
        loss.backward()
        if step in left_out:
            self.optimizer.zero_grad()
        self.optimizer.step()
        self.schedule.step()

    def run(self, left_out: tuple[int, ...] = ()) -> Training:
        for step in range(STEPS):
            self.step(step, left_out)
        return self

    def watched(self, folder: Path, step: Callable[[int], None] | None = None, **skip: Any) -> Any:
        plan = {"record": "nothing", "monitor": {"features": {"loss_rows": True}}, "audit": {"every": 1}, "skip": skip or True}
        with trainprobe.watch(self.model, self.optimizer, {**plan, "output": folder, "console": False}) as probe:
            for n in range(STEPS):
                with probe.step():
                    (step or self.step)(n)
        return probe

    def bits(self) -> Any:
        return [
            self.model.state_dict(),
            self.optimizer.state_dict()["state"],
            self.schedule.get_last_lr(),
            torch.get_rng_state(),
        ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(x, b[key]) for key, x in a.items())
    return all(map(same, a, b)) and len(a) == len(b) if isinstance(a, list) else a == b


def gradient(p: Any) -> torch.Tensor:
    return p.grad


def told(probe: Any) -> list[tuple[int, str]]:
    return [(f.step, f.message) for f in probe.findings if f.rule == "skip"]


# ---- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["none", "spike", "nan", "sharded spike"])
def test_two_ranks_leave_out_the_same_update_and_no_other(fault: str, tmp_path: Path):
    launch(SCRIPT, 2, str(tmp_path), fault)
    run = {(how, rank): torch.load(tmp_path / f"{how}{rank}.pt") for how in ("by_hand", "skip") for rank in (0, 1)}
    for rank in (0, 1):
        assert same(run["skip", rank], run["by_hand", rank])
        found = json.loads((tmp_path / f"findings{rank}.json").read_text())
        skips = [(step, text) for rule, _, step, text in found if rule == "skip"]
        if fault == "none":
            assert found == []
            continue
        [(step, text)] = skips
        assert step == BAD and text.startswith("the update was left out on all 2 ranks: the loss of rank 1 was ")
        assert f"row {ROW} of 16 on rank 1 " in text
        assert {rule for rule, severity, *_ in found if severity != "info"} <= {"skip", "spike", "nonfinite"}
        [last] = [frame.scalars for frame in read_frames(tmp_path / "out" / f"rank{rank}") if "step_skipped" in frame.scalars]
        assert (last["step_skipped"], last["skipped_by_rank"], last["skipped_by_row"]) == (1, 1, ROW)
    if not fault.startswith("sharded"):
        assert same(run["skip", 0]["weights"], run["skip", 1]["weights"])


def test_a_rank_whose_tool_has_stopped_goes_on_answering(tmp_path: Path):
    launch(SCRIPT, 2, str(tmp_path), "lost")
    for rank in (0, 1):  # the NaN of rank 1 comes behind the fault on rank 0
        skips = [found for found in json.loads((tmp_path / f"findings{rank}.json").read_text()) if found[0] == "skip"]
        assert len(skips) == rank
    weights = [torch.load(tmp_path / f"skip{rank}.pt")["weights"] for rank in (0, 1)]
    assert same(*weights) and all(bool(w.isfinite().all()) for w in weights[0])


# ---- one rank --------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., Any]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW, foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    **{
        kind: functools.partial(getattr(torch.optim, kind), lr=1e-2) for kind in ("NAdam", "RAdam", "Adamax", "Adagrad", "ASGD")
    },
    **{kind: functools.partial(getattr(torch.optim, kind), lr=1e-2) for kind in ("RMSprop", "Rprop", "Adadelta", "Adafactor")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_changes_nothing_of_any_optimizer(kind: str, tmp_path: Path):
    by_hand = Training(KINDS[kind]).run(left_out=(BAD,)).bits()
    training = Training(KINDS[kind])
    probe = training.watched(tmp_path)
    assert same(training.bits(), by_hand)
    [(step, text)] = told(probe)
    assert step == BAD and f"; row {ROW} of 16 on rank 0 has " in text
    assert {f.rule for f in probe.findings if f.severity != "info"} == {"skip", "spike"}


def test_a_healthy_run_keeps_its_bits_and_a_plan_without_it_installs_nothing(tmp_path: Path):
    bare = Training(spoil=nothing).run().bits()
    training = Training(spoil=nothing)
    before = traces(training.model)
    backward, step = torch.autograd.backward, torch.amp.GradScaler.step
    with trainprobe.watch(training.model, plan={"record": "nothing", "monitor": True, "output": tmp_path / "other"}):
        assert torch.autograd.backward is backward and torch.amp.GradScaler.step is step  # nothing stands in their place
    probe = training.watched(tmp_path)
    assert same(training.bits(), bare) and probe.findings == [] and left_behind(before, traces(training.model)) == {}


def test_without_rows_a_closure_is_judged_behind_it(tmp_path: Path):
    by_hand = Training().run(left_out=(BAD,)).bits()
    training = Training()

    def step(n: int) -> None:
        def closure() -> torch.Tensor:
            loss = training.loss(n)
            training.optimizer.zero_grad()
            loss.backward()
            return loss

        training.optimizer.step(closure)
        training.schedule.step()

    plan = {"monitor": True, "skip": True, "output": tmp_path, "console": False}
    with trainprobe.watch(training.model, training.optimizer, plan) as probe:
        for n in range(STEPS):
            with probe.step():
                step(n)
    assert same(training.bits(), by_hand)
    assert [step for step, text in told(probe) if "row" not in text] == [BAD]


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_judges_its_own_gradients_and_its_scale_goes_on(fused: bool, tmp_path: Path):
    def spoil(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        a_row(step, x, y)

    def train(left_out: bool) -> tuple[Any, Any]:
        training = Training(functools.partial(torch.optim.AdamW, lr=1e-2, fused=fused), spoil)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)

        def step(n: int) -> None:
            loss = training.loss(n)
            training.optimizer.zero_grad()
            scaler.scale(loss).backward()
            if n == 40:
                gradient(training.model[0].weight).view(-1)[0] = float("inf")  # which the scaler's own step leaves out
            if left_out and n == BAD:
                scaler.unscale_(training.optimizer)
                training.optimizer.zero_grad()
            scaler.step(training.optimizer)
            scaler.update()
            training.schedule.step()

        probe = None
        if left_out:
            for n in range(STEPS):
                step(n)
        else:
            probe = training.watched(tmp_path, step)
        return probe, [training.bits(), scaler.state_dict()]

    probe, with_skip = train(False)
    assert same(with_skip, train(True)[1])
    assert [step for step, _ in told(probe)] == [BAD]
    assert with_skip[1]["scale"] != 2.0**10


def test_a_new_level_is_trained_on_and_what_is_not_finite_is_not(tmp_path: Path):
    def level(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if step >= BAD - 5:
            x *= 40
            y[:] = x[:, :4].argmin(1)

    training = Training(functools.partial(torch.optim.SGD, lr=1e-4), level)
    assert [step for step, _ in told(training.watched(tmp_path / "a", in_a_row=3))] == [BAD - 5, BAD - 4, BAD - 3]

    def lost(step: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if step >= BAD - 5:
            x[2] = float("nan")

    training = Training(spoil=lost)
    with pytest.raises(StopTraining, match="4 updates in a row would not be finite, the last: the loss of rank 0"):
        training.watched(tmp_path / "b", in_a_row=3)
    assert all(bool(p.isfinite().all()) for p in training.model.parameters())


def test_gradients_alone_speak_against_an_update(tmp_path: Path):
    training = Training(spoil=nothing)

    def step(n: int) -> None:
        loss = training.loss(n)
        training.optimizer.zero_grad()
        loss.backward()
        if n == 3:
            gradient(training.model[3].bias)[1] = float("inf")
        training.optimizer.step()

    probe = training.watched(tmp_path, step)
    assert told(probe) == [(3, "the update was left out: gradients on rank 0 were not finite, while its loss was")]
    assert all(bool(p.isfinite().all()) for p in training.model.parameters())


def test_two_optimizers_of_one_backward_pass_are_asked_once(tmp_path: Path):
    training = Training()
    first, *others = training.model.parameters()
    optimizers = [torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)]
    kept: list[torch.Tensor] = []
    plan = {"monitor": True, "skip": True, "output": tmp_path, "console": False}
    with trainprobe.watch(training.model, optimizers, plan) as probe:
        for n in range(STEPS):
            with probe.step():
                loss = training.loss(n)
                training.optimizer.zero_grad()
                loss.backward()
                if n == BAD:
                    kept = [p.detach().clone() for p in training.model.parameters()]
                for optimizer in optimizers:
                    optimizer.step()
                if n == BAD:
                    assert same(kept, [p.detach() for p in training.model.parameters()])
    assert [step for step, _ in told(probe)] == [BAD]


def test_in_a_loop_without_a_line_of_the_tool_the_step_ends_as_others_do(tmp_path: Path):
    by_hand = Training().run(left_out=(BAD,)).bits()
    training = Training()
    plan = {"record": "nothing", "monitor": True, "skip": True, "console": False}
    loop = torch_loop.attach(training.model, training.optimizer, plan, output=tmp_path)
    training.run()
    loop.close()
    assert same(training.bits(), by_hand)
    assert [f.step for f in loop.findings if f.rule == "skip"] == [BAD]
    assert [frame.step for frame in read_frames(tmp_path / "rank0")] == list(range(STEPS))


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "skip: LBFGS makes its update by itself: leave the section out"),
        (lambda model: object(), "skip: object makes its update by itself: leave the section out"),
    ],
)
def test_what_cannot_be_left_out_is_an_error_at_open(optimizer: Any, why: str, tmp_path: Path):
    def opens(model: Any, *optimizer: Any) -> None:
        with trainprobe.watch(model, *optimizer, plan={"monitor": True, "skip": True, "output": tmp_path, "console": False}):
            pass

    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=why):
        opens(model, optimizer(model))
    model.weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="skip: Megatron makes the updates of Linear by itself"):
        opens(model)
