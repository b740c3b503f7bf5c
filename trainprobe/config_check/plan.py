"""The `config_check` section of a plan: checked here, and carried out by a tap that only needs to be opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.config_check.checker import ConfigChecker
from trainprobe.config_check.settings import make_settings

PACK = "config_check_pack.zip"


def validate(settings: Mapping[str, Any]) -> None:
    """Raise PlanError on what cannot be used (see `settings.Settings` for the keys)."""
    make_settings(settings)


class ConfigCheckTap:
    """Watches the program from its making on, and the model from `open` on; it needs no step and takes itself away.

    section: the plan's `config_check`, true for its defaults. folder: the plan's `output`; the pack lies there unless the
    section names another `output`. Whether it still works or is done, `begin` and `end` do nothing.
    """

    def __init__(self, section: Mapping[str, Any] | bool, folder: Path, on_error: str = "continue") -> None:
        given = {} if isinstance(section, bool) else dict(section)
        self._pack = Path(given.pop("output", folder / PACK))
        self._given = {"on_error": on_error, **given}
        self._checker: ConfigChecker | None = None
        ConfigChecker.apply_patches(**self._given)

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Begin to capture the model; a second model is not looked at."""
        if self._checker is None:
            self._checker = ConfigChecker(model, output_zip_path=self._pack, optimizer=optimizer, **self._given)

    def begin(self, tape: Any) -> None:
        """Nothing depends on which steps are collected."""

    def pause(self) -> None:
        """Nothing to pause."""

    def resume(self) -> None:
        """Nothing to resume."""

    def end(self, again: bool = False) -> None:
        """Nothing to remove."""

    def close(self) -> None:
        """Write the pack now; at the end of the program it is written in any case."""
        if self._checker is not None:
            self._checker.close()

    def release(self) -> None:
        """Take all patches away, and wait for nothing: what was captured until now is written in the background."""
        if self._checker is not None:
            self._checker.release()
        else:
            ConfigChecker.stop()
