"""`trainprobe judge RUN`: what a run found, the audit included, and what the rules find in its record now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.text import Text

from trainprobe.comparison.ci_formats import Github, Junit, PipelineCase, tell
from trainprobe.engine.core.findings import in_folder, place_in_words, schema_text
from trainprobe.engine.core.json_schema import prints
from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import counted
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.layout import trainings_in
from trainprobe.engine.storage.safe_files import load_yaml
from trainprobe.errors import FormatError, PlanError
from trainprobe.monitor.findings import JudgedFinding, all_findings, exit_code
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.plan import make_rules
from trainprobe.monitor.remote_run import as_given, origin, run_folder
from trainprobe.monitor.rules import RuleOptions, rule_names
from trainprobe.monitor.rules_of_run import left_out, rules_of_run
from trainprobe.monitor.run_folder import read_frames
from trainprobe.monitor.watcher import Watcher, judge_run, judged_nothing

_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_ORIGINS = {"recorded": "recorded", "judged": "found now", "both": "recorded and found now"}


def judge(
    folder: Annotated[Path, typer.Argument(help="folder that the run wrote to, or its URL", metavar="RUN", parser=as_given)],
    rules: Annotated[
        str | None,
        typer.Option("--rules", help="only these rules: names separated by commas, or a YAML file of rules and their settings"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object per finding, with its origin")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="all ranks at once: which rank left its replicas, when, and in which tensor")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="--fleet on a Ray cluster whose machines see the same paths")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON schema of a finding", is_eager=True, callback=prints(schema_text))
    ] = False,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Show the findings of the run in RUN, those of the audit included, and what the rules find in its log now.

    Exit code: 0 nothing to worry about, 1 there is a warning or an error, 3 there is nothing to judge, or nothing was found and
    the record is incomplete, or with --fleet no rank has a replica to compare with.
    """
    folder = run_folder(folder)
    if fleet:
        from trainprobe.monitor.fleet.command import judge_all_ranks

        fleet_verdict = judge_all_ranks(folder, ray, json)
        cases = _cases(str(folder), fleet_verdict.findings, fleet_verdict.code, fleet_verdict.short)
        tell("judge", cases, junit, github)
        return fleet_verdict.code
    answer = judged(folder, rules)
    if answer.short:
        typer.echo(answer.short, err=json)
    if json:
        for one in answer.findings:
            typer.echo(orjson.dumps(one.to_json(), default=str).decode())
    else:
        _show(answer)
    tell("judge", _cases(str(folder), [one.finding for one in answer.findings], answer.code, answer.short), junit, github)
    return answer.code


@dataclass(frozen=True, slots=True)
class RunJudgement:
    """What is known of a run. short: what of it was not judged, in words. more: what further was not looked at."""

    findings: list[JudgedFinding]
    seen: LookedAt
    rules: dict[str, RuleOptions]
    short: str
    more: tuple[str, ...]

    @property
    def code(self) -> int:
        """The exit code of `judge`."""
        return exit_code((one.finding for one in self.findings), bool(self.short))


def judged(folder: Path, rules: str | None = None) -> RunJudgement:
    """Judge the record of a run, and of further trainings of its script. Raises FormatError where there is none, and PlanError.

    rules: as `--rules` has them.
    """
    answer = _judged(folder, rules)
    for training in trainings_in(folder):
        answer = _with_another(answer, training, rules)
    return answer


def _with_another(answer: RunJudgement, training: Path, rules: str | None) -> RunJudgement:
    name = training.name
    try:
        other = _judged(training, rules)
    except FormatError as error:
        return replace(answer, short="; ".join(filter(None, [answer.short, f"{name}: {error}"])))
    named = [replace(one, finding=replace(one.finding, message=f"{name}: {one.finding.message}")) for one in other.findings]
    short = "; ".join(filter(None, [answer.short, other.short and f"{name}: {other.short}"]))
    return replace(
        answer, findings=[*answer.findings, *named], short=short, more=(*answer.more, f"{name}: {other.seen.amount()}")
    )


