"""The page of `trainprobe report --fleet`: ranks × steps as a map, what stands out first, one file that needs no network."""

from __future__ import annotations

from importlib.resources import files
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.findings import ranks_of
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.html_page import make_page, markup, shared, write_text
from trainprobe.monitor.fleet.verdict import FleetVerdict, bad_counts, differing_counts
from trainprobe.monitor.fleet.words import place_in_words

COLUMNS = 1_000  # of the map: a longer run joins neighbouring steps
NAMED_ROWS = 40  # ranks that have a row with their name
STATES = (  # in words, and its colour in page.css or fleet.css; a later one is graver and hides those before it
    ("as its replicas", "--calm"),
    ("not compared", "--unseen"),
    ("no step", "--unknown"),
    ("late", "--carried"),
    ("a scalar far from its replicas'", "--suspicious"),
    ("not finite", "--nonfinite"),
    ("differs from its replicas", "--bug"),
)
ALIKE, UNSEEN, MISSING, LATE, SCALAR, BAD, DIFFERS = range(len(STATES))
Codes = npt.NDArray[np.uint8]


def write_fleet_page(verdict: FleetVerdict, title: str, path: Path) -> Path:
    """Write the page to `path` and return it; it appears whole or not at all. Raises OutputError where it cannot be written."""
    assets = files("trainprobe.monitor.fleet") / "assets"
    own = (assets / name for name in ("body.html", "fleet.css", "fleet.js"))
    parts = [*own, shared("foot.html")]
    return write_text(path, make_page(title, "report", parts, describe(verdict), written=_written(verdict, title)))


def describe(verdict: FleetVerdict) -> dict[str, Any]:
    """Return what the map shows, as JSON knows it. rows: of each rank its pattern; patterns: [state, how many, …]."""
    table = verdict.table
    codes, every = joined(states(verdict))
    patterns, rows = np.unique(codes, axis=0, return_inverse=True)
    deviating = _deviating_rows(verdict, codes)
    places = verdict.survey.catalog.places
    return {
        "states": STATES,
        "ranks": table.ranks.tolist(),
        "places": [place_in_words(places[rank]) for rank in table.ranks.tolist()],
        "steps": table.steps[::every].tolist(),
        "last": int(table.steps[-1]),
        "every": every,
        "rows": rows.reshape(-1).tolist(),
        "patterns": [_runs(pattern) for pattern in patterns],
        "odd": deviating[:NAMED_ROWS],
        "more": max(0, len(deviating) - NAMED_ROWS),
        "first": _first(verdict, every),
    }


def _written(verdict: FleetVerdict, title: str) -> dict[str, markup.Markup]:
    """Return what can be read without a script: the verdict, the findings, the replicas, and what the map's colours mean."""
    table, tag = verdict.table, markup.element
    meta = (
        ("ranks", f"{len(table.ranks):,}"),
        ("steps", f"{len(table.steps):,} ({table.steps[0]} to {table.steps[-1]})"),
        ("compared", f"{verdict.compared:,} values a step among {counted(verdict.compared_ranks, 'rank')}"),
        ("findings", str(len(verdict.findings))),
    )
    calm = "Nothing was found, and no rank has a replica to compare it with."
    if verdict.short:
        calm = f"{verdict.short}: nothing was found in these."
    elif verdict.compared:
        calm = "No rank stands out."
    first = next(iter(verdict.findings), None)
    kind = "" if first else "calm" if verdict.code == 0 else "open"
    to_do = tag("p", f"→ {first.next}", class_="hint") if first and first.next else None
    say = tag("p", first.message if first else calm, class_="say")
    rows = [
        (
            markup.verdict(f.severity),
            tag("a", f.rule, href=f"#finding-{i}", id=f"finding-{i}"),
            "" if f.step is None else str(f.step),
            markup.joined((f.message, tag("span", f"→ {f.next}", class_="next") if f.next else None)),
        )
        for i, f in enumerate(verdict.findings, 1)
    ]
    heads = ("severity", "rule", "step", "what, and what to do next")
    findings = markup.table(heads, rows, ("", "", "number", "text"), id="findings") if rows else None
    groups = ("replicas", "ranks", "values compared a step", "ranks that left")
    swatches = (
        tag("li", tag("i", class_=colour.strip("-"), style=f"background-color: var({colour})"), name) for name, colour in STATES
    )
    return {
        "head": markup.run_head(title, meta),
        "verdict": tag(
            "section", tag("h2", "First finding" if first else "Verdict"), say, to_do, id="verdict", class_=f"card {kind}"
        ),
        "findings": markup.joined((findings,)),
        "notes": markup.listed(verdict.notes, id="notes"),
        "groups": markup.table(groups, _groups(verdict), ("", *["number"] * 3), id="groups"),
        "states": tag("ul", *swatches, id="states"),
    }


