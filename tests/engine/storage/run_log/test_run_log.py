"""The run log as columns holds what was written, after a kill too, and tools that know nothing of trainprobe can query it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import trainprobe
from tests.engine.storage.sinks.collected_steps import collected_steps, plan_for, small_step, told
from tests.monitor.small_training import GPT, batch
from trainprobe.cli import main
from trainprobe.engine.core.records import Feature, Place
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.dumps.layout import LIVE_FILE, find_segments
from trainprobe.engine.storage.run_log.read import read_tables
from trainprobe.engine.storage.run_log.schema import COLUMNS
from trainprobe.engine.storage.sinks import jsonl, parquet
from trainprobe.errors import FormatError, OutputError
from trainprobe.monitor.frames import SeriesTable, frame_of_step
from trainprobe.monitor.frames_of_run_log import RunLog
from trainprobe.monitor.run_folder import read_frames

ROOT = Path(__file__).resolve().parents[4]


def fill(folder: Path, written, **fields) -> None:
    sink = parquet.open(folder, plan_for(folder, sinks=["parquet"], **fields), Place())
    for step_data in written:
        sink.write(step_data)
        sink.flush()
    sink.close()


def steps_in(folder: Path) -> list[int]:
    return [frame.step for frame in RunLog(folder).frames()]


def assert_same_frames(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert [a.table.series[i] for i in a.at] == [b.table.series[i] for i in b.at]
        assert [a.table.addresses[i] for i in a.addresses] == [b.table.addresses[i] for i in b.addresses]
        assert [a.table.dimensions[i] for i in a.addresses] == [b.table.dimensions[i] for i in b.addresses]
        assert [a.table.short[i] for i in a.addresses] == [b.table.short[i] for i in b.addresses]
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.health, b.health)
        assert (a.step, a.place, a.complete) == (b.step, b.place, b.complete)
        assert str(dict(a.scalars)) == str(dict(b.scalars))  # text, because NaN may be among them


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step_data=collected_steps())
def test_any_step_is_read_back_as_it_was(step_data, tmp_path):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    fill(folder, [step_data])
    (again,) = read_log(folder)
    assert [told(record) for record in again.records()] == [told(record) for record in step_data.records()]
    assert_same_frames(RunLog(folder / "rank0").frames(), [frame_of_step(step_data, SeriesTable())])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training of 30 steps with micro-batches, features, checksums, a dump and a NaN, written in both formats."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    plan = {
        "output": folder,
        "monitor": {"activation_gradients": True, "optimizer_state": True, "features": {"dead_units": {}}},
        "step": (7,),
        "level": "mix",
        "summary": "both",
        "sinks": ("parquet", "jsonl"),
    }
    norms = []
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(30):
            with probe.step(step):
                optimizer.zero_grad()
                for _ in range(2):
                    tokens = batch(generator)
                    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    loss.backward()
                if step == 20:
                    model.layers[1].fc1.weight.grad[0, 0] = torch.nan
                norms.append(model.layers[1].fc1.weight.grad.double().norm().item())
                optimizer.step()
                probe.note("loss", loss)
    return folder, norms


def test_the_frames_of_a_training_are_those_of_its_steps(trained):
    folder, _ = trained
    table = SeriesTable()
    lines = (frame_of_step(step_data, table) for step_data in read_log(folder / "rank0/records.jsonl"))
    assert_same_frames(read_frames(folder), lines)


def test_what_only_the_monitor_saw_has_no_std_and_no_subnormals(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = {"output": tmp_path, "level": "L0", "statistics": ("std", "sublow", "norm"), "monitor": True, "sinks": ("parquet",)}
    with trainprobe.watch(model, optimizer, plan) as probe, probe.step():
        std = model.weight.double().std().item()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    rows = pq.read_table(next((tmp_path / "rank0").glob("*.parquet"))).to_pylist()
    found = {row["slot"]: (row["std"], row["subnormal"]) for row in rows if row["name"] == "weight"}
    assert found["value"] == (pytest.approx(std), 0)
    assert found["value_after"] == (None, None)


def test_judge_says_the_same_of_either_format(trained, tmp_path, capsys):
    folder, _ = trained
    answers = []
    for name in ("records.jsonl", "metrics-000000.parquet"):
        (tmp_path / name / "rank0").mkdir(parents=True)
        shutil.copy(folder / "rank0" / name, tmp_path / name / "rank0" / name)
        code = main(["judge", str(tmp_path / name), "--json"])
        answers.append((code, capsys.readouterr().out.replace(name, "")))
        assert main(["report", str(tmp_path / name), "--output", str(tmp_path / f"{name}.html")]) in (0, 1)
        assert main(["top", str(tmp_path / name), "--once"]) == 0
        assert "last step 29" in capsys.readouterr().out
    assert answers[0] == answers[1]
    assert answers[0][0] == 1
    assert "nonfinite" in answers[0][1]


def test_duckdb_answers_the_question_of_the_docs(trained):
    duckdb = pytest.importorskip("duckdb", reason="requirements/oldest.txt is without DuckDB")
    folder, norms = trained
    found = duckdb.sql(
        f"select step, norm from '{folder}/**/metrics*.parquet' "
        "where name = 'layers.1.fc1.weight' and kind = 'gradient' and micro is null order by step"
    ).fetchall()
    assert [step for step, _ in found] == list(range(30))
    np.testing.assert_allclose([norm for _, norm in found], norms, rtol=1e-12, equal_nan=True)
    assert np.isnan(found[20][1])
    losses = duckdb.sql(f"select count(*) from '{folder}/**/metrics*.parquet' where kind = 'scalar' and name = 'loss'")
    assert losses.fetchall() == [(30,)]


def test_each_column_is_described_in_the_file(trained):
    folder, _ = trained
    schema = pq.read_schema(*find_segments(folder / "rank0"))
    assert schema.names == list(COLUMNS)
    assert all(field.metadata[b"description"] for field in schema)


def test_a_range_of_steps_is_read_by_itself(trained):
    folder, _ = trained
    (table,) = read_tables(folder / "rank0", ["norm"], [("step", ">=", 5), ("step", "<=", 6)])
    assert table.column_names == ["time", "position", "step", "norm"]
    assert set(table["step"].to_pylist()) == {5, 6}


def test_segments_follow_one_another_and_each_stands_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SEGMENT", 40)
    fill(tmp_path, map(small_step, range(12)))
    assert len(find_segments(tmp_path / "rank0")) >= 2  # what comes while one is made goes into the next, which is larger then
    assert steps_in(tmp_path / "rank0") == list(range(12))
    last = find_segments(tmp_path / "rank0")[-1]
    (tmp_path / "alone").mkdir()
    shutil.copy(last, tmp_path / "alone" / last.name)
    assert next(iter(read_log(tmp_path / "alone"))).calls[0].name == "layers.0"


ENDLESS = """
import sys
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.sinks import parquet
from trainprobe.engine.storage.writer import open_writer
parquet.SEGMENT = 2000
writer = open_writer(plan_for(sys.argv[1], sinks=("parquet",)), Place())
print("ready", flush=True)
for step in range(100_000):
    writer.submit(small_step(step))
