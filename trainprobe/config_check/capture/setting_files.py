"""Reads settings out of files, without running anything: shell scripts, YAML, JSON, TOML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.references import resolved
from trainprobe.config_check.capture.shell_script import exported_variables, read_shell_script
from trainprobe.config_check.names import masked
from trainprobe.engine.storage.safe_files import open_to_read, yaml_documents
from trainprobe.errors import FormatError

LARGEST_FILE = 8 << 20  # bytes; a settings file has kilobytes
ASTRAY = "astray"  # the key of a scheduler that moves an optimizer which another one steps in place of
IDLE_LOADER = "idle loader"  # the kind of a data loader from which no captured step drew
MOST_VALUES = 200_000  # after YAML anchors are expanded
KINDS = {".sh": "shell", ".bash": "shell", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return {"kind", "name", "values", "environment"} of one file; values is flat, dotted name → scalar or list of scalars.

    Raises FormatError that says which file, which line, and what to do.
    """
    path = Path(path)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise FormatError(
            f"{path}: settings are read from {', '.join(KINDS)}, and this file ends in {path.suffix or 'nothing'!r}"
        )
    text = _text(path)
    environment: dict[str, str] = {}
    if kind == "shell":
        values: Any = read_shell_script(text, str(path))
        environment = capture_environment(exported_variables(text, str(path)))["variables"]
    else:
        values = _parsed(path, text, {"yaml": _yaml, "json": _json, "toml": _toml}[kind])
    settings = flat(values, str(path))
    settings = resolved(settings) if kind == "yaml" else settings
    return source(kind, path.name, settings) | {"environment": environment}


def source(kind: str, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one source of settings as it stands in a pack, without secrets."""
    return {"kind": kind, "name": name, "values": {k: masked(k, v) for k, v in values.items()}}


def flat(tree: Any, path: str = "settings") -> dict[str, Any]:
    """Flatten nested mappings to dotted names; a list of scalars stays a list, any other list is numbered."""
    out: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        prefix, value = stack.pop()
        if len(out) + len(stack) > MOST_VALUES:
            raise FormatError(f"{path}: holds more than {MOST_VALUES} values, which no settings file does")
        if isinstance(value, Mapping) and value:
            stack += [(f"{prefix}.{k}" if prefix else str(k), inner) for k, inner in reversed(list(value.items()))]
        elif isinstance(value, list | tuple) and any(isinstance(v, Mapping | list | tuple) for v in value):
            stack += [(f"{prefix}.{i}" if prefix else str(i), inner) for i, inner in reversed(list(enumerate(value)))]
        elif prefix:
            out[prefix] = value
    return out


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            raise FormatError(f"{path}: is a folder; name the files in it")
        with open_to_read(path) as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > LARGEST_FILE:
        size = path.stat().st_size
        raise FormatError(f"{path}: has {size} bytes; settings above {LARGEST_FILE} are refused: is it a data file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _parsed(path: Path, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        tree = parse(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise FormatError(f"{path}, line {line}: is not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise FormatError(f"{path}: is not valid YAML: {error}") from None
    except json.JSONDecodeError as error:
        raise FormatError(f"{path}, line {error.lineno}: is not valid JSON: {error.msg}") from None
    except ImportError:
        raise FormatError(f"{path}: TOML is read with Python 3.11 or newer: write these settings as YAML or JSON") from None
    except (RecursionError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read as settings: {str(error)[:200] or 'nested too deeply'}") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise FormatError(f"{path}: settings are `name: value` pairs, and this file holds a {type(tree).__name__}")
    return tree


def _yaml(text: str) -> Any:
    documents = [d for d in yaml_documents(text, most=MOST_VALUES) if d is not None]
    if len(documents) > 1:
        return {f"document{i}": d for i, d in enumerate(documents)}
    return documents[0] if documents else None


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text)
