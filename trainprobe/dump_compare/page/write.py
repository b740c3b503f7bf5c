"""Writes the page of two dumps, or of one: one HTML file that needs no network and no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from trainprobe.dump_compare.judge import Judged
from trainprobe.dump_compare.page.document import CHUNK, VERDICTS, Sides, chunk_documents, outcomes, tree_document
from trainprobe.engine.storage.html_page import make_page, packed, write_text
from trainprobe.engine.storage.html_page.markup import verdict_head

PARTS = ("body.html", "style.css", "store.js", "tree.js", "rows.js", "panel.js", "find.js", "main.js")


@dataclass(frozen=True, slots=True)
class PackedRank:
    """One rank and step as the page holds it. tree, chunks: base64 of deflated JSON. counts: calls by verdict."""

    step: int
    rank: int
    tree: str
    chunks: Sequence[str]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class ShownPair:
    """What stands above the tree.

    sentence, details, code: the verdict of a comparison (see verdict); of one dump, what it is. paths: of A and B, or of
    the one dump. first: place of a rank in the list and of a call in it, where the runs part; None where they do not.
    """

    title: str
    sentence: str
    details: Sequence[str]
    code: int
    paths: Sequence[str]
    first: tuple[int, int] | None = None


def pack_rank(step: int, rank: int, judged: Sequence[Judged], sides: Sides) -> PackedRank:
    """Return one rank and step as the page holds it. sides: B is None where one dump is shown alone."""
    tree, _ = tree_document(judged, sides)
    chunks = [_pack(chunk) for chunk in chunk_documents(judged, sides)]
    return PackedRank(step, rank, _pack(tree), chunks, dict(Counter(outcomes(judged, sides))))


def _pack(document: Any) -> str:
    return packed(orjson.dumps(document))


def write_page(shown: ShownPair, ranks: Sequence[PackedRank], path: Path, option: str = "--html") -> Path:
    """Write the page to `path` and return it; the file appears whole or not at all. Raises OutputError."""
    return write_text(path, _render(shown, ranks), option)


def _render(shown: ShownPair, ranks: Sequence[PackedRank]) -> str:
    head = {
        "paths": list(shown.paths),
        "first": shown.first,
        "verdicts": VERDICTS,
        "chunk": CHUNK,
        "ranks": [{"step": rank.step, "rank": rank.rank, "counts": rank.counts} for rank in ranks],
    }
    blobs = {
        name: text
        for i, rank in enumerate(ranks)
        for name, text in ((f"t{i}", rank.tree), *((f"c{i}-{k}", chunk) for k, chunk in enumerate(rank.chunks)))
    }
    assets = files("trainprobe.dump_compare.page") / "assets"
    parts = [assets / name for name in PARTS]
    single = len(shown.paths) == 1
    above = verdict_head(shown.sentence, "" if single else shown.code, shown.paths, shown.details)
    command = "show" if single else "dump-compare"
    return make_page(shown.title, command, parts, head, blobs, written={"head": above}, flow=False)
