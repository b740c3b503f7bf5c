"""Files that people have for mindstudio-probe become plans that record the same, or say what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainprobe.engine.plan.loading import load_plan
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


@pytest.mark.parametrize(
    ("mode", "summary"), [("statistics", "statistics"), ("md5", "statistics_and_md5"), ("xor", "checksum")]
)
def test_the_summary_mode_is_carried_over(mode: str, summary: str) -> None:
    assert load_plan(section(summary_mode=mode)).summary == summary


@pytest.mark.parametrize(
    ("modes", "summary"),
    [
        (["md5"], "md5"),
        (["max", "md5"], "statistics_and_md5"),
        (["statistics", "md5"], "statistics_and_md5"),
        (["hash"], "checksum"),
    ],
)
def test_a_list_of_summary_modes_keeps_the_kind_of_checksum(modes: list[str], summary: str) -> None:
    plan = load_plan(section(summary_mode=modes))
    assert (plan.summary, plan.notes) == (summary, ())


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
    ("mode", "phases", "sides", "more"),
    [
        (["forward"], ("forward",), ("input", "output"), ("parameters",)),
        (["backward"], ("backward",), ("input", "output"), ("parameter_gradients",)),
        (["input"], ("forward", "backward", "optimizer"), ("input",), ("parameters", "parameter_gradients")),
        (["forward", "output"], ("forward",), ("output",), ("parameters",)),
    ],
)
def test_the_data_mode_chooses_phases_and_sides_of_entries(
    mode: list[str], phases: tuple[str, ...], sides: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """A side is that of a call's entry: the input of a backward call are the gradients of the outputs."""
    plan = load_plan(section(data_mode=mode))
    assert (plan.phases, plan.entry_sides, plan.data) == (phases, sides, ("input", "kwargs", "output", *more))


def test_list_selects_by_the_full_names_of_calls() -> None:
    plan = load_plan({"level": "mix", **section(list=["layers.0", "Functional.relu.3.forward"])})
    assert plan.entries == ("layers.0", "Functional.relu.3.forward")
    assert (plan.modules, plan.ops, plan.notes) == (("**",), ("**",), ())


@pytest.mark.parametrize(
    ("names", "yes", "no"),
    [
        (["relu"], "Functional.relu", "Functional.linear"),
        (["Functional.relu.0.forward"], "Functional.relu", "Functional.relu6"),
        (["a*b"], "Torch.a*b", "Torch.axb"),
        (["relu", "Tensor."], "Functional.linear", None),
        (["backward"], "Functional.linear", None),
        (["ward"], "Functional.linear", None),
        (["3"], "Functional.linear", None),
    ],
)
def test_ops_that_no_entry_of_a_list_can_name_are_not_looked_at(names: list[str], yes: str, no: str | None) -> None:
    plan = load_plan(section(list=names))
    assert plan.op_selected(yes)
    assert no is None or not plan.op_selected(no)


def test_modules_that_no_entry_of_a_list_can_name_are_not_looked_at() -> None:
    plan = load_plan({"level": "L0", **section(list=["Module.head.Linear.forward.0"])})
    assert [plan.module_selected(n) for n in ("layers.0.mlp.fc1", "head", "heads")] == [False, True, False]
    assert load_plan({"level": "L0", **section(list=["Linear", "Module.head.Linear.forward.0"])}).modules == ("**",)


def test_a_list_for_graph_mode_is_told() -> None:
    assert "name-regex" in load_plan(section(list=["name-regex(Default/.+)"])).notes[0]


def test_tensor_list_saves_values_by_substring() -> None:
    plan = load_plan(section(tensor_list=["relu"]))
    assert plan.detail_for("op", "Functional.relu").wants_tensor
    assert not plan.detail_for("op", "Functional.linear").wants_tensor


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("Linear", ["layers.0.fc", "layers.10.fc"]),
        ("layers.1", ["layers.10.fc"]),
        ("Module.layers.0.fc.Linear.forward.0", ["layers.0.fc"]),
        ("Module.fc", []),
        ("Norm", ["norm"]),
        ("Functional.linear.3.forward", []),
    ],
)
def test_tensor_list_knows_the_classes_of_modules_and_full_names(text: str, saved: list[str]) -> None:
    plan = load_plan({"level": "mix", **section(tensor_list=[text])})
    modules = {"layers.0.fc": "Linear", "layers.10.fc": "Linear", "norm": "LayerNorm"}
    assert [name for name, kind in modules.items() if plan.detail_for("module", name, kind).wants_tensor] == saved
    assert plan.detail_for("op", "Functional.linear").wants_tensor == text.startswith("Functional")
    assert not plan.detail_for("op", "Functional.linear_x").wants_tensor


def test_tensor_list_changes_nothing_where_all_tensors_are_stored() -> None:
    plan = load_plan({"task": "tensor", "level": "mix", "tensor": {"list": ["relu"], "tensor_list": ["linear"]}})
    assert plan.tensor_entries == ()
    assert [note for note in plan.notes if "tensor_list" in note] == [
        "plan: tensor.tensor_list: not used, as there: the values of all that is selected are stored"
    ]


