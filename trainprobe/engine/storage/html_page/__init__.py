"""One self-contained HTML file: the template, script and colours that all pages share, and what each adds to them.

    page.html           the template: head, body, data, script
    page.css            colours (those of verdicts too), headings, controls, tables, cards; in light and dark
    page.js             data and blobs, headings, keys, the theme, the tip, elements
    numbers.js          numbers as text
    table.js            tables that sort, and show long lists part by part
    markup.py           what can be read without a script: headings, findings, tables
    foot.html           the end of most pages

`make_page` puts a page together from these and from the page's own files: its body (`.html`), its rules (`.css`) and its script
(`.js`), which finds the data of the page as `data` and blobs through `bytes(id)` and `json(id)`. `write_text` writes it.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from trainprobe.engine.storage.html_page.markup import Markup
from trainprobe.errors import OutputError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_IN_EVERY_PAGE = ("page.css", "page.js", "numbers.js", "table.js")


def shared(name: str) -> Traversable:
    """Return a file of this folder, as a part of a page."""
    return files("trainprobe.engine.storage.html_page") / name


def make_page(
    title: str,
    command: str,
    parts: Sequence[Traversable],
    data: Any,
    blobs: Mapping[str, str] | None = None,
    written: Mapping[str, Markup] | None = None,
    flow: bool = True,
) -> str:
    """Return a page as HTML text, which needs no network and no other file.

    command: of trainprobe, which the page names as its generator. parts: files of the page; those of one kind are joined in
    their order, after what all pages share. data: anything that JSON can hold, NumPy arrays too; NaN and infinities become
    null. blobs: id -> `packed` bytes, which are unpacked only when the script asks for them. written: what can be read without
    a script: `head`, which is above all, and what the page's `.html` has a `{{name}}` for. flow: whether the page scrolls as a
    whole; otherwise it fills the window.
    """
    texts: dict[str, str] = dict.fromkeys((".html", ".css", ".js"), "")
    for part in (*map(shared, _IN_EVERY_PAGE), *parts):
        texts[Path(part.name).suffix] += part.read_text(encoding="utf-8")
    filled = {
        "command": escape(command),
        "title": escape(title),
        "style": texts[".css"],
        "flow": "flow" if flow else "",
        "head": (written or {}).get("head", ""),
        "body": _filled(texts[".html"], written or {}),
        "script": texts[".js"],
        "blobs": "\n".join(f'<script type="text/plain" id="{key}">{blob}</script>' for key, blob in (blobs or {}).items()),
        "data": orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("<", "\\u003c"),
    }
    return _filled(shared("page.html").read_text(encoding="utf-8"), filled)


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


def _filled(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with `{{name}}` replaced by the part of this name, each once."""
    before, *rest = page.split("{{")
    pieces = [before]
    for part in rest:
        key, tail = part.split("}}", 1)
        pieces += [parts[key], tail]
    return "".join(pieces)


def packed(content: bytes) -> str:
    """Return bytes deflated and as base64, as a blob of a page; its script unpacks them with DecompressionStream("deflate")."""
    return base64.b64encode(zlib.compress(content, 6)).decode()
