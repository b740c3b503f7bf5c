"""Keeps a pack from replacing a file that is none."""

from __future__ import annotations

from pathlib import Path

from trainprobe.config_check.pack import MANIFEST
from trainprobe.config_check.pack_members import read_members
from trainprobe.errors import FormatError, OutputError


def refuse_foreign(path: Path) -> None:
    """Raise OutputError where the pack would replace a file that is no pack."""
    if path.is_dir():
        raise OutputError(f"{path}: is a folder, and the pack is a file: give a name such as {path / 'pack.zip'}")
    if path.exists():
        try:
            ours = MANIFEST in read_members(path)
        except FormatError:
            ours = False
        if not ours:
            raise OutputError(f"{path}: exists and is not a pack; it is not replaced: remove it or choose another name")
