"""The `config_check` section of a plan, carried out in a PyTorch training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.config_check.checker import ConfigChecker
from trainprobe.config_check.plan import settings_and_pack
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule


class ConfigCheckProgram(Program):
    """Watches the program from its making on, and the model from `opened` on, until its micro-steps or the run have ended.

    section: the plan's `config_check`. folder: the plan's `output`.
    """

    def __init__(self, section: Mapping[str, Any] | bool, folder: Path, on_error: str = "continue") -> None:
        super().__init__("config_check", Schedule(), part="config_check")
        self._settings, self._pack = settings_and_pack(section, folder, on_error)
        self._checker: ConfigChecker | None = None
        ConfigChecker.apply_patches(**self._settings)

    def attached(self, probe: EngineProbe) -> None:
        """Take all patches away where the tool stops, after those of the taps, which were put in later."""
        probe.guard.of(self.part).on_trip(self._release)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Begin to capture the model; a second model is not looked at."""
        if self._checker is None:
            self._checker = ConfigChecker(model, output_zip_path=self._pack, optimizer=optimizer, **self._settings)

    def closed(self) -> None:
        """The run has ended, perhaps before the micro-steps that were to be captured."""
        self._release()

    def _release(self) -> None:
        """Take all patches away, and wait for nothing: what was captured until now is written in the background."""
        if self._checker is not None:
            self._checker.release()
        else:
            ConfigChecker.stop()