def _judged(folder: Path, rules: str | None) -> RunJudgement:
    chosen, absent = (read_rules(rules), ()) if rules is not None else rules_of_run(folder)
    recorded = [f for f in read_findings(folder) if rules is None or f.rule in chosen]
    seen, watchers = LookedAt(folder), dict[int, Watcher]()
    found, unjudged = _judge_again(folder, chosen, seen, bool(recorded), watchers)
    short = seen.shortfall(folder)
    if short:
        short += ": the others are not judged"
    elif not seen.values or judged_nothing(watchers.values()):
        short = "nothing of this run was judged" + (
            "" if seen.values else ": no value was recorded that the rules could look at"
        )
    return RunJudgement(all_findings(recorded, found), seen, chosen, short, (left_out(absent), unjudged))


def _cases(folder: str, findings: Sequence[Finding], code: int, short: str) -> list[PipelineCase]:
    """Return a failure for each warning and error, and the case of the whole where there is none or the record falls short."""
    bad = [finding for finding in findings if finding.severity != "info"]
    cases = [PipelineCase(f"{f.rule} ({place_in_words(f)})", "failure", f.message, [f.next] if f.next else []) for f in bad]
    if code == 3:
        return [*cases, PipelineCase(folder, "error", short or "nothing could be compared")]
    return cases or [PipelineCase(folder, "passed", "nothing found")]


def _judge_again(
    folder: Path, rules: dict[str, RuleOptions], seen: LookedAt, recorded: bool, watchers: dict[int, Watcher]
) -> tuple[list[Finding], str]:
    """Apply the rules to the record and note the steps of each rank; see `judge_run`.

    Raises FormatError when there is no record, unless the run recorded findings, which can be shown by themselves.
    """
    try:
        found, unjudged = judge_run(seen.passing(read_frames(folder, alone=True)), rules, watchers)
    except FormatError:
        if not recorded or seen:
            raise
        return [], ""
    if not seen and not recorded:
        raise FormatError(f"{folder} holds no step that could be judged: the run wrote none before it ended, or not to here")
    return [in_folder(finding, origin(folder)) for finding in found], unjudged


def read_rules(text: str) -> dict[str, RuleOptions]:
    """Return the rules that `--rules` names. Raises PlanError for unknown names and settings."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            loaded = load_yaml(path, "--rules ")
        except FormatError as error:
            raise PlanError(str(error)) from None
        section = loaded.get("monitor", loaded) if isinstance(loaded, dict) else None
        if not isinstance(section, dict):
            raise PlanError(f"{path}: expected a section of rules and their settings")
        return make_rules(section.get("rules", section))  # pyright: ignore
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise PlanError(f"--rules names no rule (there are: {', '.join(rule_names())})")
    return make_rules(names)


def _show(answer: RunJudgement) -> None:
    console, findings, seen = Console(highlight=False, soft_wrap=True), answer.findings, answer.seen
    for one in findings:
        finding, where = one.finding, place_in_words(one.finding)
        line = Text(f"{finding.severity:<8}", style=_COLOURS[finding.severity])
        line.append(f"{finding.rule} ", style="bold not dim").append(f"({where}) " if where else "")
        console.print(line.append(f"[{_ORIGINS[one.origin]}]: {finding.message}"))
        if finding.next:
            console.print(Text(f"        → {finding.next}", style="dim"))
    count = Counter(one.finding.severity for one in findings)
    found = ", ".join(f"{n} info" if severity == "info" else counted(n, severity) for severity, n in count.items())
    what = f"{seen.amount()}, {counted(len(answer.rules), 'rule')}" if seen else f"{seen.amount()} to judge again"
    console.print(
        ". ".join(
            filter(
                None,
                [
                    f"{what}: {found or 'nothing found'}{' in these' if answer.short and not found else ''}",
                    *seen.lacking(),
                    *answer.more,
                ],
            )
        )
    )
