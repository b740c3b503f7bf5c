"""Finds the cells of a process whose `construct`, or a method that it calls, assigns to a parameter: `self.count += 1`.

Once MindSpore 2.9 has compiled such a statement, it no longer folds some constants of what it compiles later in the process
(calls of `+`, of functions that use it, and of those that call these), so that later graphs get another order of operators, and
callbacks in them can change the last bits of gradients. `ops.assign` does nothing of the kind.
"""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, nn


def assigning_cell() -> str:
    """Return the name of a class of cells that may have been compiled and assigns to a parameter; empty where there is none.

    Where cells of a class exist, they tell what is a parameter; where none does any more, the source of `__init__` does, and
    classes of installed packages do not count.
    """
    assigning = {kind: names for kind in _kinds(nn.Cell) if (names := _assigned(kind))}
    alive = [held for held in gc.get_objects() if type(held) in assigning] if assigning else []
    for cell in alive:
        if any(isinstance(getattr(cell, name, None), Parameter) for name in assigning[type(cell)]):
            return type(cell).__qualname__
    gone = assigning.keys() - {type(cell) for cell in alive}
    return next((kind.__qualname__ for kind in gone if not _is_installed(kind) and _makes(kind, assigning[kind])), "")


def _kinds(kind: Any) -> Iterator[Any]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _kinds(inner)


def _is_installed(kind: Any) -> bool:
    return "site-packages" in inspect.getfile(kind)


def _makes(kind: Any, names: set[str]) -> bool:
    """Tell whether the source of a class makes parameters of these names."""
    made = (
        node for node in ast.walk(_tree(kind.__init__)) if isinstance(node, ast.Assign) and "Parameter" in ast.dump(node.value)
    )
    return any(name in names for node in made for target in node.targets for name in _of_self(target))


def _assigned(kind: Any) -> set[str]:
    """Return the names of the attributes of its own that a class assigns to in `construct` and in what that calls of itself."""
    if "construct" not in vars(kind) or kind.__module__.startswith("mindspore."):
        return set()
    found: set[str] = set()
    methods, seen = ["construct"], set[str]()
    while methods:
        name = methods.pop()
        method = getattr(kind, name, None)
        if name in seen or not inspect.isfunction(method) or method.__module__.startswith("mindspore."):
            continue
        seen.add(name)
        for node in ast.walk(_tree(method)):
            if isinstance(node, ast.Call):
                methods += _of_self(node.func)
            elif isinstance(node, ast.Assign | ast.AugAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found |= _of_self(target)
    return found


def _of_self(target: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(target)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _tree(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])
