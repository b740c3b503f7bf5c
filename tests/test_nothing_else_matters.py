"""The numbers of a step are the same whatever else is asked for: what an audit or the monitor does is no part of them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

import trainprobe
from tests import zoo
from tests.lockstep import one_step, seed_all
from tests.matrices import matrix

MORE = {
    "details": [{"match": ["*0*", "Functional*"], "summary": "both"}],  # fingerprints of some: a second table of values
    "audit": {"every": 1},
    "monitor": {
        **{"optimizer_state": True, "update": True, "batches": True, "collectives": True, "gradients": {"unreduced": True}},
        "features": {"attention": True, "weights": True, "dead_units": True, "formats": True},
    },
    "black_box": True,
}
UNWRITTEN = {("unbound_imports", "kwargs.out")}  # memory that nobody has written to yet


def recorded(name: str, folder: Path, declare: bool = False, **plan) -> dict[tuple, list[tuple]]:
    """Return norm, mean and note of all values of a step, by place."""
    case = zoo.load(name)
    seed_all()
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, output=folder, **plan) as probe:
        probe.begin_step()
        if declare:
            probe.declare_loss(lambda model: case.loss(model, case.batch(0)))
        one_step(case, model, optimizer, 0)
        step_data = probe.end_step()
    found: dict[tuple, list[tuple]] = defaultdict(list)
    for record in step_data.records():
        site, phase = record.site, record.step.phase
        if site.kind in ("module", "op") or (site.kind == "parameter" and phase == "backward"):
            numbers = (str(record.values.get("norm")), str(record.values.get("mean")), record.note)
            found[site.kind, site.name, site.call, site.slot, phase].append(numbers)
    return {place: numbers for place, numbers in found.items() if (name, place[3]) not in UNWRITTEN}


@pytest.mark.parametrize(
    ("name", "plan"), matrix(zoo.NAMES, [{"level": "mix"}, {"level": "L0"}, {"level": "L0", "native": False}])
)
def test_a_step_is_recorded_as_without_all_that_else_is_on(name, plan, tmp_path):
    alone, among = recorded(name, tmp_path / "alone", **plan), recorded(name, tmp_path / "among", **plan, **MORE)
    assert {
        place: (alone.get(place), among.get(place)) for place in alone | among if alone.get(place) != among.get(place)
    } == {}


def test_the_run_of_a_declared_loss_is_no_part_of_the_step(tmp_path):
    plan = {"level": "mix", "audit": {"every": 1}, "monitor": True}
    alone = recorded("batchnorm_branches", tmp_path / "alone", **plan)
    assert recorded("batchnorm_branches", tmp_path / "declared", declare=True, **plan) == alone
