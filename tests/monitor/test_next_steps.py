"""What rules and relations write: commands that exist, with what they need, and all names where a message cuts a list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainprobe
from trainprobe.cli import VERBS

MONITOR = Path(trainprobe.__file__).parent / "monitor"
FILES = sorted([*(MONITOR / "rules").glob("*.py"), *(MONITOR / "audit").rglob("*.py")])
COMMAND = re.compile(r"`trainprobe ([a-z0-9-]+)([^`]*)`")


def named(path):
    return str(path.relative_to(MONITOR))


def texts(path):
    """Yield the strings of a file that are no docstrings; of an f-string, all of its text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            yield node.value


def test_each_command_that_a_finding_names_exists_and_has_its_arguments():
    found = [(named(path), *match) for path in FILES for text in texts(path) for match in COMMAND.findall(text)]
    assert len(found) >= 5
    assert [(path, verb) for path, verb, arguments in found if verb not in VERBS or not arguments.strip()] == []


@pytest.mark.parametrize("path", [p for p in FILES if "and_more(" in p.read_text(encoding="utf-8")], ids=named)
def test_a_message_that_cuts_a_list_of_names_hands_on_all_of_them(path):
    functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    for function in functions:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "and_more" for call in calls):
            made = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in ("finding", "found")]
            assert not made or any(map(hands_on_names, made)), function.name


def hands_on_names(call):
    """Tell whether a finding is made with all names: as `names`, or as what `found` is about, which is no single name."""
    about = call.args[1] if call.func.attr == "found" and len(call.args) > 1 else None
    listed = isinstance(about, ast.Name | ast.Call | ast.List | ast.ListComp)
    listed |= isinstance(about, ast.Attribute) and about.attr == "names"
    return listed or any(keyword.arg == "names" for keyword in call.keywords)