"""


@pytest.mark.parametrize("moment", range(4))
def test_whole_batches_are_read_after_kill_9_and_the_next_run_goes_on_behind_them(moment, tmp_path):
    run = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 30
    while not steps_in(tmp_path / "rank0") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(random.Random(moment).uniform(0.0, 0.8))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)

    seen = steps_in(tmp_path / "rank0")
    assert seen == list(range(len(seen)))
    assert seen
    fill(tmp_path, [small_step(len(seen))], on_existing="continue")
    assert steps_in(tmp_path / "rank0") == list(range(len(seen) + 1))
    assert not (tmp_path / "rank0" / LIVE_FILE).exists()


def test_a_torn_batch_costs_that_batch(tmp_path):
    sink = parquet.open(tmp_path, plan_for(tmp_path, sinks=["parquet"]), Place())
    for step in range(3):
        sink.write(small_step(step))
        sink.flush()
    live = tmp_path / "rank0" / LIVE_FILE
    whole = live.read_bytes()
    for lost in (1, 100, 1000):
        live.write_bytes(whole[:-lost])
        assert steps_in(tmp_path / "rank0") == [0, 1]
    live.write_bytes(b"")
    assert steps_in(tmp_path / "rank0") == []


def test_a_kill_between_the_segment_and_the_end_of_the_stream_counts_no_step_twice(tmp_path):
    sink = parquet.open(tmp_path, plan_for(tmp_path, sinks=["parquet"]), Place())
    sink.write(small_step(0))
    sink.flush()
    live = tmp_path / "rank0" / LIVE_FILE
    stream = live.read_bytes()
    sink.close()
    live.write_bytes(stream)
    assert steps_in(tmp_path / "rank0") == [0]
    fill(tmp_path, [small_step(1)], on_existing="continue")
    assert steps_in(tmp_path / "rank0") == [0, 1]


def test_a_run_of_an_earlier_version_is_read_and_continued(tmp_path):
    """`written_at_26b6f22.zip` was written at that commit: `small_step` 0 to 2 and, by a run that was killed, 3 and 4."""
    zipfile.ZipFile(Path(__file__).with_name("written_at_26b6f22.zip")).extractall(tmp_path)
    for count in (5, 6):
        found = list(read_log(tmp_path))
        assert [step_data.step for step_data in found] == [*range(count)]
        for step_data in found:
            expected = small_step(step_data.step).records()
            assert [told(record) for record in step_data.records()] == [told(record) for record in expected]
        fill(tmp_path, [small_step(count)], on_existing="continue")


def test_bins_and_numbers_of_features_are_read_as_they_were_written(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for step in range(4):
        counts = Feature("layers.0", "exponents", 0, 0, rng.integers(0, 9, 3 + step).astype(float), np.arange(4.0 + step))
        several, one = rng.normal(size=4), rng.normal(size=1)
        features = [counts, Feature("b", "entropy", 0, 0, one), Feature("a", "peak", 1, None, several)]
        steps.append(small_step(step, features=features))
    fill(tmp_path, steps)
    for made, found in zip(steps, read_log(tmp_path), strict=True):
        assert [(f.name, f.slot, f.call, f.micro) for f in found.features] == [
            (f.name, f.slot, f.call, f.micro) for f in made.features
        ]
        for ours, theirs in zip(found.features, made.features, strict=True):
            np.testing.assert_array_equal(ours.numbers, theirs.numbers)
            assert (ours.edges is None) == (theirs.edges is None)
            if ours.edges is not None:
                np.testing.assert_array_equal(ours.edges, theirs.edges)


def test_a_segment_is_made_of_what_the_stream_was_given_whatever_became_of_the_file(tmp_path):
    sink = parquet.open(tmp_path, plan_for(tmp_path, sinks=["parquet"]), Place())
    for step in range(3):
        sink.write(small_step(step))
        sink.flush()
    (tmp_path / "rank0" / LIVE_FILE).write_bytes(b"")
    sink.close()
    assert steps_in(tmp_path / "rank0") == [0, 1, 2]


def test_a_second_run_log_is_refused_and_a_damaged_segment_is_named(tmp_path):
    fill(tmp_path, [small_step()])
    with pytest.raises(OutputError, match="nothing is overwritten"):
        parquet.open(tmp_path, plan_for(tmp_path, sinks=["parquet"]), Place())
    (segment,) = find_segments(tmp_path / "rank0")
    segment.write_bytes(segment.read_bytes()[:-9])
    with pytest.raises(FormatError, match=r"metrics-000000\.parquet is no segment"):
        steps_in(tmp_path / "rank0")
    sink = parquet.open(tmp_path, plan_for(tmp_path, on_existing="continue", sinks=["parquet"]), Place())
    sink.write(small_step(1))
    sink.flush()
    with pytest.raises(FormatError, match=r"metrics-000000\.parquet is no segment"):
        steps_in(tmp_path / "rank0")
    sink.close()
    assert len(find_segments(tmp_path / "rank0")) == 2


def test_findings_are_written_once_whichever_sinks_there_are(tmp_path):
    from trainprobe.engine.core.records import Finding
    from trainprobe.engine.storage.writer import open_writer

    for number, sinks in enumerate((("parquet",), ("parquet", "jsonl"), ("jsonl",), ("dump",), ("csv",))):
        writer = open_writer(plan_for(tmp_path / str(number), sinks=sinks), Place())
        writer.submit_findings([Finding("spike", "warning", "one")])
        writer.close()
        lines = (tmp_path / str(number) / "rank0/findings.jsonl").read_text().splitlines()
        assert len(lines) == 1


def test_a_process_that_only_dumps_does_not_import_pyarrow_and_none_imports_pandas(tmp_path):
    program = (
        "import sys, torch, trainprobe\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with trainprobe.watch(model, optimizer, output=sys.argv[1], record='L0') as probe:\n"
        "    with probe.step(0):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "assert 'pyarrow' not in sys.modules\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with trainprobe.watch(model, optimizer, output=sys.argv[1] + '2', monitor=True) as p:\n"
        "    with p.step(0):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "assert 'pyarrow' in sys.modules\n"
        "assert 'pandas' not in sys.modules\n"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "out")]
    done = subprocess.run(run, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_pyarrow_a_sentence_names_what_to_install(tmp_path):
    program = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'pyarrow' else find(name, *rest)\n"
        "from trainprobe.cli import entry\n"
        f"sys.argv = ['trainprobe', 'judge', {str(tmp_path)!r}]\n"
        "entry()\n"
    )
    fill(tmp_path, [small_step()])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "needs pyarrow, which is not installed: pip install pyarrow" in done.stderr
    assert "Traceback" not in done.stderr


def test_both_formats_of_a_rank_are_read_once(tmp_path):
    sinks = [kind.open(tmp_path, plan_for(tmp_path, sinks=["parquet", "jsonl"]), Place()) for kind in (parquet, jsonl)]
    for sink in sinks:
        sink.write(small_step())
        sink.close()
    assert len(list(read_frames(tmp_path))) == 1


def test_runs_lists_what_a_folder_holds(trained, tmp_path, capsys):
    folder, _ = trained
    fill(tmp_path / "second", map(small_step, range(3, 6)))
    sink = jsonl.open(tmp_path / "third", plan_for(tmp_path), Place())
    sink.write(small_step(9))
    sink.close()
    shutil.copytree(folder, tmp_path / "first")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(run["folder"]).name for run in found] == ["first", "second", "third"]
    assert [run["format"] for run in found] == ["columns", "columns", "lines"]
    assert [(run["steps"], run["first_step"], run["last_step"]) for run in found] == [(30, 0, 29), (3, 3, 5), (1, 9, 9)]
    assert found[0]["findings"] == {"error": 1}
    assert found[1]["bytes"] == sum(file.stat().st_size for file in (tmp_path / "second").rglob("*") if file.is_file())
    assert main(["runs", str(tmp_path)]) == 0
    assert "3 (3 to 5)" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 3


def test_steps_after_a_clock_that_was_set_back_follow_those_before(tmp_path, monkeypatch):
    log = RunLog(tmp_path / "rank0")
    fill(tmp_path, [small_step(1), small_step(2)])
    assert [frame.step for frame in log.frames()] == [1, 2]
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
    fill(tmp_path, [small_step(3), small_step(4)], on_existing="continue")
    assert [frame.step for frame in log.frames()] == [3, 4]  # as `top` follows a run
    assert steps_in(tmp_path / "rank0") == [1, 2, 3, 4]
