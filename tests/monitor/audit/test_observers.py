"""Observers are there because relations name them: each relation names those whose facts it reads, and no others run."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import textwrap
import types
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import trainprobe
from tests.monitor.audit.trained import train_one
from trainprobe.engine.core.facts import StepFacts
from trainprobe.monitor.audit import observers
from trainprobe.monitor.audit.relations import load_relation, relation_names

HERE = "trainprobe.monitor.audit"
KINDS = observers._kinds()
BY_CLASS = {kind: name for name, kind in KINDS.items()}
# what `Audit` and `Evidence` make of the facts of several steps, and what ranks send each other → the facts
DERIVED = {
    "updated_once": "updates repeated",
    "follows": "updates_between",
    "stalled": "updates backwards",
    "ever_reached": "reached unreached",
    "always_reached": "reached unreached",
    "resumed": "saved",
    "resharded": "saved loaded",
    "batches_before": "batches",
    **{f"streak {kind}": f"{fact} updates" for kind, fact in (("scalar", "dependent"), ("rate", "rates"))},
    **{f"streak {kind}": f"{fact} updates" for kind, fact in (("unreached", "unreached"), ("moves", "begun buffers"))},
    **{f"peer {fact}": fact for fact in ("tokens", "differentiated", "random", "region", "drawn", "whole_numbers")},
}
# relations that use a fact where another relation has it looked at, and do without it elsewhere
WHERE_IT_IS = {
    "finite_together": {"reductions"},
    **{key: {"saved", "loaded", "randoms", "saved_by_ranks"} for key in ("resumed", "settings")},
}


def test_a_relation_names_the_observers_of_the_facts_that_it_reads():
    given = {fact: name for name, kind in KINDS.items() for fact in facts_of(kind)}
    assert set(given) | {"set_up", "model", "ordinal", "others"} == {field.name for field in fields(StepFacts)}
    for name in relation_names():
        module = load_relation(name)
        read = {fact for found in words_of(module) for fact in DERIVED.get(found, found).split() if fact in given}
        needed = {given[fact] for fact in read - WHERE_IT_IS.get(name, set())}
        missing = needed - closure(module.OBSERVERS)
        assert not missing, f"{name} reads what {missing} see"


def test_a_relation_names_only_observers_that_are_there_and_whose_facts_it_reads():
    for name in relation_names():
        module = load_relation(name)
        assert set(KINDS) >= module.OBSERVERS, name
        read = words_of(module)
        read |= {fact for found in read for fact in DERIVED.get(found, "").split()}
        unread = {one for one in module.OBSERVERS if facts_of(KINDS[one]) and not facts_of(KINDS[one]) & read}
        assert not unread - ({"backward_starts"} if name == "declared_loss" else set()), f"{name} reads nothing of {unread}"


def test_each_observer_is_named_by_a_relation():
    named = frozenset().union(*(load_relation(name).OBSERVERS for name in relation_names()))
    assert closure(named) == set(KINDS)


def closure(names):
    return {BY_CLASS[kind] for kind in observers._closure(names)}


def facts_of(kind: type) -> set[str]:
    """The names of the facts that an observer returns, as its source has them."""
    sources = [getattr(kind, event) for event in ("facts", "late") if event in vars(kind)]
    found = set[str]()
    for source in sources:
        body = ast.parse(textwrap.dedent(inspect.getsource(source)))
        found |= {key.value for node in ast.walk(body) if isinstance(node, ast.Dict) for key in node.keys if _is_text(key)}
        found |= {item.value for node in ast.walk(body) if isinstance(node, ast.Tuple) for item in node.elts if _is_text(item)}
    return found & {field.name for field in fields(StepFacts)}


def words_of(module: types.ModuleType) -> set[str]:
    """The attributes that a relation reads, itself and in the functions that it imports from beside it."""
    found = set[str]()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        found |= _words(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HERE):
            there = importlib.import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                if isinstance(getattr(there, name), types.FunctionType):
                    source = ast.parse(inspect.getsource(getattr(there, name)))
                    found |= {word for inner in ast.walk(source) for word in _words(inner)}
    return found


def _words(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute):
        return {node.attr} if ast.unparse(node.value).split(".")[-1] in ("facts", "evidence", "before") else set()
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith((".marks", ".numbers")) and _is_text(node.slice):
        return {f"peer {node.slice.value}"}  # pyright: ignore
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".streak", "streaks.get")):
        first = node.args[0].elts[0] if isinstance(node.args[0], ast.Tuple) else node.args[0]
        return {f"streak {first.value}"} if _is_text(first) else set()
    return set()


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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

class Rows(Observer):
    """Counts."""
    needs = (ModelCalls,)
    rows = 0

    def begin(self):
        self.rows = 0

    def model_called(self, model, named):
        self.rows += next(iter(named.values())).shape[0]

    def facts(self, step_data):
        return {"rows": self.rows}
'''
RELATION = '''"""A batch has as many rows as the one before."""
COST, OBSERVERS, EVERY, STAGE = frozenset({"host"}), frozenset({"rows"}), 1, "data"

def remember(evidence):
    return evidence.seen("rows", 0)

def check(evidence):
    was, rows = evidence.remembered("rows_stay", None), evidence.seen("rows", 0)
    return [evidence.finding("rows_stay", f"{rows} rows after {was}")] if was not in (None, rows) else []
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
