"""Published JSON schemas, made from the types of what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type that pydantic knows, a dataclass for example."""
    from pydantic import TypeAdapter

    return {"$schema": DIALECT, **TypeAdapter(kind).json_schema()}


def text_of(schema: dict[str, Any]) -> str:
    """Return a schema as the text of a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def prints(text: Callable[[], str]) -> Callable[[bool], None]:
    """Return what carries out a command's `--schema`: it prints a schema and ends the command."""

    def callback(asked: bool) -> None:
        import typer

        if asked:
            typer.echo(text(), nl=False)
            raise typer.Exit

    return callback
