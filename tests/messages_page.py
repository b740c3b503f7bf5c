"""Makes docs/messages.md from the code: `python -m tests.messages_page` writes it, and a test fails where it is stale.

A message stands there as the code has it, with the names of what is filled in. One that is put together from pieces has its
pieces one below the other.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainprobe.monitor.audit.relations import load_relation, relation_names
from trainprobe.monitor.rules import load_rule, rule_names

PACKAGE = Path(__file__).parents[1] / "trainprobe"
PAGE = PACKAGE.parent / "docs" / "messages.md"
COMMAND = "python -m tests.messages_page"
SPEAKERS = {"say", "line", "at_end", "_say", "_tell", "_complain", "_print", "finding", "Finding"}
REFUSING = ("cli.py", "*command.py", "engine/plan/*.py", "monitor/*.py", "debugger.py", "plan_changes.py", "integrations/r*.py")
_WORD = re.compile(r"[A-Za-z]{2,}")
_PATTERN = re.compile(r"\(\?|\|\w|\[ ")  # a regular expression
_HEAD = f"""# Messages

What trainprobe prints, each message once, made from the code by `{COMMAND}`.

Names in braces stand for what is filled in, … for a part that is put together elsewhere. A sentence that is made of pieces has
them on lines of their own. Errors about damaged files are not listed: each names the file, what is wrong with it and where.
"""


def page() -> str:
    """Return the text of the page."""
    rules = [(name, Path(str(load_rule(name).__file__))) for name in rule_names()]  # pyright: ignore[reportAttributeAccessIssue]
    relations = [(name, Path(str(load_relation(name).__file__))) for name in relation_names()]  # pyright: ignore
    parts = [
        _HEAD,
        "## While a training runs\n",
        *_listed(_said_everywhere()),
        "\n## At the end of a run\n",
        *_listed([*_texts(PACKAGE / "monitor/end_line.py"), *_of_names("monitor/watcher.py", "too_few_steps", "NO_LOSS")]),
        "\n## Findings of the rules\n",
        *_by_name(rules),
        "\n## Findings of the audit\n",
        *_by_name(relations),
        "\n## Refusals of commands and plans\n",
        *_listed(_refusals()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _by_name(files: Iterable[tuple[str, Path]]) -> Iterator[str]:
    for name, file in files:
        texts = [*_texts(file)]
        if texts:
            yield f"\n**{name}**\n"
            yield from _listed(texts)


def _listed(texts: Iterable[str]) -> Iterator[str]:
    for text in dict.fromkeys(texts):
        yield textwrap.fill(f"- {text}", 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _said_everywhere() -> Iterator[str]:
    """Yield what code outside rules and relations says by itself: lines, and findings about the tool."""
    yield from _texts(PACKAGE / "integrations/__init__.py")
    for file in sorted(PACKAGE.rglob("*.py")):
        if not {"rules", "relations", "command.py"} & {file.parent.name, file.name.rpartition("_")[2]}:
            for call in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(call, ast.Call) and _name(call.func) in SPEAKERS:
                    yield from _in(*call.args, *(word.value for word in call.keywords))


def _refusals() -> Iterator[str]:
    files = {file for pattern in REFUSING for file in PACKAGE.rglob(pattern)}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield from _in(*node.exc.args[:1])


def _of_names(file: str, *names: str) -> Iterator[str]:
    """Yield the texts of functions and constants of a file."""
    for node in ast.parse((PACKAGE / file).read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if getattr(node, "name", None) in names or any(_name(target) in names for target in targets):
            yield from _in(*ast.iter_child_nodes(_without_docstrings(node)))


def _texts(file: Path) -> Iterator[str]:
    yield from _in(_without_docstrings(ast.parse(file.read_text("utf-8"))))


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]  # type: ignore[attr-defined]
    return tree


def _in(*nodes: ast.AST) -> Iterator[str]:
    """Yield the texts in some nodes, in their order, that are sentences or pieces of them."""
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = _text(node)
            if len(_WORD.findall(re.sub(r"\{.*?\}", "", text))) > 2 and " " in text.strip() and not _PATTERN.search(text):
                yield " ".join(text.split())
            for value in getattr(node, "values", ()):  # what stands within
                if isinstance(value, ast.FormattedValue):
                    yield from _in(value.value)
        else:
            yield from _in(*ast.iter_child_nodes(node))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(v.value if isinstance(v, ast.Constant) else _filled(getattr(v, "value", v)) for v in values)  # type: ignore[misc]


def _filled(node: ast.AST) -> str:
    """Return what stands for a value: its name, or … where it is put together."""
    name = _name(node)
    if isinstance(node, ast.Call) and name == "counted":
        return f"{{n}} {ast.unparse(node.args[1])[1:-1]}s" if isinstance(node.args[1], ast.Constant) else "{n}"
    if isinstance(node, ast.Name | ast.Attribute):
        return f"{{{name}}}"
    return "…"


def _name(node: ast.AST) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
