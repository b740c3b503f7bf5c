"""The findings of a run: their order, one entry a cause, what it recorded beside what the rules find now, and its end line.

The end line is what a person reads when a run is over: steps, findings by rule, and where to read them. What a finding says was
printed when it was made, and is not repeated.
"""

from __future__ import annotations

import shlex
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from trainprobe.engine.core.findings import Cause, cause_of, merged, ranks_of, sentence
from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.core.words import counted, numbered
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.errors import FormatError, StopTraining
from trainprobe.monitor.audit.relations import STAGES, load_relation, relation_names
from trainprobe.monitor.frames import SCALED
from trainprobe.monitor.plan import Actions
from trainprobe.monitor.rules import GRAVITY, RuleOptions
from trainprobe.monitor.scalar_names import role_of

Origin = Literal["recorded", "judged", "both"]
OWN = frozenset({"plan", "probe", "guard", "writer", "kernels", "alerts"})  # rules about the tool, not about the training


@dataclass(frozen=True, slots=True)
class JudgedFinding:
    """A finding of a run, one per cause. origin: whether the run recorded it, the rules find it in the record now, or both."""

    finding: Finding
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """Return the finding as in `findings.jsonl`, with its origin."""
        return {**asdict(self.finding), "origin": self.origin}


def exit_code(findings: Iterable[Finding], incomplete: bool) -> int:
    """Return what a reader of a run exits with: 1 for a warning or an error, 0 for none.

    3 where the record is incomplete and nothing is known to be wrong with the training itself.
    """
    rules = {finding.rule for finding in findings if finding.severity != "info"}
    return 3 if incomplete and rules <= OWN else int(bool(rules))


def all_findings(recorded: Sequence[Finding], judged: Sequence[Finding]) -> list[JudgedFinding]:
    """Return one entry a cause, causes before consequences; a finding that is in both is one entry."""
    known = {_key(finding) for finding in recorded}
    new = [finding for finding in judged if _key(finding) not in known]
    by_run, now = _causes(recorded), _causes(judged)
    return [JudgedFinding(finding, _origin(cause_of(finding), by_run, now)) for finding in causes([*recorded, *new])]


def _key(finding: Finding) -> tuple[Cause, int | None, tuple[int, ...]]:
    return cause_of(finding), finding.step, ranks_of(finding)


def _causes(findings: Iterable[Finding]) -> set[Cause]:
    return {cause_of(finding) for finding in findings}


def _origin(cause: Cause, recorded: set[Cause], judged: set[Cause]) -> Origin:
    if cause in recorded and cause in judged:
        return "both"
    return "recorded" if cause in recorded else "judged"


# ---- order and causes ----


