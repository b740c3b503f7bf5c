"""A hash of each function of a source text that comments, layout, docstrings, log output and paths do not change."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from typing import Any

from trainprobe.config_check.names import load_names

_SKIPPED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_PATH = re.compile(r"(?:~|\.{1,2})?/[^\s]*|[A-Za-z]:\\[^\s]*")
_LOGGERS = re.compile(r"_?(?:log|logger|logging|console|warnings|tqdm)", re.I)
_QUIET_IMPORTS = frozenset({"logging", "warnings", "tqdm", "pprint", "typing", "__future__", "loguru"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
TOP = "(top level)"


def code_hashes(text: str) -> dict[str, str]:
    """Return qualified name → 16 hexadecimal digits for functions and methods, classes without them, and what stands outside.

    A function inside another belongs to it. What has no effect beyond output (`print`, calls of loggers) is not in the hash.
    Texts that are absolute or relative paths count as equal, and so do constants given for settings of `speed` in names.yaml,
    which are captured by value (`num_workers=4`), and for those of `places` (`logging_steps=10`). The order of definitions does
    not matter. Raises SyntaxError or ValueError for what is not Python.
    """
    return {name: _hash(nodes) for name, nodes in _pieces(ast.parse(text).body, "") if nodes}


def _pieces(body: list[Any], prefix: str) -> Iterator[tuple[str, list[Any]]]:
    rest: list[Any] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _pieces(node.body, f"{prefix}{node.name}.")
            rest += [node.name, node.bases, node.keywords, node.decorator_list]
        elif isinstance(node, _Function):
            yield f"{prefix}{node.name}", [node]
        elif not _is_quiet(node):
            rest.append(node)
    yield prefix.removesuffix(".") or TOP, rest


def _is_quiet(node: Any) -> bool:
    """Tell whether a statement changes nothing that is computed: a docstring, log output, the import of a logger, `pass`."""
    if isinstance(node, ast.Pass):
        return True
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in _QUIET_IMPORTS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in _QUIET_IMPORTS
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return isinstance(node.value, ast.Call) and _is_output(node.value.func)


def _is_output(function: ast.expr) -> bool:
    """Tell whether this is `print`, or a method of something that is named like a logger."""
    if isinstance(function, ast.Name):
        return function.id in {"print", "pprint"}
    owner = function.value if isinstance(function, ast.Attribute) else None
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return bool(_LOGGERS.fullmatch(name))


def _is_harmless(node: Any) -> bool:
    """Tell whether a constant is given for what says how fast data come, or where and how often something is written."""
    if not isinstance(node, ast.keyword) or not isinstance(node.value, ast.Constant):
        return False
    return load_names().is_speed(node.arg or "") or load_names().is_place(node.arg or "")


def _hash(nodes: list[Any]) -> str:
    parts: list[str] = []
    _write(nodes, parts)
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _write(value: Any, parts: list[str]) -> None:
    """Write a syntax tree as words; empty fields, which differ between versions of Python, are left out."""
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name, inner in ast.iter_fields(value):
            if name not in _SKIPPED and inner is not None and inner != []:
                parts.append(name)
                _write(inner, parts)
    elif isinstance(value, list):
        parts.append("[")
        for inner in value:
            if not _is_quiet(inner) and not _is_harmless(inner):
                _write(inner, parts)
        parts.append("]")
    elif isinstance(value, str) and _PATH.fullmatch(value):
        parts.append("(a path)")
    else:
        parts.append(repr(value))
