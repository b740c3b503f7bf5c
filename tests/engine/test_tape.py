"""The tape: each distinct value of a step is looked at once, nothing is kept alive, and what it says is as it was then."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.core.records import Opaque, Phase, Place, StepData, Value
from trainprobe.engine.stats.checksum import fingerprint, joined
from trainprobe.engine.stats.partials import CHECKSUM, STATS, STD
from trainprobe.engine.tape import CUT, SAVE, Tape

ABOUT = {"framework": "pytorch", "level": "L0", "task": "statistics"}


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def tape(request: pytest.FixtureRequest) -> Tape:
    return Tape(TorchLibrary(request.param))


def drained(tape: Tape) -> StepData:
    return tape.drain(0, Place(), **ABOUT)


def means(tape: Tape, *values: Value) -> list[float]:
    numbers = drained(tape).numbers()["mean"]
    return [numbers[value.row] for value in values]


def test_a_tensor_that_stays_as_it_is_is_looked_at_once(tape: Tape) -> None:
    t = torch.ones(3)
    assert tape.value(t, STATS) is tape.value(t, STATS)
    assert len(drained(tape).partials) == 1


def test_a_write_in_place_makes_a_new_value_and_the_old_one_stays(tape: Tape) -> None:
    t = torch.ones(3)
    before = tape.value(t, STATS)
    t.mul_(2)
    assert means(tape, before, tape.value(t, STATS)) == [1.0, 2.0]


@pytest.mark.parametrize("known", ["touched", "forget_all", "distrust"])
def test_a_write_without_a_trace_is_seen_once_it_is_made_known(known: str, tape: Tape) -> None:
    t = torch.ones(3)
    before = tape.value(t, STATS)
    t.data.mul_(2)
    assert tape.value(t, STATS) is before
    tape.touched(t) if known == "touched" else getattr(tape, known)()
    assert means(tape, before, tape.value(t, STATS)) == [1.0, 2.0]


def test_more_is_looked_at_where_more_is_asked_for(tape: Tape) -> None:
    t = torch.tensor([1.0, 2.0])
    few, more = tape.value(t, STATS), tape.value(t, STATS | STD)
    assert few is not more
    np.testing.assert_array_equal(np.isnan(drained(tape).partials[[few.row, more.row], 9]), [True, False])


def test_nothing_is_kept_alive(tape: Tape) -> None:
    t = torch.ones(3)
    alive = weakref.ref(t)
    value = tape.value(t, STATS)
    del t
    gc.collect()
    assert alive() is None
    assert means(tape, value) == [1.0]


def test_a_tensor_in_memory_that_another_had_is_a_value_of_its_own(tape: Tape) -> None:
    values = [tape.value(torch.full((64,), float(i)), STATS) for i in range(50)]
    assert means(tape, *values) == [float(i) for i in range(50)]


def test_what_cannot_be_reduced_has_no_row_and_a_note_that_says_why(tape: Tape) -> None:
    value = tape.value(torch.eye(2).to_sparse(), STATS)
    assert value.row == -1 and "sparse" in str(value.note)


def test_a_tree_keeps_its_form_with_values_in_place_of_tensors(tape: Tape) -> None:
    t = torch.ones(2)
    found = tape.tree([t, {"a": (1, 2.5, None, "text", True), "b": t}], STATS)
    value = tape.value(t, STATS)
    assert found == [value, {"a": [1, 2.5, None, "text", True], "b": value}]


def test_a_container_that_holds_itself_ends(tape: Tape) -> None:
    x: list[Any] = []
    x.append(x)
    found = tape.tree(x, STATS)
    while isinstance(found, list):
        found = found[0]
    assert isinstance(found, Opaque) and found.type == "depth"


def test_a_whole_number_of_very_many_bits_is_not_written_out(tape: Tape) -> None:
    assert tape.tree(1 << 5000, STATS) == Opaque("int", "a number of 5001 bits")


def test_calls_are_kept_in_order_and_numbered_by_name_and_phase(tape: Tape) -> None:
    told: list[tuple[str, Phase]] = [("a", "forward"), ("a", "backward"), ("a", "forward"), ("b", "forward")]
    for name, phase in told:
        tape.call("module", name, tape.count(name, phase), phase)
    assert [(c.name, c.phase, c.call) for c in drained(tape).calls] == [
        ("a", "forward", 0),
        ("a", "backward", 0),
        ("a", "forward", 1),
        ("b", "forward", 0),
    ]


def test_forwards_of_the_outermost_module_count_micro_batches_unless_somebody_tells_them(tape: Tape) -> None:
    counted = []
    for _ in range(2):
        tape.forward_begins("root")
        counted.append(tape.micro)
    tape.micro, tape.micro_given = 7, True
    tape.forward_begins("root")
    assert (*counted, tape.micro) == (0, 1, 7)


def test_a_twin_has_the_numbers_of_its_value_and_a_note_of_its_own(tape: Tape) -> None:
    tape.value(torch.zeros(1), STATS | CHECKSUM)
    value = tape.value(torch.ones(3), STATS)
    twin = tape.noted(value, "as it was before")
    drained(tape)
    assert twin.row == value.row >= 0 and twin.note == "as it was before" and value.note is None


def test_scalars_of_a_step_are_numbers_or_tensors_of_one_element_read_at_its_end(tape: Tape) -> None:
    tape.note("lr", 0.5)
    tape.note("loss", torch.tensor(2.5))
    tape.note_once("lr", 7.0)
    with pytest.raises(TypeError, match="a name is text"):
        tape.note(3, 1.0)
    with pytest.raises(ValueError, match="sparse"):
        tape.note("odd", torch.eye(2).to_sparse())
    assert drained(tape).scalars == {"lr": 0.5, "loss": 2.5}


def test_small_tensors_that_wait_come_to_the_host_at_the_end_and_one_that_was_never_set_says_nothing(tape: Tape) -> None:
    waiting, empty = tape.defer(), tape.defer()
    tape.feature("layer", "share", waiting)
    tape.feature("layer", "nothing", empty)
    tape.feature("layer", "share", torch.tensor([3]))
    waiting.tensor = torch.tensor([1.0, 2.0])
    found = drained(tape).features
    assert [(f.slot, f.call, f.numbers.tolist()) for f in found] == [("share", 0, [1.0, 2.0]), ("share", 1, [3.0])]
    assert empty.numbers is None


def test_a_batch_has_one_fingerprint_and_takes_no_row(tape: Tape) -> None:
    a, b = torch.arange(4), torch.ones(2)
    tape.batch([a, b])
    tape.batch([])
    step_data = drained(tape)
    assert step_data.batches == [joined([fingerprint(a.numpy()), fingerprint(b.numpy())]), joined([])]
    assert len(step_data.partials) == 0 and step_data.checksums is None


def test_rows_of_several_sorts_are_joined_and_a_fingerprint_is_there_where_it_was_asked_for(tape: Tape) -> None:
    plain, taken = tape.value(torch.ones(2), STATS), tape.value(torch.zeros(3), STATS | CHECKSUM)
    step_data = drained(tape)
    assert step_data.checksums is not None
    assert [int(step_data.checksums[v.row]) for v in (plain, taken)] == [0, fingerprint(np.zeros(3, np.float32))]
    assert [step_data.numbers()["mean"][v.row] for v in (plain, taken)] == [1.0, 0.0]


def test_a_drained_tape_is_empty_and_looks_anew(tape: Tape) -> None:
    t = torch.ones(3)
    first = tape.value(t, STATS)
    tape.call("module", "a", tape.count("a", "forward"), "forward")
    tape.note("loss", 1.0)
    drained(tape)
    assert tape.value(t, STATS) is not first and tape.count("a", "forward") == 0
    again = drained(tape)
    assert (again.calls, dict(again.scalars), len(again.partials)) == ([], {}, 1)


def test_tensors_that_stay_as_they_are_may_be_looked_at_together(tape: Tape) -> None:
    ts = [torch.full((3,), float(i)) for i in range(4)]
    with tape.batched():
        values = [tape.value(t, STATS) for t in ts]
    assert means(tape, *values) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_values_that_are_to_be_saved_are_handed_over_once_and_a_fault_is_a_note(native: bool) -> None:
    handed: list[tuple[str, int]] = []

    def save(key: str, t: Any, value: Value, cut: int) -> None:
        if key.endswith("bad"):
            raise OSError("the disk is full")
        handed.append((key, cut))

    tape = Tape(TorchLibrary(native), save)
    t = torch.ones(2)
    first = tape.tree({"x": t, "again": t, "bad": torch.ones(1)}, STATS | SAVE | 3 << CUT, "layer")
    assert handed == [("layer.x", 3)]
    assert first["x"].tensor == "layer.x" and first["bad"].tensor is None
    assert "the disk is full" in first["bad"].note
