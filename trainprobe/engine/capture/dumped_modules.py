"""`module_dump` of the classic front: for a stretch of the program one module alone is recorded, without what runs inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.capture.torch_modules import ModuleTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.tape import Tape

WHOM = "module_dump"


class DumpedModules:
    """Records modules under names of the program's own while the taps of ops pause.

    others: the taps that pause meanwhile. request: what is recorded of a module. tape: the tape of the current step, or None.
    Gradients of what was recorded arrive until `step_ends`.
    """

    def __init__(
        self,
        others: Sequence[Tap | None],
        pauses: Pauses,
        request: ModuleRequest,
        guard: Guard,
        tape: Callable[[], Tape | None],
    ) -> None:
        self._others = others
        self._pauses = pauses
        self._request = request
        self._guard = guard
        self._tape = tape
        self._taps: dict[tuple[int, str], ModuleTap] = {}
        self._begun: dict[ModuleTap, Tape] = {}
        self._current: ModuleTap | None = None
        guard.on_trip(self.step_ends)

    def begin(self, module: Any, name: str) -> None:
        """Record calls of `module`, as `Module.{name}.{its class}`, and nothing else, until `end`."""
        tape = self._tape()
        if tape is None:
            return
        self.end()
        self._pauses.begin(WHOM, self._others)
        tap = self._current = self._taps.setdefault((id(module), name), self._tap_of(module, name))
        if self._begun.get(tap) is tape:
            tap.resume()
        else:
            tap.begin(tape)
            self._begun[tap] = tape

    def end(self) -> None:
        """Record everything again."""
        tap, self._current = self._current, None
        if tap is not None:
            tap.pause()
            self._pauses.end(WHOM, self._others)

    def step_ends(self) -> None:
        """Let go of the modules of this step."""
        self.end()
        for tap in self._begun:
            tap.end()
        self._begun.clear()

    def _tap_of(self, module: Any, name: str) -> ModuleTap:
        request = replace(self._request, selected=lambda shown: shown == name)
        tap = ModuleTap(request, self._guard, None, rename=lambda inner: f"{name}.{inner}" if inner else name)
        tap.open(module)
        return tap
