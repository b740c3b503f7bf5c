"""`trainprobe judge DIR`: applies the rules to a recorded run again; what they find is what they would have found live."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import yaml
from rich.console import Console
from rich.text import Text

from trainprobe.engine.records import Finding
from trainprobe.errors import FormatError, PlanError
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.rules import RuleOptions, rule_names
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import in_order, judge_frames

_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def judge(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to", metavar="DIR")],
    rules: Annotated[
        str | None, typer.Option("--rules", help="names between commas, or a YAML file of rules and their settings")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a finding")] = False,
) -> int:
    """Judge the run in DIR. Exit code: 0 nothing to worry about, 1 a warning or an error was found, 3 cannot be judged."""
    chosen = read_rules(rules)
    steps = Counter[int]()

    def counted() -> Any:
        for frame in read_frames(folder):
            steps[frame.place.rank] += 1
            yield frame

    found = in_order(judge_frames(counted(), chosen))
    if not steps:
        raise FormatError(f"{folder} holds no step that could be judged: the run wrote none before it ended, or not to here")
    if json:
        for finding in found:
            typer.echo(orjson.dumps(dataclasses.asdict(finding), default=str).decode())
    else:
        _show(found, steps, chosen)
    return int(any(f.severity != "info" for f in found))


def read_rules(text: str | None) -> dict[str, RuleOptions]:
    """Return the rules that `--rules` names: all defaults without it. Raises PlanError for unknown names and settings."""
    if text is None:
        return make_rules(None)
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise PlanError(f"--rules {path} cannot be read as YAML: {' '.join(str(error).split())}") from None
        section = loaded.get("monitor", loaded) if isinstance(loaded, dict) else None
        if not isinstance(section, dict):
            raise PlanError(f"{path}: expected a section of rules and their settings")
        return make_rules(section.get("rules", section))  # pyright: ignore
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise PlanError(f"--rules names no rule (there are: {', '.join(rule_names())})")
    return make_rules(names)


def _show(found: list[Finding], steps: Counter[int], rules: dict[str, RuleOptions]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in found:
        where = [f"step {finding.step}"] if finding.step is not None else []
        where += [f"rank {finding.place.rank}"] if finding.place else []
        line = Text(f"{finding.severity:<8}", style=_COLOURS[finding.severity])
        console.print(line.append(f"{finding.rule} ", style="bold not dim").append(f"({', '.join(where)}): {finding.message}"))
        if finding.next:
            console.print(Text(f"        → {finding.next}", style="dim"))
    count = Counter(f.severity for f in found)
    told = ", ".join(f"{n} info" if severity == "info" else _counted(n, severity) for severity, n in count.items())
    seen = ", ".join(
        (f"{_counted(sum(steps.values()), 'step')} of {_counted(len(steps), 'rank')}", _counted(len(rules), "rule"))
    )
    console.print(f"{seen}: {told or 'nothing found'}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
