"""Observers are there because relations name them: each relation names those whose facts it reads, and no others run."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import trainprobe
from tests.monitor.audit.read_facts import facts_read
from tests.monitor.audit.trained import train_one
from trainprobe.monitor.audit import observers
from trainprobe.monitor.audit.relations import load_relation, relation_names

KINDS = observers._kinds()
BY_CLASS = {kind: name for name, kind in KINDS.items()}
# what `Audit` and `Evidence` make of the facts of several steps, and what ranks send each other → the facts
DERIVED = {
    "batches": "TrainingCalls.batches",
    "follows": "UpdateCounts.between",
    "resumed": "Saves.saved",
    "resharded": "Saves.saved Saves.loaded Saves.saved_by_ranks",
    "streak scalar": "DependentScalars.names UpdateCounts.updates",
    "streak rate": "UsedGroups.rates UpdateCounts.updates",
    "streak unreached": "UsedGradients.unreached UpdateCounts.updates",
    "streak moves": "BufferStates.begun BufferStates.updated UpdateCounts.updates",
    **{f"peer {fact}": f"TrainingCalls.{fact}" for fact in ("tokens", "drawn", "whole_numbers")},
    "peer random": "RandomFingerprints.ended",
    "peer region": "RandomFingerprints.region",
    "peer differentiated": "UsedGradients.differentiated",
}
# relations that use a fact where another relation has it looked at, and do without it elsewhere
WHERE_IT_IS = {"finite_together": {"Reductions"}, "resumed": {"Saves"}, "settings": {"Saves"}}


def test_each_observer_returns_a_fact_of_its_own_with_a_default_and_a_line_for_each_field():
    kinds = {name: fact_of(kind) for name, kind in KINDS.items()}
    assert len(set(kinds.values())) == len(KINDS)
    for kind in kinds.values():
        kind()
        assert kind.__dataclass_params__.frozen
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for node, behind in itertools.pairwise(body):
            assert not isinstance(node, ast.AnnAssign) or isinstance(behind, ast.Expr), (kind, ast.unparse(node))
        assert isinstance(body[-1], ast.Expr | ast.FunctionDef), kind


def test_a_relation_names_the_observers_of_the_facts_that_it_reads():
    given = {fact_of(kind).__name__: name for name, kind in KINDS.items()}
    for name in relation_names():
        module = load_relation(name)
        needed = {given[fact] for fact in kinds_read(module) - WHERE_IT_IS.get(name, set())}
        missing = needed - closure(module.OBSERVERS)
        assert not missing, f"{name} reads what {missing} see"


def test_a_relation_names_only_observers_that_are_there_and_whose_facts_it_reads():
    for name in relation_names():
        module = load_relation(name)
        assert set(KINDS) >= module.OBSERVERS, name
        unread = {one for one in module.OBSERVERS if fact_of(KINDS[one]).__name__ not in kinds_read(module)}
        assert not unread - ({"backward_starts"} if name == "declared_loss" else set()), f"{name} reads nothing of {unread}"


def test_each_field_of_a_fact_is_read():
    """By a relation, or by what hands facts to relations: the audit, which compares the ranks, and its evidence."""
    beside = [importlib.import_module(f"trainprobe.monitor.audit.{name}") for name in ("audit", "evidence", "history")]
    beside += [importlib.import_module(f"trainprobe.monitor.audit.{name}") for name in ("class_shares", "recurrences")]
    read = {word for module in (*map(load_relation, relation_names()), *beside) for word in read_of(module)}
    fields = {f"{kind.__name__}.{field.name}" for kind in map(fact_of, KINDS.values()) for field in dataclasses.fields(kind)}
    assert fields - read - {f"UpdateCounts.{name}" for name in ("repeated",)} == set()  # `once` reads it


def test_each_observer_is_named_by_a_relation():
    named = frozenset().union(*(load_relation(name).OBSERVERS for name in relation_names()))
    assert closure(named) == set(KINDS)


def closure(names):
    return {BY_CLASS[kind] for kind in observers._closure(names)}


def fact_of(kind: type) -> Any:
    """The class of the fact that an observer returns."""
    return typing.get_type_hints(kind.facts)["return"]  # pyright: ignore


def read_of(module: types.ModuleType) -> set[str]:
    """Each "Class.field" of a fact that a module reads, itself or by what is made of it."""
    return {fact for found in facts_read(module) for fact in DERIVED.get(found, found).split() if "." in fact}


def kinds_read(module: types.ModuleType) -> set[str]:
    """The classes of the observers' facts that a module reads."""
    known = {fact_of(kind).__name__ for kind in KINDS.values()}
    return {fact.partition(".")[0] for fact in read_of(module)} & known


