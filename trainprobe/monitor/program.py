"""The monitor of a run: judges each step by rules, says what follows, and remembers over a restart."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.engine.core.flat_parameters import FLAT
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.records import Finding, Place, Site, StepData
from trainprobe.engine.core.unmatched import Unmatched
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.errors import PlanError, StopTraining
from trainprobe.monitor.chosen_calls import chosen_calls
from trainprobe.monitor.findings import Alerts, decide
from trainprobe.monitor.plan import MonitorPlan, validate
from trainprobe.monitor.requests import looks_when_asked
from trainprobe.monitor.rules_of_run import keep_rules
from trainprobe.monitor.updates_seen import steps_without_update
from trainprobe.monitor.watcher import NO_LOSS, OF_THE_LOSS, Watcher, keep_state, resume_state, too_few_steps

Decode = Callable[[list[int]], str]  # tokens → their text
_FRAME = re.compile(r"File (?P<file>.*), line (?P<line>\d+), in (?P<function>.*?), \n (?P<source>.*)", re.S)

_NAMED = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update")  # what has names


class MonitorProgram(Program):
    """See the module text. plan: the `monitor` section of a plan. forward_at: steps whose forward pass is to be looked at."""

    def __init__(self, plan: MonitorPlan, schedule: Schedule, forward_at: set[int]) -> None:
        super().__init__("monitor", schedule)
        self._forward_at = forward_at
        self.plan = plan
        self.watcher = Watcher(plan.rules)
        self._choose = chosen_calls(plan)
        self.decode: Decode | None = None  # of the tokenizer of the training, where it is known
        self._dumps = 0
        self._kept = False

    def changed(self, plan: Plan, schedule: Schedule) -> None:
        """Go on with another plan; rules that stay keep what they remember."""
        self.plan, self.schedule = validate(plan.section("monitor") or {}), schedule
        self.watcher.change(self.plan.rules)
        self._kept, self._section = False, plan.section("monitor")
        self._choose = chosen_calls(self.plan)

    def unmatched(self, modules: Sequence[str], parameters: Sequence[str]) -> Iterator[Unmatched]:
        """Yield what is selected of modules and of parameters."""
        flat = any(name.endswith(FLAT) for name in parameters)  # the monitor names what they are made of
        for kind in _NAMED:
            collect = getattr(self.plan, kind)
            of_modules = kind.startswith("activation")
            if collect.on and (of_modules or not flat):
                names = modules if of_modules else parameters
                yield Unmatched(f"monitor.{kind}.names", Names(collect.names).unmatched(names), must=False)

    def accepts(self, plan: Plan) -> None:
        """Refuse other actions: alerts are set up at the start."""
        if validate(plan.section("monitor")).actions != self.plan.actions:
            raise PlanError(
                "while a run goes on, monitor.actions stays what it is, as alerts are set up at the start: leave it out here"
            )

    def attached(self, probe: EngineProbe) -> None:
        """Let rules fail one by one, and findings that last be counted; leave printing to the plan."""
        self._probe, self._section = probe, probe.plan.section("monitor")
        self.watcher.count, self.watcher.part = probe.reporter.count, probe.guard.part
        if not self.plan.actions.console:
            probe.console.silent = frozenset(self.plan.rules)

    def sinks(self, place: Place) -> Mapping[str, Any]:
        """Return what sends findings out."""
        return {"alerts": Alerts(self.plan.rules, self.plan.actions, self._probe.plan.output)}

    def continued(self) -> None:
        """Go on from what the rules of the earlier run remembered."""
        self._probe.report(resume_state(self.watcher, self._state_file()))

    def at_once(self, step: int) -> bool:
        """Tell whether a rule may stop the run, which is to happen before the next step."""
        return any("stop" in options.actions for options in self.plan.rules.values())

    def prepare(self, step_data: StepData) -> None:
        """Drop calls of modules that the plan does not choose."""
        if self._choose is not None:
            self._choose(step_data)

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        """Return what the rules found. With the first step, the plan's rules are kept beside the output."""
        if not self._kept and self._probe.writer is not None:
            self._kept = True
            self._probe.report(keep_rules(self._section, self._state_file().parent))
        return [with_row(with_line(finding, step_data), step_data, self.decode) for finding in self.watcher(step_data)]

    def decide(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        """Return what the actions of the rules ask for."""
        decision, self._dumps = decide(found, self.plan.rules, self.plan.actions, self._dumps)
        if self.watcher.wants_forward() and looks_when_asked(self.plan):
            self._forward_at.add(self._probe.step_number + 1)
            self._probe.scheduler.ask_anew()
        return decision.dump_steps, decision.stop

    def closing(self) -> None:
        """Name the rules that the run was too short for, and keep what they remember: a continued run is judged as one."""
        skipped = steps_without_update([self.watcher.updates])
        for sentence in (self._loss_unknown(), too_few_steps(self.watcher.not_judged()), skipped):
            if sentence:
                self._probe.at_end(sentence)
        if self._probe.writer is not None:
            self._probe.report(keep_state(self.watcher, self._state_file()))

    def keep(self, step: int) -> None:
        """Keep what the rules remember next to the output, for a run that goes on from the checkpoint of this step."""
        self._probe.settle()
        if self._probe.writer is not None:
            self._probe.report(keep_state(self.watcher, self._state_file(f"rules_step{step}.json")))

    def go_on_from(self, step: int) -> None:
        """Go on from what was kept with the checkpoint of this step; the rules stay as they are where nothing was."""
        self._probe.settle()
        self._probe.report(resume_state(self.watcher, self._state_file(f"rules_step{step}.json")))

    def _loss_unknown(self) -> str:
        """Return what to say where rules would judge the loss and no step had one; only the last pipeline stage has it."""
        stages = self._probe.place.axes.get("pp", (0, 1))[1]
        if self.watcher.knows_loss or stages > 1 or not self._probe.collected or not OF_THE_LOSS & self.plan.rules.keys():
            return ""
        return NO_LOSS

    def _state_file(self, name: str = "monitor_state.json") -> Path:
        return self._probe.plan.output / f"rank{self._probe.place.rank}" / name


def with_line(finding: Finding, step_data: StepData) -> Finding:
    """Return a finding of the rule `nonfinite` whose message ends with the line that made its call; else as it is."""
    line = line_of(finding.site, step_data) if finding.rule == "nonfinite" else ""
    return replace(finding, message=f"{finding.message}; called at {line}") if line else finding


def line_of(site: Site | None, step_data: StepData) -> str:
    """Return "train.py:21: self.norm(x)", the innermost line that is no part of torch; "" where it is not known."""
    return next(iter(lines_of(site, step_data)), "")


def lines_of(site: Site | None, step_data: StepData) -> list[str]:
    """Return the call stack of a module or an operator as `line_of` writes lines, innermost first, without those of torch."""
    if site is None or site.kind not in ("module", "op"):
        return []
    called = (c for c in step_data.calls if (c.kind, c.name, c.call, c.phase) == (site.kind, site.name, site.call, "forward"))
    stack = next((call.stack for call in called), -1)
    frames = step_data.stacks[stack] if 0 <= stack < len(step_data.stacks) else ()
    own = (frame for frame in map(_FRAME.match, frames) if frame and "/torch/" not in frame["file"])
    return [f"{frame['file']}:{frame['line']}: {frame['source'].strip()}" for frame in own]


# ---- the row of a batch that carries a spike, where the feature `loss_rows` looked at the step ----

_TEXT = 80  # characters of a row that are told
_FAR, _PART = 8.0, 0.2  # times the median of the rows, and what share of the loss above it: one row carries it


def with_row(finding: Finding, step_data: StepData, decode: Decode | None = None) -> Finding:
    """Return a finding of the rule `spike` whose message ends with the row that has most of the loss; else as it is.

    No row is named where none stands out: then the batch as a whole, or something else, made the spike.
    """
    if finding.rule != "spike" or not (words := row_in_words(step_data, decode)):
        return finding
    return replace(finding, message=f"{finding.message}; {words}")


def row_in_words(step_data: StepData, decode: Decode | None = None) -> str:
    """Return "row 137 of 512 on rank 3 has 81 % of its loss …"; "" where no row stands out or the step has no such feature.

    decode: makes text of the tokens, where a plan has some recorded.
    """
    calls: dict[int, dict[str, float]] = {}
    tokens: dict[int, list[int]] = {}
    for feature in step_data.features:
        if feature.slot == "loss_row_tokens":
            tokens[feature.call] = [int(number) for number in feature.numbers]
        elif feature.slot.startswith("loss_row"):
            calls.setdefault(feature.call, {})[feature.slot] = float(feature.numbers[0])
    return words_of_row(calls, tokens, step_data.place.rank, decode) if calls else ""


def words_of_row(
    calls: Mapping[int, Mapping[str, float]], tokens: Mapping[int, list[int]], rank: int, decode: Decode | None
) -> str:
    """Return what `row_in_words` does. calls, tokens: by the call of a loss; slot → number, and what its row begins with."""
    call, most = max(calls.items(), key=lambda pair: pair[1]["loss_row_loss"])
    loss, median, of = most["loss_row_loss"], most["loss_row_median"], most["loss_row_of"]
    above = loss / most["loss_row_share"] - of * median if most["loss_row_share"] else 0.0
    if of < 2 or not loss > _FAR * median or not loss - median > _PART * above:
        return ""
    part = f" in loss call {call}" if len(calls) > 1 else ""  # of the step, counted from 0
    return (
        f"row {most['loss_row']:.0f} of {of:.0f}{part} on rank {rank} has {most['loss_row_share']:.0%} of the "
        f"loss there and {most['loss_row_gradient']:.0%} of its gradient, {loss:.3g} where the median row has {median:.3g}"
        + _read(tokens.get(call, []), decode)
    )


def _read(tokens: list[int], decode: Decode | None) -> str:
    """Return what the tokens of a row are, as text where something decodes them."""
    if not tokens:
        return ""
    text = attempt(decode, tokens, otherwise=lambda _: "") if decode is not None else ""
    if not text:
        return f", around tokens {' '.join(map(str, tokens))}"
    return f", around {text if len(text) <= _TEXT else text[: _TEXT - 1] + '…'!r}"
