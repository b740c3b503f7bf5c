"""Files that people have for mindstudio-probe become plans that record the same, or say what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainprobe.engine.plan_loading import load_plan
from trainprobe.errors import PlanError

SHIPPED = {
    "task": "statistics",
    "dump_path": "./dump_path",
    "rank": [],
    "step": [],
    "level": "L1",
    "extra_info": True,
    "async_dump": False,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"},
}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        load_plan({"dump_path": "x", **config})
    return str(caught.value)


def section(**settings: Any) -> dict[str, Any]:
    return {"dump_path": "x", "statistics": settings}


def test_the_file_that_the_tool_ships_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHIPPED))
    plan = load_plan(path)
    assert (plan.level, plan.task, plan.output, plan.step, plan.rank) == (
        "L1",
        "statistics",
        Path("dump_path"),
        ("all",),
        ("all",),
    )
    assert plan.notes == ()


def test_its_defaults_are_that_tools_and_not_a_plans() -> None:
    plan = load_plan({"dump_path": "x"})
    assert (plan.level, plan.ops_scope) == ("L1", "focus")


@pytest.mark.parametrize(
    "keys", [{"statistics": {}}, {"tensor": {}}, {"risk_level": "ALL"}, {"extra_info": False, "level": "L0"}]
)
def test_it_is_recognised_by_its_keys(keys: dict[str, Any]) -> None:
    load_plan(keys)


def test_a_plan_with_one_of_its_keys_is_told_the_right_one() -> None:
    with pytest.raises(PlanError, match="unknown key 'risk_level' — did you mean 'ops_scope'"):
        load_plan({"output": "x", "risk_level": "ALL"})


def test_keyword_arguments_stand_over_the_file() -> None:
    assert load_plan(SHIPPED, level="mix").level == "mix"


def test_steps_and_ranks_are_numbers_texts_and_ranges() -> None:
    plan = load_plan({"dump_path": "x", "step": [1, "3", "5-7"], "rank": [0]})
    assert [n for n in range(10) if plan.wants_step(n)] == [1, 3, 5, 6, 7]
    assert [n for n in range(3) if plan.wants_rank(n)] == [0]


@pytest.mark.parametrize(("risk", "scope"), [("ALL", "all"), ("CORE", "core"), ("FOCUS", "focus"), (None, "focus")])
def test_the_risk_level_becomes_the_scope_of_ops(risk: str | None, scope: str) -> None:
    assert load_plan({"dump_path": "x", "risk_level": risk}).ops_scope == scope


def test_extra_info_switches_stacks_and_tree() -> None:
    plan = load_plan({"dump_path": "x", "extra_info": False})
    assert (plan.stacks, plan.construct) == (False, False)


def test_task_tensor_writes_a_pt_file_a_tensor() -> None:
    plan = load_plan({"task": "tensor", "dump_path": "x", "tensor": {"list": ["relu"]}})
    assert (plan.task, plan.tensor_format, plan.op_selected("Functional.relu")) == ("tensor", "pt", True)


@pytest.mark.parametrize(("mode", "summary"), [("statistics", "statistics"), ("md5", "md5"), ("xor", "checksum")])
def test_the_summary_mode_is_carried_over(mode: str, summary: str) -> None:
    assert load_plan(section(summary_mode=mode)).summary == summary


def test_another_fingerprint_than_the_one_asked_for_is_told() -> None:
    assert "'xor' becomes the 64-bit checksum" in load_plan(section(summary_mode="xor")).notes[0]


def test_a_list_of_summary_modes_becomes_statistics() -> None:
    plan = load_plan(section(summary_mode=["max", "l2norm", "nan count", "hash"]))
    assert (plan.statistics, plan.summary) == (("max", "norm", "nan"), "both")


def test_counts_that_are_merged_are_told() -> None:
    plan = load_plan(section(summary_mode=["negative inf count", "positive inf count"]))
    assert plan.statistics == ("inf",)
    assert "counted together" in plan.notes[0]


@pytest.mark.parametrize(
    ("mode", "phases", "data"),
    [
        (["forward"], ("forward",), ("input", "kwargs", "output", "parameters")),
        (["backward"], ("backward",), ("input", "kwargs", "output", "parameter_gradients")),
        (
            ["input"],
            ("forward", "backward", "optimizer"),
            ("input", "kwargs", "parameters", "parameter_gradients"),
        ),
        (["forward", "output"], ("forward",), ("output", "parameters")),
    ],
)
def test_the_data_mode_chooses_phases_and_data(mode: list[str], phases: tuple[str, ...], data: tuple[str, ...]) -> None:
    plan = load_plan(section(data_mode=mode))
    assert (plan.phases, plan.data) == (phases, data)


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("relu", "Functional.relu", "Functional.linear"),
        ("Functional.relu.0.forward", "Functional.relu", "Functional.relu6"),
        ("Tensor.", "Tensor.add", "Functional.relu"),
        ("a*b", "Torch.a*b", "Torch.axb"),
    ],
)
def test_list_selects_ops_by_substring_or_full_name(name: str, yes: str, no: str) -> None:
    plan = load_plan(section(list=[name]))
    assert (plan.op_selected(yes), plan.op_selected(no)) == (True, False)


def test_list_selects_modules_at_level_l0() -> None:
    plan = load_plan({"level": "L0", **section(list=["mlp", "Module.head.Linear.forward.0"])})
    assert [plan.module_selected(n) for n in ("layers.0.mlp.fc1", "head", "heads")] == [True, True, False]


def test_one_call_of_an_op_cannot_be_chosen_and_that_is_told() -> None:
    assert "all calls of Functional.relu are recorded" in load_plan(section(list=["Functional.relu.3.forward"])).notes[0]


def test_a_name_of_a_class_is_told_to_be_none() -> None:
    assert "not in the names of classes" in load_plan({"level": "L0", **section(list=["Linear"])}).notes[0]


def test_list_at_level_mix_records_all_and_tells() -> None:
    plan = load_plan({"level": "mix", **section(list=["layers.0"])})
    assert plan.module_selected("head")
    assert "no equivalent: all is recorded" in plan.notes[0]


def test_tensor_list_saves_values_by_substring() -> None:
    plan = load_plan(section(tensor_list=["relu"]))
    assert plan.detail_for("op", "Functional.relu").wants_tensor
    assert not plan.detail_for("op", "Functional.linear").wants_tensor


def test_scope_is_carried_over() -> None:
    assert load_plan(section(scope=["Functional.a.0.forward", "Functional.b.0.forward"])).scope == (
        "Functional.a.0.forward",
        "Functional.b.0.forward",
    )


def test_a_slice_applies_to_dimensions_of_its_size() -> None:
    cut = load_plan(section(slice=[{"dim": 0, "size": 8, "begin": 1, "end": 3}])).base_detail
    assert cut.index((8, 2)) == (slice(1, 3), slice(None))
    assert cut.index((7, 2)) is None


def test_structure_records_the_tree_without_numbers() -> None:
    plan = load_plan({"task": "structure", "dump_path": "x"})
    assert (plan.statistics, plan.level, plan.construct) == ((), "mix", True)


def test_nan_check_counts_nan_and_infinities() -> None:
    plan = load_plan({"task": "nan_check", "dump_path": "x"})
    assert {"nan", "inf"} <= set(plan.statistics)
    assert "nan_check counts NaN" in plan.notes[0]


def test_a_switched_off_file_records_nothing_and_tells_that_it_is_not_watched() -> None:
    plan = load_plan({"dump_path": "x", "dump_enable": False})
    assert plan.level == "off"
    assert "the file is not watched" in plan.notes[0]


def test_a_live_comparison_is_told_to_be_none() -> None:
    plan = load_plan({"task": "tensor", "dump_path": "x", "tensor": {"bench_path": "y", "diff_nums": 1}})
    assert "not compared while training" in plan.notes[0]


def test_a_key_that_nobody_knows_is_told() -> None:
    assert load_plan({"dump_path": "x", "zzzzzz": 1}).notes == ("plan: zzzzzz: unknown key, not used",)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"dump_paht": "y"}, "plan: dump_paht: unknown key — did you mean 'dump_path'?"),
        ({"statistics": {"lisst": []}}, "plan: statistics.lisst: unknown key — did you mean 'list'?"),
        ({"statistics": []}, None),
        ({"statistics": "x"}, "plan: statistics: 'x' cannot be used: expected a section"),
        ({"task": "statistic"}, "did you mean 'statistics'?"),
        ({"task": "acc_check"}, "plan: task: 'acc_check': re-running ops against a reference is not part of a plan"),
        ({"task": "free_benchmark"}, "perturbing ops changes the training"),
        ({"level": "L2"}, "plan: level: 'L2' (kernel dumps of the device) has no equivalent"),
        ({"level": "L9"}, "plan: level: 'L9' cannot be used"),
        ({"risk_level": "FOCSU"}, "did you mean 'FOCUS'?"),
        ({"load": {"path": "x"}}, "replaying recorded inputs changes the training"),
        ({"statistics": {"data_mode": ["forwards"]}}, "did you mean 'forward'?"),
        ({"statistics": {"summary_mode": "md6"}}, "did you mean 'md5'?"),
        ({"statistics": {"summary_mode": ["maxx"]}}, "did you mean 'max'?"),
        ({"statistics": {"summary_mode": 3}}, "plan: statistics.summary_mode: '3' is not a statistic"),
        ({"statistics": {"list": [3]}}, "plan: statistics.list: 3 cannot be used: expected a list of texts"),
        ({"statistics": {"slice": [3]}}, "plan: statistics.slice[0]: 3 cannot be used"),
        ({"statistics": {"scope": ["a"]}}, "plan: scope[1]: is missing"),
        ({"extra_info": "yes"}, "'yes' cannot be used: expected true or false"),
        ({"step": ["x"]}, "plan: step: 'x' is not a number or a range"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_with_the_reason(config: dict[str, Any], sentence: str | None) -> None:
    if sentence is None:
        assert load_plan({"dump_path": "x", **config}).notes == ()
    else:
        assert sentence in refusal(config)
