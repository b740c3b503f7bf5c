"""The bench of silent bugs: its programs, their one switch, and the figures of its page."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from benchmarks.sight.case import CLASSES, Case
from benchmarks.sight.catalogue import CASES
from benchmarks.sight.healthy import HEALTHY
from benchmarks.sight.judge import judged
from benchmarks.sight.running import alarms, run

PAGE = (Path(__file__).parents[1] / "docs" / "sight_bench.md").read_text()
SAMPLE = (
    "ratio_always_one",
    "balance_sums_to_one",
    "guessed_tokens_visible",
    "broadcast_over_the_batch",
    "noise_is_given",
    "second_task_overwritten",
)


def finding(rule, step, name, message, severity="warning"):
    """Return a finding as it is written to findings.jsonl."""
    return {"rule": rule, "step": step, "severity": severity, "message": message, "site": {"name": name} if name else None}


def test_there_are_sixty_cases_at_least_three_a_class_and_half_after_public_threads():
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)
    assert all(sum(case.number == number for case in CASES) >= 3 for number in CLASSES)
    assert 2 * sum(bool(case.source) for case in CASES) >= len(CASES)
    assert len(HEALTHY) >= 40


@pytest.mark.parametrize("program", sorted({case.program for case in CASES}, key=lambda program: program.__name__))
def test_a_bug_differs_from_its_twin_by_one_switch(program):
    """Each comparison with `bug` names a case of the program, and each case is compared with once."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(program)))
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and ast.unparse(node.left) == "bug"]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "bug"]
    names = [node.comparators[0].value for node in compared]
    assert sorted(names) == sorted(case.name for case in CASES if case.program is program)
    assert len(uses) == len(compared)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_page_says_what_is_found(name):
    (case,) = (case for case in CASES if case.name == name)
    line = judged(case, run(case.program, name, ranks=case.ranks), run(case.program, "", ranks=case.ranks))
    assert line["alarms"] == []
    told = "named first" if line["named"] else "found" if line["found"] else "missed"
    (row,) = re.findall(rf"^\| `{name}` \| \d+ \| ([a-z ]+) \|", PAGE, re.MULTILINE)
    assert row == told


def test_two_ranks_and_a_healthy_loop_run():
    (case,) = (case for case in CASES if case.name == "counters_apart")
    assert all(f["place"]["world_size"] == 2 for f in run(case.program, "counters_apart", ranks=2))
    assert alarms(run(HEALTHY["closure_lbfgs"])) == []


def test_a_program_that_fails_is_told():
    with pytest.raises(RuntimeError, match="by zero"):
        run(lambda: 1 // 0)


def test_the_judgement_asks_for_kind_place_and_time_and_takes_off_what_the_twin_has():
    case = Case("b", 5, lambda bug: None, r"net\..*", "clear", "the gradient was cleared", by=20)
    twin = [finding("lr", 3, "lr", "rate")]
    late, other = finding("x", 30, "net.a", "was cleared"), finding("lr", 5, "lr", "cleared rate")
    assert not judged(case, [late, other], twin)["found"]
    elsewhere = finding("x", 8, "head", "was cleared")
    right, note = finding("x", 9, "net.a", "was cleared"), finding("x", 1, "net.b", "was cleared", "info")
    assert judged(case, [note, elsewhere, right], twin)["found"] and not judged(case, [elsewhere, right], twin)["named"]
    line = judged(case, [other, right], twin)
    assert line["named"] and line["alarms"] == ["lr (step 3) lr: rate"]
