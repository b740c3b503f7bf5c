"""A fleet's run log, made up: 4,096 ranks × 100 steps × 300 values a step, with planted differences, written by the real sink.

    python -m benchmarks.fleet write DIR [--data 512 --tensor 4 --pipeline 2 --steps 100 --whole]
    python -m benchmarks.fleet measure DIR

`write` sends one rank of each shard (the template, tensor × pipeline of them) step by step through the sink `parquet`. Every
other rank has its template's parameters, gradients and gradient norm and its own activations and loss: its rows are what the
sink writes for it (`tests/monitor/fleet/test_fleet_generator.py` compares the bytes), and unless `--whole` is given they are
stored as `trainprobe runs --compact` stores them. `measure` prints the size, and CPU seconds, clock and memory of the commands.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from trainprobe.engine.core.records import Call, Place, StepData, Value
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.dumps.header import place_text
from trainprobe.engine.storage.dumps.layout import find_segments, log_folder
from trainprobe.engine.storage.run_log.live import STREAM
from trainprobe.engine.storage.run_log.replicas import SameAs, compact_segment, read_segment, referring_table
from trainprobe.engine.storage.run_log.schema import SCHEMA
from trainprobe.engine.storage.run_log.segments import write_segment
from trainprobe.engine.storage.sinks import parquet

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
AT = {name: i for i, name in enumerate(PARTIALS)}
COUNT = 1 << 20
SECOND = 1_000_000  # microseconds a step
START = 1_795_000_000 * SECOND
STATISTICS = ("min", "max", "mean", "norm")


@dataclass(frozen=True)
class Planted:
    """What is wrong in the fleet. `rank` and `step` of each; None where nothing is wrong."""

    parted: tuple[int, int] | None = None  # one parameter has other bits from this step on
    nan: tuple[int, int] | None = None  # its first layer makes a NaN at this step, which the next stage and all gradients get
    stopped: tuple[int, int] | None = None  # writes nothing from this step on
    loss: tuple[int, int] | None = None  # reports twice the loss from this step on
    late: tuple[int, int] | None = None  # a pipeline stage, not a rank: three seconds behind from this step on


@dataclass(frozen=True)
class Fleet:
    """The shape of a fleet: ranks on each axis, steps, and values a step: parameters with their gradients, and activations."""

    data: int = 512
    tensor: int = 4
    pipeline: int = 2
    steps: int = 100
    parameters: int = 130
    activations: int = 40
    planted: Planted = Planted()

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def place(self, rank: int) -> Place:
        """Tensor ranks are neighbours, then data-parallel ones, then pipeline stages, as in Megatron."""
        tp, dp, pp = rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)
        axes = {"dp": (dp, self.data), "tp": (tp, self.tensor), "pp": (pp, self.pipeline)}
        return Place(rank, self.ranks, axes)

    def template_of(self, rank: int) -> int:
        """Return the rank with the same shard and the data-parallel index 0."""
        return rank - self.place(rank).axes["dp"][0] * self.tensor

    def last_step(self, rank: int) -> int:
        stopped = self.planted.stopped
        return stopped[1] if stopped and stopped[0] == rank else self.steps

    def time(self, rank: int, step: int) -> int:
        late = self.planted.late
        behind = late is not None and self.place(rank).axes["pp"][0] == late[0] and step >= late[1]
        return START + step * SECOND + rank % 97 + (3 * SECOND if behind else 0)

    # ---- values: columns of the partials, and checksums, of one step -----------------------------------------------

    @cached_property
    def calls(self) -> tuple[list[Call], list[Value]]:
        """The calls of a step: modules forward, then parameters with their gradients."""
        values = [Value(i, "torch.bfloat16", (1024, 1024)) for i in range(self.activations + 2 * self.parameters)]
        calls: list[Call] = []
        for i in range(self.activations // 2):
            call = Call("module", f"layers.{i}", 0, "forward", cls="Block", micro=0)
            call.args, call.out = [values[2 * i]], values[2 * i + 1]
            calls.append(call)
        for i in range(self.parameters):
            call = Call("state", f"layers.{i // 7}.weight{i % 7}", 0, "optimizer")
            call.params = {"value": values[self.activations + 2 * i], "grad": values[self.activations + 2 * i + 1]}
            calls.append(call)
        return calls, values

    def step_data(self, rank: int, step: int) -> StepData:
        """Return what a rank hands to the writer at a step."""
        calls, values = self.calls
        own, shared = drawn(rank, self.steps, self.activations), drawn(self.template_of(rank), self.steps, 2 * self.parameters)
        partials = np.concatenate([own[0][step], shared[0][step]])
        sums = np.concatenate([own[1][step], shared[1][step]])
        self._plant(partials, sums, rank, step)
        loss = self.losses(rank)[step]
        scalars = {"loss": loss, "grad_norm": 1.0 + 1 / (step + 1)}
        about = {"checksums": sums, "scalars": scalars}
        return StepData(step, self.place(rank), "pytorch", "off", "statistics", calls, values, partials, **about)

    def _plant(self, partials: F64, sums: U64, rank: int, step: int) -> None:
        parted, nan = self.planted.parted, self.planted.nan
        if parted and parted[0] == rank and step >= parted[1]:
            row = self.activations + 2 * (self.parameters // 2)
            sums[row] ^= np.uint64(1 << 40)
            partials[row, AT["sumsq"]] *= 1.0001
        if nan and step == nan[1]:
            partials[self.first_nan(rank) : self.activations, AT["nan"]] = 3
            partials[self.activations + 1 :: 2, AT["nan"]] = 3  # the reduced gradients

    def first_nan(self, rank: int) -> int:
        """Return the first activation that is NaN: the fourth layer's output in the origin, all in the stages behind it."""
        origin = self.planted.nan[0] if self.planted.nan else -1
        if rank == origin:
            return min(7, self.activations - 1)
        here, there = self.place(rank).axes, self.place(origin).axes
        behind = here["dp"] == there["dp"] and here["tp"] == there["tp"] and here["pp"][0] > there["pp"][0]
        return 0 if behind else self.activations

    def own(self, rank: int) -> tuple[F64, U64]:
        """Return the partials [steps, activations, columns] and checksums of a rank's activations."""
        partials, sums = drawn(rank, self.steps, self.activations)
        if self.planted.nan:
            partials = partials.copy()
            partials[self.planted.nan[1], self.first_nan(rank) :, AT["nan"]] = 3
        return partials, sums

    def losses(self, rank: int) -> F64:
        """Return the loss of each step."""
        noise = np.random.default_rng((rank, 1)).normal(size=self.steps)
        losses = 2 + 8 / (np.arange(self.steps) + 1) + 0.05 * noise
        if self.planted.loss and self.planted.loss[0] == rank:
            losses[self.planted.loss[1] :] *= 2
        return losses


