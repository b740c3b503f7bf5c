"""Recording that stops says so: a full disk, no descriptors, a folder that is gone, a thread that dies, a kill.

The training is a process of its own; what is done to it is real.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kills import kill_one
from tests.engine.storage.sinks.collected_steps import small_step
from trainprobe.cli import main
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.sinks.memory import MemorySink
from trainprobe.engine.storage.step_counts import Count, read_counts
from trainprobe.engine.storage.writer import Writer
from trainprobe.monitor.run_folder import find_logs, steps_of_log

ROOT = Path(__file__).resolve().parents[3]
TRAIN = """
import ctypes, os, resource, shutil, signal, sys, threading, time
from pathlib import Path
import torch, trainprobe
torch.manual_seed(0)
out = Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def before(i, probe): pass
{what}
with trainprobe.watch(model, optimizer, level="L0", monitor=True, output=out, on_error="continue", {fields}) as probe:
    for i in range({steps}):
        before(i, probe)
        with probe.step():
            loss = model(torch.randn(4, 8)).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
            probe.note("loss", loss)
        time.sleep(0.03)
"""


def train(folder: Path, what: str, steps: int = 60, fields: str = 'sinks=["parquet", "jsonl"]') -> str:
    """Train for some steps; return what was printed, the exit code in front where it is not 0."""
    code = TRAIN.format(what=what, steps=steps, fields=fields)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=560, env=environment
    )
    return f"{done.returncode or ''}{done.stderr}"


def recorded(folder: Path) -> list[int]:
    return [step for log in find_logs(folder) for step, _ in steps_of_log(log)]


def judged(folder: Path, capsys) -> tuple[int, str]:
    capsys.readouterr()
    return main(["judge", str(folder)]), capsys.readouterr().out


FULL = """
space = out.parent / "fill"
def before(i, probe):
    if i == 8:
        probe.flush()
        for name, n in (("fill", 65536), ("fill2", 1)):
            try:
                with open(out.parent / name, "wb", buffering=0) as f:
                    while True: f.write(b"x" * n)
            except OSError: pass
    if i == 30:
        for name in ("fill", "fill2"): os.remove(out.parent / name)
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
def test_a_disk_that_is_full_for_a_moment_costs_the_steps_of_that_moment(tmp_path, capsys):
    """Case c04."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        said = train(disk / "run", FULL)
        assert recorded(disk / "run") == list(range(60))  # the table waited for the disk
        lines = [step_data.step for step_data in read_log(disk / "run/rank0/records.jsonl")]
        assert {*range(8), *range(31, 60)} <= {*lines}
        assert len(lines) < 60
        assert len(re.findall("the writer 'jsonl' failed at step", said)) == 1
        assert re.search(rf"the writer 'jsonl' lost {60 - len(lines)} of 60 steps, \d+ to \d+: .*No space left on device", said)
        assert f"trainprobe: {len(lines)} of 60 steps recorded (the others are lost to jsonl): 60 steps watched" in said
        counts = read_counts(disk / "run/rank0")
        assert counts is not None
        assert counts.ended
        assert (counts.sinks["parquet"].lost, counts.sinks["jsonl"].lost) == (0, 60 - len(lines))
        assert judged(disk / "run", capsys)[0] == 1  # all steps were judged, and a finding says what another file lacks
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


SMALL = """
def before(i, probe):
    if i == 20:
        probe.flush()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((out / "rank0/metrics.arrow").stat().st_size + 100, -1))
    if i == AGAIN: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""


def test_a_table_that_could_not_grow_for_a_while_has_all_steps(tmp_path):
    """What the stream could not take waits; its dictionaries go on behind it."""
    said = train(tmp_path / "run", SMALL.replace("AGAIN", "45"), fields='sinks=["parquet"]')
    assert "the writer 'parquet' failed: [Errno 27] File too large; it is tried again" in said
    assert [step_data.step for step_data in read_log(tmp_path / "run")] == list(range(60))
    assert "recorded" not in said


def test_a_table_that_could_not_grow_again_is_incomplete_for_every_reader(tmp_path, capsys):
    said = train(tmp_path / "run", SMALL.replace("AGAIN", "-1"), fields='sinks=["parquet"]')
    have = recorded(tmp_path / "run")
    assert have == list(range(len(have)))
    assert 20 <= len(have) < 60
    share = f"{len(have)} of 60 steps recorded"
    assert f"trainprobe: {share} (the others are lost to parquet): 60 steps watched" in said
    code, told = judged(tmp_path / "run", capsys)
    assert (code, told.startswith(share)) == (3, True)
    for words, begins in (
        (["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")], True),
        (["top", "--once", str(tmp_path / "run")], True),
        (["nan-trace", str(tmp_path / "run")], True),
        (["export", str(tmp_path / "run"), "--trend", str(tmp_path / "run.trend.db")], True),
        (["judge", "--fleet", str(tmp_path / "run")], True),
        (["runs", str(tmp_path / "run")], False),  # a table
    ):
        code = main(words)
        told = capsys.readouterr().out
        assert told.startswith(share) if begins else share in told, words
        assert code == (3 if begins else 0), words
    assert share in (tmp_path / "page.html").read_text()


