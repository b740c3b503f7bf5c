"""Programs in manners that others write them, under `trainprobe run default`: healthy ones get no word, faults keep their name.

Each runs in processes of its own, with the observer of `tests/foreign` and without trainprobe first: no bit may change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.foreign import running
from tests.foreign.catalog import Program
from tests.matrices import covered
from trainprobe.monitor.run_folder import find_logs, frames_of_log

VARIANTS = Path(__file__).parents[1] / "foreign" / "variants"
RANKS = "torchrun --standalone --nproc_per_node 2 {here}/"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]

# start → steps that are recorded, over all ranks
HEALTHY = {
    f"{RANKS}fsdp2_evaluated.py before": 60,
    f"{RANKS}fsdp2_evaluated.py between": 60,
    f"{RANKS}fsdp2_evaluated.py nested": 60,
    "{here}/dummy_update.py dcp": 45,
    "{here}/dummy_update.py hand": 45,
    "{here}/dummy_update.py tried": 45,
    "{here}/dummy_update.py warm": 45,
    "{here}/average_under_root.py task": 60,
    "{here}/average_under_root.py swa": 60,
    "{here}/average_under_root.py teacher": 60,
    "{here}/counted_on_meta.py meta": 45,
    "{here}/counted_on_meta.py model": 45,
    f"{RANKS}two_ranks.py fsdp2 healthy": 120,
    f"{RANKS}two_ranks.py ddp parts": 120,
    f"{RANKS}tensor_parallel.py healthy": 60,
    "{here}/used_afterwards.py training": 45,
    "{here}/used_afterwards.py evaluation": 45,
}
# start → rules that are to report something, and words of one of them
FAULTS = {
    f"{RANKS}fsdp2_evaluated.py written": ({"untouched_between_steps"}, "the weight of 0.weight changed"),
    "{here}/dummy_update.py autocast": ({"ambient_state"}, "autocast at the update is bfloat16"),
    "{here}/average_under_root.py left_out": (
        {"ownership", "movement", "frozen"},
        "owns 4 of 6 live trainable parameters: it never updates model.4",
    ),
    "{here}/average_under_root.py written": ({"untouched_between_steps"}, "the weight of model.0.weight changed"),
    "{here}/average_under_root.py rests": ({"modes", "evaluation"}, "the whole model"),
    f"{RANKS}two_ranks.py fsdp2 evaluation": ({"modes"}, "the whole model trains in evaluation mode"),
    f"{RANKS}two_ranks.py ddp evaluation": ({"modes"}, "the whole model trains in evaluation mode"),
    f"{RANKS}two_ranks.py fsdp2 same": ({"modes", "distinct_data"}, "ranks 0, 1 train on the same data"),
    f"{RANKS}two_ranks.py ddp twice": ({"weighted_ranks"}, "the loss of rank 1 is multiplied by 2"),
    f"{RANKS}two_ranks.py fsdp2 twice": ({"weighted_ranks"}, "the loss of rank 1 is multiplied by 2"),
    f"{RANKS}tensor_parallel.py seed": ({"replicas"}, "random states of the ranks differ"),
}


def program_of(start: str) -> set[str]:
    """Return which program a start runs, and how it is sharded."""
    return {word for word in start.replace("/", " ").split() if word.endswith(".py") or word in ("ddp", "fsdp2")}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory):
    """Return what runs a program both ways, once, and says what was seen of it and where."""
    root = tmp_path_factory.mktemp("variants")
    nowhere = str(root / "nothing")
    (root / "nothing" / "lmdata").mkdir(parents=True)
    where = {"data": nowhere, "site": nowhere, "core": nowhere, "here": str(VARIANTS)}
    done: dict[str, tuple[running.Result, Path]] = {}

    def run(start: str) -> tuple[running.Result, Path]:
        if start not in done:
            folder = root / str(len(done))
            folder.mkdir()
            program = Program("variant", "torch==2", "", start, updates=0, launcher=start.startswith("torchrun"))
            done[start] = running.run(program, folder), folder
        return done[start]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_places", lambda: where)
        patch.setattr(running, "RESULTS", root / "results")
        yield run


@pytest.mark.parametrize("start", covered(HEALTHY, program_of))
def test_a_healthy_program_gets_no_word(watched, start):
    """Cases c11 (`dummy_update.py dcp`) and c12 (`fsdp2_evaluated.py before`) are among them."""
    result, _ = watched(start)
    assert result.codes == (0, 0)
    assert result.difference == ""
    assert result.losses > 0
    assert [finding for finding in result.findings if finding[1] != "info"] == []
    assert (result.steps, "cut short" in result.ending) == (HEALTHY[start], False)


def test_the_first_step_behind_a_forward_without_gradients_has_all_gradients_and_states(watched):
    _, folder = watched(f"{RANKS}fsdp2_evaluated.py before")
    logs = find_logs(folder / "watched")
    assert len(logs) == 2
    for log in logs:
        first = next(frames_of_log(log))
        series = [first.table.series[number] for number in first.at.tolist()]
        for slot in ("grad", "value_after", "exp_avg_after", "exp_avg_sq_after"):
            names = {each.address.name for each in series if each.address.slot == slot and each.statistic == "norm"}
            assert {name for name in names if "." in name} == {"0.weight", "0.bias", "2.weight", "2.bias"}, slot


@pytest.mark.parametrize("start", covered(FAULTS, lambda start: program_of(start) | FAULTS[start][0]))
def test_a_fault_is_named_and_nothing_else(watched, start):
    rules, words = FAULTS[start]
    result, _ = watched(start)
    assert (result.codes, result.difference) == ((0, 0), "")
    assert {rule for rule, _, _ in result.findings} == rules
    assert any(words in message for _, _, message in result.findings), result.findings


def test_a_step_that_an_error_ends_is_told_as_cut_short(watched):
    result, _ = watched("{here}/used_afterwards.py cut")
    assert (result.codes, result.difference, result.steps) == ((1, 1), "", 30)
    assert "1 cut short" in result.ending


def test_where_only_a_model_without_data_runs_nothing_is_said_to_be_watched(watched):
    result, _ = watched("{here}/counted_on_meta.py nothing")
    assert (result.codes, result.steps, result.models) == ((0, 0), 0, 0)
    assert "nothing was watched" in result.ending
