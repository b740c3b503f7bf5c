"""The background writer: nothing is lost in silence, and a sink's fault stays its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.storage import sink_calls
from trainprobe.engine.storage import writer as writer_module
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.sinks.memory import MemorySink
from trainprobe.engine.storage.writer import Writer, open_writer
from trainprobe.errors import OutputError, UsageError

ROOT = Path(__file__).resolve().parents[3]


class Slow(MemorySink):
    def __init__(self):
        super().__init__(kept=100)
        self.gate = threading.Event()

    def write(self, step_data):
        self.gate.wait(10)
        super().write(step_data)


class Full(MemorySink):
    """A disk that is full from step 2 on."""

    def write(self, step_data):
        if step_data.step >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(step_data)


def test_every_step_arrives_in_order():
    sink = MemorySink(kept=100)
    writer = Writer({"memory": sink})
    for step in range(20):
        writer.submit(small_step(step))
    writer.close()
    assert [step_data.step for step_data in sink.collected_steps] == list(range(20))


class Telling(MemorySink):
    """Says when so many steps are written."""

    def __init__(self, enough):
        super().__init__(kept=100)
        self.enough = enough
        self.written = threading.Event()

    def write(self, step_data):
        super().write(step_data)
        if len(self.collected_steps) == self.enough:
            self.written.set()


def test_steps_that_follow_one_another_wait_for_each_other_and_no_longer_than_the_queue_has_room(monkeypatch):
    monkeypatch.setattr(writer_module, "WAKE_INTERVAL_S", 3600.0)
    sink = Telling(3)
    writer = Writer({"telling": sink}, max_steps=4)
    for step in range(2):
        writer.submit(small_step(step))
    assert not sink.collected_steps
    writer.submit(small_step(2))
    assert sink.written.wait(60)
    writer.submit(small_step(3))
    assert writer.flush()
    assert [step_data.step for step_data in sink.collected_steps] == list(range(4))
    writer.submit(small_step(4))
    writer.close()
    assert len(sink.collected_steps) == 5


def test_a_finding_does_not_wait_for_more_steps(monkeypatch):
    monkeypatch.setattr(writer_module, "WAKE_INTERVAL_S", 3600.0)
    sink = Telling(1)
    writer = Writer({"telling": sink})
    writer.submit(small_step(0))
    writer.submit_findings([Finding("spike", "error", "the loss spiked")])
    assert sink.written.wait(60)
    writer.close()


def test_a_last_step_is_written_without_being_asked_for():
    sink = Telling(2)
    writer = Writer({"telling": sink})
    writer.submit(small_step(0))
    writer.submit(small_step(1))
    assert sink.written.wait(60)
    writer.close()


def waits_at(writer: Writer, sink: Slow, handed: list[int], train: Callable[[], None]) -> int:
    """Train while the sink takes nothing, and return how much was handed over then; afterwards it takes all."""
    training = threading.Thread(target=train)
    training.start()
    time.sleep(0.3)
    waited_at = len(handed)
    sink.gate.set()
    training.join(10)
    writer.close()
    return waited_at


def test_a_full_queue_makes_the_training_wait():
    sink = Slow()
    writer = Writer({"slow": sink}, max_steps=2)
    handed: list[int] = []

    def train():
        for step in range(5):
            writer.submit(small_step(step))
            handed.append(step)

    waited_at = waits_at(writer, sink, handed, train)
    assert (waited_at, len(sink.collected_steps)) == (2, 5)


def test_tensors_wait_by_their_bytes():
    sink = Slow()
    writer = Writer({"slow": sink}, max_bytes=1000)
    writer.submit(small_step(0))
    handed: list[int] = []

    def train():
        for number in range(4):
            writer.submit_tensor(1, f"t{number}", np.zeros(100))
            handed.append(number)

    waited_at = waits_at(writer, sink, handed, train)
    assert (waited_at, len(handed)) == (1, 4)


def test_flush_returns_when_everything_is_written():
    sink = MemorySink(kept=100)
    writer = Writer({"memory": sink})
    for step in range(10):
        writer.submit(small_step(step))
    assert writer.flush()
    assert len(sink.collected_steps) == 10
    writer.close()


def test_a_flush_that_takes_too_long_says_so():
    sink = Slow()
    writer = Writer({"slow": sink})
    writer.submit(small_step(0))
    assert not writer.flush(0.05)
    sink.gate.set()
    writer.close()


def test_a_sink_that_fails_is_tried_at_each_step_and_the_findings_say_what_was_lost():
    full, memory = Full(), MemorySink(kept=100)
    said: list[Finding] = []
    writer = Writer({"full": full, "memory": memory}, report=said.append, place=Place(3))
    for step in range(6):
        writer.submit(small_step(step))
    writer.close()
    assert (
        [step_data.step for step_data in full.collected_steps],
        [step_data.step for step_data in memory.collected_steps],
    ) == ([0, 1], list(range(6)))
    assert [finding.step for finding in said] == [2, 2]
    assert (
        "failed at step 2: [Errno 28] No space left on device; that step is lost to it, and it is tried again"
        in said[0].message
    )
    assert said[1].message == "the writer 'full' lost 4 of 6 steps, 2 to 5: [Errno 28] No space left on device"
    assert [finding.rule for finding in memory.found] == ["writer", "writer"]


def test_a_fault_is_raised_in_the_training_when_asked_for():
    writer = Writer({"full": Full()}, on_error="raise")
    with pytest.raises(OutputError, match="No space left"):
        for step in range(100):
            writer.submit(small_step(step))
            time.sleep(0.001)
    writer.close()


def test_a_copy_that_is_under_way_is_waited_for_on_the_writers_thread():
    sink = MemorySink()
    writer = Writer({"memory": sink})
    threads: list[str] = []

    def arrive():
        threads.append(threading.current_thread().name)
        return np.arange(3.0)

    writer.submit_tensor(0, "x", arrive)
    writer.submit(small_step(0))
    writer.close()
    assert threads == ["trainprobe-writer"]
    assert bytes(sink.tensors[0]["x"].data) == np.arange(3.0).tobytes()


def test_no_tensor_is_wanted_once_the_budget_is_used_up(tmp_path):
    writer = open_writer(plan_for(tmp_path, max_bytes=100, on_error="continue"), Place())
    writer.submit_tensor(0, "a", np.zeros(10))
    writer.submit_tensor(0, "b", np.zeros(10))
    writer.submit(small_step(0))
    writer.flush()
    assert (writer.takes_tensors, [f.severity for f in writer.findings()]) == (False, ["warning"])
    writer.close()


def test_what_is_handed_to_a_closed_writer_is_an_error():
    writer = Writer({"memory": MemorySink()})
    writer.close()
    with pytest.raises(UsageError, match="step 7"):
        writer.submit(small_step(7))


def test_closing_twice_is_harmless():
    writer = Writer({"memory": MemorySink()})
    writer.close()
    writer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_writes_nor_hangs(tmp_path):
    writer = open_writer(plan_for(tmp_path, sinks=("jsonl",)), Place())
    writer.submit(small_step(0))
    writer.flush()
    child = os.fork()
    if child == 0:
        writer.submit(small_step(1))
        writer.flush()
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.submit(small_step(2))
    writer.close()
    assert [step_data.step for step_data in read_log(tmp_path)] == [0, 2]


ENDS_WITHOUT_CLOSE = """
import sys
from collections.abc import Callable
from pathlib import Path
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.writer import open_writer
writer = open_writer(plan_for(sys.argv[1], sinks=("jsonl", "dump")), Place())
for step in range(30):
    writer.submit(small_step(step))
