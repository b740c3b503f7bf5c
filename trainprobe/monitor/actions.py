"""What findings do: `decide` says it, the probe carries it out, and `Alerts` sends them out on the writer's thread.

log      keep it: findings file, report, the probe's list (always)
alert    webhook, callback (the console prints warnings and errors of every rule)
dump     collect the next steps in full
stop     end the run: the integration raises StopTraining
"""

from __future__ import annotations

import dataclasses
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from trainprobe.engine.core.findings import sentence
from trainprobe.engine.core.records import Finding
from trainprobe.errors import StopTraining
from trainprobe.monitor.plan import Actions
from trainprobe.monitor.rules import RuleOptions


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
        body = orjson.dumps({"text": text, **self._about, **dataclasses.asdict(finding)}, default=str)
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