SMALL_CSV = """
def before(i, probe):
    if i == 20:
        probe.flush()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        largest = max(path.stat().st_size for path in out.rglob("*.csv"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 100, -1))
    if i == 30: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""


def test_csv_files_that_could_not_grow_for_a_while_are_incomplete_for_csv2tb(tmp_path, capsys, require):
    require("tensorboard")
    said = train(tmp_path / "run", SMALL_CSV, fields='sinks=["csv"]')
    share = re.search(r"trainprobe: (\d+ of 60 steps recorded) \(the others are lost to csv\)", said)
    assert share is not None, said
    capsys.readouterr()
    assert main(["csv2tb", str(tmp_path / "run"), "-o", str(tmp_path / "events")]) == 3
    assert capsys.readouterr().out.startswith(f"{share[1]}: the event files have no others")


NO_FILES = """
most = resource.getrlimit(resource.RLIMIT_NOFILE)
def before(i, probe):
    if i == 8: probe.flush(); resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), most[1]))
    if i == 20: resource.setrlimit(resource.RLIMIT_NOFILE, most)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_time_without_file_descriptors_costs_the_dumps_of_that_time(tmp_path, capsys):
    said = train(tmp_path / "run", NO_FILES, steps=40, fields='sinks=["dump"]')
    there = sorted(int(path.parent.name[4:]) for path in (tmp_path / "run").glob("step*/rank0"))
    assert {*range(8), *range(21, 40)} <= {*there}
    assert len(there) < 40
    share = f"{len(there)} of 40 steps recorded"
    assert share in said
    assert "Too many open files" in said
    code, told = judged(tmp_path / "run", capsys)
    assert (code, told.startswith(share)) == (3, True)


REMOVED = """
def before(i, probe):
    if i == 20: probe.flush(); shutil.rmtree(out)
"""


def test_a_folder_that_is_removed_is_made_again(tmp_path, capsys):
    """Of the table, what was in the stream is still known; of the lines, what was in the file is gone."""
    said = train(tmp_path / "run", REMOVED, steps=40)
    assert recorded(tmp_path / "run") == list(range(40))
    lines = [step_data.step for step_data in read_log(tmp_path / "run/rank0/records.jsonl")]
    assert lines == list(range(21, 40))
    assert "records.jsonl was removed, and what it held is lost" in said
    (tmp_path / "run/rank0/metrics-000000.parquet").unlink()
    code, told = judged(tmp_path / "run", capsys)
    assert (code, told.startswith("19 of 40 steps recorded")) == (3, True)


ENDED = """
def before(i, probe):
    if i == 20:
        thread = ctypes.c_ulong(probe.writer._thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
"""


def test_a_writers_thread_that_is_ended_is_replaced(tmp_path):
    said = train(tmp_path / "run", ENDED)
    assert "the writer's thread had ended before its work was done: another one goes on" in said
    assert len(recorded(tmp_path / "run")) >= 59
    assert recorded(tmp_path / "run")[-1] == 59


class Failing(MemorySink):
    """Fails at one step as no disk does."""

    def write(self, step_data):
        if step_data.step == 2:
            raise KeyError("findings")
        super().write(step_data)


def test_a_sink_with_a_fault_of_its_own_is_tried_again():
    failing, said = Failing(kept=100), list[Finding]()
    writer = Writer({"failing": failing}, report=said.append)
    for step in range(6):
        writer.submit(small_step(step))
    writer.close()
    assert [step_data.step for step_data in failing.collected_steps] == [0, 1, 3, 4, 5]
    assert writer.counts.sinks["failing"] == Count(6, 1, 2, 2)
    assert writer.counts.sentence() == "5 of 6 steps recorded (the others are lost to failing)"
    assert [finding.message for finding in said] == [
        "the writer 'failing' failed at step 2: KeyError: 'findings'; that step is lost to it, and it is tried again; "
        "the training goes on",
        "the writer 'failing' lost 1 of 6 steps, step 2: KeyError: 'findings'",
    ]


KILLED = """
def before(i, probe):
    if i == 20: probe.flush()
    if i == 23: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_took_is_counted(tmp_path, capsys):
    assert train(tmp_path / "run", KILLED).startswith("-9")
    counts = read_counts(tmp_path / "run/rank0")
    assert counts is not None
    assert (counts.sinks["parquet"].handed, counts.ended, counts.alive) == (23, False, False)
    have = len(recorded(tmp_path / "run"))
    assert 20 <= have <= 23
    code, told = judged(tmp_path / "run", capsys)
    if have < 23:
        assert (code, told.startswith(f"{have} of 23 steps recorded")) == (3, True)


@pytest.mark.parametrize("rest", [0.0, 0.05])
def test_a_kill_costs_the_table_a_second_at_most(rest):
    killed = kill_one(rest, 2, "parquet", True, 2.5)
    assert killed.kept
    assert killed.seconds < 1.5  # a second, and what a machine that is busy with other tests takes
