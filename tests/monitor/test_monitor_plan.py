"""The monitor's section of a plan is checked to the last key."""

import pytest

from trainprobe.errors import PlanError
from trainprobe.monitor.plan import MonitorPlan, make_rules, validate
from trainprobe.monitor.rules import OPTIONAL, rule_names


def test_the_defaults_judge_with_every_rule_but_the_ones_that_need_to_be_named():
    assert set(validate().rules) == set(rule_names()) - set(OPTIONAL)


def test_a_rule_can_be_switched_off_changed_and_added():
    rules = validate({"rules": {"dead": False, "spike": {"z": 5}, "threshold": True}}).rules
    assert "dead" not in rules
    assert rules["spike"].z == 5
    assert "threshold" in rules


def test_a_kind_of_number_can_be_switched_and_given_patterns_and_an_interval():
    plan = validate({"activations": False, "optimizer_state": {"names": "layers.**", "every": 10}})
    assert not plan.activations.on
    assert (plan.optimizer_state.on, plan.optimizer_state.names, plan.optimizer_state.every) == (True, ("layers.**",), 10)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"activation": True}, r"monitor: activation: unknown key 'activation' — did you mean 'activations'\?"),
        ({"gradients": {"reducd": True}}, r"gradients.reducd: unknown key 'reducd' — did you mean 'reduced'\?"),
        ({"rules": {"spikes": True}}, r"'spikes' is not a rule — did you mean 'spike'\?"),
        ({"rules": {"spike": {"zz": 1}}}, r"rules.spike.zz: unknown key 'zz'"),
        ({"rules": {"spike": {"actions": ["explode"]}}}, r"rules.spike.actions.0: 'explode' cannot be used"),
        ({"rules": {"spike": 3}}, r"rules.spike: 3 cannot be used: write true, false or a section"),
        ({"parameters": {"every": 0}}, r"parameters.every: 0 cannot be used"),
        ({"parameters": {"names": "re:["}}, r"is not a regular expression"),
        ({"step": "sometimes"}, r"step: .*'sometimes' is not a number or a range"),
        ({"actions": {"webhook": "ftp://x"}}, r"'ftp://x' is not a URL"),
    ],
)
def test_what_cannot_be_used_is_an_error_with_key_value_and_guess(section, message):
    with pytest.raises(PlanError, match=message):
        validate(section)


def test_every_key_has_a_docstring_and_the_plan_cannot_be_changed():
    plan = validate()
    assert all(field.description for field in MonitorPlan.model_fields.values())
    with pytest.raises(ValueError, match="frozen"):
        plan.step = (1,)


def test_a_list_of_names_gives_these_rules_with_their_defaults():
    assert list(make_rules(["spike", "threshold"])) == ["spike", "threshold"]


def test_the_main_plan_hands_its_section_over():
    from trainprobe.engine.plan.loading import load_plan

    with pytest.raises(PlanError, match="did you mean 'activations'"):
        load_plan({"monitor": {"activation": True}})
