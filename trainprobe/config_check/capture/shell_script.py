"""Reads the arguments of a training command out of a shell script, as bash would build them, without running anything.

Read: quotes, backslashes, line continuations, comments, `NAME=value`, `NAME+=value`, `export`, arrays, `$NAME`, `${NAME}`,
`${NAME:-default}`, `${NAME[@]}`, word splitting of unquoted variables, and several commands a line. Here-documents are skipped.
Not read, and left as it is written: `$(…)`, `` `…` ``, any other `${…}`, and a variable that the script does not set, or sets
inside of `if`, `case`, `for`, `while` or `until`.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from trainprobe.errors import FormatError

_LAUNCHERS = re.compile(
    r"(python[\d.]*|torchrun|msrun|mpirun|mpiexec|deepspeed|accelerate|srun|fabric|lightning|colossalai|horovodrun|ray|bash|sh)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.S)
_PROLOGUE = frozenset(
    {"export", "nohup", "exec", "time", "then", "do", "else", "env", "sudo", "local", "readonly", "declare", "if", "!", "{"}
)
_OPENS, _CLOSES = {"if", "case", "for", "while", "until"}, {"fi", "esac", "done"}
_MOST = 1 << 24  # characters that variables may expand to
_RUN = r"\$\([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*\)"
_DOLLAR = rf"{_RUN}|\$\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)*\}}|\$\w+|\$[@*#?$!-]"
_TOKEN = re.compile(
    rf"""
      (?P<blank>[ \t]+) | (?P<joined>\\\n) | (?P<comment>(?<![^\s;&|()])\#[^\n]*)
    | (?P<document><<-?[ \t]*(?P<quote>['"]?)(?P<end>[A-Za-z_]\w*)(?P=quote)(?!<))
    | (?P<redirection>(?:(?:(?<![^\s;&|()])\d+)?(?:>>|>|<<<|<(?!<))|&>>?)[ \t]*(?P<stream>&[\d-]+)?)
    | (?P<array>(?<![^\s;&|()])[A-Za-z_]\w*\+?=\() | (?P<stop>[;&|()\n])
    | (?P<single>'[^']*') | (?P<double>"[^"\\$]*(?:(?:\\.|{_RUN}|\$(?!\())[^"\\$]*)*")
    | (?P<dollar>{_DOLLAR}) | (?P<escape>\\.?) | (?P<plain>`[^`]*`|[^\s'"\\`$;&|()<>]+|\$(?![({{]))
    """,
    re.X | re.S,
)
_INSIDE = re.compile(rf'\\(?P<kept>[$`"\\])|(?P<joined>\\\n)|(?P<dollar>{_DOLLAR})', re.S)  # what is special in double quotes
_VARIABLE = re.compile(r"\$(?:\{(\w+)(\[[@*\d]+\])?(?::?([-=+?])([^{}]*))?\}|(\w+))")
_WHOLE_ARRAY = re.compile(r'"\$\{\w+\[@\]\}"')
_UNCLOSED = {
    "'": "a ' that is never closed",
    '"': 'a " that is never closed',
    "`": "a ` that is never closed",
    "$(": "a $( that is never closed",
    "${": "a ${ that is never closed",
    "<<": "a here-document without a name",
}


def read_shell_script(text: str, path: str) -> dict[str, Any]:
    """Return the flags of the training command and the variables it exports, as a flat mapping.

    A flag without value is True; one that is given several values is a list; one that is repeated keeps the last, as
    argparse does. Raises FormatError for a script with a syntax error.
    """
    values: dict[str, Any] = {}
    for command in _Script(text, path).commands:
        values |= flags(command)
    return values


def exported_variables(text: str, path: str) -> dict[str, str]:
    """Return the variables that a script exports or puts before its command."""
    found: dict[str, str] = {}
    for command in _Script(text, path).commands:
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


class _Script:
    """A script as the words of its commands. Raises FormatError for a syntax error."""

    def __init__(self, text: str, path: str) -> None:
        self._text, self._path = text.replace("\r\n", "\n"), path
        self.commands: list[list[str]] = []
        self._variables: dict[str, list[str]] = {}
        self._depth = 0  # of if, case and loops: what is set there may or may not hold behind them
        self._words: list[str] = []
        self._word: list[list[str]] | None = None  # pieces of the word that is read; of several, where a variable splits it
        self._quoted = False
        self._expanded = 0  # characters that came of variables
        self._skipped = False  # whether it is the target of a redirection
        self._array: tuple[int, re.Match[str]] | None = None  # where it begins, its name
        self._before: list[str] = []  # words before the array
        self._documents: list[tuple[str, bool]] = []
        self._read()

    def _error(self, at: int, what: str) -> FormatError:
        line = self._text.count("\n", 0, at) + 1
        return FormatError(f"{self._path}, line {line}: {what}: the script is not valid shell")

    def _read(self) -> None:
        at, text = 0, self._text
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise self._error(at, _UNCLOSED.get(text[at : at + 2]) or _UNCLOSED[text[at]])
            kind, start, at = token.lastgroup, at, token.end()
            if kind in ("single", "double", "dollar", "escape", "plain"):
                self._piece(kind, token[0])
                continue
            if kind != "joined":
                self._end_word()
            at = self._between_words(token, start, at)
        self._end_word()
        if self._array is not None:
            raise self._error(self._array[0], "an array that is never closed with )")
        self._end_command()
        self._behind_documents(at)

    def _between_words(self, token: re.Match[str], start: int, at: int) -> int:
        """Take what is no part of a word; return where to go on."""
        kind = token.lastgroup
        if kind == "array" and self._array is None:
            name = _ASSIGNMENT.match(token[0])
            assert name is not None
            self._array, self._before, self._words = (start, name), self._words, []
        elif self._array is not None and kind in ("stop", "array", "redirection", "document"):
            self._in_array(token[0])
        elif kind == "document":
            self._documents.append((token["end"], token[0].startswith("<<-")))
        elif kind == "redirection":
            self._skipped = token["stream"] is None
        elif kind == "stop":
            self._end_command()
            return self._behind_documents(at) if token[0] == "\n" else at
        return at

    def _in_array(self, token: str) -> None:
        assert self._array is not None
        start, name = self._array
        if token == ")":
            inner, self._words, self._array = self._words, self._before, None
            had = self._variables.get(name[1], []) if name[2] == "+=" else []
            self._set(name[1], [*had, *inner])
        elif token != "\n":
            raise self._error(start, f"an array that holds a bare {token[-1]!r}")

    def _piece(self, kind: str, raw: str) -> None:
        word = self._word = self._word or [[]]
        self._quoted |= kind in ("single", "double")
        if kind == "dollar" or (word == [[]] and _WHOLE_ARRAY.fullmatch(raw)):
            values = self._values(raw.strip('"'))
            if kind == "dollar":
                values = [part for value in values for part in (value.split() if value != raw else [value])]
            word[-1] += values[:1]
            word += [[value] for value in values[1:]]
            self._quoted &= bool(values)
        elif kind == "double":
            text = _INSIDE.sub(lambda m: " ".join(self._values(m[0])) if m["dollar"] else m["kept"] or "", raw[1:-1])
            word[-1].append(text)
        else:
            word[-1].append({"single": raw[1:-1], "escape": raw[1:]}.get(kind, raw))

    def _values(self, raw: str) -> list[str]:
        """Return the words that a text which begins with $ stands for; what is not known stays as it is written."""
        match = _VARIABLE.fullmatch(raw)
        if match is None:
            return [raw]
        known = self._variables.get(match[1] or match[5])
        if known is None:
            return [_unquoted(match[4])] if match[3] in ("-", "=") else [raw]
        found = known if match[2] in ("[@]", "[*]") else known[:1]
        self._expanded += sum(len(value) + 1 for value in found)
        if self._expanded > _MOST:
            raise FormatError(
                f"{self._path}: its variables expand to more than {_MOST} characters, which no launch script does"
            )
        return found

    def _end_word(self) -> None:
        if self._word is None:
            return
        word, quoted, skipped = ["".join(pieces) for pieces in self._word], self._quoted, self._skipped
        self._word, self._quoted, self._skipped = None, False, False
        if _ASSIGNMENT.fullmatch(word[0]):
            word = [" ".join(word)]
        self._words += [] if skipped else [w for w in word if w or quoted]

    def _end_command(self) -> None:
        words, self._words, self._skipped = self._words, [], False
        if not words:
            return
        self.commands.append(words)
        self._depth = max(0, self._depth + (words[0] in _OPENS) - (words[0] in _CLOSES))
        rest = iter(words)
        for word in rest:
            match = _ASSIGNMENT.fullmatch(word)
            if match:
                had = self._variables.get(match[1], []) if match[2] == "+=" else []
                self._set(match[1], [*had[:-1], "".join(had[-1:]) + match[3]])
            elif word not in _PROLOGUE:
                break

    def _set(self, name: str, value: list[str]) -> None:
        self._variables[name] = value
        if self._depth:
            del self._variables[name]

    def _behind_documents(self, at: int) -> int:
        for end, strip in self._documents:
            indent = r"\t*" if strip else ""
            found = re.compile(rf"^{indent}{re.escape(end)}$", re.M).search(self._text, at)
            if found is None:
                raise self._error(at, f"a here-document that never ends with {end!r}")
            at = found.end()
        self._documents = []
        return at


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
