"""Writes a pack of what can be known without running anything."""

from __future__ import annotations

from pathlib import Path

from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.packages import capture_packages
from trainprobe.config_check.capture.setting_files import read_settings
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.config_check.settings import CapturedSettings

_CAPTURES = ("environment", "packages", "hyperparameters")


def write_static_pack(settings: CapturedSettings, note: str) -> Path:
    """Write environment, packages and the settings in `settings.scripts`, as far as `settings.captures` names them.

    Variables that a script exports are its own. Returns the path of the pack. Raises FormatError for a script that cannot be
    read.
    """
    captures = tuple(c for c in settings.captures if c in _CAPTURES)
    sources = [read_settings(path) for path in settings.scripts]
    environment = capture_environment()
    for one in sources:
        environment["variables"] |= one["environment"]
    writer = PackWriter(settings.output, captures=captures)
    writer.note(note)
    if "environment" in captures:
        writer.put("environment", environment)
    if "packages" in captures:
        writer.put("packages", capture_packages(Path(settings.scripts[0]) if settings.scripts else None))
    if "hyperparameters" in captures:
        writer.put("hyperparameters", {"sources": sources})
    return writer.close()
