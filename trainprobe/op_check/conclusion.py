"""What all rows of a dump come to: one sentence, and an exit code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from trainprobe.comparison.verdict import Verdict
from trainprobe.op_check.dump import DumpChecked, Row
from trainprobe.op_check.judge import OUTCOMES


@dataclass(frozen=True, slots=True)
class Conclusion(Verdict):
    """The answer of op-check. Exit codes: 0 all right, 1 suspicious or in another mode, 2 a bug, 3 something was not checked.

    worst: the row that the sentence is about.
    """

    worst: Row | None = None
    colours: ClassVar[tuple[str, str, str, str]] = "green", "magenta", "red", "yellow"

    @property
    def page_code(self) -> int:
        """The exit code whose colour the sentence has on a page or in a notebook; 3 is a warning."""
        return 3 if self.code == 1 else self.code


def outcomes(rows: Iterable[Row]) -> Counter[str]:
    """Return how many calls have each outcome; calls that are equal to one have its outcome too."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.worst.outcome] += 1 + row.equal
    return counts


def conclude(found: DumpChecked) -> Conclusion:
    """Return what to say first and the exit code: 2 a bug, 3 something was not checked, 1 suspicious or a mode, 0 neither."""
    rows = found.rows
    counts = outcomes(rows)
    unequal = [row for row in rows if row.same_inputs]
    details = [
        f"{row.entry} had the inputs of {row.same_inputs} and gave another result: it is not deterministic" for row in unequal
    ]
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons[row.worst.reason] += (1 + row.equal) * (row.worst.outcome == "not checked")
    reasons = +reasons
    details += [f"not checked, {count} calls: {reason}" for reason, count in reasons.most_common()]
    details += found.notes
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    whole = f"{counts.total()} calls judged ({summary})"
    worst = max(rows, key=_gravity, default=None)
    if found.made:
        details.insert(
            0, "the dump holds statistics alone: inputs were made, and this machine's operators were judged, not the device's"
        )
    if worst is None:
        return Conclusion(3, "no operator call was judged", details)
    if counts["bug"]:
        return Conclusion(2, f"{said(worst)}. {whole}", details, worst)
    if unequal:
        first = unequal[0]
        text = f"{first.entry}{_where(first)} had the inputs of {first.same_inputs} and gave another result; {whole}"
        return Conclusion(2, text, details, unequal[0])
    if counts["suspicious"]:
        return Conclusion(3 if counts["not checked"] else 1, f"{said(worst)}; {whole}", details, worst)
    if counts["not checked"]:
        text = f"no bug, but {counts['not checked']} of {whole.replace(' judged', '')} were not checked"
        return Conclusion(3, text, details, worst)
    if counts["mode"]:
        return Conclusion(1, f"{said(worst)}; {whole}", details, worst)
    if counts["unspecified"] == len(rows):
        return Conclusion(3, f"nothing was judged: no call has a result that is specified; {whole}", details, worst)
    return Conclusion(0, f"every operator is right, up to rounding: {whole}", details, worst)


def _gravity(row: Row) -> tuple[int, float]:
    order = [*(o for o in OUTCOMES if o not in ("not checked", "unspecified")), "not checked", "unspecified"]
    seriousness = {"bug": 5, "suspicious": 4, "not checked": 3, "mode": 2, "rounding": 1}.get(row.worst.outcome, 0)
    return seriousness * len(order), row.worst.worst


def _where(row: Row) -> str:
    return f" in {row.module}" if row.module else ""


def said(row: Row) -> str:
    """Return one row as a sentence: where, which operator, direction and result, how far off, at which element."""
    return f"step {row.step}, rank {row.rank}: {described(row)}"


def described(row: Row) -> str:
    """Return what `said` does, without step and rank."""
    judgement = row.worst
    results = list(row.checked.judgements)
    which = f" result {results.index(judgement)}" if len(results) > 1 and judgement in results else ""
    element = ""
    if judgement.at is not None and judgement.got is not None and judgement.want is not None:
        place = f" at {[*judgement.at]}" if judgement.at else ""
        element = f" (worst{place}: {judgement.got:.9g} where {judgement.want:.9g} belongs)"
    cause = f"; {row.checked.note}" if row.checked.note else ""
    reason = f": {judgement.reason}" if judgement.reason else ""
    return f"{row.entry}{_where(row)}{which} is {_word(judgement.outcome)}{reason}{element}{cause}"


def _word(outcome: str) -> str:
    return {"bug": "a bug", "mode": "in another mode"}.get(outcome, outcome)


def beyond(worst: float) -> str:
    """Return the distance in bounds as text."""
    return "" if not worst else "∞" if math.isinf(worst) else f"{worst:.3g}"
