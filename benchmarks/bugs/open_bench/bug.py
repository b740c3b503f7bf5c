"""What a bug of the open bench states, and how a program hands its training to the probe."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainprobe
from trainprobe.engine.plan.defaults import default_plan


def plan_named(name: str) -> dict[str, Any]:
    """Return the plan `default` (that of an integration that is given none) or `every-step` (its audit at each step)."""
    plan = default_plan()
    return plan if name == "default" else {**plan, "audit": {"every": 1}}


@dataclass(frozen=True, slots=True)
class OpenBug:
    """A silent bug.

    source: the public thread that reports it. program: a function of (name of the bug or "", Watch). begins: the first step
    that it harms, in the numbering of the program's framework. place: a regular expression that the name of the first
    finding's site must match as a whole; says: one that its message may match instead, where the place is no value.
    """

    name: str
    family: str
    source: str
    program: Callable[[str, Watch], None]
    begins: int
    place: str
    says: str = ""
    ranks: int = 1

    def located(self, finding: dict[str, Any]) -> bool:
        """Whether this finding names the right place."""
        site = finding["site"]
        if site is not None and re.fullmatch(self.place, site[1]):
            return True
        return bool(self.says) and re.search(self.says, finding["message"], re.IGNORECASE) is not None


class Watch:
    """Hands trainings to the probe as the README shows it, and keeps the probes for their findings."""

    def __init__(self, plan: dict[str, Any], folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.kept: list[Any] = []

    @contextlib.contextmanager
    def loop(self, model: Any, optimizer: Any) -> Generator[Any]:
        """A plain loop: `with trainprobe.watch(model, optimizer) as probe`."""
        with trainprobe.watch(model, optimizer, self.plan, output=str(self.folder)) as probe:
            self.kept.append(probe)
            yield probe

    def transformers(self) -> Any:
        """The callback of the Hugging Face Trainer."""
        from trainprobe.integrations.transformers import ProbeCallback

        return self._keep(ProbeCallback(self.plan, output=str(self.folder)))

    def lightning(self) -> Any:
        """The callback of Lightning."""
        from trainprobe.integrations.lightning import ProbeCallback

        return self._keep(ProbeCallback(self.plan, output=str(self.folder)))

    def deepspeed(self, engine: Any) -> Any:
        """A DeepSpeed engine."""
        from trainprobe.integrations.deepspeed import attach, probe_of

        engine = attach(engine, self.plan, output=str(self.folder))
        self._keep(probe_of(engine))
        return engine

    def findings(self) -> list[dict[str, Any]]:
        """Everything that was found, as JSON values, in the order of its steps."""
        found = [told(f) for kept in self.kept for f in kept.findings]
        return sorted(found, key=lambda f: f["step"] if f["step"] is not None else 1 << 30)

    def _keep(self, kept: Any) -> Any:
        self.kept.append(kept)
        return kept


def told(finding: Any) -> dict[str, Any]:
    """Return a finding as JSON values."""
    site = finding.site
    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "message": finding.message,
        "step": finding.step,
        "site": None if site is None else [site.kind, site.name, site.slot],
        "measured": finding.measured,
    }