def causes(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding a cause, causes before consequences.

    A NaN that a collective handed to a rank, or that the rank sees only once gradients have been exchanged, is that of the rank
    that made it in the same step, as `trainprobe nan-trace` reports it. A spike that a rank sees only then, likewise.
    """
    ordered = in_order(merged(findings))
    ordered.sort(key=lambda f: (f.step is None, f.step or 0, _is_handed_over(f)))  # behind what may have made it
    found: list[Finding] = []
    reached: dict[int, set[int]] = {}  # where in `found` a non-finite value's origin is → the ranks that it reached
    born: dict[tuple[str, int | None], int] = {}  # rule and step → where in `found` the origin of its values is
    for finding in ordered:
        origin = born.get((finding.rule, finding.step))
        if origin is not None and _came_from(finding, found[origin]):
            reached.setdefault(origin, set()).update(ranks_of(finding))
            continue
        if finding.rule in _CARRIED:
            born.setdefault((finding.rule, finding.step), len(found))
        found.append(finding)
    return [_reaching(finding, reached.get(i, set())) for i, finding in enumerate(found)]


_CARRIED = frozenset({"nonfinite", "spike"})  # rules whose values the exchange of gradients carries to other ranks


def _is_handed_over(finding: Finding) -> bool:
    """Tell whether a collective gave a rank what is not finite, and the rank had given it finite values."""
    return finding.rule == "nonfinite" and finding.site is not None and finding.site.kind == "collective"


def _came_from(finding: Finding, origin: Finding) -> bool:
    """Tell whether a non-finite value was handed over, or seen after the exchange of gradients, and `origin` made elsewhere."""
    exchanged = STAGES.index("whole gradient")
    elsewhere = not {*ranks_of(finding)} & {*ranks_of(origin)}
    later = _stage(origin)[0] < exchanged <= _stage(finding)[0]
    handed = _is_handed_over(finding) and not _is_handed_over(origin)
    return elsewhere and (later or handed) and origin.severity == finding.severity


def _reaching(finding: Finding, ranks: Set[int]) -> Finding:
    """Return the finding of the ranks that made a non-finite value, with those that it reached.

    What a collective handed to all ranks, and none of them made, the collective made: a sum that overflows.
    """
    if not ranks:
        every = _is_handed_over(finding) and finding.place is not None and len(ranks_of(finding)) == finding.place.world_size
        return replace(finding, message=f"{finding.message}; no rank gave it, the collective made it") if every else finding
    made, reached = (numbered("rank", each) for each in (ranks_of(finding), ranks))
    message = f"{finding.message}; {made} made it, and it reached {reached}"
    return replace(finding, ranks=tuple(sorted({*ranks_of(finding), *ranks})), message=message)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with causes before consequences.

    By step, then by where in a step they arise, gravity and rank; findings about the whole run come last.
    """
    return sorted(findings, key=lambda f: (f.step is None, f.step or 0, *_stage(f), -GRAVITY[f.severity], ranks_of(f)))


def _stage(finding: Finding) -> tuple[int, int]:
    """Return the stage of a step in which a violation arises, and its order within the stage.

    A rule says which number is wrong, and a relation of the same stage why: the relation comes first.
    """
    if finding.rule in relation_names():
        return STAGES.index(load_relation(finding.rule).STAGE), relation_names().index(finding.rule)
    site, behind = finding.site, len(relation_names())
    if site is None:
        return len(STAGES), behind
    slot = site.slot.split(".")[0]
    if site.kind == "scalar":
        return _OF_SCALARS.get(role_of(site.name) or "", STAGES.index("evaluation")), behind
    places = (place for part, place in _OF_SLOTS if slot.startswith(part) or slot.endswith(part))
    return next(places, STAGES.index("forward")), behind


_OF_SCALARS = {
    "loss": STAGES.index("forward"),
    "loss scale": STAGES.index("backward"),
    "gradient norm": STAGES.index("clipping"),
    "learning rate": STAGES.index("rate"),
}
_OF_SLOTS = (  # the first that fits: how the slot begins or ends
    ("_after", STAGES.index("update")),
    ("update", STAGES.index("update")),
    ("exp_avg", STAGES.index("update")),
    ("grad_output", STAGES.index("backward")),
    ("grad_input", STAGES.index("backward")),
    ("grad_unreduced", STAGES.index("backward")),
    (SCALED, STAGES.index("backward")),
    ("grad_unclipped", STAGES.index("whole gradient")),
    ("grad", STAGES.index("clipping")),
)


# ---- the end line ----


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run that is over, as one rank saw it.

    steps, collected: how many there were, and how many were looked at. cut_short: how many of the others an error or the end of
    the run cut short while they were looked at. judged: whether the plan has a monitor or an audit. written: whether `output`
    can be read back. stopped: whether the tool has disabled itself. left_out: parts that failed. recorded: how many steps were
    recorded, where some were lost.
    """

    steps: int
    collected: int
    first_step: int
    place: Place
    output: Path
    cut_short: int = 0
    judged: bool = True
    written: bool = True
    stopped: bool = False
    left_out: tuple[str, ...] = ()
    recorded: str = ""


def end_line(run: RunSummary, findings: Sequence[Finding]) -> str:
    """Return the line, without the tool's name. findings: of this rank; what other ranks wrote in this run is added."""
    found = [f for f in causes([*findings, *_of_other_ranks(run)]) if matters(f)]
    nothing = _nothing_found(run, findings)
    outcome = f"{counted(len(found), 'finding')} ({_by_rule(found)}{_since(found)})" if found else nothing
    share = f"{run.recorded}: " if run.recorded else ""
    return f"{share}{_steps(run)}, {outcome}; {_where(run, bool(found))}"


def _nothing_found(run: RunSummary, findings: Sequence[Finding]) -> str:
    if not run.judged:
        return "nothing judged (monitor=True and audit=True judge the steps)"
    if run.collected:
        told = sum(f.rule in OWN and f.severity != "info" for f in findings)
        return "no findings" + (
            f" on the training, {counted(told, 'warning')} about the plan or the tool above" if told else ""
        )
    if run.cut_short:
        return "no step judged as a whole"
    unnamed = run.steps and not run.stopped
    return "nothing judged" + (" (none of them is among the steps that the plan names)" if unnamed else "")


def _steps(run: RunSummary) -> str:
    all_of_them = run.steps == run.collected
    seen = counted(run.steps, "step") + (" watched" if all_of_them else f", {run.collected} of them watched")
    seen += f", {run.cut_short} cut short" if run.cut_short else ""
    if run.stopped:
        return f"{seen}, then disabled by a fault of its own"
    return seen + (f" (without {' and '.join(run.left_out)}, left out after a fault)" if run.left_out else "")


def matters(finding: Finding) -> bool:
    """Tell whether a finding is a warning or an error about the training, and not about the plan or the tool."""
    return finding.severity != "info" and finding.rule not in OWN


def _of_other_ranks(run: RunSummary) -> list[Finding]:
    """Return what the other ranks wrote since this run began; nothing where their files are elsewhere."""
    if run.place.world_size == 1 or not run.written:
        return []
    try:
        found = read_findings(run.output)
    except (FormatError, OSError):
        return []  # one that is being written
    others = [f for f in found if f.place is not None and f.place.rank != run.place.rank]
    return [f for f in others if f.step is None or f.step >= run.first_step]


def _by_rule(found: Sequence[Finding]) -> str:
    return ", ".join(f"{rule} {n}" if n > 1 else rule for rule, n in Counter(f.rule for f in found).items())


def _since(found: Sequence[Finding]) -> str:
    steps = [finding.step for finding in found if finding.step is not None]
    return f", first at step {min(steps)}" if steps else ""


def _where(run: RunSummary, found: bool) -> str:
    folder = shlex.quote(str(run.output))
    if not run.written:
        return "nothing was written to disk"
    if found:
        return f"read them with `trainprobe judge {folder}`, or as a page with `trainprobe report {folder}`"
    return f"output in {folder}"


# ---- what findings do: `decide` says it, the probe carries it out, and `Alerts` sends them out on the writer's thread ----
#
# log      keep it: findings file, report, the probe's list (always)
# alert    webhook, callback (the console prints warnings and errors of every rule)
# dump     collect the next steps in full
# stop     end the run: the integration raises StopTraining


@dataclass(frozen=True, slots=True)
class Decision:
    """What the probe has to do after a step. dump_steps: how many next steps to collect in full (0: none)."""

    dump_steps: int = 0
    stop: StopTraining | None = None


def decide(
    findings: Sequence[Finding], rules: Mapping[str, RuleOptions], actions: Actions, dumps_so_far: int = 0
) -> tuple[Decision, int]:
    """Return what to do about the findings of one step, and the number of dumps asked for so far.

    Findings of severity info never dump or stop.
    """
    severe = [f for f in findings if f.severity != "info" and f.rule in rules]
    dump = any("dump" in rules[f.rule].actions for f in severe) and dumps_so_far < actions.dump_limit
    stopper = next((f for f in severe if "stop" in rules[f.rule].actions), None)
    stop = None
    if stopper is not None:
        stop = StopTraining(f"rule {stopper.rule!r} at step {stopper.step}: {stopper.message}")
    return Decision(actions.dump_steps if dump else 0, stop), dumps_so_far + dump


class Alerts:
    """A sink that sends out the findings of rules with the action alert. Called on the writer's thread.

    A webhook gets a POST of one JSON object: the keys of a Finding, `run` (the folder's name), `host`, `folder`, and `text`,
    one line for people that names these. If it fails, one complaint is made and the training goes on; the next alert is tried
    again. A fault in the callback is the callback's: the writer gives this sink up and says so. folder: of the run.
    """

    def __init__(self, rules: Mapping[str, RuleOptions], actions: Actions, folder: Path) -> None:
        folder = folder.absolute()
        self._about = {"run": folder.name, "host": socket.gethostname(), "folder": str(folder)}
        self._rules = rules
        self._actions = actions
        self._warnings: list[Finding] = []
        self._complained = False

    def findings(self, findings: Sequence[Finding]) -> None:
        """Send out what is to be sent."""
        for finding in findings:
            options = self._rules.get(finding.rule)
            if options is None or "alert" not in options.actions:
                continue
            if self._actions.webhook is not None:
                self._post(self._actions.webhook, finding)
            if self._actions.callback is not None:
                self._actions.callback(finding)

    def warnings_made(self) -> Sequence[Finding]:
        """Return what could not be sent, once."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def close(self) -> None:
        """Do nothing."""

    def _post(self, url: str, finding: Finding) -> None:
        text = "trainprobe: {run} on {host}: {finding} ({folder})".format(**self._about, finding=sentence(finding))
        body = orjson.dumps({"text": text, **self._about, **asdict(finding)}, default=str)
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._actions.webhook_timeout):
                pass
        except (OSError, ValueError) as error:
            if not self._complained:
                message = (
                    f"the webhook {url} did not take the alert ({error}): later alerts are tried again, the training goes on"
                )
                self._warnings.append(Finding("alerts", "warning", message, step=finding.step))
            self._complained = True
