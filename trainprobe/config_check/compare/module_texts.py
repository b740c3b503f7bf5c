"""Class and settings of a module as one text, `Linear(in_features=4, out_features=8, bias=True)`, and their parts."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MODULE = re.compile(r"(\w+)\((.*)\)", re.S)


def class_and_arguments(text: str) -> tuple[str, dict[str, str]]:
    """Return the class, and name → text of each argument; those without a name are numbered.

    Commas in brackets do not divide. A text of another form is a class without arguments.
    """
    match = _MODULE.fullmatch(text)
    if match is None:
        return text, {}
    found: dict[str, str] = {}
    for index, piece in enumerate(re.split(r",\s*(?![^(\[]*[)\]])", match[2])):
        name, equals, value = piece.partition("=")
        found[name if equals else str(index)] = value if equals else piece
    return match[1], found


def text_of(name: str, arguments: Mapping[str, str]) -> str:
    """Return class and arguments as one text."""
    told = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name}({told})" if told else name
