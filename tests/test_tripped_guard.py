"""A fault of the tool, wherever it comes, leaves torch, the model and the training as they would be without the tool."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint
import torch.nn.utils.stateless
import torch.utils.checkpoint
from torch import nn

import trainprobe
from tests.test_odd_trainings import EVERYTHING
from tests.traces import left_behind, traces
from trainprobe.engine.capture import part_of
from trainprobe.engine.capture.features.attention import AttentionFeature
from trainprobe.errors import PlanError
from trainprobe.monitor.audit.relations import load_relation

JUDGED = {"step": ["all"], "ops": ["linear", "layer_norm"]}
PHASES = ("open", "begin", "forward", "backward", "clip", "optimizer", "moment", "note", "end", "control", "close")


@pytest.fixture(autouse=True)
def forgiving(monkeypatch):
    """Faults disable the tool, as they do for users; under test they are raised otherwise."""
    monkeypatch.delenv("TRAINPROBE_ON_ERROR", raising=False)


def everything_of_torch() -> dict[str, int]:
    """Return the identity of each function and class of torch's modules, and of each member of its classes."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if (name == "torch" or name.startswith(("torch.", "random", "numpy.random"))) and inspect.ismodule(module):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found[f"{name}.{key}"] = id(value)
                if inspect.isclass(value) and value.__module__ == name:
                    found |= {f"{name}.{key}.{own}": id(member) for own, member in vars(value).items() if callable(member)}
    return found


class Trips(nn.Module):
    """A model in which something calls `trip` while a phase of the step runs."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.trips = {}

    def forward(self, x):
        self.trips.get("forward", int)()
        hidden = self.norm(self.first(x))
        heads = hidden.view(1, 2, 3, 4) if hidden.shape == (3, 8) else hidden.view(1, 1, *hidden.shape)
        hidden = hidden + nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(hidden.shape)
        if "backward" in self.trips and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.trips["backward"]())
        return self.second(hidden)


def call(trip, *_):
    trip()


def train(model, optimizer, probe=None, steps=3, trips=None):
    """Train; at the second step the phase named in `trips` calls its function."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(steps):
        now = trips if trips is not None and step == 1 else {}
        model.trips = now
        if probe is not None:
            probe.begin_step()
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        if probe is not None:
            now.get("note", int)()
            probe.note("loss", loss)
            now.get("moment", int)()
        loss.backward()
        now.get("clip", int)()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        handle = optimizer.register_step_pre_hook(partial(call, now.get("optimizer", int)))
        optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        scheduler.step()
        if probe is not None:
            now.get("end", int)()
            probe.end_step()
    return [p.detach().clone() for p in model.parameters()]


def start():
    torch.manual_seed(0)
    model = Trips()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def breaks(*_, **__):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_leaves_torch_as_it_was_and_the_bits_and_lets_go_of_the_model(phase, tmp_path, capsys):
    bare = train(*start())
    model, optimizer = start()
    before, hooks = everything_of_torch(), traces(model, optimizer)
    probe = trainprobe.Probe(output=tmp_path / "out", control=1, config_check=True, op_check=JUDGED, **EVERYTHING)
    if phase == "open":
        probe._open_writer = breaks
    probe.open(model, optimizer)
    if phase == "begin":
        probe.new_tape = breaks
    if phase == "control":
        probe._control.look = breaks
    if phase == "end":
        probe.watchers.append(breaks)
    inside = phase not in ("open", "begin", "control", "end", "close")
    trips = {phase: partial(probe.guard.run, breaks)} if inside else {}
    watched = train(model, optimizer, probe, trips=trips)
    if phase == "close":
        probe.guard.run(breaks)
    assert probe.guard.tripped is not None and "broken on purpose" in probe.guard.tripped.message
    model.trips = {}
    changed = {name for name, identity in everything_of_torch().items() if before.get(name, identity) != identity}
    assert changed == set()  # before close: what the fault left
    left = {name for name in left_behind(hooks, traces(model, optimizer)) if name != "threads"}
    assert left <= {"attributes of the optimizer", "optimizer _optimizer_step_pre_hooks"}  # the program's scheduler and hook
    probe.close()
    for thread in threading.enumerate():
        if thread.name == "trainprobe-config-check-merge":  # writes what was captured until then
            thread.join(60)
    assert left_behind(hooks, traces(model, optimizer)).keys() <= {"attributes of the optimizer"}
    assert all(map(torch.equal, bare, watched))
    assert capsys.readouterr().err.count("disabled itself") == 1
    gone = [weakref.ref(model), weakref.ref(probe), weakref.ref(optimizer)]
    del model, probe, optimizer, trips
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_a_mistake_in_the_plan_is_raised_and_a_model_that_cannot_be_looked_at_is_not(tmp_path, capsys):
    model, optimizer = start()
    with (
        pytest.raises(PlanError, match="match nothing"),
        trainprobe.watch(model, optimizer, output=tmp_path / "a", modules=["nowhere"]),
    ):
        pass
    with trainprobe.watch("no model", optimizer, output=tmp_path / "b") as probe:
        assert all(map(torch.equal, train(*start()), train(model, optimizer, probe)))
    printed = capsys.readouterr().err
    assert "unobserved: the model that was given is a str and no torch.nn.Module: give watch" in printed
    assert "Error" not in printed


