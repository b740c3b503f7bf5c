"""`trainprobe migrate config.json`: the plan that records what a configuration of mindstudio-probe asks for, with comments."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.legacy import is_legacy, translate
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.errors import OutputError, UsageError

WIDTH = 118


def migrate(
    config: Annotated[Path, typer.Argument(help="the config.json", metavar="CONFIG")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the plan here instead of to the terminal")
    ] = None,
) -> int:
    """Write a plan that records what CONFIG records. Comments in it say what means something else or is not available."""
    text = plan_text(config)
    if output is None:
        typer.echo(text, nl=False)
    elif output.exists():
        raise OutputError(f"{output} exists already, and nothing is overwritten: name another file or remove it")
    else:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"{output} can be used as a plan")
    return 0


def plan_text(config: Path) -> str:
    """Return the plan as YAML. Raises PlanError for what cannot be carried over, UsageError for what is a plan already."""
    settings = read_plan_file(config)
    if not is_legacy(settings):
        raise UsageError(f"{config} has no key that only mindstudio-probe has: it is a plan already")
    load_plan(settings)  # refuses what no plan can be made of
    fields, notes = translate(settings, config.name)
    lines = [f"# made from {config.name}"]
    for note in notes:
        lines += _comment(note, "# not the same: ")
    for name, value in fields.items():
        lines += ["", *_comment(" ".join((Plan.model_fields[name].description or "").split()), "# ")]
        lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")  # JSON is YAML
    return "\n".join(lines) + "\n"


def _comment(text: str, first: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent="#   ")
