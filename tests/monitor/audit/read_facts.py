"""Which facts a relation reads, as its source has them."""

from __future__ import annotations

import ast
import importlib
import inspect
import types

HERE = "trainprobe.monitor.audit"


def facts_read(module: types.ModuleType) -> set[str]:
    """Return each "Class.field" that is read off `….of(Class)`, and each attribute of an `evidence`, such as "follows".

    Those of a relation, and of the functions that it imports from beside it.
    """
    found = _in(ast.parse(inspect.getsource(module)))
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HERE):
            there = importlib.import_module(node.module or "")
            for function in (getattr(there, alias.name) for alias in node.names):
                if isinstance(function, types.FunctionType):
                    found |= _in(ast.parse(inspect.getsource(function)))
    return found


def _in(source: ast.AST) -> set[str]:
    scopes = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    return {word for scope in scopes for word in _in_function(scope)}


def _in_function(scope: ast.FunctionDef) -> set[str]:
    named: dict[str, str] = {}  # local name → class of the fact that it holds
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            several = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
            names, values = (x.elts if several else [x] for x in (node.targets[0], node.value))  # pyright: ignore
            named |= {
                name.id: kind
                for name, value in zip(names, values, strict=True)
                if isinstance(name, ast.Name) and (kind := _kind(value))
            }
    found = set[str]()
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute):
            kind = _kind(node.value) or (named.get(node.value.id) if isinstance(node.value, ast.Name) else None)
            if kind:
                found.add(f"{kind}.{node.attr}")
            elif ast.unparse(node.value).split(".")[-1] in ("evidence", "before"):
                found.add(node.attr)
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith((".marks", ".numbers")):
            found |= {f"peer {key}" for key in _text(node.slice)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".streak", "streaks.get")):
            first = node.args[0].elts[0] if isinstance(node.args[0], ast.Tuple) else node.args[0]
            found |= {f"streak {kind}" for kind in _text(first)}
    return found


def _kind(node: ast.AST) -> str | None:
    """Return the class in `….of(Class)`."""
    of = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "of"
    return node.args[0].id if of and isinstance(node.args[0], ast.Name) else None  # pyright: ignore


def _text(node: ast.AST) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
