"""Reads a plan's YAML or JSON text strictly: no code, no duplicate key, no surprise in what a scalar becomes.

YAML is read by the 1.2 rules for scalars, so that `level: off` is the text "off" and not false, and `step: 2024-01-01` is a
text and not a date. Anchors are allowed, but what they expand to is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

from trainprobe.engine.storage.safe_files import open_to_read, yaml_documents
from trainprobe.errors import FormatError, PlanError

LARGEST_FILE = 1 << 20  # bytes
_SUFFIXES = {".yaml", ".yml", ".json"}
_SCALARS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


def read_plan_file(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return the mapping that a `.yaml`, `.yml` or `.json` file holds; PlanError says what is wrong and where.

    text: what stands in the file, where that is known already.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise PlanError(f"{path}: a plan is a .yaml, .yml or .json file, and this one ends in {path.suffix or 'nothing'!r}")
    text = _text(path) if text is None else text
    try:
        tree = _json(text) if path.suffix.lower() == ".json" else _yaml(text)
    except RecursionError:
        raise PlanError(f"{path}: the values are nested too deeply to be a plan") from None
    except _Fault as fault:
        raise PlanError(f"{path}: {fault}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise PlanError(f"{path}: a plan is a list of `key: value` lines, and this file holds a {type(tree).__name__}")
    return cast("dict[str, Any]", tree)


class _Fault(Exception):  # noqa: N818  (never leaves this file)
    """A sentence about the text, to which the path is added."""


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise PlanError(f"{path}: is a folder, and a plan is a file")
        with open_to_read(path) as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such plan file (looked in {path.absolute().parent})") from None
    except FormatError as error:
        raise PlanError(str(error)) from None
    except OSError as error:
        raise PlanError(f"{path}: the plan file cannot be read: {error.strerror}") from None
    if len(raw) > LARGEST_FILE:
        raise PlanError(f"{path}: is larger than {LARGEST_FILE >> 20} MiB, which no plan is; was another file meant?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _json(text: str) -> object:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise _Fault(f"the key {key!r} stands twice in one section: remove one of the two")
            out[key] = value
        return out

    def constant(name: str) -> float:
        raise _Fault(f"{name} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise _Fault(f"line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except ValueError as error:  # a number with more digits than Python converts
        raise _Fault(f"is not JSON: {error}") from None


def _yaml(text: str) -> object:
    import yaml

    try:
        found = yaml_documents(text, _loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _Fault(f"{place}is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise _Fault(f"is not YAML: {error}") from None
    except FormatError as error:
        raise _Fault(str(error)) from None
    except ValueError as error:
        raise _Fault(f"is not YAML: {error}") from None
    if len(found) > 1:
        raise _Fault(f"holds {len(found)} documents, and a plan is one")
    return found[0] if found else None


def _loader() -> type:
    import yaml

    class Strict(yaml.SafeLoader):
        """The safe loader, with YAML 1.2 scalars and no key twice."""

        yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    continue
                if not isinstance(key, yaml.ScalarNode):
                    raise _Fault(f"line {key.start_mark.line + 1}: a key must be one word")
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise _Fault(f"line {line}: the key {key.value!r} stands twice in one section: remove one of the two")
                seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    for name, pattern in _SCALARS.items():
        Strict.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), None)
    Strict.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^(?:<<)$"), ["<"])
    Strict.add_constructor("tag:yaml.org,2002:int", _whole_number)
    Strict.add_constructor("tag:yaml.org,2002:float", _number)
    return Strict


def _whole_number(loader: Any, node: Any) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _number(loader: Any, node: Any) -> float:
    text = str(loader.construct_scalar(node)).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))
