"""No reader sees a number that nobody computed: each kernel, and each way from a row to a reader, against NumPy in float64.

A step shows tensors of all sorts, each reduced with several sets of flags, and one that cannot be reduced. Whatever a file says
of one of them must be what NumPy says, and what the flags did not ask for must be unknown: absent, null or an empty cell.
"""

from __future__ import annotations

import csv
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from reduction_oracle import IMPLEMENTATIONS, REDUCERS, bits_of, rows_of
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from tests.engine.storage.sinks.collected_steps import plan_for
from trainprobe.dump_compare.dump_side import Side
from trainprobe.dump_compare.layouts.joined import Join, JoinedSide, RankPart
from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.arrays.torch_reduce import SMALLEST_NORMAL
from trainprobe.engine.core.records import Place, Record, StepData
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.stats.partials import (
    ASKED,
    CHECKSUM,
    COMPUTED_WITH,
    CRC32,
    PARTIALS,
    STATISTICS,
    STATS,
    STD,
    SUBNORMAL,
    finish,
    known,
)
from trainprobe.engine.storage.dumps import read_log
from trainprobe.engine.storage.dumps.entry_text import KEYS
from trainprobe.engine.storage.dumps.read import read
from trainprobe.engine.storage.dumps.record_log import decode, encode
from trainprobe.engine.storage.run_log.replicas import compact_segment
from trainprobe.engine.storage.run_log.schema import OF_STATISTIC
from trainprobe.engine.storage.sinks import csv as csv_sink
from trainprobe.engine.storage.sinks import dump, jsonl, msprobe_csv, msprobe_second_csv, parquet, tensorboard
from trainprobe.engine.storage.step_journal import StepJournal, read_journal
from trainprobe.engine.tape import Tape
from trainprobe.monitor.frames import Frame, SeriesTable, frame_of_step
from trainprobe.monitor.frames_of_run_log import RunLog
from trainprobe.monitor.metric_files import read_metrics

