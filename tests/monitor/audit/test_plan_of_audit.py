"""Which steps are audited, and what is said of steps at which nothing is looked at."""

from __future__ import annotations

import torch

import trainprobe
from trainprobe.monitor.audit.plan import validate
from trainprobe.monitor.audit.relations import STAGES, load_relation, relation_names


def test_every_relation_says_its_cost_its_interval_and_its_stage():
    for name in relation_names():
        relation = load_relation(name)
        assert {"host", "fingerprints", "ranks", "rerun"} >= relation.COST
        assert relation.EVERY >= 1
        assert relation.STAGE in STAGES
        assert relation.__doc__


def test_relations_are_checked_in_the_order_of_a_step():
    stages = [STAGES.index(load_relation(name).STAGE) for name in relation_names()]
    assert stages == sorted(stages)


def test_the_default_audits_every_tenth_step_and_nothing_between():
    plan = validate(True)
    assert [step for step in range(31) if plan.wants_step(step)] == [0, 10, 20, 30]
    assert [step for step in range(101) if plan.wants(step, "rerun")] == [0, 50, 100]


def test_steps_that_are_not_audited_say_nothing(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, level="off", audit={"relations": {"modes": 1}}, output=tmp_path / "out") as probe:
        for _ in range(12):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(3, 2)).sum().backward()
                optimizer.step()
        assert probe.findings == []
