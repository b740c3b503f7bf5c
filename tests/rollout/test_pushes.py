"""Pushes of weights as rows of the run log, and what the rule `rollout` says of their history, live and of the log."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import trainprobe
from trainprobe.rollout.health import note_rollout

STEPS = 6


def model_of(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(
    folder: Path,
    *,
    when: str = "after",
    pushed: str = "model",
    rate: float = 0.1,
    rates: dict[int, float] | None = None,
    versions: dict[int, int] | None = None,
    loses: bool = False,
) -> list[str]:
    """Train, push at each step, and return the messages of warnings. when: before or after the update, or between steps."""
    model, engine = model_of(), model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    other = copy.deepcopy(model) if pushed == "copy" else model
    draw = torch.Generator().manual_seed(3)

    def push(step: int, probe: object) -> None:
        with trainprobe.weight_sync(other, (versions or {}).get(step, step), probe=probe) as sync:
            engine.load_state_dict(other.state_dict())
            if loses and step == 3:
                engine[2].bias.data.add_(1)
        sync.received(engine)

    with trainprobe.watch(model, optimizer, output=str(folder), console=False) as probe:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = (rates or {}).get(step, rate)
            with probe.step():
                if when == "before":
                    push(step, probe)
                model(torch.randn(5, 6, generator=draw)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if when == "after":
                    push(step, probe)
            if when == "between":
                push(step, probe)
    return [finding.message for finding in probe.findings if finding.severity != "info"]


def series(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for file in folder.glob("rank0/metrics*.parquet"):
        for row in pq.read_table(file, columns=["step", "kind", "name", "value"]).to_pylist():
            if row["kind"] == "scalar" and row["name"].startswith("rollout/push_"):
                found.setdefault(row["name"].removeprefix("rollout/push_"), {})[row["step"]] = row["value"]
    return found


def judged(folder: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-m", "trainprobe", "judge", folder], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("rates", [{}, {0: 0.0}, {2: 0.0}, {2: 0.0, 3: 0.0}, {5: 0.0}])
def test_healthy_pushes_have_rows_and_no_finding(tmp_path, when, rates):
    assert train(tmp_path / "run", when=when, rates=rates) == []
    found = series(tmp_path / "run")
    late = when == "between"
    at = {step: float(step - late) for step in range(late, STEPS)}
    assert found["version"] == at | ({STEPS - 1: STEPS - 1.0} if late else {})  # the last push stands with the last step
    assert set(found["lost"].values()) == {0.0}
    # the push of version n has the updates before step n, or the one of step n too
    still = {n for n in range(1, STEPS) if (n - (when == "before")) in rates}
    changed = {v: found["changed"][step] for step, v in found["version"].items() if step in found["changed"]}
    assert changed == {v: 0.0 if v in still else 1.0 for v in changed}
    assert len(changed) >= STEPS - 2


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_a_model_that_no_optimizer_moves_is_named_live_and_in_the_log(tmp_path, when):
    messages = train(tmp_path / "run", when=when, pushed="copy")
    assert messages == ["the last push had the bits of the one before it, and parameters moved between them"]
    code, said = judged(tmp_path / "run")
    assert code == 1
    assert messages[0] in " ".join(said.split())


def test_pushes_between_batches_do_not_break_a_streak(tmp_path):
    model = model_of()
    batch = {"tokens": torch.randint(3, 9, (4, 12)), "mask": torch.ones(4, 12), "rewards": torch.ones(4)}
    said: dict[bool, list[tuple[int | None, str]]] = {}
    for pushes in (False, True):
        with trainprobe.watch(model, output=str(tmp_path / f"run{pushes}"), console=False) as probe:
            for step in range(30):
                with probe.step():
                    if step % 2 == 0:
                        note_rollout(probe, batch, group_size=2)
                    elif pushes:
                        with trainprobe.weight_sync(model, step, probe=probe):
                            pass
                    model(torch.ones(1, 6)).sum().backward()
        said[pushes] = [(finding.step, finding.message) for finding in probe.findings if finding.rule == "rollout"]
    assert said[True] == said[False] != []


def test_a_version_that_goes_back_is_named(tmp_path):
    messages = train(tmp_path / "run", versions={3: 1})
    assert messages == ["version 1 was pushed behind version 2: the engine goes back"]
    assert "version 1 was pushed behind version 2" in " ".join(judged(tmp_path / "run")[1].split())


def test_tensors_that_did_not_arrive_are_counted_and_named(tmp_path):
    assert train(tmp_path / "run", loses=True) == ["a push did not arrive in the engine as sent: 1 of its tensors"]
    assert series(tmp_path / "run")["lost"] == {step: float(step == 3) for step in range(STEPS)}
    lines = (tmp_path / "run/rank0/findings.jsonl").read_text()
    assert "2.bias" in lines


def test_an_odd_batch_is_a_finding_and_the_training_goes_on(tmp_path):
    model = model_of()
    odd: list[object] = [
        {"reword": torch.ones(3)},
        {"rewards": torch.tensor(3.0)},
        {"rewards": torch.ones(3), "advantages": torch.ones(4)},
        {"tokens": torch.ones(3, 4), "mask": torch.ones(3, 5)},
        {"rewards": "none"},
        7,
    ]
    with trainprobe.watch(model, output=str(tmp_path / "run"), console=False) as probe:
        for batch in odd:
            with probe.step():
                note_rollout(probe, batch)  # type: ignore[arg-type]
                model(torch.ones(1, 6)).sum().backward()
    messages = [finding.message for finding in probe.findings if finding.severity == "warning"]
    assert len([m for m in messages if m.startswith("a batch of rollouts was not judged: ")]) == len(odd)
    assert any("rewards of the batch is one number" in m for m in messages)
    assert probe.collected == len(odd)