@lru_cache(maxsize=4)
def drawn(rank: int, steps: int, n: int) -> tuple[F64, U64]:
    """Return partials [steps, n, columns] and checksums [steps, n] by chance, the same for the same arguments."""
    rng = np.random.default_rng((rank, steps, n))
    partials = np.zeros((steps, n, len(PARTIALS)))
    scale = np.exp(rng.normal(size=(steps, n))).astype(np.float32).astype(np.float64)
    partials[..., AT["count"]] = COUNT
    partials[..., AT["min"]], partials[..., AT["max"]] = -scale, np.float32(scale * rng.uniform(0.5, 1, (steps, n)))
    partials[..., AT["sum"]], partials[..., AT["sumsq"]] = rng.normal(size=(steps, n)) * scale, scale**2 * COUNT / 9
    return partials, rng.integers(1, 1 << 63, (steps, n)).astype(np.uint64)


# ---- writing -------------------------------------------------------------------------------------------------------------


def write_through_sink(fleet: Fleet, folder: Path, rank: int) -> Path:
    """Write a rank's run log with the real sink, its steps at the fleet's times, and return its folder."""
    clock = time.time_ns
    sink = parquet.open(folder, Plan(output=folder, on_existing="replace", sinks=("parquet",)), fleet.place(rank))
    try:
        for step in range(fleet.last_step(rank)):
            time.time_ns = lambda step=step: fleet.time(rank, step) * 1000
            sink.write(fleet.step_data(rank, step))
        sink.close()
    finally:
        time.time_ns = clock
    return log_folder(folder, rank)