NAMES = (*STATISTICS, "checksum", "crc32")
FLAGS = {
    "plain": STATS,
    "std": STATS | STD,
    "sublow": STATS | SUBNORMAL,
    "all": STATS | STD | SUBNORMAL | CHECKSUM | CRC32,
    "checksum": CHECKSUM,
    "crc32": CRC32,
}


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of each sort of dtype and content."""
    plain = torch.tensor([1.5, -2.0, 0.0, 1e-40, 3.25])
    found = {
        "float32": plain,
        "broken": torch.tensor([1.0, math.nan, math.inf, 0.0]),
        "equal": torch.full((4,), 3.0),
        "one": torch.tensor([2.0]),
        "nothing": torch.zeros(0, 3),
        "float64": torch.cat([plain.double(), torch.tensor([1e-310], dtype=torch.float64)]),
        "bfloat16": torch.cat([plain, torch.tensor([1e-39])]).bfloat16(),
        "int64": torch.tensor([0, 5, -7, 1 << 40]),
        "bool": torch.tensor([True, False, True]),
        "complex64": torch.tensor([3 + 4j, 0j, 1e-40 + 0j]),
        "large": torch.linspace(-1, 1, 20_000),
    }
    if hasattr(torch, "float8_e4m3fn"):
        found["float8"] = torch.tensor([1.0, -0.5, 2.0**-8, 0.0]).to(torch.float8_e4m3fn)
    return found


def numpy_says(t: torch.Tensor) -> dict[str, float]:
    """All numbers of a tensor, by NumPy in float64; a tensor without elements has no extremes, mean and deviation."""
    x = (t.abs() if t.dtype.is_complex else t).double().numpy().ravel()
    real = torch.empty(0, dtype=t.dtype).real.dtype if t.dtype.is_complex else t.dtype
    tiny = SMALLEST_NORMAL.get(real, 0.0)
    bits = bits_of(t)
    whole = t.contiguous().numpy() if t.dtype.is_complex else bits
    with np.errstate(all="ignore"):
        told = {
            **{"nan": np.isnan(x).sum(), "inf": np.isinf(x).sum(), "zero": (x == 0).sum(), "count": x.size},
            **{"norm": np.sqrt((x * x).sum()), "sublow": ((np.abs(x) < tiny) & (x != 0)).sum()},
            **{"checksum": fingerprint(whole), "crc32": zlib.crc32(bits.tobytes())},
        }
        if x.size:
            told |= {"max": x.max(), "min": x.min(), "mean": x.mean(), "absmax": np.abs(x).max()}
            told["std"] = x.std(ddof=1) if x.size > 1 else math.nan
    return {name: number if isinstance(number, int) else float(number) for name, number in told.items()}


TENSORS = tensors()
RIGHT = {name: numpy_says(t) for name, t in TENSORS.items()}


def asked(flags: int, name: str) -> bool:
    """Whether a number is computed with these flags."""
    if name in ("checksum", "crc32"):
        return bool(flags & (CHECKSUM if name == "checksum" else CRC32))
    need = COMPUTED_WITH[ASKED[name].partial] if name in ASKED else COMPUTED_WITH["count"] if name == "count" else STATS
    return need & flags == need


def is_right(place: str, name: str, number: float | None, loose: float = 1e-9) -> bool:
    """Whether a reader may see this number, None for unknown, of the value at this place."""
    sort, _, flags = place.partition("_")
    if sort == "sparse":
        return number is None
    if not asked(FLAGS[flags], name) or name not in RIGHT[sort]:
        return number is None or (
            name in ("checksum", "nan", "inf", "zero", "count", "norm") and RIGHT[sort]["count"] == number == 0
        )
    right = RIGHT[sort][name]
    if number is None:  # of no elements nothing need be said, nor how many there are without numbers; undefined is unknown
        return RIGHT[sort]["count"] == 0 or math.isnan(right) or (name == "count" and not FLAGS[flags] & STATS)
    return number == right if isinstance(right, int) else number == pytest.approx(right, rel=loose, abs=1e-44, nan_ok=True)


# ---- kernels ---------------------------------------------------------------------------------------------------------------

KERNELS = [*REDUCERS, pytest.param("numpy", id="numpy"), pytest.param("numpy-compiled", id="numpy-compiled")]


@pytest.mark.parametrize("flags", [*FLAGS, "deviations alone"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_holds_what_numpy_says_and_nothing_that_was_not_asked_for(kernel: bool | str, flags: str) -> None:
    bits = FLAGS.get(flags, STD | SUBNORMAL)
    for sort, t in TENSORS.items():
        if str(kernel).startswith("numpy"):
            if sort == "float8" and kernel == "numpy":  # NumPy has no such dtype
                continue
            rows: Any = NumpyStatsRows(bits, compiled=kernel == "numpy-compiled")
            whole = bits_of(t).reshape(t.shape) if sort in ("bfloat16", "float8") else t.numpy()
            rows.add(whole, str(t.dtype).removeprefix("torch."))
        else:
            rows = rows_of(kernel, bits)
            rows.add(t)
        partials = rows.drain()[0]
        for name in STATISTICS:
            number = float(finish(partials, (name,))[name][0])
            there = bool(known(partials, name)[0])
            need = COMPUTED_WITH[ASKED[name].partial] if name in ASKED else STATS if name != "count" else 0
            assert there == (need & bits == need), f"{name} of {sort}"
            assert (
                not there
                or name not in RIGHT[sort]
                or number == pytest.approx(RIGHT[sort][name], rel=1e-9, abs=1e-44, nan_ok=True)
            )
            assert there or math.isnan(number), f"{name} of {sort} was not asked for and is {number}"
        unasked = [name for name in PARTIALS if COMPUTED_WITH.get(name, STATS) & ~bits]
        assert np.isnan([partials[0, PARTIALS.index(name)] for name in unasked]).all()


# ---- from a row to a reader ------------------------------------------------------------------------------------------------

Seen = dict[str, dict[str, float]]  # place → statistic → number; what is unknown is not there


def places() -> Iterator[tuple[str, torch.Tensor, int]]:
    for sort, t in TENSORS.items():
        yield from ((f"{sort}_{flags}", t, bits) for flags, bits in FLAGS.items())
    yield "sparse_all", torch.eye(3).to_sparse(), FLAGS["all"]


def filled(tape: Tape) -> Tape:
    for place, t, bits in places():  # each a tensor of its own: a tape looks once at one
        call = tape.call("module", place, 0, "forward", cls="Layer")
        call.out = tape.value(t.clone(), bits)
        tape.more_known(call)
    return tape


def step_of(native: bool, rank: int = 0, step: int = 3) -> StepData:
    about = {"framework": "pytorch", "level": "L0", "task": "statistics", "statistics": tuple(STATISTICS)}
    about["programs"] = ("dump", "monitor")
    return filled(Tape(TorchLibrary(native))).drain(step, Place(rank), **about)


def of_records(records: Iterator[Record]) -> Seen:
    found: Seen = {}
    for record in records:
        found.setdefault(record.site.name, {}).update(record.values)
    return found


def write(sink: Any, step_data: StepData) -> None:
    sink.write(step_data)
    sink.close()


def by_records(step_data: StepData, folder: Path) -> Seen:
    return of_records(step_data.records())


def by_dump(step_data: StepData, folder: Path) -> Seen:
    write(dump.open(folder, plan_for(folder), Place()), step_data)
    text = json.loads((folder / "step3/rank0/dump.json").read_text())["data"]
    statistics = {KEYS.get(name, name): name for name in STATISTICS}
    found: Seen = {}
    for name, entry in text.items():
        (leaf,) = entry["output"]
        seen = {statistics[key]: x for key, x in leaf.items() if key in statistics and x is not None}
        seen = {key: float(x) for key, x in seen.items()}
        seen |= {"checksum": int(leaf["checksum"], 16)} if "checksum" in leaf else {}
        found[name.split(".")[1]] = seen | ({"crc32": int(leaf["md5"], 16)} if "md5" in leaf else {})
    return found


def by_dump_read(step_data: StepData, folder: Path) -> Seen:
    write(dump.open(folder, plan_for(folder), Place()), step_data)
    return of_records(read(folder / "step3/rank0").records())


def run_log(step_data: StepData, folder: Path, rank: int = 0) -> Path:
    write(parquet.open(folder, plan_for(folder), Place(rank)), step_data)
    (segment,) = (folder / f"rank{rank}").glob("*.parquet")
    return segment


def of_row(row: dict[str, Any]) -> dict[str, float]:
    found = {name: row[column] for name, column in OF_STATISTIC.items()} | {"checksum": row["checksum"]}
    found["crc32"] = None if row["crc32"] is None else int(row["crc32"], 16)
    found["inf"] = None if row["posinf"] is None else row["posinf"] + row["neginf"]
    return {name: number for name, number in found.items() if number is not None}


def by_parquet(step_data: StepData, folder: Path) -> Seen:
    return {
        row["name"]: of_row(row) for row in pq.read_table(run_log(step_data, folder)).to_pylist() if row["kind"] == "module"
    }


def by_duckdb(step_data: StepData, folder: Path) -> Seen:
    found = duckdb.sql(f"select * exclude time from '{run_log(step_data, folder)}' where kind = 'module'")
    return {row["name"]: of_row(row) for row in (dict(zip(found.columns, row, strict=True)) for row in found.fetchall())}


def by_run_log_read(step_data: StepData, folder: Path) -> Seen:
    run_log(step_data, folder)
    return of_records(next(iter(read_log(folder))).records())


def by_live_run_log(step_data: StepData, folder: Path) -> Seen:
    sink = parquet.open(folder, plan_for(folder), Place())
    sink.write(step_data)
    sink.flush()
    return of_records(next(iter(read_log(folder))).records())


def by_replica(step_data: StepData, folder: Path) -> Seen:
    first = run_log(step_data, folder)
    second = run_log(step_of(native=True, rank=1), folder, rank=1)
    assert compact_segment(second, first.parent)
    return of_records(next(iter(read_log(folder / "rank1"))).records())


def by_resumed_run(step_data: StepData, folder: Path) -> Seen:
    """Of a run that was killed and went on: what its first part holds is as known as what came after."""
    killed = parquet.open(folder, plan_for(folder), Place())
    killed.write(step_of(native=True, step=2))
    killed.flush()
    write(parquet.open(folder, plan_for(folder, on_existing="continue"), Place()), step_data)
    before, after = (of_records(step.records()) for step in read_log(folder))
    assert {place: seen.keys() for place, seen in before.items()} == {place: seen.keys() for place, seen in after.items()}
    return after


def by_joined_shards(step_data: StepData, folder: Path) -> Seen:
    """Two ranks hold a half each, and both halves have the same numbers: the norm alone is another, by the root of two."""
    write(dump.open(folder, plan_for(folder), Place()), step_data)
    write(dump.open(folder, plan_for(folder), Place(1)), step_of(native=True, rank=1))
    ranks = [Side(folder / f"step3/rank{rank}") for rank in range(2)]
    whole, found = JoinedSide("both", ranks), dict[str, dict[str, float]]()
    for calls in zip(*(side.step_data.calls for side in ranks), strict=True):
        halves = [RankPart(side, call.out[0], rank) for rank, (side, call) in enumerate(zip(ranks, calls, strict=True))]
        seen = dict(whole.numbers(whole.add(Join(halves))))
        found[calls[0].name] = seen | ({"norm": seen["norm"] / math.sqrt(2)} if "norm" in seen else {})
    return found


def by_jsonl(step_data: StepData, folder: Path) -> Seen:
    write(jsonl.open(folder, plan_for(folder), Place()), step_data)
    return of_records(next(iter(read_log(folder))).records())


def by_old_jsonl(step_data: StepData, folder: Path) -> Seen:
    """As earlier releases wrote it: 0 where nothing was computed."""
    old = StepData(**{name: getattr(step_data, name) for name in StepData.__slots__ if name != "layout"})
    old.partials = np.nan_to_num(step_data.partials, nan=0.0, posinf=np.inf, neginf=-np.inf)
    blind = np.isnan(step_data.partials[:, PARTIALS.index("nan")])
    old.partials[blind] = 0
    line = json.loads(encode(old))
    del line["nullable"]
    found = of_records(decode(json.dumps(line).encode()).records())
    for place, seen in found.items():  # what could have been told, and cannot any more
        if asked(FLAGS[place.partition("_")[2]], "sublow") and RIGHT.get(place.partition("_")[0], {}).get("sublow") == 0:
            seen.setdefault("sublow", 0.0)
        if place.startswith("equal_") and asked(FLAGS[place.partition("_")[2]], "std"):
            seen.setdefault("std", 0.0)
    return found


def by_journal(step_data: StepData, folder: Path) -> Seen:
    memory = memoryview(bytearray(1 << 20))
    journal = StepJournal(memory)
    about = {
        "place": {"rank": 0, "world_size": 1, "axes": {}},
        "framework": "pytorch",
        "level": "L0",
        "task": "statistics",
        "wanted": [*STATISTICS],
    }
    journal.begin(3, json.dumps(about).encode())
    filled(Tape(TorchLibrary(), journal=journal))
    found = read_journal(memory)
    assert found is not None
    return of_records(found[0].records())


def by_tidy_csv(step_data: StepData, folder: Path) -> Seen:
    write(csv_sink.open(folder, plan_for(folder), Place()), step_data)
    found: Seen = {}
    for row in csv.DictReader((folder / "rank0/metrics.csv").open()):
        text = row["value"]
        found.setdefault(row["name"], {})[row["statistic"]] = int(text) if text.isdigit() else float(text)
    return found


def by_wide_csv(step_data: StepData, folder: Path) -> Seen:
    write(csv_sink.open(folder, plan_for(folder, csv_layout="wide"), Place()), step_data)
    rows = csv.DictReader((folder / "metrics-rank0-wide/actv_0-999.csv").open())
    return {row["name"].removesuffix(".output"): {s: float(row[s]) for s in STATISTICS if row[s]} for row in rows}


def by_metric_files(step_data: StepData, folder: Path) -> Seen:
    write(csv_sink.open(folder, plan_for(folder, csv_layout="wide"), Place()), step_data)
    return of_records(record for step in read_metrics(folder / "metrics-rank0-wide") for record in step.records)


def by_tensorboard(step_data: StepData, folder: Path) -> Seen:
    write(tensorboard.open(folder, plan_for(folder), Place()), step_data)
    (file,) = folder.glob("tensorboard/rank0/*")
    found: Seen = {}
    for raw in RawEventFileLoader(str(file)).Load():
        for value in Event.FromString(raw).summary.value:
            _, name, _, statistic = value.tag.split("/")
            found.setdefault(name, {})[statistic] = value.simple_value
    return found


READERS: dict[str, Callable[[StepData, Path], Seen]] = {
    name.removeprefix("by_"): reader for name, reader in list(globals().items()) if name.startswith("by_")
}
NOT_THERE = {  # what a format has no place for
    **{reader: {"checksum", "crc32"} for reader in ("wide_csv", "metric_files", "tensorboard")},
    "joined_shards": set(NAMES) - {"max", "min", "mean", "norm"},
    **{"parquet": {"absmax"}, "duckdb": {"absmax"}, "journal": {"crc32"}},
}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def step_data(request: pytest.FixtureRequest) -> StepData:
    return step_of(native=request.param)


@pytest.mark.parametrize(
    ("reader", "statistic"), [(r, s) for r in READERS for s in NAMES if s not in NOT_THERE.get(r, ())], ids=str
)
def test_a_reader_sees_what_numpy_says_and_nothing_else(
    reader: str, statistic: str, step_data: StepData, tmp_path: Path
) -> None:
    seen = READERS[reader](step_data, tmp_path)
    loose = 1e-6 if reader == "tensorboard" else 1e-9
    wrong = {
        place: seen.get(place, {}).get(statistic)
        for place, _, _ in places()
        if not is_right(place, statistic, seen.get(place, {}).get(statistic), loose)
    }
    assert not wrong


@pytest.mark.parametrize("sink", [msprobe_csv, msprobe_second_csv])
def test_files_for_scripts_of_others_have_no_row_of_a_value_of_which_nothing_is_known(
    sink: Any, step_data: StepData, tmp_path: Path
) -> None:
    write(sink.open(tmp_path, plan_for(tmp_path), Place()), step_data)
    (file,) = [file for file in tmp_path.rglob("*.csv") if file.name.startswith(("actv", "module"))]
    rows = list(csv.DictReader(file.open()))
    names = {row.get("name", row.get("module_name", "")).partition(".")[0] for row in rows}
    assert names == {place for place, t, bits in places() if bits & STATS and t.layout is torch.strided and t.numel()}
    assert {row["std"] for row in rows if "_plain" in row.get("name", row.get("module_name", ""))} == {"nan"}


def series_of(frame: Frame) -> Seen:
    found: Seen = {}
    for at, number in zip(frame.at.tolist(), frame.values.tolist(), strict=True):
        series = frame.table.series[at]
        found.setdefault(series.address.name, {})[series.statistic] = number
    return found


@pytest.mark.parametrize("where", ["live", "recorded"])
def test_rules_see_the_values_whose_numbers_were_computed(where: str, step_data: StepData, tmp_path: Path) -> None:
    if where == "live":
        frame = frame_of_step(step_data, SeriesTable())
    else:
        run_log(step_data, tmp_path)
        (frame,) = RunLog(tmp_path / "rank0").frames()
    seen = series_of(frame)
    assert seen.keys() == {place for place, t, bits in places() if bits & STATS and t.layout is torch.strided and t.numel()}
    for place, numbers in seen.items():
        right = RIGHT[place.partition("_")[0]]
        for name in ("norm", "absmax", "mean"):
            assert numbers[name] == pytest.approx(right[name], rel=1e-9, nan_ok=True)
        assert numbers["zero_share"] == right["zero"] / right["count"]
        assert ("checksum" in numbers) == place.endswith("_all")
