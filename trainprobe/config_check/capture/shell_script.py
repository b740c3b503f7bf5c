"""Reads the arguments of a training command out of a shell script, as bash would build them, without running anything.

Understood: single and double quotes, backslashes, line continuations, comments, here-documents (skipped), `NAME=value`,
`export`, `NAME+=value`, arrays, `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME[@]}`, word splitting of unquoted variables, and
several commands a line. `$(…)`, `` `…` `` and what a variable holds that the script does not set stay as they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from trainprobe.errors import FormatError

_LAUNCHERS = re.compile(
    r"(python[\d.]*|torchrun|msrun|mpirun|mpiexec|deepspeed|accelerate|srun|fabric|lightning|colossalai|horovodrun|ray|bash|sh)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.S)
_REDIRECTION = re.compile(r"(?:\d*(?:>>|>|<<<|<)|&>>?)[ \t]*(&[\d-]+)?")
_BREAKS = {";", "&", "|", "(", ")", "\n"}
_PROLOGUE = frozenset(
    {"export", "nohup", "exec", "time", "then", "do", "else", "env", "sudo", "local", "readonly", "declare", "if", "!", "{"}
)


@dataclass
class _Reader:
    """The state of a reading: position, variables set so far, the words of the current command."""

    text: str
    path: str
    at: int = 0
    variables: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    words: list[str] = field(default_factory=list[str])
    commands: list[list[str]] = field(default_factory=list[list[str]])

    def fail(self, start: int, what: str) -> FormatError:
        line = self.text.count("\n", 0, start) + 1
        return FormatError(f"{self.path}, line {line}: {what}: the script is not valid shell")


def read_shell_script(text: str, path: str) -> dict[str, Any]:
    """Return the flags of the training command and the variables it exports, as a flat mapping.

    A flag without value is True; one that is given several values is a list; one that is repeated keeps the last, as
    argparse does. Raises FormatError for a script with a syntax error.
    """
    reader = _Reader(text.replace("\r\n", "\n"), path)
    _read(reader)
    values: dict[str, Any] = {}
    for command in reader.commands:
        values |= flags(command)
    return values


def exported_variables(text: str, path: str) -> dict[str, str]:
    """Return the variables that a script exports or puts before its command."""
    reader = _Reader(text.replace("\r\n", "\n"), path)
    _read(reader)
    found: dict[str, str] = {}
    for command in reader.commands:
        leading = True
        for word in command:
            match = _ASSIGNMENT.fullmatch(word)
            if leading and match and match[2] == "=":
                if command[0] == "export" or _LAUNCHERS.search(" ".join(command)):
                    found[match[1]] = match[3]
            elif word not in _PROLOGUE:
                leading = False
    return found


def flags(command: list[str]) -> dict[str, Any]:
    """Return the `--flag value` pairs of a command, {} where nothing is launched by it.

    Only the arguments behind the script are its own; those before it belong to the launcher and are named `launcher.…`.
    """
    start = next((i for i, w in enumerate(command) if _LAUNCHERS.fullmatch(PurePath(w).name)), None)
    if start is None:
        return {}
    script = next((i for i, w in enumerate(command) if i > start and w.endswith((".py", ".sh"))), None)
    if script is None and "-m" in command[start:]:
        script = command.index("-m", start) + 1
    if script is None:
        return parse_flags(command[start + 1 :])
    launcher = {f"launcher.{k}": v for k, v in parse_flags(command[start + 1 : script]).items() if k != "m"}
    return launcher | parse_flags(command[script + 1 :])


def parse_flags(arguments: list[str]) -> dict[str, Any]:
    """Return flag → value of an argument list: `--a=b`, `--a b`, `--a` (True), `--a b c` (a list), `key=value`."""
    values: dict[str, Any] = {}
    name: str | None = None
    for word in arguments:
        if is_flag(word):
            name, equals, value = word.lstrip("-").partition("=")
            values[name] = value if equals else True
            if equals:
                name = None
        elif name is not None:
            had = values[name]
            values[name] = word if had is True else [*had, word] if isinstance(had, list) else [had, word]
        elif match := re.fullmatch(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", word, re.S):
            values[match[1]] = match[2]
    return values


def is_flag(word: str) -> bool:
    """Tell whether a word is an option and not a negative number."""
    return bool(re.match(r"--?[A-Za-z]", word)) and not re.fullmatch(r"-(inf|nan)", word, re.I)


def _read(r: _Reader) -> None:
    pending: list[tuple[str, bool]] = []
    while r.at < len(r.text):
        c = r.text[r.at]
        if c == "\n" and pending:
            r.at += 1
            for end, strip in pending:
                _skip_document(r, end, strip)
            pending = []
            _end_command(r)
        elif r.text.startswith("<<", r.at) and not r.text.startswith("<<<", r.at):
            match = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2").match(r.text, r.at)
            if match is None:
                raise r.fail(r.at, "a here-document without a name")
            pending.append((match[3], bool(match[1])))
            r.at = match.end()
        elif redirection := _REDIRECTION.match(r.text, r.at):
            r.at = redirection.end()
            if not redirection[1]:
                kept = list(r.words)
                _word(r)
                r.words = kept
        elif c in _BREAKS:
            r.at += 1
            _end_command(r)
        elif c in " \t" or r.text.startswith("\\\n", r.at):
            r.at += 2 if c == "\\" else 1
        elif c == "#":
            r.at = _line_end(r.text, r.at)
        else:
            _word(r)
    _end_command(r)


def _skip_document(r: _Reader, end: str, strip: bool) -> None:
    start = r.at
    while r.at < len(r.text):
        stop = _line_end(r.text, r.at)
        line = r.text[r.at : stop]
        r.at = stop + 1
        if (line.lstrip("\t") if strip else line) == end:
            r.at = stop
            return
    raise r.fail(start, f"a here-document that never ends with {end!r}")


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _end_command(r: _Reader) -> None:
    words, r.words = r.words, []
    rest = list(words)
    while rest and rest[0] in _PROLOGUE:
        rest.pop(0)
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        _assign(r, match[1], [match[3]], match[2] == "+=")
        rest.pop(0)
    if words:
        r.commands.append(words)


def _assign(r: _Reader, name: str, value: list[str], more: bool, array: bool = False) -> None:
    had = r.variables.get(name, [])
    if more and had and not array:
        value = [*had[:-1], had[-1] + value[0]]
    r.variables[name] = [*had, *value] if more and array else value


def _word(r: _Reader) -> None:
    """Read one word with all its quotes and variables; it may become several words, or none."""
    start = r.at
    array = re.compile(r"([A-Za-z_]\w*)(\+?)=\(").match(r.text, r.at)
    if array:
        r.at = array.end()
        _assign(r, array[1], _array(r, start), array[2] == "+", array=True)
        return
    text, splits, quoted = "", [], False
    while r.at < len(r.text) and r.text[r.at] not in " \t\n;&|()<>":
        piece, parts, in_quotes = _piece(r)
        quoted = quoted or in_quotes
        if parts is None:
            text += piece
        elif parts:
            splits += [text + parts[0], *parts[1:]]
            text = splits.pop()
    assigns = _ASSIGNMENT.match(r.text[start : r.at])
    if assigns and splits:
        r.words.append(" ".join([*splits, text]))
    else:
        r.words += splits
        if text or quoted:
            r.words.append(text)


def _array(r: _Reader, start: int) -> list[str]:
    outer, r.words = r.words, []
    while r.at < len(r.text) and r.text[r.at] != ")":
        c = r.text[r.at]
        if c in " \t\n" or r.text.startswith("\\\n", r.at):
            r.at += 2 if c == "\\" else 1
        elif c == "#":
            r.at = _line_end(r.text, r.at)
        elif c in ";&|(<>":
            raise r.fail(start, f"an array that holds a bare {c!r}")
        else:
            _word(r)
    if r.at >= len(r.text):
        raise r.fail(start, "an array that is never closed with )")
    r.at += 1
    inner, r.words = r.words, outer
    return inner


def _piece(r: _Reader) -> tuple[str, list[str] | None, bool]:
    """Read one piece of a word: (text, None, quoted), or ("", words, quoted) for something that splits into words."""
    c = r.text[r.at]
    if c == "\\":
        r.at += 2
        kept = r.text[r.at - 1 : r.at]
        return ("" if kept == "\n" else kept), None, False
    if c == "'":
        end = r.text.find("'", r.at + 1)
        if end < 0:
            raise r.fail(r.at, "a ' that is never closed")
        piece, r.at = r.text[r.at + 1 : end], end + 1
        return piece, None, True
    if c == '"':
        return _double_quoted(r)
    if c == "`":
        end = r.text.find("`", r.at + 1)
        if end < 0:
            raise r.fail(r.at, "a ` that is never closed")
        piece, r.at = r.text[r.at : end + 1], end + 1
        return piece, None, False
    if c == "$":
        words = _dollar(r)
        return "", [w for word in words for w in (word.split() if not word.startswith("$") else [word])], False
    r.at += 1
    return c, None, False


def _double_quoted(r: _Reader) -> tuple[str, list[str] | None, bool]:
    start = r.at
    r.at += 1
    text = ""
    while r.at < len(r.text) and r.text[r.at] != '"':
        c = r.text[r.at]
        if c == "\\":
            following = r.text[r.at + 1 : r.at + 2]
            text += "" if following == "\n" else following if following in '$`"\\' else "\\" + following
            r.at += 2
        elif c == "$":
            whole = re.compile(r'\$\{\w+\[@\]\}"').match(r.text, r.at)
            words = _dollar(r)
            if whole and not text and r.text[start + 1] == "$":
                r.at += 1
                return "", words, True
            text += " ".join(words)
        else:
            text += c
            r.at += 1
    if r.at >= len(r.text):
        raise r.fail(start, 'a " that is never closed')
    r.at += 1
    return text, None, True


def _dollar(r: _Reader) -> list[str]:
    """Read what begins with $ and return its words; what is not known stays as it is written."""
    start = r.at
    if r.text.startswith("$(", r.at):
        depth, r.at = 1, r.at + 2
        while r.at < len(r.text) and depth:
            depth += {"(": 1, ")": -1}.get(r.text[r.at], 0)
            r.at += 1
        if depth:
            raise r.fail(start, "a $( that is never closed")
        return [r.text[start : r.at]]
    match = re.compile(r"\$(?:\{(\w+)(\[[@*\d]+\])?(?::?([-=+?])([^{}]*))?\}|(\w+))").match(r.text, r.at)
    if match is None:
        if r.text.startswith("${", r.at):
            end = r.text.find("}", r.at)
            if end < 0:
                raise r.fail(start, "a ${ that is never closed")
            r.at = end + 1
        else:
            r.at += 2
        return [r.text[start : r.at]]
    r.at = match.end()
    name = match[1] or match[5]
    known = r.variables.get(name)
    if known is None:
        return [_unquoted(match[4])] if match[3] in ("-", "=") else [r.text[start : r.at]]
    return known if match[2] in ("[@]", "[*]") else known[:1]


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
