"""CSV files, TensorBoard events and the record log, read by what people read them with."""

from __future__ import annotations

import csv
import math
import subprocess
import sys

import pytest

from tests.engine.storage.sinks.collected_steps import plan_for, small_step, told
from trainprobe.engine.core.records import Call, Finding, Place
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.dumps.findings_file import open_findings
from trainprobe.engine.storage.sinks import csv as csv_sink
from trainprobe.engine.storage.sinks import jsonl, memory, tensorboard
from trainprobe.errors import FormatError, OutputError


def fill(sink, steps=2, **about):
    for step in range(steps):
        sink.write(small_step(step, **about))
    sink.close()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- csv -------------------------------------------------------------------------------------------------------------


def test_tidy_rows_hold_every_number_of_every_record(tmp_path):
    fill(csv_sink.open(tmp_path, plan_for(tmp_path), Place(2)))
    rows = rows_of(tmp_path / "rank2/metrics.csv")
    found = {(int(r["step"]), r["name"], r["slot"], r["kind"], r["statistic"]): float(r["value"]) for r in rows}
    for step in range(2):
        for record in small_step(step).records():
            for name, value in record.values.items():
                number = found[step, record.site.name, record.site.slot, record.site.kind, name]
                assert number == value or math.isnan(number) == math.isnan(value)
    assert len(rows) == 2 * (11 * 4 + 1)
    assert rows[0]["shape"] == "[2, 3]"


def test_a_recomputed_forward_is_no_row(tmp_path):
    step_data = small_step()
    step_data.calls[1].phase = "recompute"
    sink = csv_sink.open(tmp_path, plan_for(tmp_path), Place())
    sink.write(step_data)
    sink.close()
    assert len(rows_of(tmp_path / "rank0/metrics.csv")) == 8 * 4 + 1


def test_a_torn_last_row_is_cut_off_when_a_run_continues(tmp_path):
    fill(csv_sink.open(tmp_path, plan_for(tmp_path), Place()), steps=1)
    path = tmp_path / "rank0/metrics.csv"
    whole = path.read_bytes()
    path.write_bytes(whole + b"1,0,0,modu")
    csv_sink.open(tmp_path, plan_for(tmp_path, on_existing="continue"), Place()).close()
    assert path.read_bytes() == whole


def test_wide_files_have_the_names_and_columns_of_existing_metric_files(tmp_path):
    fill(csv_sink.open(tmp_path, plan_for(tmp_path, csv_layout="wide"), Place()))
    folder = tmp_path / "metrics-rank0-wide"
    actv = rows_of(folder / "actv_0-999.csv")
    assert list(actv[0]) == ["vpp_stage", "name", "step", "micro_step", "max", "min", "mean", "norm", "shape", "dtype"]
    assert [row["name"] for row in actv] == ["layers.0.input", "layers.0.output"] * 2
    assert list(rows_of(folder / "grad_unreduced_0-999.csv")[0]) == [
        *("vpp_stage", "name", "step", "max", "min", "mean", "norm", "shape", "dtype")
    ]
    assert {path.name.partition("_0-")[0] for path in folder.iterdir()} == {
        *("actv", "actv_grad", "grad_unreduced", "param_origin", "other", "scalar")
    }


def test_what_the_optimizer_step_sees_has_wide_files_of_its_own(tmp_path):
    step_data = small_step()
    state = Call("state", "layers.0.weight", 0, "optimizer")
    state.params = {
        "value": step_data.values[0],
        "value_after": step_data.values[1],
        "grad": step_data.values[2],
        "exp_avg": step_data.values[4],
    }
    step_data.calls.append(state)
    sink = csv_sink.open(tmp_path, plan_for(tmp_path, csv_layout="wide"), Place())
    sink.write(step_data)
    sink.close()
    for sort in ("param_origin", "param_updated", "grad_unreduced", "grad_reduced", "exp_avg"):
        names = [row["name"] for row in rows_of(tmp_path / f"metrics-rank0-wide/{sort}_0-999.csv")]
        assert "layers.0.weight" in names