def states(verdict: FleetVerdict) -> Codes:
    """Return the gravest state of each rank at each step, [ranks, steps] as in the timetable: an index into STATES."""
    table = verdict.table
    codes = np.where(table.there, np.where(_compared(verdict), ALIKE, UNSEEN), MISSING).astype(np.uint8)
    for finding in verdict.findings:
        state = {"fleet_late": LATE, "fleet_scalars": SCALAR}.get(finding.rule)
        if state is not None and finding.step is not None:
            rows = np.searchsorted(table.ranks, ranks_of(finding))
            after = (table.steps >= finding.step) & table.there[rows]
            codes[rows] = np.where(after, np.maximum(codes[rows], state), codes[rows])
    codes[bad_counts(verdict) > 0] = BAD
    codes[differing_counts(verdict) > 0] = DIFFERS
    return codes


def _compared(verdict: FleetVerdict) -> npt.NDArray[np.bool_]:
    """Return at which steps values of each rank were compared with those of its replicas, [ranks, steps]."""
    table, survey = verdict.table, verdict.survey
    seen = np.zeros(table.there.shape, bool)
    steps: dict[int, set[int]] = {}
    for row in survey.table("seen").to_pylist():
        steps.setdefault(row["grp"], set()).add(row["step"])
    for group in survey.groups:
        rows = np.searchsorted(table.ranks, [rank for rank in group.ranks if rank in survey.catalog.places])
        seen[rows] = np.isin(table.steps, [*steps.get(group.number, ())])
    for rank, repeated in survey.catalog.repeated.items():
        seen[np.searchsorted(table.ranks, rank), np.isin(table.steps, [*repeated])] = False
    return seen


def joined(codes: Codes) -> tuple[Codes, int]:
    """Return states with neighbouring steps joined into at most COLUMNS columns of the gravest, and how many a column has."""
    every = -(-codes.shape[1] // COLUMNS)
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % every)))
    return padded.reshape(len(codes), -1, every).max(axis=2), every


def _runs(pattern: Codes) -> list[int]:
    return list(chain.from_iterable((state, len(list(run))) for state, run in groupby(pattern.tolist())))


def _deviating_rows(verdict: FleetVerdict, codes: Codes) -> list[int]:
    """Return the rows of the ranks that findings are about, the gravest finding first; of a finding on many, the first few."""
    table, deviating = verdict.table, dict[int, None]()
    for finding in verdict.findings:
        ranks = [rank for rank in ranks_of(finding) if rank in verdict.survey.catalog.places]
        rows = np.searchsorted(table.ranks, ranks[: max(1, NAMED_ROWS // 5)]).tolist()
        deviating.update(dict.fromkeys(row for row in rows if (codes[row] > UNSEEN).any()))
    return [*deviating]


def _first(verdict: FleetVerdict, every: int) -> dict[str, int] | None:
    """Return the cell of the first finding, in columns of the map."""
    finding, table = next(iter(verdict.findings), None), verdict.table
    if finding is None or finding.step is None or not ranks_of(finding):
        return None
    row = int(np.searchsorted(table.ranks, ranks_of(finding)[0]))
    return {"row": row, "column": int(np.searchsorted(table.steps, finding.step)) // every}


def _groups(verdict: FleetVerdict) -> list[list[str]]:
    values = {row["grp"]: row["places"] for row in verdict.survey.table("compared").to_pylist()}
    left = {*verdict.survey.table("differing")["rank"].to_pylist()}
    groups = verdict.survey.groups
    return [
        [g.label, *map(str, (len(g.ranks), values.get(g.number, 0), sum(rank in left for rank in g.ranks)))] for g in groups
    ]
