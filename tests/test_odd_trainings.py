"""An odd value costs a note on that value: the tool goes on, the bits, the warnings and what modes count stay the same."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch

import trainprobe
from tests.matrices import matrix
from tests.odd_trainings import CASES

EVERYTHING = {
    "level": "mix",
    "task": "tensor",
    "details": [{"match": ["*0*", "Functional*"], "summary": "both"}],
    "audit": {"every": 1},
    "monitor": {
        **{"optimizer_state": True, "update": True, "batches": True, "collectives": True, "gradients": {"unreduced": True}},
        "features": {"attention": True, "weights": True, "dead_units": True, "formats": True},
    },
    "black_box": True,
}
TWINS = ("arg_cyclic", "arg_deep", "arg_hostile_list", "arg_huge_int", "arg_surrogate_key", "arg_raising_shape", "notes")


class Bare:
    """Stands for a probe where nobody watches."""

    def __init__(self, model, optimizer):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def step(self):
        return nullcontext(self)

    def note(self, name, value):
        pass

    def open(self, model, optimizer):
        pass


def run(case, watch):
    """Return what a training came to, and the texts of the warnings that it caused."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = CASES[case](watch)
    return result, {str(w.message)[:100] for w in told}


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    if a.is_nested or a.layout is not torch.strided or a.is_meta:
        return type(a) is type(b)
    plain = [t.detach().as_subclass(torch.Tensor) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in plain))


def check(case, folder, **plan):
    probes = []

    @contextmanager
    def watch(model, optimizer):
        with trainprobe.watch(model, optimizer, output=folder / str(len(probes)), console=False, **plan) as probe:
            probes.append(probe)
            yield probe

    bare, before = run(case, Bare)
    watched, after = run(case, watch)
    assert [probe.guard.tripped for probe in probes if probe.guard.tripped] == []
    assert len(bare) == len(watched) and all(map(same, bare, watched))
    assert after - before == set()
    return probes


@pytest.fixture(autouse=True)
def forgiving(monkeypatch):
    """Faults disable the tool, as they do for users, and are seen as that."""
    monkeypatch.delenv("TRAINPROBE_ON_ERROR", raising=False)


PLANS = {"everything": EVERYTHING, "default": {}, "everything uncompiled": {**EVERYTHING, "native": False}}
ODD_ARGUMENTS = [name for name in CASES if name.startswith("arg_")]
OTHERS = [name for name in CASES if name not in ODD_ARGUMENTS]
PAIRS = [
    *matrix(OTHERS, ["everything", "default"]),
    *(pytest.param(name, "everything") for name in ODD_ARGUMENTS),
    *(pytest.param(name, "everything uncompiled") for name in TWINS),
]


@pytest.mark.parametrize(("case", "plan"), PAIRS)
def test_the_tool_goes_on_and_nothing_changes(case, plan, tmp_path):
    check(case, tmp_path, **PLANS[plan])


def test_what_cannot_be_noted_is_left_out_and_said_once(tmp_path):
    (probe,) = check("notes", tmp_path)
    told = [f.message for f in probe.findings if f.rule == "probe"]
    assert any("'odd' was left out: it is neither a number nor a tensor of one element" in text for text in told)
    assert len(told) == len(set(told))
