"""`trainprobe black-box RUN`: what the last steps of a rank were like when something happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded
from trainprobe.errors import FormatError
from trainprobe.monitor.black_box.box import BOX_FILE, RING_FILE
from trainprobe.monitor.black_box.kept_replicas import kept_differences
from trainprobe.monitor.black_box.last_words import last_words
from trainprobe.monitor.black_box.ring import read_ring, read_where
from trainprobe.monitor.black_box.step_in_progress import step_in_progress


def black_box(
    file: Annotated[
        Path, typer.Argument(help="a black_box.jsonl or .ring file, or the folder of a run or rank", metavar="RUN")
    ],
    json: Annotated[bool, typer.Option("--json", help="the steps as JSON lines, whole")] = False,
    flipped: Annotated[
        bool, typer.Option("--flipped", help="of a dump that kept tensors: which element and bit differ between ranks")
    ] = False,
) -> int:
    """Show the last steps that each rank kept: scalars, batch, random state, largest norms, and the findings."""
    console = Console(highlight=False, soft_wrap=flipped)
    if flipped:
        found = [str(difference) for difference in kept_differences(file)]
        console.print("\n".join(found) or "the kept tensors are the same bits on all ranks", markup=False)
        return int(bool(found))
    for path in find_boxes(file):
        head, steps = read_box(path)
        if json:
            if path.suffix == ".ring":
                typer.echo(orjson.dumps({"where": dataclasses.asdict(read_where(path))}).decode())
            for step in steps:
                typer.echo(orjson.dumps(step).decode())
            continue
        words = last_words(path.parent)
        why = head.get("why") or (words.split("\n")[0] if words else "the process was killed while it ran")
        console.print(f"[bold]{path}[/bold]: {why}")
        last = _seen_last(steps)
        where = head.get("where") if head else _where(path, words, last)
        if where:
            console.print(f"It was at {where}{_gradient(last)}.", markup=False)
        console.print(_table(steps))
        for finding in head.get("findings", ()):
            console.print(
                f"  {finding['severity']} {finding['rule']} (step {finding['step']}): {finding['message']}", markup=False
            )
        if words:
            console.print(f"At the signal:\n{words}", markup=False)
    return 0


_BACKWARD = "in _engine_run_backward"  # the frame of torch that runs it


def find_boxes(file: Path) -> list[Path]:
    """Return the black boxes at or below a path: written out, else left by a killed process. Raises FormatError for none."""
    if file.is_file():
        return [file]
    if not file.exists():
        raise FormatError(f"{file} does not exist: name the folder that the run wrote to (`output` of its plan)")
    written = sorted(file.rglob(BOX_FILE))
    folders = {path.parent for path in written}
    left = [path for path in sorted(file.rglob(RING_FILE)) if path.parent not in folders]
    if not written and not left:
        raise FormatError(f"there is no {BOX_FILE} or {RING_FILE} under {file}: a run that ended well leaves none")
    return sorted(written + left)


def read_box(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (head, steps), each step {"facts": …, "reel": a line of the record log}. Raises FormatError for anything else.

    The last one may be the step in which the process died; its facts tell the call that was "seen_last".
    """
    left = path.suffix == ".ring"
    lines = read_ring(path) if left else read_bounded(path, LARGEST_STATE, follow=True).splitlines()
    try:
        values: list[dict[str, Any]] = [orjson.loads(line) for line in lines]
        heads = [value for value in values if "black_box" in value]
        steps = [value for value in values if "reel" in value]
    except (orjson.JSONDecodeError, TypeError) as error:
        raise FormatError(f"{path} is not a black box: {error}") from error
    last = step_in_progress(path) if left else None
    if last is not None and not (steps and steps[-1]["reel"]["step"] == last["reel"]["step"]):
        steps.append(last)
    return (heads[0] if heads else {}), steps


def _where(path: Path, words: str | None, last: Mapping[str, Any]) -> str:
    """Return where the process was that left a ring; the stacks, or what was seen last, tell a backward pass."""
    where = read_where(path)
    text = "" if where.step < 0 else str(where)
    backward = _BACKWARD in (words or "") or last.get("phase") == "backward"
    return text.replace("the loss or the backward pass", "the backward pass") if backward else text


def _seen_last(steps: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return the call that was seen last in a step that was cut short; nothing of any other."""
    if not steps or steps[-1]["reel"].get("complete", True):
        return {}
    calls = steps[-1]["reel"]["calls"]
    return steps[-1]["facts"].get("seen_last") or (calls[-1] if calls else {})


def _gradient(last: Mapping[str, Any]) -> str:
    """Return whose gradient was seen last, if what was seen last is a gradient."""
    unreduced = last.get("kind") == "state" and last.get("node") == "unreduced"
    backward = last.get("kind") in ("module", "parameter", "op") and last.get("phase") == "backward"
    return f"; the last gradient seen was that of {last['name']}" if backward or unreduced else ""


def _table(steps: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2))
    names = list(dict.fromkeys(name for step in steps for name in step["reel"].get("scalars", {})))
    for title in ("step", *names[:8], "batches", "random state", "tensors"):
        table.add_column(title)
    for step in steps:
        step_data, facts = step["reel"], step["facts"]
        table.add_row(
            str(step_data["step"]) + ("" if step_data.get("complete", True) else " (cut short)"),
            *(_number(step_data["scalars"].get(name)) for name in names[:8]),
            " ".join(_short(b) for b in facts.get("batches", ())),
            _short(facts.get("random", "")),
            str(step_data.get("rows", 0)),
        )
    return table


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else str(value if value is not None else "")


def _short(value: Any) -> str:
    return f"{value:x}"[:8] if isinstance(value, int) else str(value if not isinstance(value, Mapping) else "")