def test_a_model_that_fails_when_it_is_looked_at_names_the_file_of_ours(tmp_path, capsys):
    model, optimizer = start()
    model.modules = breaks
    with trainprobe.watch(model, optimizer, output=tmp_path / "b") as probe:
        assert all(map(torch.equal, train(*start()), train(model, optimizer, probe)))
    assert "torch_modules.py" in capsys.readouterr().err


def fail_the_rule(monkeypatch, probe):
    monkeypatch.setitem(probe.monitor.watcher._checks, "drift", breaks)


def fail_the_relation(monkeypatch, probe):
    monkeypatch.setattr(load_relation("untouched_between_steps"), "check", breaks)


def fail_the_feature(monkeypatch, probe):
    monkeypatch.setattr(AttentionFeature, "_seen", property(breaks, breaks), raising=False)


def fail_the_audit(monkeypatch, probe):
    monkeypatch.setattr(probe.audit.audit, "evidence", breaks)


def fail_the_black_box(monkeypatch, probe):
    monkeypatch.setattr(type(probe.backend), "random_state", breaks)


@pytest.mark.parametrize(
    ("fails", "part", "place"),
    [
        (fail_the_rule, "the rule drift", "watcher.py:"),
        (fail_the_relation, "the relation untouched_between_steps", "audit.py:"),
        (fail_the_feature, "the feature AttentionFeature", "attention.py:"),
        (fail_the_audit, "the audit", "audit.py:"),
        (fail_the_black_box, "the black box", "black_box.py:"),
    ],
)
def test_a_part_that_fails_costs_that_part_and_is_said_once(fails, part, place, tmp_path, capsys, monkeypatch):
    bare = train(*start())
    model, optimizer = start()
    before, hooks = everything_of_torch(), traces(model, optimizer)
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", **EVERYTHING) as probe:
        fails(monkeypatch, probe)
        assert all(map(torch.equal, bare, train(model, optimizer, probe)))
        assert probe.guard.tripped is None and probe.collected == 3
        with torch.no_grad():
            model.first.weight[0, 0] = torch.nan
        train(model, optimizer, probe, steps=1)
    (told,) = [f.message for f in probe.findings if "broken on purpose" in f.message]
    assert told.startswith(f"{part} failed and is left out from here on") and place in told
    printed = capsys.readouterr().err
    assert printed.count(told) == 1
    (end,) = [line for line in printed.splitlines() if "4 steps watched" in line]
    assert part in end and "left out after a fault" in end
    assert "nonfinite" in {f.rule for f in probe.findings}  # the others go on
    monkeypatch.undo()
    assert {name for name, identity in everything_of_torch().items() if before.get(name, identity) != identity} == set()
    assert left_behind(hooks, traces(model, optimizer)).keys() <= {"attributes of the optimizer"}


def parts():
    """Return the names of all taps, observers and features of a probe, as they are registered with its guard."""
    return tuple(trainprobe.Probe(**EVERYTHING).guard.parts)


