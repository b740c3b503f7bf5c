"""What a plan accepts, what it answers, and what it says about mistakes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any, get_args

import pytest

from trainprobe.engine.core.row_schema import StatisticName
from trainprobe.engine.plan.detail import Slice
from trainprobe.engine.plan.field_types import DetailRule, Histogram, SliceRule
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.subplans import sections
from trainprobe.engine.stats import STATISTICS
from trainprobe.errors import PlanError


def problem(*args: Any, **fields: Any) -> str:
    with pytest.raises(PlanError) as caught:
        load_plan(*args, **fields)
    return str(caught.value)


def test_the_names_of_statistics_are_those_that_exist() -> None:
    assert set(get_args(StatisticName)) == set(STATISTICS)


@pytest.mark.parametrize("model", [Plan, DetailRule, SliceRule, Histogram])
def test_every_field_says_what_it_does(model: type[Plan]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_loading_a_plan_imports_neither_a_tensor_library_nor_numpy() -> None:
    code = """import sys
from trainprobe.engine.plan.loading import load_plan
load_plan(record="L0")
print({'torch', 'numpy', 'mindspore'} & {*sys.modules})"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_plan().level = "L1"  # type: ignore[misc]


RICH = {
    "level": "mix",
    "step": [10, "100-110", "every 50"],
    "tensors": "layers.0.**",
    "histogram": {"bins": 8},
    "max_bytes": "10 GiB",
    "scope": ["a", "b"],
    "details": [
        {"match": "**", "summary": "checksum"},
        {"match": "layers.*.mlp", "task": "tensor", "slice": {"dim": 0, "size": 2}},
    ],
}


def test_a_plan_written_out_and_read_again_is_the_same_plan() -> None:
    plan = load_plan(RICH)
    assert load_plan(plan.model_dump(mode="json", exclude={"sinks"})) == plan


def test_a_plan_can_be_pickled() -> None:
    plan = load_plan(RICH)
    assert plan.wants_step(105)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_keyword_arguments_stand_over_the_source() -> None:
    assert load_plan(load_plan(RICH), level="L1").level == "L1"
    assert load_plan(RICH, level="L1").step == (10, "100-110", "every 50")


def test_the_environment_decides_on_error_only_where_the_plan_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINPROBE_ON_ERROR", "raise")
    assert load_plan().on_error == "raise"
    assert load_plan(on_error="continue").on_error == "continue"


def test_a_wrong_environment_variable_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINPROBE_ON_ERROR", "rise")
    assert problem() == (
        "environment variable TRAINPROBE_ON_ERROR: on_error: 'rise' cannot be used: "
        "expected one of continue, raise — did you mean 'raise'?"
    )


def test_no_plan_judges_and_dumps_nothing() -> None:
    for plan in (load_plan(), load_plan({}), load_plan(output="x", rank=0, sinks="jsonl", console=False), Plan(output="x")):
        assert (plan.record, plan.level, plan.audit) == ("nothing", "off", True)
        assert set(plan.monitor) >= {"gradients", "parameters", "scalars"}
    assert load_plan().sinks == ("parquet", "csv") and load_plan(sinks="jsonl").sinks == ("jsonl",)


@pytest.mark.parametrize("program", ["monitor", "audit", "black_box", "config_check", "op_check", "replay"])
def test_a_plan_that_asks_for_one_program_alone_dumps_nothing(program: str) -> None:
    plan = load_plan({program: True})
    asked = [name for name in sections() if getattr(plan, name)]
    assert (plan.level, asked) == ("off", [program])
    assert load_plan({program: True}, record="mix").level == "mix"


HOW = ("output", "on_existing", "rank", "sinks", "csv_layout", "csv_steps", "nan_tokens", "console", "on_error", "reuse")
HOW += ("native", "control", "told", "join_runs")


@pytest.mark.parametrize("name", [name for name in Plan.model_fields if name not in (*HOW, *sections(), "record", "level")])
def test_a_field_that_says_what_is_dumped_asks_for_a_dump(name: str) -> None:
    value = {"step": [3], "scope": ("a", "b"), "details": [{"match": "a"}], "slice": [{"dim": 0}]}.get(
        name, Plan.model_fields[name].default
    )
    plan = load_plan({name: value, "monitor": True})
    assert (plan.record, plan.level) == ("L0", "L0")


@pytest.mark.parametrize(
    ("record", "level"), [("nothing", "off"), ("L0", "L0"), ("L1", "L1"), ("mix", "mix"), ("debug", "debug")]
)
def test_record_and_level_are_two_names_of_one_field(record: str, level: str) -> None:
    plans = [load_plan(record=record), load_plan(level=level), load_plan({"level": "L1"}, record=record)]
    plans += [load_plan({"record": "L1"}, level=level), load_plan(load_plan(level="L1"), record=record)]
    assert {(plan.record, plan.level) for plan in plans} == {(record, level)}


