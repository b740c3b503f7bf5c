"""A connection to DuckDB within the memory of a small machine, and Parquet files and Arrow tables as one relation."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trainprobe.errors import FormatError, MissingExtra

MEMORY = "1000MB"  # what DuckDB may take; Python and Arrow come on top


class Duck:
    """One in-memory database."""

    def __init__(self) -> None:
        if importlib.util.find_spec("duckdb") is None:
            raise MissingExtra("duckdb", "fleet", "--fleet")
        import duckdb

        self._errors = duckdb.Error
        threads = max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16))
        settings: dict[str, Any] = {"threads": threads, "memory_limit": MEMORY, "preserve_insertion_order": False}
        self._connection = duckdb.connect(":memory:", config=settings)
        self._registered: list[pa.Table] = []  # kept alive

    def source(self, name: str, files: Sequence[Path], tables: Sequence[pa.Table] = ()) -> str | None:
        """Return SQL for the rows of Parquet files and of Arrow tables, None where there are neither."""
        parts: list[str] = []
        if files:
            parts.append(f"select * from read_parquet([{', '.join(_quoted(str(file)) for file in files)}])")
        if tables:
            joined = pa.concat_tables(tables)
            self._registered.append(joined)
            self._connection.register(f"{name}_live", joined)
            parts.append(f"select * from {name}_live")
        return f"({' union all by name '.join(parts)})" if parts else None

    def add(self, name: str, table: pa.Table) -> None:
        """Make an Arrow table known under a name."""
        self._registered.append(table)
        self._connection.register(name, table)

    def run(self, sql: str) -> None:
        """Carry out a statement. Raises FormatError where a file cannot be read."""
        self._guarded(lambda: self._connection.execute(sql))

    def table(self, sql: str) -> pa.Table:
        """Return the answer of a query. Raises FormatError where a file cannot be read."""
        return self._guarded(lambda: self._connection.sql(sql).to_arrow_table())

    def _guarded(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._errors as error:
            raise FormatError(f"the run log cannot be queried: {' '.join(str(error).split())}") from error


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
