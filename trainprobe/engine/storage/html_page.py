"""One self-contained HTML file: texts and packed data filled into a page, written whole or not at all."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from trainprobe.errors import OutputError


def write_text(target: Path, text: str, option: str = "-o") -> Path:
    """Write a page, whole or not at all, and return where.

    option: what the user changes when it cannot be written there. Raises OutputError in that case.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write the page to {target}: {error}; choose another place with {option}") from error
    return target


def fill_page(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with `{{name}}` replaced by the part of this name, each once."""
    before, *rest = page.split("{{")
    pieces = [before]
    for part in rest:
        key, tail = part.split("}}", 1)
        pieces += [parts[key], tail]
    return "".join(pieces)


def escape(text: str) -> str:
    """Return text as HTML holds it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def packed(content: bytes) -> str:
    """Return bytes deflated and as base64, which the page unpacks with DecompressionStream("deflate")."""
    return base64.b64encode(zlib.compress(content, 6)).decode()