# ---- tensorboard -------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_every_number_under_its_tag(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill(tensorboard.open(tmp_path, plan_for(tmp_path), Place()))
    events = EventAccumulator(str(tmp_path / "tensorboard/rank0")).Reload()
    tags = events.Tags()["scalars"]
    assert len(tags) == 11 * 4 + 1
    assert [(e.step, e.value) for e in events.Scalars("scalars/loss")] == [(0, 2.5), (1, 1.25)]
    norm = next(iter(small_step().records())).values["norm"]
    assert events.Scalars("activations/layers.0/input.0/norm")[0].value == pytest.approx(norm, rel=1e-6)
    assert "gradients/layers.0.weight/grad/norm" in tags
    assert "parameters/layers.0/parameters.weight/norm" in tags


def test_tensorboard_reads_the_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fill(tensorboard.open(tmp_path, plan_for(tmp_path), Place()), histograms={0: ([-1.0, 0.0, 1.0], [2, 4])})
    events = EventAccumulator(str(tmp_path / "tensorboard/rank0")).Reload()
    histogram = events.Histograms("activations/layers.0/input.0/histogram")[0].histogram_value
    assert histogram.num == 6


WITHOUT_HEAVY_LIBRARIES = """
import sys
from pathlib import Path
from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Place
from trainprobe.engine.storage.writer import open_writer
writer = open_writer(plan_for(sys.argv[1], sinks=("dump", "jsonl", "csv", "tensorboard", "memory")), Place())
writer.submit(small_step())
writer.close()
heavy = {"torch", "tensorflow", "mindspore"} & set(sys.modules)
assert not heavy, heavy
"""


def test_no_sink_imports_a_tensor_library(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEAVY_LIBRARIES, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out").rglob("*.*"))) >= 6


# ---- record log and memory -----------------------------------------------------------------------------------------------


def test_the_record_log_gives_the_steps_back(tmp_path):
    fill(jsonl.open(tmp_path, plan_for(tmp_path), Place()), steps=3)
    again = [[told(r) for r in step_data.records()] for step_data in read_log(tmp_path)]
    assert again == [[told(r) for r in small_step(step).records()] for step in range(3)]


def test_a_torn_last_line_is_left_out_and_a_run_that_continues_cuts_it_off(tmp_path):
    fill(jsonl.open(tmp_path, plan_for(tmp_path), Place()))
    path = tmp_path / "rank0/records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [step_data.step for step_data in read_log(path)] == [0]
    sink = jsonl.open(tmp_path, plan_for(tmp_path, on_existing="continue"), Place())
    sink.write(small_step(7))
    sink.close()
    assert [step_data.step for step_data in read_log(path)] == [0, 7]


def test_a_line_that_is_no_step_is_named(tmp_path):
    fill(jsonl.open(tmp_path, plan_for(tmp_path), Place()))
    path = tmp_path / "rank0/records.jsonl"
    path.write_bytes(b'{"format": 99}\n' + path.read_bytes())
    with pytest.raises(FormatError, match=r"records\.jsonl, line 1"):
        list(read_log(path))


def test_a_second_record_log_is_refused(tmp_path):
    fill(jsonl.open(tmp_path, plan_for(tmp_path), Place()))
    with pytest.raises(OutputError, match="nothing is overwritten"):
        jsonl.open(tmp_path, plan_for(tmp_path), Place())


def test_findings_are_kept_beside_the_record_log(tmp_path):
    sink = open_findings(plan_for(tmp_path), Place())
    sink.findings([Finding("nan", "error", "a NaN", step=3)])
    sink.close()
    assert '"a NaN"' in (tmp_path / "rank0/findings.jsonl").read_text()


def test_memory_keeps_the_last_steps():
    sink = memory.MemorySink(kept=2)
    for step in range(5):
        sink.write(small_step(step))
    assert [step_data.step for step_data in sink.collected_steps] == [3, 4]
