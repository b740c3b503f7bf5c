"""Writes a comparison for people and for programs: one file a format, each with a function `write(comparison, path)`."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

from trainprobe.config_check.compare.verdicts import PackComparison
from trainprobe.engine.storage.safe_files import open_to_read, regular
from trainprobe.errors import OutputError, UsageError, did_you_mean

FORMATS = {"xlsx": "spreadsheet", "html": "page", "json": "machine", "md": "markdown"}
MARK = "trainprobe config-check"


def write_reports(comparison: PackComparison, folder: Path, formats: list[str]) -> list[Path]:
    """Write `result.FORMAT` for each format into a folder and return their paths; no other file there is touched.

    Raises UsageError for an unknown format, OutputError where a file of that name is not a report of this tool.
    """
    check_formats(formats)
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; name a folder for the reports")
    paths = [folder / f"result.{name}" for name in dict.fromkeys(formats)]
    for path in paths:
        if path.exists() and not _is_ours(path):
            raise OutputError(f"{path}: exists and was not written by this tool; it is not replaced: choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            module = importlib.import_module(f"trainprobe.config_check.report.{FORMATS[path.suffix[1:]]}")
            temporary = path.with_name(f".{path.name}.tmp")
            module.write(comparison, temporary)
            temporary.replace(path)
    except OSError as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{folder}: a report cannot be written: {error.strerror or error}") from None
    return paths


def check_formats(formats: list[str]) -> None:
    """Raise UsageError for an unknown format."""
    for name in formats:
        if name not in FORMATS:
            raise UsageError(
                f"--format {name!r} is not one{did_you_mean(name, list(FORMATS))} (there are: {', '.join(FORMATS)})"
            )


def _is_ours(path: Path) -> bool:
    try:
        if path.suffix == ".xlsx":
            with zipfile.ZipFile(regular(path)) as book:
                return MARK.encode() in book.read("docProps/core.xml")
        with open_to_read(path) as file:
            return MARK.encode() in file.read(4096)
    except (OSError, KeyError, zipfile.BadZipFile):
        return False
