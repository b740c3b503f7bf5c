"""Which steps are audited, and what is said of steps at which nothing is looked at."""

from __future__ import annotations

import pytest
import torch

import trainprobe
from tests.monitor.audit.trained import audited
from trainprobe.monitor.audit.plan import validate
from trainprobe.monitor.audit.relations import STAGES, load_relation, relation_names, usual_interval


def test_every_relation_says_its_cost_its_interval_and_its_stage():
    for name in relation_names():
        relation = load_relation(name)
        assert {"host", "fingerprints", "ranks", "rerun"} >= relation.COST
        assert usual_interval(name) == (50 if "rerun" in relation.COST else 10)
        assert relation.STAGE in STAGES
        assert relation.__doc__


def test_relations_are_checked_in_the_order_of_a_step():
    stages = [STAGES.index(load_relation(name).STAGE) for name in relation_names()]
    assert stages == sorted(stages)


def test_the_default_audits_pairs_of_steps_and_nothing_between():
    plan = validate(True)
    assert [step for step in range(95) if plan.wants_step(step)] == [0, 1, 23, 24, 46, 47, 69, 70, 92, 93]
    assert [step for step in range(150) if plan.wants(step, "rerun")] == [0, 47, 115, 143]


def test_the_default_audits_one_step_in_ten_and_reruns_at_one_in_fifty():
    plan = validate(True)
    assert sum(plan.wants_step(step) for step in range(10_000)) == 1000
    assert sum(plan.wants(step, "rerun") for step in range(10_000)) == 200


@pytest.mark.parametrize("period", [2, 3, 4, 5, 7])
def test_the_default_meets_every_phase_of_a_short_period_soon(period):
    plan = validate(True)
    assert {step % period for step in range(71) if plan.wants_step(step)} == set(range(period))


def test_intervals_that_a_plan_gives_are_kept_exactly():
    plan = validate({"relations": {"modes": 7, "ties": False, "hooks": True}, "every": 4})
    assert [step for step in range(22) if "modes" in plan.due(step)] == [0, 7, 14, 21]
    assert not any("ties" in plan.due(step) for step in range(100))
    assert [step for step in range(30) if "hooks" in plan.due(step)] == [0, 1, 23, 24]
    assert [step for step in range(13) if "clipping" in plan.due(step)] == [0, 4, 8, 12]


def test_the_default_finds_what_happens_between_two_steps(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "end" and step % 2:  # never between two steps that are multiples of ten
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0

    first = audited(tmp_path, tamper, steps=48, every=None)[0]
    assert (first.rule, first.site.name, first.step) == ("untouched_between_steps", "0.weight", 24)


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