"""


def test_what_is_queued_when_the_interpreter_ends_is_written(tmp_path):
    run = [sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(tmp_path / "out")]
    subprocess.run(run, check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert [step_data.step for step_data in read_log(tmp_path / "out")] == list(range(30))


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        open_writer(plan_for(tmp_path / "file" / "out"), Place())


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Give all steps to the writer before it takes the first of them."""
    monkeypatch.setattr(writer_module, "WAKE_INTERVAL_S", 3600.0)

    def write(steps, **fields):
        fields = {"sinks": ("dump", "jsonl"), **fields}
        writer = open_writer(plan_for(tmp_path, on_error="continue", **fields), Place())
        for step in steps:
            writer.submit(small_step(step))
        writer.close()
        return writer.findings()

    return write


def whole(folder):
    return sorted(int(path.parent.name[4:]) for path in folder.glob("step*/rank0") if (path / "dump.json").stat().st_size)


def test_many_steps_at_once_are_each_written(many, tmp_path):
    assert many(range(20)) == []
    assert whole(tmp_path) == list(range(20))
    assert [step_data.step for step_data in read_log(tmp_path / "rank0")] == list(range(20))
    assert not list(tmp_path.rglob("*.partial"))


def test_of_many_steps_at_once_all_but_the_one_that_fails_are_written(many, tmp_path):
    (tmp_path / "step3" / ".rank0.partial").mkdir(parents=True)  # left behind: made anew
    (tmp_path / "step5").write_text("a file where a folder has to be")
    findings = many(range(8))
    assert whole(tmp_path) == [0, 1, 2, 3, 4, 6, 7]
    assert [(finding.severity, finding.step) for finding in findings] == [("error", 5), ("error", 5)]
    assert "the writer 'dump' failed at step 5" in findings[0].message
    assert "the writer 'dump' lost 1 of 8 steps, step 5: " in findings[1].message
    assert [step_data.step for step_data in read_log(tmp_path / "rank0")] == list(range(8))