class Faults:
    """Counts the calls that go through the guard of a part; the one with the number `at` fails."""

    def __init__(self, guard, name, at=-1):
        self.calls, self.at, self.part = 0, at, guard.of(name)
        self.within, self.part.within = self.part.within, self
        self.before, self.part._without_dispatch = self.part._without_dispatch, self.enter

    def __call__(self, call, *args, **kwargs):
        """Stand in for `within`."""
        self.calls += 1
        return self.within(breaks if self.calls == self.at + 1 else call, *args, **kwargs)

    def enter(self):
        """Stand in for what `run` enters first."""
        self.calls += 1
        if self.calls == self.at + 1:
            breaks()
        return self.before()


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The weights of a training, what torch is like, and how many calls each part gets in a training without a fault."""
    model, optimizer = start()
    with trainprobe.watch(model, optimizer, output=tmp_path_factory.mktemp("calls"), **EVERYTHING) as probe:
        counted = {name: Faults(probe.guard, name) for name in parts()}
        train(model, optimizer, probe)
        assert [f.message for f in probe.findings if f.severity != "info"] == []
        calls = {name: faults.calls for name, faults in counted.items()}
    return train(*start()), everything_of_torch(), calls


@pytest.mark.parametrize("name", parts())
def test_a_fault_of_any_tap_observer_or_feature_costs_that_alone(name, calls, tmp_path, capsys):
    bare, before, counted = calls
    assert counted[name] > 0
    for at in {0, counted[name] // 2}:
        model, optimizer = start()
        hooks = traces(model, optimizer)
        with trainprobe.watch(model, optimizer, output=tmp_path / f"at{at}", **EVERYTHING) as probe:
            Faults(probe.guard, name, at)
            assert all(map(torch.equal, bare, train(model, optimizer, probe)))
            assert probe.guard.tripped is None and probe.guard.leaves_out(name) and probe.collected == 3
            (told,) = [f.message for f in probe.findings if f.severity != "info"]
            with torch.no_grad():
                model.first.weight[0, 0] = torch.nan
            train(model, optimizer, probe, steps=1)
        assert told.startswith(f"{name} failed and is left out from here on") and "broken on purpose" in told
        assert capsys.readouterr().err.count(told) == 1
        assert "nonfinite" in {f.rule for f in probe.findings}, at  # the others go on
        assert left_behind(hooks, traces(model, optimizer)).keys() <= {"attributes of the optimizer"}
    assert {key for key, identity in everything_of_torch().items() if before.get(key, identity) != identity} == set()


def test_a_tap_that_cannot_learn_the_model_is_left_out_alone(calls, tmp_path, capsys):
    bare, before, _ = calls
    for i in range(len(trainprobe.Probe(**EVERYTHING).scheduler.taps)):
        model, optimizer = start()
        hooks = traces(model, optimizer)
        probe = trainprobe.Probe(output=tmp_path / f"tap{i}", **EVERYTHING)
        name = part_of(type(probe.scheduler.taps[i]))
        probe.scheduler.taps[i].open = breaks
        probe.open(model, optimizer)
        assert all(map(torch.equal, bare, train(model, optimizer, probe))), name
        assert probe.guard.tripped is None and probe.guard.leaves_out(name) and probe.collected == 3
        (told,) = [f.message for f in probe.findings if f.severity != "info"]
        probe.close()
        assert told.startswith(f"{name} failed and is left out from here on") and "broken on purpose" in told
        assert capsys.readouterr().err.count(told) == 1
        assert left_behind(hooks, traces(model, optimizer)).keys() <= {"attributes of the optimizer"}, name
    assert {key for key, identity in everything_of_torch().items() if before.get(key, identity) != identity} == set()


def test_one_release_that_fails_does_not_keep_the_others_from_theirs(tmp_path, capsys):
    model, optimizer = start()
    before = everything_of_torch()
    with trainprobe.watch(model, optimizer, output=tmp_path / "out", **EVERYTHING) as probe:
        for tap in probe.scheduler.taps[::2]:
            probe.guard._on_trip.insert(0, lambda tap=tap: breaks(tap))
        with probe.step():
            probe.guard.run(breaks)
            assert {name for name, identity in everything_of_torch().items() if before.get(name, identity) != identity} == set()
    assert "something may still be installed" in capsys.readouterr().err
