"""What was saved, to be set against what is loaded: fingerprints of all parameters and states when a state dict is taken.

`torch.optim.Optimizer.state_dict` is what every way of saving a training calls. The fingerprints of the last few saves lie in a
file of this rank beside the output, so that the process that resumes the run finds them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainprobe.engine.facts import SavedTensors
from trainprobe.engine.guard import Guard
from trainprobe.engine.taps.replaced import Replaced

KEPT = 3
FILE = "saved_states.json"
Fingerprints = Callable[[], Mapping[tuple[str, str], int]]


class SavedStates:
    """Remembers saves from `start` to `stop`. awaits: something was loaded, or a run goes on, and nobody has compared yet.

    loaded: is told when something was loaded. look: returns (name, slot) → fingerprint of what this process holds now; step:
    the number of the last step.
    """

    def __init__(self, guard: Guard, look: Fingerprints, step: Callable[[], int]) -> None:
        self.awaits = False
        self.loaded: Callable[[], None] = lambda: None
        self._guard = guard
        self._look = look
        self._step = step
        self._saved: list[SavedTensors] = []
        self._path: Path | None = None
        self._replaced: list[Replaced] = []

    def start(self, folder: Path | None = None) -> None:
        """Begin to remember. folder: of this rank, where an earlier process may have left what it saved."""
        if self._replaced:
            return
        self._path = None if folder is None else folder / FILE
        if self._path is not None and self._path.exists():
            self._saved = self._guard.run(_read, self._path) or []
            self.awaits = bool(self._saved)
        kind: Any = torch.optim.Optimizer
        self._replaced = [
            Replaced(kind, "state_dict", self._around_save(kind.state_dict)),
            Replaced(kind, "load_state_dict", self._around_load(kind.load_state_dict)),
        ]

    def stop(self) -> None:
        """Remember no more."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced = []

    def take(self) -> tuple[SavedTensors, ...]:
        """Return what was saved, if something was loaded since; then nothing until the next load."""
        if not self.awaits:
            return ()
        self.awaits = False
        return tuple(self._saved)

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
                self.loaded()
            return out

        return load_state_dict

    def _remember(self) -> None:
        if self._step() < 0:
            return  # nothing was trained yet: some take a state dict to see what is in it
        tensors = dict(self._look())
        if not tensors or (self._saved and self._saved[-1].tensors == tensors):
            return
        self._saved = [*self._saved, SavedTensors(self._step(), tensors)][-KEPT:]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._path.with_name(f".{FILE}.partial")
            draft.write_text(json.dumps([[s.step, [[*key, n] for key, n in s.tensors.items()]] for s in self._saved]))
            draft.replace(self._path)


def _read(path: Path) -> list[SavedTensors]:
    return [SavedTensors(step, {(name, slot): n for name, slot, n in rows}) for step, rows in json.loads(path.read_text())]