def test_what_a_task_that_is_replaced_selects_is_taken_over_and_the_rest_is_told() -> None:
    plan = load_plan({"task": "run_ut", "run_ut": {"white_list": ["conv1d"], "black_list": ["relu"], "rank_list": []}})
    assert (plan.task, plan.entries) == ("tensor", ("conv1d",))
    assert [note for note in plan.notes if "black_list" in note and "rank_list" not in note]
    plan = load_plan({"task": "overflow_check", "overflow_check": {"overflow_nums": 3}})
    assert any("overflow_check.overflow_nums: not used" in note for note in plan.notes)


def test_free_benchmark_runs_operators_again_after_the_step() -> None:
    section = {"list": ["relu"], "fuzz_stage": "forward", "pert_mode": "bit_noise", "handler_type": "fix"}
    plan = load_plan({"task": "free_benchmark", "step": [3], "free_benchmark": section})
    assert (plan.level, plan.op_check) == ("off", {"condition": "last-bit", "ops": ["relu"], "step": [3]})
    assert [note.split(": ")[1] for note in plan.notes[1:]] == ["free_benchmark.fuzz_stage", "free_benchmark.handler_type"]
    assert "changes the training" in plan.notes[-1]
    assert load_plan({"dump_path": "x", "task": "free_benchmark"}).op_check == {"condition": "precision"}
    assert load_plan({"task": "free_benchmark", "free_benchmark": {"pert_mode": "to_cpu"}}).op_check is True
    with pytest.raises(PlanError, match="did you mean 'bit_noise'"):
        load_plan({"task": "free_benchmark", "free_benchmark": {"pert_mode": "bit_nois"}})


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


def test_a_switched_off_file_records_nothing() -> None:
    plan = load_plan({"dump_path": "x", "dump_enable": False})
    assert plan.level == "off"
    assert "only PrecisionDebugger looks at this key" in plan.notes[0]
    assert load_plan({"dump_path": "x", "dump_enable": True}).notes == ()


def test_a_live_comparison_is_told_to_be_none() -> None:
    plan = load_plan({"task": "tensor", "dump_path": "x", "tensor": {"bench_path": "y", "diff_nums": 1}})
    assert "not compared while training" in plan.notes[0]


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"zzzzzz": 1}, "plan: zzzzzz: unknown key, not used"),
        ({"dump_paht": "y"}, "plan: dump_paht: unknown key, not used — did you mean 'dump_path'?"),
        ({"statistics": {"lisst": []}}, "plan: statistics.lisst: unknown key, not used — did you mean 'list'?"),
    ],
)
def test_a_key_that_nobody_knows_is_told(config: dict[str, Any], note: str) -> None:
    assert load_plan({"dump_path": "x", **config}).notes == (note,)


@pytest.mark.parametrize(
    ("task", "fields", "note"),
    [
        ("acc_check", {"task": "tensor", "level": "L1"}, "op-check DUMP"),
        ("run_ut", {"task": "tensor"}, "op-check DUMP"),
        ("diff_check", {"task": "tensor"}, "dump-compare"),
        ("overflow_check", {"task": "statistics", "statistics": ("max", "min", "mean", "norm", "nan", "inf")}, "overflow flag"),
        ("exception_dump", {"task": "statistics"}, "black_box"),
        (
            "grad_probe",
            {"level": "off", "monitor": {"gradients": {"names": ["**fc**"]}, "parameters": False, "activations": False}},
            "docs/monitor.md",
        ),
        (
            "free_benchmark",
            {"level": "off", "op_check": {"condition": "precision"}},
            "run again with perturbed inputs after it",
        ),
    ],
)
def test_old_tasks_record_what_is_nearest_and_tell_the_difference(task: str, fields: dict[str, Any], note: str) -> None:
    sections = {"grad_probe": {"grad_level": "L1", "param_list": ["fc"], "bounds": [-1, 0, 1]}, "run_ut": {"white_list": []}}
    plan = load_plan({"dump_path": "x", "task": task, **sections})
    assert {name: getattr(plan, name) for name in fields} == fields
    assert note in plan.notes[0]


def test_seeds_are_for_the_script_to_set() -> None:
    note = load_plan({"dump_path": "x", "seed": 7, "is_deterministic": True}).notes[0]
    assert "call `from trainprobe.pytorch import seed_all; seed_all(seed=7, mode=True)`" in note
    assert "call start(), stop() and step()" in load_plan({"dump_path": "x", "enable_dataloader": True}).notes[0]


@pytest.mark.parametrize("release", ["1.3", "26.2"])
def test_the_configurations_that_the_releases_ship_are_read(release: str) -> None:
    older = {
        "enable_dataloader": False,
        "overflow_check": {"overflow_nums": 1, "check_mode": "all"},
        "run_ut": {"white_list": [], "black_list": [], "error_data_path": "./"},
        "grad_probe": {"grad_level": "L1", "param_list": [], "bounds": [-1, 0, 1]},
        "free_benchmark": {"scope": [], "list": [], "fuzz_device": "npu", "pert_mode": "improve_precision"},
    }
    assert load_plan({**SHIPPED, **(older if release == "1.3" else {})}).notes == ()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"statistics": []}, None),
        ({"statistics": "x"}, "plan: statistics: 'x' cannot be used: expected a section"),
        ({"task": "statistic"}, "did you mean 'statistics'?"),
        (
            {"level": "L2"},
            "plan: level: 'L2' (kernel dumps) is what MindSpore itself writes, with the settings that `trainprobe kernel-",
        ),
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