def test_record_and_level_that_differ_are_refused_and_a_wrong_one_is_named_alone() -> None:
    assert problem({"record": "L1", "level": "off"}) == (
        "plan: record: 'L1' and level: 'nothing' cannot both be: leave `level`, its older name, out"
    )
    assert problem(record="L3").splitlines() == [
        "keyword argument: record: 'L3' cannot be used: expected one of nothing, L0, L1, mix, debug — did you mean 'L1'?"
    ]
    assert problem(level="L3").count("\n") == 0


def test_level_off_wants_no_step() -> None:
    assert not load_plan(level="off").wants_step(0)


def test_steps_ranks_and_micro_batches_are_chosen_by_ranges() -> None:
    plan = load_plan(step=[10, "100-110"], rank="0-3", micro="every 2")
    assert [plan.wants_step(n) for n in (9, 10, 100, 110, 111)] == [False, True, True, True, False]
    assert [plan.wants_rank(n) for n in (0, 3, 4)] == [True, True, False]
    assert [plan.wants_micro(n) for n in (0, 1, 2, None)] == [True, False, True, True]


def test_the_last_step_is_known_unless_there_is_none() -> None:
    assert load_plan(step=[10, "every 50 to 120"]).last_step() == 100
    assert load_plan(step="every 50").last_step() is None


def test_a_step_range_that_never_came_is_named_as_it_was_written() -> None:
    assert load_plan(step=[10, "100-110"]).pending_steps(50) == ("100-110",)


def test_names_are_chosen_by_patterns_of_their_kind() -> None:
    plan = load_plan(modules=["layers.*", "!layers.1"], ops="Functional.*", parameters="**.weight")
    assert [plan.module_selected(n) for n in ("layers.0", "layers.1", "layers.0.mlp")] == [True, False, False]
    assert [plan.op_selected(n) for n in ("Functional.linear", "Tensor.add")] == [True, False]
    assert [plan.parameter_selected(n) for n in ("layers.0.weight", "layers.0.bias")] == [True, False]


def test_later_details_win_and_only_where_they_say_something() -> None:
    plan = load_plan(RICH)
    detail = plan.detail_for("module", "layers.3.mlp")
    assert (detail.task, detail.summary, detail.slice) == ("tensor", "checksum", (Slice(0, 0, 2),))
    assert plan.detail_for("op", "Functional.linear").task == "statistics"


def test_values_are_saved_where_tensors_matches() -> None:
    assert load_plan(tensors="head").detail_for("module", "head").wants_tensor
    assert not load_plan(tensors="head").detail_for("module", "body").wants_tensor


@pytest.mark.parametrize(
    ("summary", "wants"),
    [
        ("statistics", (1, 0, 0)),
        ("checksum", (0, 1, 0)),
        ("md5", (0, 0, 1)),
        ("both", (1, 1, 0)),
        ("statistics_and_md5", (1, 0, 1)),
    ],
)
def test_a_summary_says_what_must_be_computed(summary: str, wants: tuple[int, int, int]) -> None:
    detail = load_plan(summary=summary).base_detail
    assert (detail.wants_statistics, detail.wants_checksum, detail.wants_crc32) == wants


@pytest.mark.parametrize(
    ("rule", "shape", "index"),
    [
        ({"dim": 0, "end": 2}, (5, 3), (slice(0, 2), slice(None))),
        ({"dim": -1, "begin": 1, "size": 1}, (5, 3), (slice(None), slice(1, 2))),
        ({"dim": 1, "begin": -2}, (5, 3), (slice(None), slice(-2, None))),
        ({"dim": 2, "end": 2}, (5, 3), None),
        ({"dim": 0, "end": 2, "length": 4}, (5, 3), None),
        ({"dim": 0, "end": 2, "length": 5}, (5,), (slice(0, 2),)),
    ],
)
def test_a_slice_becomes_the_index_of_what_is_stored(rule: dict[str, int], shape: tuple[int, ...], index: object) -> None:
    assert load_plan(slice=rule).base_detail.index(shape) == index


@pytest.mark.parametrize(
    ("text", "size"), [(7, 7), ("7", 7), ("10 GiB", 10 << 30), ("500 MB", 500_000_000), ("1.5k", 1536), ("0", 0)]
)
def test_sizes_are_read_with_their_unit(text: object, size: int) -> None:
    assert load_plan(max_bytes=text).max_bytes == size


def test_equal_bins_become_edges() -> None:
    histogram = load_plan(histogram={"bins": 4, "low": 0, "high": 1}).histogram
    assert isinstance(histogram, Histogram)
    assert histogram.boundaries() == (0, 0.25, 0.5, 0.75, 1)


def test_a_pattern_without_a_match_is_told_with_the_nearest_name_for_each_field() -> None:
    plan = load_plan(modules="layer.0", details=[{"match": "haed"}])
    assert plan.unmatched(["layers.0", "head"]) == [("layer.0", "layers.0")]
    assert plan.unmatched(["layers.0", "head"], "details") == [("haed", "head")]