@pytest.mark.parametrize(
    ("only", "there"), [("hooks", set()), ("outer_products", {"OuterProducts", "ModuleInputs", "ModelCalls"})]
)
def test_what_no_relation_of_the_plan_names_is_not_installed(tmp_path, only, there):
    relations_ = dict.fromkeys(relation_names(), False) | {only: 1}
    model = torch.nn.Linear(6, 6)
    patched = [
        (torch.nn.Module, "_call_impl"),
        (torch.autograd, "backward"),
        (torch.Tensor, "__mul__"),
        (torch.optim.Optimizer, "state_dict"),
    ]
    originals = [getattr(*place) for place in patched]
    with trainprobe.watch(model, level="off", audit={"relations": relations_}, output=tmp_path / "out") as probe:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        with probe.step():
            train_one(probe, model, optimizer, lambda when: seen.append([getattr(*place) for place in patched]))
        assert {type(one).__name__ for one in probe.audit.tap._observers._all.values()} == there
    replaced = [now is not was for now, was in zip(seen[0], originals, strict=True)]
    assert replaced == ([False] * 4 if not there else [True, False, True, False])


OBSERVER = '''"""How many rows the model was called with."""
from trainprobe.monitor.audit.observers import Observer
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.relations.rows_stay import Rows

class RowCounter(Observer):
    """Counts."""
    needs = (ModelCalls,)
    rows = 0

    def begin(self):
        self.rows = 0

    def model_called(self, model, named):
        self.rows += next(iter(named.values())).shape[0]

    def facts(self, step_data) -> Rows:
        return Rows(self.rows)
'''
RELATION = '''"""A batch has as many rows as the one before."""
from dataclasses import dataclass

COST, OBSERVERS, EVERY, STAGE = frozenset({"host"}), frozenset({"rows"}), 1, "data"

@dataclass(frozen=True)
class Rows:
    """Rows of what the model was called with."""
    count: int = 0
    """In all micro-batches."""

def check(evidence):
    was, rows = evidence.before and evidence.before.of(Rows).count, evidence.of(Rows).count
    return [evidence.found(f"{rows} rows after {was}")] if was not in (None, rows) else []
'''


TRAINING = """
import sys, torch, trainprobe
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with trainprobe.watch(model, optimizer, level="off", audit={"every": 1}, output=sys.argv[1]) as probe:
    for rows in (4, 4, 4, 2):
        with probe.step():
            optimizer.zero_grad()
            model(torch.randn(rows, 3)).sum().backward()
            optimizer.step()
    print([(f.rule, f.step, f.message) for f in probe.findings if f.rule == "rows_stay"], trainprobe.__file__, file=sys.stderr)
"""


def test_a_new_fact_takes_an_observer_and_a_relation_and_no_other_file(tmp_path):
    """Both are laid into their folders in a copy of the package, and a training with a shorter last batch is found."""
    package = Path(trainprobe.__file__).parent
    shutil.copytree(package, tmp_path / "trainprobe", copy_function=os.symlink)
    (tmp_path / "trainprobe/monitor/audit/observers/rows.py").write_text(OBSERVER)
    (tmp_path / "trainprobe/monitor/audit/relations/rows_stay.py").write_text(RELATION)
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "out")]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"[('rows_stay', 3, '2 rows after 4')] {tmp_path}/trainprobe/__init__.py" in run.stderr


def test_call_stacks_of_recorded_operators_show_no_line_of_the_audit(tmp_path):
    """Observers stand around the functions that they replace, such as the operators of a tensor."""
    model = torch.nn.Linear(3, 1)
    plan = {"level": "mix", "sinks": ["memory"], "audit": {"every": 1}, "on_error": "raise"}
    with trainprobe.watch(model, torch.optim.SGD(model.parameters(), 0.1), output=tmp_path / "out", **plan) as probe:
        probe.begin_step()
        (model(torch.ones(2, 3)) * torch.ones(2, 1)).sum().backward()
        step_data = probe.end_step()
    lines = {line for call in step_data.calls if call.kind == "op" for line in step_data.stacks[call.stack]}
    assert any(__file__ in line for line in lines)
    package = f"{Path(trainprobe.__file__).parent}/"
    assert [line for line in lines if package in line] == []