class Copier:
    """Makes the segments of the ranks that hold the same shard as a template from the template's segment."""

    def __init__(self, fleet: Fleet, template: Path, whole: bool = False) -> None:
        (self._segment,) = find_segments(template)
        self._fleet, self._template, self._whole = fleet, template, whole
        table = read_segment(self._segment)
        self._stream = table.schema.metadata[STREAM].decode()
        if not whole:
            kind, name = (table[column].cast(pa.string()) for column in ("kind", "name"))
            table = table.filter(pc.or_kleene(pc.is_in(kind, pa.array(["module", "step"])), pc.equal(name, "loss")))
        self._table = table
        self._at = {name: table.schema.get_field_index(name) for name in table.schema.names}
        self._step = table["step"].to_numpy()
        kind, name, slot = (np.array(table[column].to_pylist(), object) for column in ("kind", "name", "slot"))
        self._modules, self._losses = np.flatnonzero(kind == "module"), np.flatnonzero(name == "loss")
        self._value = np.array(
            [2 * int(n[7:]) + (s == "output") for n, s in zip(name[kind == "module"], slot[kind == "module"], strict=True)]
        )
        self._steps = np.flatnonzero(kind == "step")
        self._detail = table["detail"].to_pylist()

    def write(self, folder: Path, rank: int) -> None:
        """Write the run log of another rank of this shard. One whose shared rows are its own goes through the sink."""
        if self._fleet.planted.parted and self._fleet.planted.parted[0] == rank:
            target = write_through_sink(self._fleet, folder, rank)
            if not self._whole:
                compact_segment(find_segments(target)[0], self._template)
            return
        table, last = self.rows(rank), self._fleet.last_step(rank) - 1
        stream = {STREAM: secrets.token_hex(8)}
        if self._whole:  # a file that was read calls what is in a list `element` and not `item`
            table = table.cast(SCHEMA).replace_schema_metadata({**SCHEMA.metadata, **stream})
        else:
            table = table.replace_schema_metadata({**table.schema.metadata, **stream})
        if not self._whole:
            to = SameAs(int(self._template.name[4:]), ((0, last),), {self._segment.name: self._stream})
            table = referring_table(table, to)
        target = log_folder(folder, rank)
        target.mkdir(parents=True, exist_ok=True)
        write_segment(target / self._segment.name, table)

    def rows(self, rank: int) -> pa.Table:
        """Return the rows as the sink would have written them for this rank."""
        fleet, table = self._fleet, self._table
        partials, sums = fleet.own(rank)
        at = self._step[self._modules], self._value
        numbers = {**finish(partials[at], STATISTICS), "nan": partials[at][:, AT["nan"]], "checksum": sums[at]}
        columns = {name: self._changed(name, self._modules, values) for name, values in numbers.items()}
        columns["value"] = self._changed("value", self._losses, fleet.losses(rank)[self._step[self._losses]])
        columns["rank"] = np.full(table.num_rows, rank, np.int32)
        columns["time"] = np.array([fleet.time(rank, step) for step in range(fleet.steps)])[self._step]
        columns["detail"] = self._details(rank)
        for name, column in columns.items():
            field = table.schema.field(name)
            array = column if isinstance(column, pa.Array) else pa.array(column)
            table = table.set_column(self._at[name], field, array.cast(field.type))
        return table.filter(pa.array(self._step < fleet.last_step(rank)))

    def _changed(self, name: str, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> pa.Array:
        column = self._table[name].combine_chunks()
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False).copy()
        numbers[rows] = values
        return pa.array(numbers, mask=column.is_null().to_numpy(zero_copy_only=False))

    def _details(self, rank: int) -> pa.Array:
        detail = list(self._detail)
        place, made = place_text(self._fleet.place(rank)), dict[str, str]()
        for row in self._steps.tolist():
            about = detail[row]
            if about not in made:
                made[about] = orjson.dumps({**orjson.loads(about), "place": place}).decode()
            detail[row] = made[about]
        return pa.array(detail, pa.string())


def write_fleet(fleet: Fleet, folder: Path, whole: bool = False) -> None:
    """Write the run log of every rank."""
    for template in sorted({fleet.template_of(rank) for rank in range(fleet.ranks)}):
        copier = Copier(fleet, write_through_sink(fleet, folder, template), whole)
        for rank in range(template + fleet.tensor, template + fleet.tensor * fleet.data, fleet.tensor):
            copier.write(folder, rank)


# ---- measuring -----------------------------------------------------------------------------------------------------------


def measured(*command: str) -> str:
    """Return clock, CPU seconds, largest memory and exit code of a command of trainprobe, and the first line that it prints."""
    program = (
        "import resource, sys\nfrom trainprobe.cli import main\ncode = main(sys.argv[1:])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024\n"
        "print(f'{cpu:.1f} s of CPU, {memory:.0f} MB, exit code {code}', file=sys.stderr)"
    )
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    first = next(iter(done.stdout.splitlines()), "")
    return f"{' '.join(command)}: {time.monotonic() - before:.1f} s, {done.stderr.splitlines()[-1]}\n    {first}"


def measure(folder: Path) -> None:
    """Print what the run log takes, and what the commands take to read it."""
    files = list(folder.rglob("metrics-*.parquet"))
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} segments, {size / 1e6:.1f} MB: {size / len(files) / 100:.0f} bytes a rank and step of 100 steps")
    print(measured("judge", "--fleet", str(folder)))
    print(measured("report", "--fleet", str(folder), "--output", str(folder / "fleet.html")))
    print(f"    page: {(folder / 'fleet.html').stat().st_size / 1e6:.2f} MB")


def planted_in(fleet: Fleet) -> Planted:
    """Return one fault of each kind, scattered over a fleet of this shape."""
    ranks, steps = fleet.ranks, fleet.steps
    return Planted(
        parted=(ranks * 3 // 10, steps * 4 // 10),
        nan=(ranks // 5, steps * 7 // 10),
        stopped=(ranks * 9 // 10, steps * 85 // 100),
        loss=(ranks * 6 // 10, steps * 3 // 10),
        late=(fleet.pipeline - 1, steps * 6 // 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "measure"))
    parser.add_argument("folder", type=Path)
    for name, default in (("data", 512), ("tensor", 4), ("pipeline", 2), ("steps", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--whole", action="store_true")
    chosen = parser.parse_args()
    if chosen.what == "measure":
        measure(chosen.folder)
        return
    fleet = Fleet(chosen.data, chosen.tensor, chosen.pipeline, chosen.steps)
    fleet = fleet if chosen.healthy else replace(fleet, planted=planted_in(fleet))
    write_fleet(fleet, chosen.folder, chosen.whole)


if __name__ == "__main__":
    main()
