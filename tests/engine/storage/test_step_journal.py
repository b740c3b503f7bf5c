"""The journal of a step says what the step's own data say, while the step still runs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests import zoo
from trainprobe.engine.core.records import Call, Opaque, Value
from trainprobe.engine.storage.step_journal import HEAD, ON_DEVICE, StepJournal, read_journal

ROOT = Path(__file__).parents[3]
ABOUT = orjson.dumps(
    {"place": {"rank": 3, "world_size": 4}, "framework": "pytorch", "level": "L0", "task": "statistics", "wanted": ["max"]}
)


@pytest.fixture(scope="module", params=["kernels", "torch"])
def zoo_told(request):
    """Return (what the journal says, what the collected step says) of each case, reduced by the kernels or by torch."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.storage.journal_of_a_step", request.param],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return orjson.loads(done.stdout)


@pytest.mark.parametrize("level", ["mix", "off"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_journal_of_a_step_says_what_its_step_says(zoo_told, name, level):
    journal, step_data = zoo_told[f"{name} {level}"]
    assert len(step_data["records"]) > 10
    assert journal == step_data


def written(memory):
    """Return a journal in this memory."""
    return StepJournal(memoryview(memory))


def a_step(journal):
    """Tell a journal a step, and return its calls and values, which live as long as the step."""
    numbers = struct.pack("<12d", 4.0, 0, 0, 0, 2.0, -1.5, float("inf"), 3.0, 9.5, 0, 0, 0)
    value, twin = Value(0, "torch.float32", (2, 2), requires_grad=True), Value(0, "torch.float32", (2, 2), note="twice")
    far = Value(5, "torch.bfloat16", (), device="cuda:0")
    outer = Call("module", "a", 0, "forward", cls="Block", micro=1)
    inner = Call("op", "torch.add", 2, "backward", parent=outer)
    journal.begin(7, ABOUT)
    journal.value(value, numbers, 2**64 - 3)
    journal.twin(twin, value)
    journal.value(far, None, 0)
    outer.args = [value, {"é": far, "whole": 3, "half": 0.5, "yes": True, "none": None, "text": "x" * 70_000}]
    journal.call(outer)
    outer.out = [twin, Opaque("torch.dtype", "torch.float32")]
    inner.args = value
    journal.call(inner)
    journal.call(outer)
    journal.scalar("loss", value)
    journal.scalar("lr", 0.25)
    journal.batch(2**64 - 1)
    return value, twin, far, outer, inner


def test_what_is_told_is_read():
    memory = bytearray(1 << 18)
    journal = written(memory)
    kept = a_step(journal)
    found = read_journal(bytes(memory))
    assert found is not None
    step_data, last = found
    assert (step_data.step, step_data.complete, step_data.place.rank, step_data.statistics) == (7, False, 3, ("max",))
    outer, inner = step_data.calls
    assert (outer.kind, outer.name, outer.cls, outer.micro, inner.parent, inner.phase, inner.call) == (
        *("module", "a", "Block", 1, outer, "backward"),
        2,
    )
    assert last is outer
    value, named = outer.args
    assert step_data.partials[value.row].tolist() == [4.0, 0, 0, 0, 2.0, -1.5, float("inf"), 3.0, 9.5, 0, 0, 0]
    assert step_data.checksums is not None and int(step_data.checksums[value.row]) == 2**64 - 3
    assert (value.shape, value.dtype, value.requires_grad, value.note) == ((2, 2), "torch.float32", True, None)
    assert (named["é"].device, named["é"].row, named["é"].note) == ("cuda:0", -1, ON_DEVICE)
    assert [named[key] for key in ("whole", "half", "yes", "none")] == [3, 0.5, True, None]
    assert named["text"] == "x" * 70_000
    assert (outer.out[0].row, outer.out[0].note, outer.out[1].type) == (value.row, "twice", "torch.dtype")
    assert step_data.scalars == {"loss": 0.75, "lr": 0.25} and step_data.batches == [2**64 - 1]
    del kept


def test_after_each_record_the_memory_holds_whole_records():
    memory = bytearray(1 << 18)
    journal = written(memory)
    a_step(journal)
    used = struct.unpack_from("<Q", memory)[0]
    ends = [at + 1 for at in range(HEAD, HEAD + used) if memory[at] == ord("\n")]
    assert ends[-1] == HEAD + used and len(ends) > 10
    for end in ends:  # as if the process had died behind this record
        cut = bytearray(memory)
        struct.pack_into("<Q", cut, 0, end - HEAD)
        cut[end:] = b"\xff" * (len(cut) - end)
        found = read_journal(bytes(cut))
        assert found is not None and found[0].step == 7


def test_what_has_no_room_is_counted_and_what_came_before_stays():
    memory = bytearray(HEAD + 900 + 8)
    guard = memory[HEAD + 900 :]
    journal = written(memoryview(memory)[: HEAD + 900])
    kept = a_step(journal)
    found = read_journal(bytes(memory[: HEAD + 900]))
    assert found is not None
    assert [value.shape for value in found[0].values] == [(2, 2), (2, 2), ()]
    assert "raise `max_bytes` of `black_box`" in found[0].notes[0]
    assert memory[HEAD + 900 :] == guard
    journal.begin(8, ABOUT)
    journal.batch(5)
    again = read_journal(bytes(memory[: HEAD + 900]))
    assert again is not None and (again[0].step, again[0].notes, again[0].batches) == (8, (), [5])
    del kept


def test_between_two_steps_and_after_the_end_nothing_is_written():
    memory = bytearray(4096)
    journal = written(memory)
    kept = [a_step(journal)]
    journal.end()
    assert read_journal(bytes(memory)) is None
    before = bytes(memory)
    value, _, _, outer, _ = kept[0]
    journal.call(outer)
    journal.scalar("loss", value)
    journal.batch(1)
    assert bytes(memory) == before
    journal.begin(9, ABOUT)
    journal.close()
    journal.begin(10, ABOUT)
    journal.batch(1)
    found = read_journal(bytes(memory))
    assert found is not None and (found[0].step, found[0].batches) == (9, [])
    memory.clear()  # nobody holds it any more
