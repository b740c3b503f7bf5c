"""Finds the cells of a process whose `construct` assigns to an attribute: `self.count += 1`.

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

from mindspore import nn


def assigning_cell() -> str:
    """Return the name of a class of cells that may have been compiled and assigns in `construct`; empty where there is none.

    Classes of installed packages count where cells of them exist; others also where none does any more.
    """
    assigning = [kind for kind in _kinds(nn.Cell) if _assigns(kind)]
    if not assigning:
        return ""
    alive = {type(held) for held in gc.get_objects()}
    found = (kind for kind in assigning if kind in alive or not _is_installed(kind))
    return next((kind.__qualname__ for kind in found), "")


def _kinds(kind: Any) -> Iterator[Any]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _kinds(inner)


def _is_installed(kind: Any) -> bool:
    return "site-packages" in inspect.getfile(kind)


def _assigns(kind: Any) -> bool:
    construct = vars(kind).get("construct")
    if construct is None or kind.__module__.startswith("mindspore."):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(construct)))
    except (OSError, TypeError, SyntaxError):
        return False
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return any(isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self" for t in targets)
