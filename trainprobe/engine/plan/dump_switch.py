"""`dump_enable` of a `config.json` of mindstudio-probe: switches recording on and off while the training runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.core.findings import Console
from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.legacy import is_legacy
from trainprobe.errors import PlanError

KEY = "dump_enable"


class DumpSwitch:
    """Looks at the file whenever it is asked, which costs one `stat`. settings: what the file held at first, switched on.

    Only the key itself is read again; a file that cannot be read leaves the switch as it is. Each rank looks for itself.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._on = bool(settings[KEY])
        self._stamp = self._look()
        self.settings = {**settings, KEY: True}

    @classmethod
    def of(cls, source: Any) -> DumpSwitch | None:
        """Return the switch of a file that has the key, and None for any other plan. Raises PlanError for a broken file."""
        if not isinstance(source, str | os.PathLike):
            return None
        path = Path(source)  # pyright: ignore[reportUnknownArgumentType]
        settings = read_plan_file(path)
        return cls(path, settings) if settings.get(KEY) is not None and is_legacy(settings) else None

    def on(self) -> bool:
        """Tell whether recording is switched on now."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            self._read()
        return self._on

    def _read(self) -> None:
        try:
            value = read_plan_file(self._path).get(KEY)
        except (PlanError, OSError) as error:
            Console().line(f"{KEY} stays {str(self._on).lower()}: {error}")
            return
        self._on = self._on if value is None else bool(value)

    def _look(self) -> tuple[int, int] | None:
        try:
            seen = self._path.stat()
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size
