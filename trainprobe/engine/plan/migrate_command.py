"""`trainprobe migrate config.json`: the plan that records what a configuration of mindstudio-probe asks for, with comments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.legacy import is_legacy, translate
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.new_plan import comment, commented, write_new
from trainprobe.errors import UsageError


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
    else:
        write_new(output, text)
        typer.echo(f"{output} can be used as a plan")
    return 0


def plan_text(config: Path) -> str:
    """Return the plan as YAML. Raises PlanError for what cannot be carried over, UsageError for what is a plan already."""
    settings = read_plan_file(config)
    if not is_legacy(settings):
        raise UsageError(f"{config} has no key that only mindstudio-probe has: it is a plan already")
    load_plan(settings)  # refuses what no plan can be made of
    fields, notes = translate(settings, config.name)
    differences = [line for note in notes for line in comment(note, "# not the same: ")]
    return commented(fields, [f"# made from {config.name}", *differences])