@pytest.mark.parametrize("sink", ["jsonl", "parquet"])
def test_of_many_steps_those_that_fit_on_the_disk_are_kept_and_the_others_counted(tmp_path, sink):
    code = f"""
import resource, sys
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.storage import sink_calls, writer as module
from trainprobe.engine.core.records import Place
sink_calls.BATCH_ROWS = 10
writer = module.open_writer(plan_for({str(tmp_path)!r}, on_error="continue", sinks=({sink!r},)), Place())
writer.submit(small_step(0))
writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (18_000, 18_000))
for step in range(1, 30):
    writer.submit(small_step(step))
writer.close()
print([(finding.step, finding.message) for finding in writer.findings()])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    kept = [step_data.step for step_data in read_log(tmp_path / "rank0")]
    assert 0 < len(kept) < 30
    assert kept == list(range(len(kept)))
    assert f"the writer '{sink}' failed" in done.stdout
    assert f"lost {30 - len(kept)} of 30 steps, {len(kept)} to 29: [Errno 27] File too large" in done.stdout


class Gathering(MemorySink):
    """Keeps steps back until it is told to write them."""

    def __init__(self):
        super().__init__(kept=100)
        self.waiting = []
        self.written = threading.Event()

    def write(self, step_data):
        self.waiting.append(step_data)

    def flush(self):
        for step_data in self.waiting:
            super().write(step_data)
        self.waiting.clear()
        self.written.set()


def test_a_sink_that_gathers_steps_writes_them_after_a_while_when_asked_and_at_the_end(monkeypatch):
    monkeypatch.setattr(sink_calls, "BATCH_WINDOW", 0.05)
    sink = Gathering()
    writer = Writer({"gathering": sink})
    writer.submit(small_step(0))
    assert sink.written.wait(60)
    monkeypatch.setattr(sink_calls, "BATCH_WINDOW", 3600.0)
    writer.submit(small_step(1))
    assert writer.flush()
    assert [step_data.step for step_data in sink.collected_steps] == [0, 1]
    sink.written.clear()
    monkeypatch.setattr(sink_calls, "BATCH_ROWS", 12)
    for step in (2, 3, 4):  # of five rows each
        writer.submit(small_step(step))
    assert sink.written.wait(60)
    assert [step_data.step for step_data in sink.collected_steps] == [0, 1, 2, 3, 4]
    writer.submit(small_step(5))
    writer.close()
    assert [step_data.step for step_data in sink.collected_steps] == [0, 1, 2, 3, 4, 5]


def test_few_large_steps_wait_and_many_small_ones(monkeypatch):
    monkeypatch.setattr(writer_module, "WAKE_INTERVAL_S", 3600.0)
    sink = Slow()
    writer = Writer({"slow": sink})
    waits = writer._room
    for step in range(writer_module.FEW_STEPS):
        assert waits(0)
        writer.submit(large_step(step))
    assert not waits(0)
    sink.gate.set()
    assert writer.flush()
    assert [step_data.step for step_data in sink.collected_steps] == list(range(writer_module.FEW_STEPS))
    writer.close()
    writer = Writer({"slow": sink})
    for step in range(3 * writer_module.FEW_STEPS - 1):
        assert writer._room(0)
        writer.submit(small_step(step))
    writer.close()
    assert len(sink.collected_steps) == 4 * writer_module.FEW_STEPS - 1


def large_step(step):
    step_data = small_step(step)
    step_data.partials = np.zeros((writer_module.MANY_ROWS // 2, step_data.partials.shape[1]))
    return step_data


CHILDREN = """
import multiprocessing, sys
from collections.abc import Callable
from pathlib import Path
from trainprobe.engine.storage.writer import Writer

class Gathering:
    def __init__(self, path):
        self.path, self.steps = path, []
    def write(self, step_data):
        self.steps.append(step_data.step)
    def flush(self):
        self.path.write_text(repr(self.steps))
    def findings(self, findings):
        pass
    def close(self):
        self.flush()

def work(path):
    from tests.engine.storage.sinks.collected_steps import small_step
    writer = Writer({"gathering": Gathering(Path(path))})
    for step in range(3):
        writer.submit(small_step(step))

if __name__ == "__main__":
    for how in ("fork", "spawn"):
        child = multiprocessing.get_context(how).Process(target=work, args=(sys.argv[1] + how,))
        child.start()
        child.join()
        assert child.exitcode == 0
"""


def test_a_process_of_multiprocessing_writes_what_it_gathered_before_it_ends(tmp_path):
    """A forked one ends without the handlers of atexit, well within BATCH_WINDOW."""
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, str(script), str(tmp_path) + "/"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {how: (tmp_path / how).read_text() for how in ("fork", "spawn")} == dict.fromkeys(("fork", "spawn"), "[0, 1, 2]")
