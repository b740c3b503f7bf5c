"""Makes the two pages of messages: `python -m tests.messages_page` writes them, and a test fails where one is stale.

docs/messages.md has what findings say, each with an example that a test made (message_examples.json). docs/all_messages.md has
every text as the code has it, with the names of what is filled in; one that is put together from pieces has them one below the
other. The command runs the tests of those examples anew whose rule has other words now, and tests that it is given besides.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.record_findings import findings_of
from trainprobe.cli import VERBS
from trainprobe.monitor.audit.relations import load_relation, relation_names
from trainprobe.monitor.rules import load_rule, rule_names

PACKAGE = Path(__file__).parents[1] / "trainprobe"
PAGE, ALL = (PACKAGE.parent / "docs" / name for name in ("messages.md", "all_messages.md"))
EXAMPLES = Path(__file__).with_name("message_examples.json")
COMMAND = "python -m tests.messages_page"
ANSWERS = ("verdict", "sentences", "conclusion", "trace", "compare", "end_line")  # files that say what a command comes to
SPEAKERS = {"say", "line", "at_end", "_say", "_tell", "_complain", "_print", "finding", "Finding"}
REFUSING = (
    "cli.py",
    "*command.py",
    "engine/plan/*.py",
    "monitor/*.py",
    "run/precision_debugger.py",
    "composition.py",
    "integrations/r*.py",
    "again/**/*.py",
)
_WORD = re.compile(r"[A-Za-z]{2,}")
_GAP = re.compile(r"\{\w+\}|…")
_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
_PATTERN = re.compile(r"\(\?|\|\w|\[ ")  # a regular expression
_HEAD = f"""# Messages

What trainprobe prints, made by `{COMMAND}`: each line was printed in a test. A finding has at most two
lines: what, the value and where; and what to do next. [All other texts](all_messages.md) are on a page of their own.
"""
_ALL_HEAD = f"""# All texts

Each text that trainprobe prints, made from the code by `{COMMAND}`; [messages.md](messages.md) has
examples of findings.

Names in braces stand for what is filled in, … for what is put together elsewhere. A sentence that is made of pieces has
them on lines of their own. Errors about damaged files are not listed: each names the file, what is wrong with it and where.
"""


def page() -> str:
    """Return the text of docs/messages.md."""
    known = examples()
    parts = [_HEAD]
    for title, names in (("Findings of the rules", rule_names()), ("Findings of the audit", relation_names())):
        parts.append(f"## {title}\n")
        for name in names:
            parts += [f"**{name}**\n", *map(_shown, known.get(name, {}).get("examples", ())[:1]), ""]
    parts += [
        "## Commands\n",
        *(f"**{name}**\n\n{_shown(known[name]['examples'][0])}\n" for name in commands()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _shown(example: dict[str, Any]) -> str:
    lines = [example["message"], *([f"next: {example['next']}"] if example["next"] else [])]
    return "\n".join(textwrap.indent(textwrap.fill(line, 120, subsequent_indent="  ", **_WHOLE), "    ") for line in lines)


def all_texts() -> str:
    """Return the text of docs/all_messages.md."""
    parts = [
        _ALL_HEAD,
        "## While a training runs\n",
        *_listed(_said_everywhere()),
        "\n## At the end of a run\n",
        *_listed([*_texts(PACKAGE / "monitor/findings.py"), *_of_names("monitor/watcher.py", "too_few_steps", "NO_LOSS")]),
        "\n## Findings of the rules\n",
        *_by_name(rule_names()),
        "\n## Findings of the audit\n",
        *_by_name(relation_names()),
        "\n## Refusals of commands and plans\n",
        *_listed(_refusals()),
    ]
    return "\n".join(parts).rstrip() + "\n"


def examples() -> dict[str, Any]:
    """Return rule or relation → {"words": fingerprint of its texts, "examples": [{message, next, test}]}."""
    return json.loads(EXAMPLES.read_text("utf-8")) if EXAMPLES.is_file() else {}


def commands() -> list[str]:
    """Return the commands whose first line is an example, in the order of the test that makes them."""
    return [name for name in examples() if name.startswith("trainprobe ")]


@cache
def words_of(name: str) -> str:
    """Return the fingerprint of the texts of a rule, relation or command, which its examples are of."""
    return hashlib.sha256("\n".join(_all_texts(name)).encode()).hexdigest()[:16]


def record(tests: Iterable[str]) -> None:
    """Keep examples of what these tests find, and make those of rules anew that have other words now."""
    known, sources = examples(), _sources()
    stale = [name for name in sources if known.get(name, {}).get("words") != words_of(name)]
    again = {example["test"] for name in stale for example in known.get(name, {}).get("examples", ())}
    chosen = sorted({*tests, *again})
    found = findings_of(chosen) if chosen else []
    for name in sorted(sources):
        old = [] if name in stale else known.get(name, {}).get("examples", [])
        if made := _distinct([*old, *(one for one in found if one["rule"] == name)], _all_texts(name)):
            known[name] = {"words": words_of(name), "examples": made}
    kept = {name: known[name] for name in sorted(known) if name in sources}
    EXAMPLES.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _distinct(found: Iterable[dict[str, Any]], texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return one example, a short one, for each way in which a rule puts its texts together; graver ones first."""
    patterns = [re.compile(".*?".join(map(re.escape, _GAP.split(text)))) for text in dict.fromkeys(texts)]
    best: dict[tuple[bool, ...], dict[str, Any]] = {}
    for one in sorted(found, key=lambda one: (one.get("severity") == "info", len(one["message"]))):
        used = tuple(bool(pattern.search(one["message"])) for pattern in patterns)
        best.setdefault(used, {key: one[key] for key in ("message", "next", "test")})
    return [example for used, example in best.items() if any(used)] or [*best.values()]  # words may be in another file


@cache
def _sources() -> dict[str, list[Path]]:
    """Return rule, relation or command → its files: of a command its own, and those of its answer beside it."""
    modules = {name: load_rule(name).__file__ for name in rule_names()}  # pyright: ignore[reportAttributeAccessIssue]
    modules |= {name: load_relation(name).__file__ for name in relation_names()}  # pyright: ignore
    files = {name: [Path(str(file))] for name, file in modules.items()}
    for verb, (where, _) in VERBS.items():
        file = PACKAGE.parent / f"{where.partition(':')[0].replace('.', '/')}.py"
        file = file if file.is_file() else file.with_suffix("") / "__init__.py"
        files[f"trainprobe {verb}"] = [
            file,
            *(beside for name in ANSWERS if (beside := file.with_name(f"{name}.py")).is_file()),
        ]
    return files


def _all_texts(name: str) -> list[str]:
    return [text for file in _sources()[name] for text in _texts(file)]


def _by_name(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if texts := _all_texts(name):
            yield f"\n**{name}**\n"
            yield from _listed(texts)


def _listed(texts: Iterable[str]) -> Iterator[str]:
    for text in dict.fromkeys(texts):
        yield textwrap.fill(f"- {text}", 128, subsequent_indent="  ", **_WHOLE)


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
    record(sys.argv[1:])
    PAGE.write_text(page(), encoding="utf-8")
    ALL.write_text(all_texts(), encoding="utf-8")
