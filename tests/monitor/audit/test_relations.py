"""Each relation on a real training: silent where it holds, and right about what breaks it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.monitor.audit.trained import audited
from trainprobe.monitor.audit.relations.gradient_norm import _format_of


def rules(found):
    return [f.rule for f in found]


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad"])
def test_a_healthy_training_violates_nothing(tmp_path, optimizer):
    assert audited(tmp_path, optimizer=optimizer, steps=12) == []


def test_a_gradient_that_was_used_and_is_still_there_is_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "begin" and step == 0:
            optimizer.zero_grad = lambda *a, **k: None

    found = audited(tmp_path, tamper)
    assert (found[0].rule, found[0].step, found[0].site.name) == ("cleared_gradients", 1, "0.weight")


def test_a_factor_on_the_gradient_is_measured_against_the_declared_loss(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "backward" and step == 2:
            for p in model.parameters():
                p.grad.mul_(2)

    found = audited(tmp_path, tamper)
    assert (found[0].rule, found[0].step) == ("declared_loss", 2)
    assert found[0].measured == pytest.approx(2, rel=1e-6)


def test_a_write_through_data_between_two_updates_is_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "end" and step == 2:
            model[3].bias.data[1] += 1e-4

    found = audited(tmp_path, tamper)
    assert [(f.rule, f.step, f.site.name) for f in found] == [("untouched_between_steps", 3, "3.bias")]


def test_moments_that_were_lost_are_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "end" and step == 2:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    assert audited(tmp_path, tamper)[0].rule == "moments_present"


def test_a_parameter_that_was_replaced_is_no_longer_owned(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "begin" and step == 2:
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    found = audited(tmp_path, tamper)
    assert rules(found)[:2] == ["ownership", "parameter_objects"]
    assert {f.site.name for f in found[:2]} == {"0.weight"}


def test_a_parameter_that_is_frozen_by_the_way_is_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "begin" and step == 2:
            model[3].bias.requires_grad_(False)

    found = audited(tmp_path, tamper)
    assert (found[0].rule, found[0].site.name) == ("trainable_set", "3.bias")


def test_dropout_that_lives_in_an_evaluation_is_found_in_its_module(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "evaluate":
            model[2].train()

    found = audited(tmp_path, tamper, steps=2)
    assert [(f.rule, f.site.name) for f in found] == [("evaluation", "2")]


def test_an_evaluation_after_the_last_step_is_judged_too(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "evaluate" and step == 1:
            model[2].train()

    assert rules(audited(tmp_path, tamper, steps=2)) == ["evaluation"]


def test_a_counter_that_was_reset_is_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "end" and step == 2:
            for state in optimizer.state.values():
                state["step"].zero_()

    assert "step_counters" in rules(audited(tmp_path, tamper))


def test_a_gradient_that_escapes_the_clipping_is_found(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "update" and step == 2:
            model[3].weight.grad.mul_(3)

    found = audited(tmp_path, tamper)
    assert [(f.rule, f.site.name) for f in found] == [("clipping", "3.weight")]


def test_a_relation_that_the_plan_leaves_out_is_not_checked(tmp_path):
    def tamper(when, step, model, optimizer):
        if when == "update" and step == 2:
            model[3].weight.grad.mul_(3)

    assert audited(tmp_path, tamper, relations={"clipping": False}) == []


def test_a_relation_with_an_unknown_name_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'ownership'"):
        audited(tmp_path, relations={"ownershp": True})


def test_the_audit_reads_nothing_at_steps_at_which_nothing_is_due(tmp_path):
    torch.manual_seed(0)
    assert audited(tmp_path, steps=3, every=50) == []


def test_a_norm_that_float16_cannot_hold_causes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _format_of(123456.789) == 0.0
        assert _format_of(0.0999755859375) == 2**-11
