"""Findings as people and files see them: one entry a cause, one line of words, and the schema of the file.

A finding is written when it is made. The same violation at a later step, or on another rank, is the same finding: it is
counted there (`Finding.count`, `last_step`, `ranks`), and `merged` joins what several steps and ranks wrote.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.json_schema import schema_of, text_of
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import numbered

Cause = tuple[str, str, str, str]
_NUMBERS = re.compile(r"[-+]?\d[\d.,e+-]*")


def cause_of(finding: Finding) -> Cause:
    """Return what two findings of one cause have in common: rule, severity, the value that it is about, and what was expected.

    Where a finding is about no value, its message without the numbers stands for one.
    """
    site = finding.site
    where = f"{site.kind} {site.name} {site.slot}" if site is not None else _NUMBERS.sub("", finding.message)
    return finding.rule, finding.severity, where, finding.expected if isinstance(finding.expected, str) else ""


Count = Callable[[Sequence[Finding], int], list[Finding]]  # counts findings that hold at one more step, returns them then


def counted_all(findings: Sequence[Finding], step: int) -> list[Finding]:
    """Return findings that were seen at one more step."""
    return [counted(finding, step) for finding in findings]


def counted(finding: Finding, step: int) -> Finding:
    """Return a finding that was seen at one more step."""
    return dataclasses.replace(finding, count=finding.count + 1, last_step=step)


def recount(found: list[Finding], seen: Sequence[Finding], step: int) -> dict[int, Finding]:
    """Count the findings `seen`, which hold at one more step, in `found`; return place → finding as it is there now."""
    now: dict[int, Finding] = {}
    for finding in seen:
        key = cause_of(finding), finding.step, ranks_of(finding)
        place = next((i for i, f in enumerate(found) if (cause_of(f), f.step, ranks_of(f)) == key), None)
        if place is not None:
            found[place] = now[place] = counted(found[place], step)
    return now


def in_folder(finding: Finding, folder: Path | str) -> Finding:
    """Return a finding whose `next` names the run's folder where it said `{output}`."""
    if finding.next is None or "{output}" not in finding.next:
        return finding
    return dataclasses.replace(finding, next=finding.next.replace("{output}", shlex.quote(str(folder))))


def with_last_counts(findings: Iterable[Finding]) -> list[Finding]:
    """Return the lines of one rank's file, a finding that was counted in place of its earlier lines."""
    latest: dict[tuple[Cause, int | None], int] = {}
    kept: list[Finding] = []
    for finding in findings:
        key = cause_of(finding), finding.step
        if finding.count > 1 and key in latest:
            kept[latest[key]] = finding
        else:
            latest[key] = len(kept)
            kept.append(finding)
    return kept


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding a cause, in the order in which causes come first: that of the first step and the lowest rank.

    Its `count` is that of the rank that saw it at most steps.
    """
    groups: dict[Cause, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(cause_of(finding), []).append(finding)
    return [_joined(group) for group in groups.values()]


def _joined(group: Sequence[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    first = min(group, key=lambda f: (f.step if f.step is not None else -1, ranks_of(f)))
    times: dict[int, int] = {}
    for finding in group:
        for rank in ranks_of(finding):
            times[rank] = times.get(rank, 0) + finding.count
    lasts = [step for f in group if (step := f.step if f.last_step is None else f.last_step) is not None]
    last = max(lasts, default=None)
    return dataclasses.replace(
        first,
        names=tuple(dict.fromkeys(name for f in (first, *group) for name in f.names)),
        count=max(times.values(), default=len(group)),
        last_step=None if last == first.step else last,
        ranks=tuple(sorted(times)),
    )


def ranks_of(finding: Finding) -> tuple[int, ...]:
    """Return the ranks that saw a finding; none where it is about no rank."""
    return finding.ranks or ((finding.place.rank,) if finding.place is not None else ())


def sentence(finding: Finding) -> str:
    """Return a finding as one line for people."""
    where = place_in_words(finding)
    return f"{finding.severity} {finding.rule}{f' ({where})' if where else ''}: {finding.message}"


def place_in_words(finding: Finding) -> str:
    """Say at which step, on which ranks and how often: "step 8, ranks 0–3, also at 7 later steps until step 93"."""
    ranks = ranks_of(finding)
    words = [f"step {finding.step}"] if finding.step is not None else []
    words += [numbered("rank", ranks)] if ranks else []
    if finding.count > 1 and finding.last_step is not None:
        later = finding.count - 1
        words.append(f"also at {later} later step{'s until' if later > 1 else ','} step {finding.last_step}")
    elif finding.last_step is not None:
        words.append(f"until step {finding.last_step}")
    return ", ".join(words)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a line of `findings.jsonl`, as it stands in docs/finding.schema.json."""
    return schema_of(Finding)


def schema_text() -> str:
    """Return that schema as the text of a file."""
    return text_of(schema())