WRONG: list[tuple[dict[Any, Any], str]] = [
    ({"levle": "L0"}, "plan: unknown key 'levle' — did you mean 'level'?"),
    ({1: 2}, "plan: unknown key 1 (`trainprobe plan --explain` lists the keys)"),
    ({"output": "x", "dump_path": "y"}, "plan: unknown key 'dump_path' — did you mean 'output'?"),
    ({"level": "l1"}, "plan: level: 'l1' cannot be used: expected one of off, L0, L1, mix, debug — did you mean 'L1'?"),
    ({"level": False}, "put the text in quotes"),
    ({"level": None}, "(the key has no value: remove it to have its default)"),
    ({"step": [10, "5-3"]}, "plan: step: '5-3' ends at 3, before it begins at 5: swap the two numbers"),
    ({"step": 1.5}, "plan: step[0]: 1.5 cannot be used: expected a whole number or a text"),
    ({"step": []}, "plan: step: the list is empty and would select nothing"),
    ({"rank": True}, "plan: rank[0]: True cannot be used: expected a whole number or a text"),
    ({"modules": []}, "plan: modules: the list is empty"),
    ({"ops": "re:("}, "plan: ops: 're:(' is not a regular expression"),
    ({"stacks": "yes"}, "plan: stacks: 'yes' cannot be used: expected true or false"),
    ({"stacks": 1}, "plan: stacks: 1 cannot be used: expected true or false"),
    ({"statistics": ["max", "nrom"]}, "did you mean 'norm'?"),
    ({"phases": []}, "plan: phases: [] cannot be used: expected a list of at least 1"),
    ({"histogram": 3}, "plan: histogram: 3 cannot be used: expected a section of `key: value` lines or 'exponent'"),
    ({"histogram": "exp"}, "plan: histogram: 'exp' cannot be used: expected 'exponent' — did you mean 'exponent'?"),
    ({"histogram": {"binz": 2}}, "plan: histogram.binz: unknown key 'binz' — did you mean 'bins'?"),
    ({"histogram": {"edges": [1, 1]}}, "plan: histogram: the edges of a histogram must be at least two and rise"),
    ({"histogram": {"edges": [0, 1], "bins": 2}}, "plan: histogram: a histogram has either `edges` or `bins`"),
    ({"quantiles": [2]}, "plan: quantiles[0]: 2 cannot be used: expected at most 1"),
    ({"slice": [{"begin": 0}]}, "plan: slice[0].dim: is missing"),
    ({"slice": [{"dim": 0, "end": 0}]}, "plan: slice[0]: the slice ends at 0 and begins at 0, so it is empty"),
    ({"details": [{"match": "a", "tsk": 1}]}, "plan: details[0].tsk: unknown key 'tsk' — did you mean 'task'?"),
    ({"details": [{"match": "re:["}]}, "plan: details[0].match: 're:[' is not a regular expression"),
    ({"details": "x"}, "plan: details[0]: 'x' cannot be used: expected a section of `key: value` lines"),
    ({"max_bytes": "10 Gobs"}, "plan: max_bytes: '10 Gobs' is not a size"),
    ({"max_bytes": -1}, "plan: max_bytes: -1 cannot be used: expected at least 0"),
    ({"scope": ["a"]}, "plan: scope[1]: is missing"),
    ({"scope": ["a", "b", "c"]}, "plan: scope: "),
    ({"output": 3}, "plan: output: 3 cannot be used: expected the path of a folder"),
    ({"monitor": "x"}, "plan: monitor: 'x' cannot be used: expected a section of `key: value` lines or true or false"),
    ({"sinks": "tensorbord"}, "plan: sinks: 'tensorbord' is not a writer"),
]


@pytest.mark.parametrize(("fields", "sentence"), WRONG, ids=[str(fields) for fields, _ in WRONG])
def test_a_mistake_is_told_with_the_key_the_value_and_what_to_write(fields: dict[Any, Any], sentence: str) -> None:
    assert sentence in problem(fields)


@pytest.mark.parametrize("fields", [fields for fields, _ in WRONG], ids=str)
def test_no_message_carries_the_raw_text_of_the_validator(fields: dict[Any, Any]) -> None:
    text = problem(fields)
    assert not any(
        raw in text for raw in ("pydantic", "Input should", "type=", "validation error", "Value error", "another kind")
    )


def test_all_problems_are_told_at_once() -> None:
    assert len(problem({"level": "x", "step": "y"}, stacks=3).splitlines()) == 3


def test_a_mistake_in_a_keyword_argument_is_told_as_one() -> None:
    assert problem(RICH, level="x").startswith("keyword argument: level: 'x'")


def test_the_class_itself_raises_a_plan_error_too() -> None:
    with pytest.raises(PlanError, match="plan: level: 'x' cannot be used"):
        Plan(level="x")  # type: ignore[arg-type]


def test_each_problem_in_a_section_names_it_once() -> None:
    said = problem(monitor={"activations": {"nmes": ["*"]}, "rulez": []}).splitlines()
    assert said[0] == "keyword argument: monitor: activations.nmes: unknown key 'nmes' — did you mean 'names'?"
    assert said[1].startswith("keyword argument: monitor: rulez: unknown key 'rulez'")
    assert len(said) == 2
