"""The log-probabilities of one file as a self-contained HTML page, which can be read without its script."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np

from trainprobe.comparison.verdict import NAMES
from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text
from trainprobe.rollout.logprobs.judge import PROFILES, LogprobComparison, profile, worst_tokens
from trainprobe.rollout.logprobs.tokens import ScoredTokens

_POINTS = 3000
_SIDE = 400  # of the scatter, in its own units
_COLUMNS = ("gap", "token", "text", "around", "trainer", "engine", "sequence", "place")


def write_page(found: LogprobComparison, source: Path, path: Path) -> None:
    """Write the page. Raises OutputError."""
    verdict = found.verdict
    written = {
        "head": markup.verdict_head(verdict.sentence, verdict.code, [str(source)], verdict.details),
        "statistics": markup.table(
            ("statistic", "value"), [(k, f"{v:,.4g}") for k, v in found.statistics.items()], ("", "number")
        ),
        "scatter": _scatter(found.scored),
        "profiles": markup.joined(_card(found, kind) for kind in PROFILES),
        "worst": _worst(found.scored),
    }
    folder = files("trainprobe.rollout.logprobs")
    own = [folder / name for name in ("page.html", "page.css", "page.js")]
    page = make_page(
        f"{source.name}: {NAMES[verdict.code]}", "rollout-compare", [*own, shared("foot.html")], {}, written=written
    )
    write_text(path, page, "--html")


def _card(found: LogprobComparison, kind: str) -> markup.Markup | None:
    rows = profile(found.scored, kind)
    if not rows:
        return None
    name = kind.replace("_", "-")
    table = markup.table((name, "mean |gap|", "tokens"), [(r["of"], f"{r['mean']:.3g}", f"{r['tokens']:,}") for r in rows],
                         ("", "number", "number"))  # fmt: skip
    scroll = markup.element("div", table, class_="scroll")
    return markup.element("section", markup.element("h2", f"Gap by {name}"), scroll, class_="card")


def _worst(scored: ScoredTokens) -> markup.Markup:
    rows = worst_tokens(scored)
    shown = [name for name in _COLUMNS if rows and name in rows[0]]
    cells = [[f"{r[n]:.4g}" if isinstance(r[n], float) else str(r[n]) for n in shown] for r in rows]
    return markup.table(
        shown or ("nothing is counted",), cells, ["name" if n in ("text", "around") else "number" for n in shown] or [""]
    )


def _scatter(scored: ScoredTokens) -> markup.Markup:
    """Return a drawing of evenly chosen tokens, and of all that are far from the diagonal."""
    k = len(scored.counted)
    if not k:
        return markup.Markup()
    far = np.argsort(scored.size)[-_POINTS // 6 :]
    chosen = np.unique(np.concatenate([np.linspace(0, k - 1, min(k, _POINTS)).astype(np.int64), far]))
    x, y = scored.trainer[scored.counted][chosen], scored.engine[scored.counted][chosen]
    low, high = float(min(x.min(), y.min())), max(float(max(x.max(), y.max())), 0.0)
    span = (high - low) or 1.0
    points = [
        markup.element("circle", cx=f"{(a - low) / span * _SIDE:.1f}", cy=f"{_SIDE - (b - low) / span * _SIDE:.1f}", r="1.8")
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    ends = [markup.element("text", f"{low:.3g}", x="0", y=str(_SIDE + 14)),
            markup.element("text", f"{high:.3g}", x=str(_SIDE), y=str(_SIDE + 14), text_anchor="end")]  # fmt: skip
    line = markup.element("line", x1="0", y1=str(_SIDE), x2=str(_SIDE), y2="0")
    box, what = f"-4 -4 {_SIDE + 8} {_SIDE + 24}", "Log-probability of the trainer (across) and the engine (up)"
    return markup.element("svg", line, *points, *ends, viewBox=box, class_="scatter", role="img", aria_label=what)
