"""The JSON of that tool's monitors as a plan: what each key means, and what is said of what cannot be had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.migrate_command import plan_text
from trainprobe.engine.plan.selection import Names
from trainprobe.errors import PlanError
from trainprobe.monitor.plan import MonitorPlan, validate


def monitor_of(**keys: Any) -> MonitorPlan:
    return validate(load_plan({"targets": {}, **keys}).monitor)


def watched(plan: MonitorPlan) -> set[str]:
    kinds = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update", "collectives")
    return {kind for kind in kinds if getattr(plan, kind).on}


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({}, set[str]()),
        ({"wg_distribution": True}, {"gradients"}),
        ({"param_distribution": True, "mv_distribution": True}, {"parameters", "optimizer_state"}),
        ({"xy_distribution": True}, {"activations", "activation_gradients"}),
        ({"xy_distribution": True, "forward_only": True}, {"activations"}),
        ({"xy_distribution": True, "backward_only": True}, {"activation_gradients"}),
        ({"xy_distribution": True, "forward_only": True, "backward_only": True}, set[str]()),
        ({"ur_distribution": True, "cc_distribution": {"enable": True, "cc_codeline": []}}, {"update", "collectives"}),
        ({"cc_distribution": {"enable": False}}, set[str]()),
    ],
)
def test_each_switch_watches_its_kind(keys: dict[str, Any], kinds: set[str]) -> None:
    assert watched(monitor_of(**keys)) == kinds


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"start_step": 7}, [7, 8, 9]),
        ({"start_step": 1, "step_interval": 3}, [1, 4, 7]),
        ({"start_step": 1, "step_interval": 3, "collect_times": 2}, [1, 4]),
        ({"collect_times": 2}, [0, 1]),
        ({"step_interval": "2"}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),  # that tool warns and takes its default
    ],
)
def test_steps_are_counted_as_there(keys: dict[str, Any], chosen: list[int]) -> None:
    plan = load_plan(step=monitor_of(**keys).step)
    assert [n for n in range(10) if plan.wants_step(n)] == chosen


def test_targets_are_modules_and_all_that_is_below_them_of_parameters() -> None:
    plan = monitor_of(targets={"0:module.layers.1": {}, "head.weight": {}}, xy_distribution=True, wg_distribution=True)
    modules, parameters = Names(plan.activations.names), Names(plan.gradients.names)
    names = ["layers.1", "layers.1.fc", "layers.10", "decoder.layers.1", "head"]
    assert [name for name in names if name in modules] == ["layers.1", "decoder.layers.1"]
    held = ["layers.1.fc.weight", "layers.10.fc.weight", "head.weight", "head.bias"]
    assert [name for name in held if name in parameters] == ["layers.1.fc.weight", "head.weight"]


def test_all_xy_watches_all_modules_whatever_the_targets() -> None:
    plan = monitor_of(targets={"layers.1": {}}, xy_distribution=True, all_xy=True)
    assert plan.activations.names == ("**",)


def test_statistics_keep_their_order_and_unknown_ones_are_noted() -> None:
    plan = load_plan({"targets": {}, "ops": ["nans", "norm", "mim", "zeros", "id"], "eps": 1e-8})
    assert plan.statistics == ("nan", "norm", "zero")
    assert [note.partition(": ")[2] for note in plan.notes] == [
        "ops: 'mim' is not a statistic, not used — did you mean 'min'?",
        "eps: zeros is the share of elements that are exactly zero, whatever eps is",
    ]
    assert load_plan({"targets": {}, "ops": []}).statistics == ("norm",)


def test_alerts_become_rules() -> None:
    rules = [
        {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}},
        {"rule_name": "AnomalyNan", "args": {"threshold": 9}},
    ]
    made = monitor_of(ops=["norm", "max"], alert={"rules": rules, "dump": True}).rules
    assert (made["mean_deviation"].threshold, made["mean_deviation"].statistics) == (0.5, ("norm",))  # type: ignore[attr-defined]
    assert (made["threshold"].limit, made["threshold"].statistics) == (9, ("norm", "max"))  # type: ignore[attr-defined]


def test_features_are_worked_out_where_their_hooks_are() -> None:
    targets = {"attention_hook": ["0:attn"], "linear_hook": [], "moe_router_weight_hook": ["0:mlp.router"]}
    features = monitor_of(recording_l2_features=True, l2_targets=targets).features
    assert (features.attention.on, features.weights.names, features.routers.on) == (True, ("**",), True)
    assert "layers.0.attn" in Names(features.attention.names)
    assert "layers.0.attn.qkv" not in Names(features.attention.names)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mg_direction": True}, "mg_direction: the share of gradients"),
        ({"print_struct": True}, "print_struct: the training is not stopped"),
        ({"stack_info": True}, "stack_info: stack_info.csv is not written"),
        ({"monitor_mbs_grad": True}, "monitor_mbs_grad: the gradient of each micro-batch alone"),
        ({"dynamic_on": True}, "dynamic_on: this file is read once"),
        ({"append_output": ["Dec03_21-34-40", "Dec03_21-34-41"]}, "append_output: each run has folders of its own"),
        ({"format": "tensorboard"}, "format: tags are those of trainprobe"),
        ({"format": "xlsx"}, "format: 'xlsx' is not a format: CSV files are written"),
        ({"all_yx": True}, "all_yx: unknown key, not used — did you mean 'all_xy'?"),
        (
            {"cc_distribution": {"enable": True, "cc_log_only": True}},
            "cc_distribution.cc_log_only: the training is not stopped",
        ),
    ],
)
def test_what_means_something_else_is_noted(keys: dict[str, Any], said: str) -> None:
    assert any(said in note for note in load_plan({"targets": {}, **keys}).notes)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"wg_distribution": "yes"}, "plan: wg_distribution: 'yes' cannot be used: write true or false"),
        ({"targets": ["layers"]}, "plan: targets: .* expected a section"),
        ({"alert": {"rules": [{"rule_name": "AnomalyNam"}]}}, "did you mean 'AnomalyNan'"),
        ({"recording_l2_features": True, "l2_targets": {"attn_hook": []}}, "l2_targets.attn_hook: is not a hook"),
        ({"module_ranks": "0,x"}, "rank"),
    ],
)
def test_what_that_tool_refuses_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        load_plan({"targets": {}, **keys})


def test_the_second_monitor_is_read_too() -> None:
    plan = load_plan(
        {
            "monitors": {
                "module": {"targets": ["fc"], "ops": ["norm"]},
                "weight_grad": {"enabled": True, "ops": ["max"], "monitor_mbs_grad": True},
                "optimizer": {"mv_distribution": True},
            },
            **{"start_step": 2, "stop_step": 9, "step_interval": 3, "rank": 1, "output_dir": "here"},
        }
    )
    monitor = validate(plan.monitor)
    assert watched(monitor) == {
        "activations",
        "activation_gradients",
        "gradients",
    }  # as there, the optimizer is off unless enabled
    assert (plan.statistics, plan.rank, str(plan.output)) == (("norm", "max"), (1,), "here")
    assert [n for n in range(20) if load_plan(step=monitor.step).wants_step(n)] == [2, 5, 8]
    assert monitor.gradients.per_micro
    assert plan.notes == ("plan: monitors: norm, max are recorded for all kinds",)


def test_migrate_writes_the_plan_that_means_the_same(tmp_path: Any) -> None:
    config, migrated = tmp_path / "monitor.json", tmp_path / "plan.yaml"
    config.write_text(
        json.dumps({"targets": {"fc": {}}, "wg_distribution": True, "mg_direction": True, "ops": ["norm", "nans"]})
    )
    migrated.write_text(plan_text(config))
    assert load_plan(read_plan_file(migrated)).model_dump() == load_plan(config).model_dump()
    assert "# not the same: monitor.json: mg_direction:" in migrated.read_text()
