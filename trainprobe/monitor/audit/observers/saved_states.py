"""What was saved, to be set against what is loaded: fingerprints of all parameters and states when a state dict is taken.

`torch.optim.Optimizer.state_dict` is what every way of saving a training calls. The fingerprints of the last few saves lie in a
file of this rank beside the output, so that the process that resumes the run finds them, in whatever layout it does.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.random_state import random_fingerprints
from trainprobe.engine.capture.saved_shards import HeldShards
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.records import Place, StepData
from trainprobe.engine.geometry.shards import SavedShard
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded, write_whole
from trainprobe.monitor.audit.capture.registered import saved_buffers
from trainprobe.monitor.audit.capture.set_up import optimizer_groups
from trainprobe.monitor.audit.facts.saves import Save, Saves
from trainprobe.monitor.audit.observers import Audited, RunReplacing, let
from trainprobe.monitor.audit.observers.model_calls import ModelCalls
from trainprobe.monitor.audit.observers.schedules import ScheduleWatch

KEPT = 3
_FIRST, _LAST = 4, 28  # steps whose data is remembered
FILE = "saved_states.json"


class SavedStates(RunReplacing):
    """Remembers saves from `start` to `stop`. awaits: something was loaded, or a run goes on, and nobody has compared yet."""

    needs = (ModelCalls, ScheduleWatch)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self.awaits = False
        self._scale = (-1, 0.0)  # after which step a loss scaler was saved, and its scale
        self._first: list[tuple[int, tuple[int, ...]]] = []
        self._last: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_LAST)
        self._randoms: Mapping[str, int] = {}  # as the first step of the run began
        self._begun: Mapping[str, int] = {}  # random states as this step began
        self._loaded: HeldShards | None = None
        self._saved: list[Save] = []
        self._path: Path | None = None

    def start(self) -> None:
        """Begin to remember, where a run goes on with what an earlier process has left."""
        if self.replaces:
            return
        folder, goes_on = self._audited.run.folder, self._audited.run.continues
        self._path = None if folder is None else folder / FILE
        if goes_on and self._path is not None:
            self._saved = self._guard.run(_read, self._path) or [] if self._path.exists() else []
            self.awaits = bool(self._saved) or any(_of_all_ranks(self._path))
            for seen in self._saved[-1].batches if self._saved else ():
                self._trained_on(*seen)
            self._randoms = {name: first for name, (first, _) in self._saved[-1].randoms.items()} if self._saved else {}
        super().start()

    def replaced(self) -> Iterator[Replaced]:
        """See each save and load of an optimizer, and each save of a scaler."""
        kind: Any = torch.optim.Optimizer
        yield Replaced(kind, "state_dict", self._around_save(kind.state_dict))
        yield Replaced(kind, "load_state_dict", self._around_load(kind.load_state_dict))
        yield Replaced(torch.amp.GradScaler, "state_dict", self._around_scaler(torch.amp.GradScaler.state_dict))

    def stop(self) -> None:
        """Remember no more."""
        self.awaits = False
        super().stop()

    def begin(self) -> None:
        """A step begins."""
        self._loaded, self._begun = None, {}
        self._begun = self._begins()

    def steps(self, optimizer: Any) -> None:
        """Look at what was loaded before an update changes it."""
        tape = self._audited.tape
        if self.awaits and self._loaded is None and tape is not None:
            self._loaded = self._audited.states.deferred_shards(tape)

    def facts(self, step_data: StepData) -> Saves:
        """Return what was saved and what was loaded, and remember the data of the step."""
        loaded = None if self._loaded is None else self._loaded.read()
        found = Saves(self._take(), loaded, self._begun, self._everyone)
        if batches := self._audited.of(ModelCalls).fingerprints:
            self._trained_on(step_data.step, batches)
        return found

    def _begins(self) -> dict[str, int]:
        """Return the random states as a step begins, if it is the first of the run or follows a load; otherwise nothing."""
        if self._randoms and not self.awaits:
            return {}
        now = random_fingerprints()
        self._randoms = self._randoms or now
        return now

    def _take(self) -> tuple[Save, ...]:
        """Return what was saved, if something was loaded since; then nothing until the next load."""
        if not self.awaits:
            return ()
        self.awaits = False
        return tuple(self._saved)

    def _everyone(self) -> dict[int, list[Save]]:
        """Return rank → what it saved, as far as it lies next to the output; nothing on ranks other than 0."""
        if self._path is None or self._path.parent.name != "rank0":
            return {}
        return {rank: _read(path) for rank, path in _of_all_ranks(self._path)}

    def _trained_on(self, step: int, batches: tuple[int, ...]) -> None:
        """Remember the data of a step."""
        if len(self._first) < _FIRST:
            self._first.append((step, batches))
        else:
            self._last.append((step, batches))

    def _around_save(self, original: Any) -> Any:
        def state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not state_dict.ended:  # type: ignore[attr-defined]
                self._guard.run(self._remember)
            return original(optimizer, *args, **kwargs)

        return state_dict

    def _around_load(self, original: Any) -> Any:
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            out = original(optimizer, *args, **kwargs)
            if self._saved and not load_state_dict.ended:  # type: ignore[attr-defined]
                self.awaits = True
                self._audited.run.loaded()
            return out

        return load_state_dict

    def _around_scaler(self, original: Any) -> Any:
        def state_dict(scaler: Any) -> Any:
            out = original(scaler)
            if out and not state_dict.ended:  # type: ignore[attr-defined]
                self._guard.run(self._remember_scale, float(out["scale"]))
            return out

        return state_dict

    def _remember_scale(self, scale: float) -> None:
        self._scale = (self._audited.run.step, scale)
        if self._saved and self._saved[-1].step == self._audited.run.step:
            self._saved[-1] = replace(self._saved[-1], scale=scale)
            self._write()

    def _remember(self) -> None:
        if self._audited.run.step < 0:
            return  # nothing was trained yet: some take a state dict to see what is in it
        tensors = self._held()
        if not tensors or (self._saved and self._saved[-1].tensors == tensors):
            return
        batches = (*self._first, *self._last)
        cut = {key: piece for key, piece in self._audited.states.pieces().items() if key in tensors}
        step, scale = self._scale
        world, positions = self._audited.run.world_size, let(self._guard, self._audited.of(ScheduleWatch).positions)
        now = Save(self._audited.run.step, tensors, positions or {}, batches, world, cut, self._settings())
        stand = random_fingerprints()
        randoms = {name: (first, stand[name]) for name, first in self._randoms.items() if name in stand}
        self._saved = [*self._saved, replace(now, scale=scale if step == now.step else 0.0, randoms=randoms)][-KEPT:]
        self._write()

    def _held(self) -> dict[tuple[str, str], int]:
        """Return (parameter, slot) → fingerprint of what is trained and this process holds; reads the device once."""
        audited = self._audited
        if audited.tape is not None:
            return {}
        tape, names = audited.run.new_tape(), audited.names()
        trained = {names.get(id(p)) for p in parameters_in(audited.models) if p.requires_grad}
        values = [(key, value) for key, value in audited.states.held(tape) if key[0] in trained]
        values += [((name, "buffer"), tape.value(b, STATS | CHECKSUM)) for name, b in saved_buffers(audited.models)]
        sums = tape.drain(-1, Place(), framework="", level="off", task="statistics").checksums
        return {} if sums is None else {key: int(sums[value.row]) for key, value in values if value.row >= 0}

    def _settings(self) -> dict[str, Any]:
        """Return the plain numbers of the parameter groups."""
        groups = optimizer_groups(self._audited.optimizers, self._audited.names()) if self._audited.plain else ()
        return {f"{i} {name}": value for i, group in enumerate(groups) for name, value in group.options.items()}

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps([_written(saved) for saved in self._saved]).encode())


def _written(saved: Save) -> dict[str, Any]:
    return {
        "step": saved.step,
        "tensors": [[*key, fingerprint] for key, fingerprint in saved.tensors.items()],
        "positions": saved.positions,
        "batches": saved.batches,
        "world": saved.world,
        "pieces": [[*key, *astuple(piece)] for key, piece in saved.pieces.items()],
        "settings": saved.settings,
        "scale": saved.scale,
        "randoms": saved.randoms,
    }


def _of_all_ranks(path: Path) -> Iterator[tuple[int, Path]]:
    """Yield each rank and its file, given that of one rank."""
    for found in path.parent.parent.glob(f"rank*/{FILE}"):
        number = found.parent.name.removeprefix("rank")
        if number.isdigit():
            yield int(number), found


def _read(path: Path) -> list[Save]:
    return [
        Save(
            saved["step"],
            {(name, slot): fingerprint for name, slot, fingerprint in saved["tensors"]},
            saved["positions"],
            tuple((step, tuple(batches)) for step, batches in saved["batches"]),
            saved["world"],
            {(name, slot): SavedShard(*piece) for name, slot, *piece in saved.get("pieces", ())},
            saved.get("settings", {}),
            saved.get("scale", 0.0),
            {name: (first, stood) for name, (first, stood) in saved.get("randoms", {}).items()},
        )
        for saved in json.loads(read_bounded(path, LARGEST_STATE))
        if isinstance(saved, dict)
    ]
