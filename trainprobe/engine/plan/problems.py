"""Turns what is wrong with a plan into sentences: the value, the file and key, and what was probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from trainprobe.errors import did_you_mean

# keys that people know from other tools → the field that does the same here
_SYNONYMS = {
    "dump_path": "output",
    "output_dir": "output",
    "summary_mode": "summary",
    "data_mode": "data",
    "risk_level": "ops_scope",
    "tensor_list": "tensors",
    "list": "modules",
    "extra_info": "stacks",
    "steps": "step",
    "ranks": "rank",
    "micro_batch": "micro",
}
_EXPECTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "the path of a folder",
    "tuple_type": "a list",
    "dict_type": "a section of `key: value` lines",
    "model_type": "a section of `key: value` lines",
    "model_attributes_type": "a section of `key: value` lines",
    "none_required": "null",
}
_LIMITS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}


def unknown_keys(fields: Mapping[Any, Any], model: type[BaseModel]) -> list[tuple[Any, str]]:
    """Return a sentence for each key of `fields` that the model does not have, with the key it stands for."""
    known = list(model.model_fields)
    return [(key, _unknown(key, known)) for key in fields if key not in known]


def describe_problems(error: ValidationError, model: type[BaseModel], origin: Callable[[str], str]) -> str:
    """Word every problem of a ValidationError, one a line. origin: top-level key → where it was written."""
    by_path: dict[str, list[Any]] = {}
    for problem in error.errors(include_url=False):
        by_path.setdefault(_key_path(problem["loc"]), []).append(problem)
    deepest = [path for path in by_path if not any(_is_inside(other, path) for other in by_path)]
    return "\n".join(
        f"{origin(re.split(r'[.[]', path)[0])}: {_about(path)}{line.removeprefix(_about(path))}"  # a section names itself
        for path in deepest
        for line in _sentence(by_path[path], model).splitlines()
    )


def _about(path: str) -> str:
    """Return the key with a colon; nothing for the plan as a whole."""
    return f"{path}: " if path else ""


def _is_inside(path: str, outer: str) -> bool:
    return path.startswith((f"{outer}.", f"{outer}["))


def _key_path(loc: tuple[Any, ...]) -> str:
    """Write ("details", 0, "match") as details[0].match, without the tags that a choice between types adds."""
    text = ""
    for piece in loc:
        if isinstance(piece, int):
            text += f"[{piece}]"
        elif re.fullmatch(r"[a-z_][\w-]*", piece) and piece not in {"int", "str", "bool", "float", "nullable"}:
            text += f".{piece}" if text else piece
        elif not text:
            text = piece
    return text


def _sentence(problems: list[Any], model: type[BaseModel]) -> str:
    """Word what is wrong with one key; several problems mean that none of the kinds it may have fits."""
    value = problems[0]["input"]
    for problem in problems:
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        if problem["type"] == "extra_forbidden":
            return _unknown(problem["loc"][-1], list(model_at(model, problem["loc"][:-1]).model_fields))
        if problem["type"] == "missing":
            return "is missing"
    if isinstance(value, str):
        problems = [p for p in problems if p["type"] == "literal_error"] or problems
    texts = dict.fromkeys(_expected(p) for p in problems)
    return f"{_shown(value)} cannot be used: expected {' or '.join(texts)}{_hint(value)}"


def _expected(problem: Any) -> str:
    kind, context, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        guess = did_you_mean(value, known) if isinstance(value, str) else ""
        return f"{known[0]!r}{guess}" if len(known) == 1 else f"one of {', '.join(known)}{guess}"
    if kind in _LIMITS:
        key, word = _LIMITS[kind]
        return f"{word} {context[key]}"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    return _EXPECTED.get(kind, "another kind of value (`trainprobe plan --explain` tells which)")


def _unknown(key: Any, known: list[str]) -> str:
    synonym = _SYNONYMS.get(str(key))
    others = {other: here for other, here in _SYNONYMS.items() if here in known}
    hint = f" — did you mean {synonym!r}?" if synonym in known else did_you_mean(str(key), [*known, *others])
    near = next((f" — did you mean {other!r}, here {here!r}?" for other, here in others.items() if f"{other!r}?" in hint), hint)
    hint = near if synonym not in known else hint
    if not hint:
        hint = f" (there are: {', '.join(known)})" if len(known) < 10 else " (`trainprobe plan --explain` lists the keys)"
    return f"unknown key {key!r}{hint}"


def model_at(model: type[BaseModel], loc: Sequence[Any]) -> type[BaseModel]:
    """Return the section in which a key stands; numbers of items are passed over."""
    for piece in loc:
        field = model.model_fields.get(str(piece))
        model = next(_sections(field.annotation), model) if field is not None else model
    return model


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that the type of a field speaks of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in get_args(kind):
        yield from _sections(inner)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _hint(value: Any) -> str:
    if isinstance(value, bool):
        return " (some YAML readers turn off, on, yes and no into a boolean: put the text in quotes)"
    if type(value).__name__ in {"date", "datetime"}:
        return " (some YAML readers turn such a text into a date: put it in quotes)"
    return " (the key has no value: remove it to have its default)" if value is None else ""
