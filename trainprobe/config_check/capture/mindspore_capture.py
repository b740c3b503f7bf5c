"""Captures what decides the numbers of a MindSpore training: environment, packages, settings, data, weights.

A micro-step is a call of the model from Python while it is in training mode; in graph mode, where the model is not called from
Python, one of the cell that trains. Tensors are read and reduced on the host. Random calls are not captured: MindSpore's
operators draw inside their kernels. After `micro_steps` nothing is left behind.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy as np

from trainprobe.config_check.capture.cell_settings import clipping_source, clips, describe, optimizer_source, present_rates
from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.hyperparameters import SettingsWatch
from trainprobe.config_check.capture.packages import capture_packages
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.setting_files import flat, read_settings, source
from trainprobe.config_check.merge import merge_ranks
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.config_check.plan import settings_and_pack
from trainprobe.config_check.settings import make_settings
from trainprobe.engine.arrays.mindspore_library import HostStatsRows, host_array, plain_dtype, without_data
from trainprobe.engine.arrays.numpy_rows import NumpyStatsRows
from trainprobe.engine.capture.mindspore.calls import KnownCalls, listed
from trainprobe.engine.capture.mindspore.cells import is_graph_mode, is_optimizer
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.stats import finish
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.engine.stats.partials import CHECKSUM, STATS

MOST_STEPS = 1000  # learning rates that are kept
STATISTICS = ("min", "max", "mean", "norm")
MOST_ROWS, LARGEST_ROWS = 4096, 1 << 22  # samples of a batch that get a fingerprint of their own; elements of such a batch
UNSEEN = "random calls are not captured under MindSpore: its operators draw inside their kernels"


class CellCapture(Program):
    """Carries out the `config_check` section of a plan from its first step on; the step need not be collected.

    section: the plan's `config_check`. folder: the plan's `output`.
    """

    def __init__(self, section: Mapping[str, Any] | bool, folder: Path, on_error: str = "continue") -> None:
        super().__init__("config_check", Schedule(), part="config_check")
        settings, pack = settings_and_pack(section, folder, on_error)
        self.settings = make_settings({**settings, "output": pack})
        self.micro = 0
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._writer: PackWriter | None = None
        self._ending: threading.Thread | None = None
        self._started = time.time()
        self._rates: dict[int, list[list[float]]] = {}  # number of an optimizer → its rates of each step
        self._stepped: dict[int, dict[str, Any]] = {}  # number of an optimizer → its settings as it first stepped
        self._clipping: dict[str, Any] | None = None

    def attached(self, probe: EngineProbe) -> None:
        """Run under the guard of this part of the probe."""
        self._probe = probe
        self._guard = probe.guard.of(self.part)
        self._calls = _Calls(self._guard, self._called)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Remember the model; a second one is not looked at."""
        if not self._models:
            self._models, self._optimizers = listed(model), listed(optimizer)

    def watch(self, training_cell: Any) -> None:
        """Begin to look at calls: of the model, or, in graph mode, of the cell that trains."""
        if self._writer is None and self._ending is None:
            self._guard.run(self._start)
            self._calls.know(listed(training_cell) if is_graph_mode() else [*self._models, *self._optimizers])
            self._calls.begin()

    def begins(self, step: int) -> None:
        """Begin to look at calls, unless that has begun."""
        self.watch(None)

    def closed(self) -> None:
        """Write what there is, and wait until it is written."""
        if self._writer is not None:
            self._finish()
        if self._ending is not None:
            self._ending.join(self.settings.wait + 30)

    # ---- captures --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        captures, place = self.settings.captures, self._probe.place
        writer = self._writer = PackWriter(
            self.settings.output, place.rank, place.world_size, tuple(c for c in captures if c != "randomness")
        )
        if place.world_size > 1 and place.rank == 0:
            self.settings.output.unlink(missing_ok=True)
        if "environment" in captures:
            writer.put("environment", capture_environment())
        if "packages" in captures:
            writer.put("packages", capture_packages)
        if "hyperparameters" in captures:
            scripts = [read_settings(path) for path in self.settings.scripts]
            given = SettingsWatch().sources([], dict(self.settings.settings))
            self._sources = [*scripts, *given, *(part for model in self._models for part in _of_model(model))]
            self._put_settings(writer)
        if "randomness" in captures:
            writer.note(UNSEEN)

    def _put_settings(self, writer: PackWriter) -> None:
        """Put settings into the pack, with what is known of optimizers and of clipping by now."""
        found = [self._clipping] if self._clipping is not None else []
        for i, optimizer in enumerate(self._optimizers):
            stepped = self._stepped.get(i) or optimizer_source(i, optimizer)
            found.append({**stepped, "values": {**stepped["values"], "lr_by_step": list(self._rates.get(i, []))}})
        writer.put("hyperparameters", {"framework": "mindspore", "sources": [*self._sources, *found]})

    def _called(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        writer = self._writer
        if writer is None:
            return
        if is_optimizer(cell):
            self._steps(writer, cell)
        elif clips(cell):
            self._clipping = self._clipping or clipping_source(cell)
        elif cell.training and self.micro < self.settings.micro_steps:
            self._begins_micro_step(writer, cell, args, kwargs)
        elif cell.training:
            self._finish()

    def _begins_micro_step(self, writer: PackWriter, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captures, micro = self.settings.captures, self.micro
        done = micro if is_graph_mode() else max(map(len, self._rates.values()), default=0)
        if "dataset" in captures:
            writer.put("dataset", _inputs(cell, args, kwargs, done, self.settings.tokens), micro)
        if "weights" in captures:
            named = ((p.name, p, "parameter") for model in self._models for p in model.get_parameters())
            writer.put("weights", {"step": done, "parameters": entries(named)}, micro)
        self.micro += 1

    def _steps(self, writer: PackWriter, optimizer: Any) -> None:
        """Keep the rates of a step; at the first one, settings are those that are used."""
        number = next((i for i, known in enumerate(self._optimizers) if known is optimizer), len(self._optimizers))
        if number == len(self._optimizers):
            self._optimizers.append(optimizer)
        steps = self._rates.setdefault(number, [])
        if len(steps) < MOST_STEPS:
            steps.append(present_rates(optimizer))
        if number not in self._stepped and "hyperparameters" in self.settings.captures:
            self._stepped[number] = optimizer_source(number, optimizer)
            self._put_settings(writer)

    def _finish(self) -> None:
        self._calls.end()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if "hyperparameters" in self.settings.captures:
            self._guard.run(self._put_settings, writer)
        if self.micro < self.settings.micro_steps:
            writer.note(f"the training ended after {self.micro} of {self.settings.micro_steps} micro-steps")
        self._ending = threading.Thread(
            target=self._guard.run, args=(self._write, writer), name="trainprobe-config-check-merge", daemon=True
        )
        self._ending.start()

    def _write(self, writer: PackWriter) -> None:
        writer.close()
        place = self._probe.place
        if place.rank == 0 and place.world_size > 1:
            merge_ranks(self.settings.output, place.world_size, self.settings.wait, self._started)


class _Calls(KnownCalls):
    """Reports also calls of what clips gradients, and of another optimizer than was known."""

    def _joins(self, cell: Any) -> bool:
        return clips(cell) or (is_optimizer(cell) and not is_graph_mode())


def entries(named: Iterable[tuple[str, Any, str]], tokens: int = 0) -> dict[str, dict[str, Any]]:
    """Return name → shape, dtype, checksum (16 hexadecimal digits), min, max, mean, norm of tensors, as torch packs hold them.

    named: name, tensor, and its kind; one of kind "input" also gets a fingerprint of each index of dimension 0, and a whole
    one its first `tokens` elements.
    """
    strip = HostStatsRows(NumpyStatsRows(STATS | CHECKSUM))
    found: dict[str, dict[str, Any]] = {}
    rows: dict[str, int] = {}
    for name, t, kind in named:
        entry: dict[str, Any] = {"shape": list(t.shape), "dtype": plain_dtype(str(t.dtype)), "kind": kind}
        found[name] = entry
        note = without_data(t)
        array = None if note else host_array(t)
        row = -1 if array is None else strip.add(array)
        if array is None or row < 0:
            entry["note"] = note or "cannot be read"
            continue
        rows[name] = row
        if kind == "input":
            del entry["kind"]
            if array.data.ndim and 0 < array.shape[0] <= MOST_ROWS and 0 < array.data.size <= LARGEST_ROWS:
                entry["samples"] = [f"{fingerprint(sample):016x}" for sample in array.data]
            if array.data.dtype.kind in "iu" and array.data.size <= LARGEST_ROWS:
                wide = array.data.astype(np.int64)  # as PyTorch's are
                entry["checksum_int64"] = f"{fingerprint(wide):016x}"
                if "samples" in entry:
                    entry["samples_int64"] = [f"{fingerprint(sample):016x}" for sample in wide]
            if tokens and array.data.dtype.kind in "iu":
                entry["tokens"] = array.data.reshape(-1)[:tokens].tolist()
    partials, sums, _ = strip.drain()
    numbers = finish(partials, STATISTICS)
    for name, row in rows.items():
        found[name]["checksum"] = f"{int(sums[row]) if sums is not None else 0:016x}"
        found[name] |= {key: float(numbers[key][row]) for key in STATISTICS}
    return found


def _inputs(cell: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int, tokens: int) -> dict[str, Any]:
    parameters = inspect.signature(cell.construct).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {names[i] if i < len(names) else f"args.{i}": value for i, value in enumerate(args)} | dict(kwargs)
    leaves = flat(given)
    tensors = {name: value for name, value in leaves.items() if isinstance(value, mindspore.Tensor)}
    scalars = {name: v for name, v in leaves.items() if isinstance(v, bool | int | float | str) or v is None}
    return {"step": step, "tensors": entries(((n, t, "input") for n, t in tensors.items()), tokens), "scalars": scalars}


def _of_model(model: Any) -> list[dict[str, Any]]:
    """Return what a model's cells are, and the configuration of a model of MindFormers, as sources of settings."""
    found = [source("model", "model", {name: describe(cell) for name, cell in model.cells_and_names() if name})]
    config: Any = getattr(model, "config", None)
    values = plain(config.to_dict()) if hasattr(config, "to_dict") else None
    return [*found, source("model settings", "model.config", flat(values))] if isinstance(values, Mapping) else found
