"""The page of a preflight: its lines, and charts of what changes with what. One HTML file that is read without a script."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text
from trainprobe.preflight.report import Report
from trainprobe.preflight.subject import Subject

_BLOCKS, _ROWS = 16, 12  # of a chart, at most
_TITLES = {
    "time": "Outputs of a row (across) when tokens of a block (down) are others",
    "rows": "Outputs of each row (across) when the input of a row (down) is another",
}


def charts(subject: Subject) -> dict[str, list[list[float]]]:
    """Return time and rows → how far outputs move (columns) when inputs are others (rows), as a share of the largest."""
    batch, before, found = subject.batch, subject.base.logits, dict[str, list[list[float]]]()
    tokens, count = batch.of("tokens"), batch.rows
    if before is None or count < 2 or before.shape[0] % count:
        return found
    if tokens is not None and before.dim() == 3 and before.shape[:2] == tokens.shape:
        block = torch.arange(tokens.shape[1], device=tokens.device) * _BLOCKS // max(tokens.shape[1], _BLOCKS)
        blocks = block.unique()
        same = batch.take([0] * len(blocks))  # a row for each block that is changed
        seen = subject.run(same.with_role("tokens", same.other_tokens(block == blocks.unsqueeze(1))), backward=False).logits
        if seen is not None and seen.shape[1:] == before.shape[1:]:
            gaps = (seen - before[:1]).abs().double().amax(2)
            found["time"] = _shares([torch.stack([x[block == b].max() for b in blocks]) for x in gaps])
    inputs = [i for i in batch.by_row if i != batch.roles.get("labels")]
    moved = list[Tensor]()
    for row in range(min(count, _ROWS)):
        take = [(i + 1) % count if i == row else i for i in range(count)]
        seen = subject.run(batch.with_leaves({i: batch.leaves[i][take] for i in inputs}), backward=False).logits
        if seen is not None and seen.shape == before.shape:
            moved.append((seen - before).abs().double().reshape(count, -1).amax(1))
    return {**found, "rows": _shares(moved)} if moved else found


def _shares(moved: list[Tensor]) -> list[list[float]]:
    whole = torch.stack(moved)
    return (whole / whole.max().clamp_min(1e-30)).tolist()


def write_page(report: Report, title: str, path: Path) -> None:
    """Write the page. Raises OutputError."""
    verdict = report.verdict
    own = report.passes - sum(line.passes for line in report.lines)
    rest = f"{own} of them for the step as it is{' and for the charts' if report.charts else ''}"
    remark = f"{report.passes} passes in {report.seconds:.3g} s, {rest}"
    rows = [(line.name, markup.verdict(line.status), line.text, str(line.passes)) for line in report.lines]
    written = {
        "head": markup.verdict_head(verdict.sentence, verdict.code, [title, remark], []),
        "lines": markup.table(("property", "", "what was seen", "passes"), rows, ("", "", "text", "number"), class_="stacks"),
        "charts": markup.joined(_drawn(name, shares) for name, shares in report.charts.items()),
    }
    assets = [files("trainprobe.preflight") / name for name in ("page.html", "page.css", "page.js")]
    write_text(path, make_page(title, "preflight", [*assets, shared("foot.html")], {}, written=written), "--html")


def _drawn(name: str, shares: list[list[float]]) -> markup.Markup:
    cells = [
        markup.element("rect", markup.element("title", f"{y} → {x}: {share:.2g}"), x=str(x), y=str(y), width="1", height="1",
                       fill_opacity=f"{share**0.25 if share > 1e-6 else 0:.2f}")
        for y, row in enumerate(shares) for x, share in enumerate(row)
    ]  # fmt: skip
    box = f"-.1 -.1 {len(shares[0]) + 0.2} {len(shares) + 0.2}"
    drawing = markup.element("svg", *cells, viewBox=box, class_="chart", role="img", aria_label=_TITLES[name])
    return markup.element("section", markup.element("h2", _TITLES[name]), drawing, class_="card")
