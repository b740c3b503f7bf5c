"""How the results of a comparison are written: JSON and CSV, and one error where a file cannot be written."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.storage.sheet_cells import write_rows
from trainprobe.errors import OutputError


@contextmanager
def writing(path: Path, hint: str = "") -> Generator[None]:
    """Raise OutputError where the block cannot write `path`. hint: what the user can do, as the end of a sentence."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error}{f'; {hint}' if hint else ''}") from error


def write_json(document: Any, path: Path) -> None:
    """Write a document as indented JSON; NaN and infinities become null. Raises OutputError."""
    with writing(path):
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def write_csv(columns: Iterable[str], rows: Iterable[Iterable[Any]], path: Path, encoding: str = "utf-8") -> None:
    """Write a CSV file in which no text is a formula. Raises OutputError."""
    with writing(path), path.open("w", newline="", encoding=encoding) as file:
        write_rows(file, [columns])
        write_rows(file, rows)
