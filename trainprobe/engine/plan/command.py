"""`trainprobe plan`: checks a plan, says what it will do, explains every field, exports the schema for editors."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from trainprobe.engine.core.json_schema import DIALECT, text_of
from trainprobe.engine.plan.field_types import DetailRule, Histogram, SliceRule
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.new_plan import ask
from trainprobe.errors import OutputError

WIDTH = 128  # of a line of docs/plan.md
_SECTIONS = {"details": DetailRule, "slice": SliceRule, "histogram": Histogram}


def plan(
    file: Annotated[
        Path | None, typer.Argument(help="plan to check: .yaml, .json, or a config.json of mindstudio-probe")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="ask three questions and write a commented plan to FILE")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="print every field, its default and what it does")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema for editors")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write --explain or --schema to this file")] = None,
) -> int:
    """Check FILE and say in plain sentences what it will do."""
    if new:
        ask(file or Path("plan.yaml"))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if schema or explain:
        text = schema_text() if schema else explain_text()
        if output is None:
            console.print(text, end="")
        else:
            _write(output, text)
        return 0
    checked = load_plan(file)
    console.print(f"{file or 'The default plan'} can be used. It will:")
    for sentence in sentences(checked):
        console.print(f"  • {sentence}")
    for note in checked.notes:
        console.print(f"  ! {note}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output {path} cannot be written: {error.strerror or error}") from None


def schema_text() -> str:
    """Return the JSON schema of a plan, as it stands in docs/plan.schema.json and beside this file."""
    schema = Plan.model_json_schema()
    schema["$schema"] = DIALECT
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            _allow_one(name, field)
    return text_of(schema)


def _allow_one(name: str, field: dict[str, Any]) -> None:
    """Let an editor accept a single value where a plan takes one for a list of one."""
    if field.get("type") == "array":
        field["anyOf"] = [
            {key: field.pop(key) for key in ("type", "items", "minItems", "maxItems", "prefixItems") if key in field}
        ]
    if name not in {"scope", "edges"}:
        field.get("anyOf", []).extend([kind["items"] for kind in field.get("anyOf", []) if "items" in kind])
    if name == "max_bytes":
        field["anyOf"].append({"type": "string"})


_BEGINNING = """# Plan

    trainprobe plan --new plan.yaml

asks three questions and writes a commented plan, which an editor completes and checks:

```yaml
# yaml-language-server: $schema=…/plan.schema.json
sinks: ["parquet", "wandb"]
output: "probe_out"
monitor: true
audit: true
```

A plan is YAML, JSON, a dict or keyword arguments. Every key is checked.
"""


def explain_text() -> str:
    """Return every field with its default and what it does, as it stands in docs/plan.md."""
    lines = [_BEGINNING, *_explain(Plan)]
    for name, section in _SECTIONS.items():
        lines += [f"## An entry of `{name}`", "", _wrapped(_one_line(section.__doc__ or "")), "", *_explain(section)]
    return "\n".join(lines)


def _explain(model: type[BaseModel]) -> Iterator[str]:
    properties = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"default {_written(properties[name].get('default'))}"
        text = f"- **{name}** ({default}{_choices(properties[name])}): {_one_line(field.description or '')}"
        yield _wrapped(text, "  ")
    yield ""


def _choices(schema: dict[str, Any]) -> str:
    found = schema.get("enum") or schema.get("items", {}).get("enum")
    return f"; one of {', '.join(found)}" if found and "enum" in schema else f"; among {', '.join(found)}" if found else ""


def _written(value: Any) -> str:
    return "nothing" if value in (None, []) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def sentences(checked: Plan) -> Iterator[str]:
    """Say in plain sentences what a plan will do."""
    programs = [name.replace("_", " ") for name in checked.programs]
    if checked.level == "off" and not programs:
        yield "record nothing, because record is nothing"
        return
    if checked.level == "off":
        sinks, verb = [sink for sink in checked.sinks if sink != "dump"], "asks" if len(programs) == 1 else "ask"
        yield f"dump nothing, because record is nothing; of each step record what the {' and the '.join(programs)} {verb} for"
        if sinks:
            yield f"write {', '.join(sinks)} to {checked.output} ({_on_existing(checked)})"
        yield from (f"run the {name}" for name in programs)
        return
    where = {"L0": "every module", "L1": "every op", "mix": "every module and op", "debug": "only what `save` is handed, at"}
    yield f"look at {where[checked.level]}{_narrowed(checked)}"
    yield ", ".join(f"on {_which(noun, getattr(checked, noun))}" for noun in ("step", "rank", "micro"))
    yield f"in the phases {', '.join(checked.phases)}: {', '.join(checked.data).replace('_', ' ')}"
    yield f"record of each tensor {_recorded(checked)}"
    for rule in checked.details:
        changes = ", ".join(
            f"{k} {_written(v)}" for k, v in rule.model_dump(mode="json", exclude={"match"}, exclude_none=True).items()
        )
        yield f"but for {', '.join(rule.match)}: {changes or 'nothing else'}"
    if checked.max_bytes is not None:
        yield f"store at most {checked.max_bytes:,} bytes of tensors a rank"
    last = checked.last_step()
    yield "go on until the training ends" if last is None else f"be done after step {last}"
    yield f"write {', '.join(checked.sinks)} to {checked.output} ({_on_existing(checked)})"
    yield from (f"run the {name}" for name in programs)


def _narrowed(checked: Plan) -> str:
    fields = {"modules": checked.modules, "ops": checked.ops, "parameters": checked.parameters}
    parts = [f"{name} {', '.join(patterns)}" for name, patterns in fields.items() if patterns != ("**",)]
    if checked.ops_scope != "all" and checked.level in {"L1", "mix"}:
        parts.append(f"ops in the {checked.ops_scope} set")
    if checked.scope:
        parts.append(f"from {checked.scope[0]} to {checked.scope[1]}")
    if checked.entries:
        parts.append(f"calls whose full names contain {' or '.join(checked.entries)}")
    if len(checked.entry_sides) == 1:
        parts.append(f"the {checked.entry_sides[0]} of each call")
    return f", only {'; '.join(parts)}" if parts else ""


def _pieces(pieces: tuple[int | str, ...]) -> str:
    return ", ".join(str(piece) for piece in pieces)


def _which(noun: str, pieces: tuple[int | str, ...]) -> str:
    noun = "micro-batch" if noun == "micro" else noun
    return f"every {noun}" if "all" in pieces else f"{noun} {_pieces(pieces)}"


def _recorded(checked: Plan) -> str:
    detail = checked.base_detail
    parts = [", ".join(detail.statistics)] if detail.wants_statistics else []
    parts += ["a 64-bit checksum"] if detail.wants_checksum else []
    parts += ["the CRC-32 of its bytes"] if detail.wants_crc32 else []
    parts += ["a histogram"] if checked.histogram else []
    parts += [f"the quantiles {_pieces(tuple(map(str, checked.quantiles)))}"] if checked.quantiles else []
    parts += [f"its values as {checked.tensor_format}"] if detail.wants_tensor else []
    named = [*checked.tensors, *(f"what has {text} in its full name" for text in checked.tensor_entries)]
    saved = f", and the values of {', '.join(named)} as {checked.tensor_format}" if named else ""
    return ("; ".join(parts) or "its type and shape") + saved


def _on_existing(checked: Plan) -> str:
    effects = {
        "beside": "or beside a run that lies there",
        "refuse": "refused where a run lies there",
        "continue": "beside a run that lies there",
    }
    return effects.get(checked.on_existing, "replacing a run that lies there")
