"""`trainprobe plan --new FILE`: three questions, and a plan with comments that an editor completes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import OutputError, PlanError

WIDTH = 118
SCHEMA = Path(__file__).with_name("plan.schema.json")
_PURPOSES = {
    "judge": "each step is judged while the training runs",
    "dump": "steps are dumped, to be compared with another run",
    "both": "both",
}


def ask(file: Path) -> None:
    """Ask three questions and write a plan. Raises PlanError for an answer that no plan can have, OutputError."""
    purpose = _chosen()
    fields: dict[str, Any] = {"record": "nothing" if purpose == "judge" else "L0"}
    if purpose == "judge":
        fields["sinks"] = ["parquet", *_words(typer.prompt("A service that gets the numbers (wandb, mlflow, otlp …)", ""))]
    else:
        fields["step"] = [
            int(word) if word.isdigit() else word for word in _words(typer.prompt("Steps to dump, such as 0, 100-110", "0"))
        ]
        fields["sinks"] = ["dump", "parquet"]
    fields["output"] = typer.prompt("Folder to write to", "probe_out")
    if purpose != "dump":
        fields |= {"monitor": True, "audit": True}
    load_plan(fields)  # refuses what no plan can have
    write_new(file, commented(fields, ["# made by `trainprobe plan --new`"]))
    typer.echo(f"{file} can be used as a plan: trainprobe run --plan {file} -- train.py")


def _chosen() -> str:
    for number, (name, text) in enumerate(_PURPOSES.items(), 1):
        typer.echo(f"  {number}  {name}: {text}")
    answer = str(typer.prompt("What for", "1")).strip()
    chosen = dict(zip("123", _PURPOSES, strict=True)).get(answer, answer)
    if chosen not in _PURPOSES:
        raise PlanError(f"{answer!r} is none of {', '.join(_PURPOSES)}")
    return chosen


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises OutputError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputError(f"{path} exists already, and nothing is overwritten: name another file or remove it") from None
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def commented(fields: Mapping[str, Any], head: list[str]) -> str:
    """Return fields as YAML, each with what it does, behind the line that tells an editor where the schema is."""
    lines = [f"# yaml-language-server: $schema={SCHEMA}", *head]
    for name, value in fields.items():
        lines += ["", *comment(" ".join((Plan.model_fields[name].description or "").split()), "# ")]
        lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")  # JSON is YAML
    return "\n".join(lines) + "\n"


def comment(text: str, first: str) -> list[str]:
    """Return a text as comments. first: what the first line begins with."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent="#   ")
