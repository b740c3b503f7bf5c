"""What a finding is, and how people and files see it: one entry a cause, one line of words, HTML, and the schema of the file.

A finding is written when it is made. The same violation at a later step, or on another rank, is the same finding: it is
counted there (`Finding.count`, `last_step`, `ranks`), and `merged` joins what several steps and ranks wrote.

`Reporter` keeps findings, hands them to the writer and has a `Console` print them: warnings and errors when they happen, each
once, and one line at the end. Nothing is printed inside a step: a finding is reported when its step has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainprobe.engine.core.json_schema import schema_of, text_of
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.places import Place, Site
from trainprobe.engine.core.words import counted as number_of
from trainprobe.engine.core.words import numbered

if TYPE_CHECKING:
    from trainprobe.engine.storage.html_page.markup import Markup
    from trainprobe.engine.storage.writer import Writer

Cause = tuple[str, str, str, str]
_NUMBERS = re.compile(r"[-+]?\d[\d.,e+-]*")
MOST_IN_NOTEBOOK = 8  # findings that a notebook shows
PRINTED_PER_RULE = 5  # findings of one rule that are printed; further ones are in the log
_OF_ALL_RANKS = frozenset({"plan"})  # what is the same on every rank: printed by one rank
_PRINTED_THERE = frozenset({"guard", "writer"})  # faults of the tool, which these print themselves


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule, a relation of the audit or the probe itself has to report, with its evidence."""

    __pydantic_config__: ClassVar[dict[str, bool]] = {"use_attribute_docstrings": True}  # for the schema

    rule: str
    """Name of the rule or of the relation; `plan`, `probe`, `guard`, `writer`, `kernels` and `alerts` are the tool itself."""
    severity: Literal["info", "warning", "error"]
    """How grave it is; info is a note."""
    message: str
    """What, the value and where, in words."""
    step: int | None = None
    """The first step at which it was seen; null for what is about the whole run."""
    place: Place | None = None
    """The rank that saw it."""
    site: Site | None = None
    """The value that it is about; of several, the first."""
    measured: float | str | None = None
    """What was measured; null stands for NaN too."""
    expected: float | str | None = None
    """What it should have been."""
    floor: float | None = None
    """The difference below which nothing would have been reported."""
    next: str | None = None
    """What to do next."""
    names: tuple[str, ...] = ()
    """All parameters, modules or scalars that it is about, also where the message names only some of them."""
    count: int = 1
    """At how many steps it was seen, the first included."""
    last_step: int | None = None
    """The last step at which it was seen, where that is not the first."""
    ranks: tuple[int, ...] = ()
    """The ranks that saw it, where findings of several ranks were joined."""

    def _repr_html_(self) -> str:
        return findings_for_notebook(f"{self.severity} {self.rule}", [self])


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

    Its `count` is that of the rank that saw it at most steps. Where a rank says the same and more, its message is taken.
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
    more = (f.message for f in group if f.step == first.step and f.message.startswith(f"{first.message}; "))
    return dataclasses.replace(
        first,
        message=max((first.message, *more), key=len),
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


def finding_item(
    f: Finding,
    number: int,
    first: bool = False,
    on_map: bool = False,
    following: Sequence[Markup] = (),
    trace: Sequence[tuple[str, str]] = (),
) -> Markup:
    """Return the list item of a finding, which `#finding-NUMBER` leads to.

    following: items of what follows from it, folded. trace: what else is known of it, each with its label.
    """
    from trainprobe.engine.storage.html_page.markup import element, joined

    where: list[Markup] = []
    if f.site:
        where.append(element("span", element("code", f.site.name), f" {f.site.slot}" if f.site.slot else ""))
    for label, value in (("measured ", f.measured), ("expected ", f.expected), ("noise floor ", f.floor)):
        if value is not None:
            where.append(element("span", label, element("code", value if isinstance(value, str) else f"{value:.4g}")))
    where += [element("span", label, element("code", text)) for label, text in trace]
    if on_map and f.step is not None:
        where.append(element("a", "show on the map", href="#map", class_="show", data_finding=str(number)))
    names = None
    if len(f.names) > 1:
        summary = element("summary", f"all {len(f.names)} names")
        names = element("details", summary, element("code", ", ".join(f.names)), class_="names")
    badge = element("span", "first", class_="first-badge") if first else None
    mark = element("div", element("a", f.rule, href=f"#finding-{number}"), element("span", place_in_words(f)), class_="mark")
    said = element("div", joined((badge, f.message)), class_="say")
    to_do = element("div", f.next, class_="next") if f.next else None
    under = None
    if following:
        summary = element(
            "summary", f"{number_of(len(following), 'finding')} {'follows' if len(following) == 1 else 'follow'} from this"
        )
        under = element("details", summary, element("ol", *following), class_="following")
    body = element("div", said, element("div", *where, class_="where"), to_do, names, under)
    return element("li", mark, body, class_=f"finding {f.severity}", id=f"finding-{number}")


def findings_for_notebook(headline: str, found: Sequence[Finding]) -> Markup:
    """Return a sentence and the findings under it, as `_repr_html_` gives it to a notebook."""
    from trainprobe.engine.storage.html_page.markup import element, notebook_card

    gravest = next((tone for tone in ("error", "warning") if any(f.severity == tone for f in found)), "info")
    items = [finding_item(f, i) for i, f in enumerate(found[:MOST_IN_NOTEBOOK], 1)]
    more = element("p", f"and {len(found) - MOST_IN_NOTEBOOK} more") if len(found) > MOST_IN_NOTEBOOK else None
    return notebook_card(headline, gravest, element("ol", *items) if items else None, more)


class Console:
    """Prints and logs the findings of one rank. on: False does neither. write_line: prints a line, None to standard error.

    speaks: whether this rank prints what all ranks share. silent: rules whose findings are not printed. markers: a folder
    that the ranks of a run share, in which the first rank that prints an error leaves a mark, so that others do not repeat it.
    about: what the lines begin with, where several models are watched.
    """

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.write_line: Callable[[str], object] | None = None
        self.speaks = True
        self.about = ""
        self.silent: Collection[str] = ()
        self.markers: Path | None = None
        self._printed: set[Cause] = set()
        self._times: Counter[str] = Counter()
        self._pid = os.getpid()

    def report(self, finding: Finding) -> None:
        """Print a warning or an error, the first time that it comes."""
        if not self._is_for_people(finding):
            return
        self._printed.add(cause_of(finding))
        self._times[finding.rule] += 1
        if self._times[finding.rule] > PRINTED_PER_RULE:
            self.line(f"further findings of {finding.rule} are in the run's folder and not printed")
            self.silent = {*self.silent, finding.rule}
        elif self._is_first_rank(finding):
            then = [f"  next: {finding.next}"] if finding.next else []
            text = finding.message if finding.step is None else sentence(finding)
            self.line(text, *then, severity=finding.severity, finding=finding)

    def line(self, *lines: str, severity: str = "info", **fields: Any) -> None:
        """Print and log lines of the tool; nothing in a process that was forked from the training's. See `say`."""
        if self.on and os.getpid() == self._pid:
            first = f"{self.about}: {lines[0]}" if self.about else lines[0]
            say(first, *lines[1:], severity=severity, write_line=self.write_line, **fields)

    def _is_for_people(self, finding: Finding) -> bool:
        if not self.on or finding.severity == "info" or finding.rule in _PRINTED_THERE or finding.rule in self.silent:
            return False
        return (self.speaks or finding.rule not in _OF_ALL_RANKS) and cause_of(finding) not in self._printed

    def _is_first_rank(self, finding: Finding) -> bool:
        """Return whether no other rank has printed this finding; True where that cannot be known."""
        if self.markers is None:
            return True
        key = repr((finding.step, cause_of(finding))).encode()
        try:
            self.markers.mkdir(parents=True, exist_ok=True)
            name = self.markers / hashlib.sha256(key).hexdigest()[:16]
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True


class Reporter:
    """Reports findings. output: the plan's folder, which sentences name.

    writer: gets findings while there is one. listeners: called with each finding, before it is printed.
    """

    def __init__(self, console: Console, output: Path) -> None:
        self.console = console
        self.findings: list[Finding] = []
        self.writer: Writer | None = None
        self.listeners: list[Callable[[Finding], None]] = []
        self._output = output
        self._reported: set[str] = set()
        self._counts: dict[int, Finding] = {}  # place in `findings` → one that was counted and is not written yet

    def report(self, finding: Finding) -> None:
        """Keep, write and print a finding."""
        finding = in_folder(finding, self._output)
        self.findings.append(finding)
        if self.writer is not None:
            self.writer.submit_findings([finding])
        for listener in self.listeners:
            listener(finding)
        self.console.report(finding)

    def report_once(self, finding: Finding, key: str = "") -> None:
        """Report a finding, unless one with this key was reported before. key: by default its message."""
        if self.is_new(key or finding.message):
            self.report(finding)

    def is_new(self, key: str) -> bool:
        """Tell whether this is the first time that somebody asks for this key."""
        new = key not in self._reported
        self._reported.add(key)
        return new

    def count(self, seen: Sequence[Finding], step: int) -> list[Finding]:
        """Count findings that were made before and hold at this step too; return them as they are now."""
        now = recount(self.findings, seen, step)
        self._counts |= now
        if any(finding.count & (finding.count - 1) == 0 for finding in now.values()):  # the powers of two, and at the end
            self.write_counts()
        return list(now.values())

    def write_counts(self) -> None:
        """Hand the findings that were counted since the last time to the writer."""
        if self.writer is not None and self._counts:
            self.writer.submit_counts(list(self._counts.values()))
        self._counts.clear()
