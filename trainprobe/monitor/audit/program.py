"""The audit of a run: what its tap asks about the run, and what the relations find."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainprobe.engine.capture import AUDIT
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.apart_on_purpose import why_not_compared, why_not_only_own
from trainprobe.monitor.audit.audit import Audit, Gather
from trainprobe.monitor.audit.plan import AuditPlan, validate
from trainprobe.monitor.audit.relations import observers_of
from trainprobe.monitor.findings import matters

# see docs/audit.md, "What it does not see"
_BEYOND = "What only an experiment shows, `trainprobe preflight -- {script}` tests."
_REPLICATES = "DistributedDataParallel"  # a wrapper whose ranks all have the same parameters
_DATA_PARALLEL = (_REPLICATES, "FullyShardedDataParallel", "FSDPModule")


class AuditProgram(Program):
    """See the module text.

    plan: the `audit` section of a plan. tap: `AuditTap`, or that of another framework. gather: see `Audit`.
    """

    def __init__(self, plan: AuditPlan, tap: Any, schedule: Schedule, gather: Gather | None) -> None:
        super().__init__("audit", schedule, part=AUDIT)
        self.tap = tap
        self.tap.attach(self)
        self.audit = Audit(plan, tap.take, gather)
        self._observers = observers_of(plan.checked())
        self._said = {""}  # why ranks are not compared, and weights not judged

    @property
    def plan(self) -> AuditPlan:
        """The `audit` section of the plan, as it is now."""
        return self.audit.plan

    @property
    def last(self) -> Any:
        """The evidence of the last audited step; None before the first."""
        return self.audit.last

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Learn what the user declares to be the loss of the step, where this framework can use that."""
        if self.tap.can_declare_loss:
            self.tap.declare_loss(loss)

    # ---- events --------------------------------------------------------------------------------------------------

    def attached(self, probe: EngineProbe) -> None:
        """Let relations fail one by one, and findings that last be counted."""
        self._probe = probe
        self.audit.count, self.audit.part = probe.reporter.count, probe.guard.part
        probe.guard.of(AUDIT).on_trip(self.tap.close)

    def changed(self, plan: Plan, schedule: Schedule) -> None:
        """Go on with another plan; what was learnt so far stays."""
        self.audit.plan, self.schedule = validate(plan.section("audit") or {}), schedule
        self._observers = observers_of(self.plan.checked())

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Learn over which ranks parameters are replicated for certain, and whether all ranks answer."""
        certain = declared or _is_wrapped(model, _REPLICATES)
        self.audit.certain = frozenset({"dp", "cp"}) if certain else frozenset()
        self.audit.assumed = not declared and not _is_wrapped(model, *_DATA_PARALLEL)
        if not all(map(self._probe.plan.wants_rank, range(self.world_size))):
            self.audit.gather = None  # some ranks do not collect: they would never answer
        optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self.audit.not_compared = partial(why_not_compared, chunks_of(model), optimizers)
        self.audit.not_only_own = partial(why_not_only_own, chunks_of(model))

    def at_once(self, step: int) -> bool:
        """Tell whether the step is audited: its facts are those of now, and all ranks compare them at one place."""
        return self.name in self._probe.running

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        """Return the violations that are new."""
        apart = self.audit.not_compared() if self.plan.ranks and self.world_size > 1 else ""
        for why in (apart, self.audit.not_only_own()):
            if why not in self._said:
                self._said.add(why)
                self._probe.report(Finding("audit", "info", why))
        return self.audit(step_data)

    def ended(self, step: int, complete: bool) -> None:
        """Answer the other ranks' comparison where this rank's audit has stopped."""
        guard = self._probe.guard
        if complete and (guard.tripped is not None or guard.leaves_out(AUDIT)):
            guard.keep_on(self.audit.answer_for_stopped, step, self._probe.place)

    def closing(self) -> None:
        """Judge what came after the last audited step, say what no watching sees, and leave nothing behind."""
        facts = self.tap.late_evaluations()
        if facts is not None:
            for finding in self.audit.late(facts, self.step, self._probe.place):
                self._probe.report(finding)
        if self.last is not None and self._probe.framework == "pytorch" and not any(map(matters, self._probe.findings)):
            self._probe.at_end(_BEYOND.format(script=_script()))
        self.tap.close()

    # ---- what the tap asks ---------------------------------------------------------------------------------------

    @property
    def observers(self) -> frozenset[str] | None:
        """The observers that the relations of the plan name; None: all."""
        return self._observers

    def observers_due(self) -> frozenset[str] | None:
        """Return those that the relations name which are checked at this step; None: all."""
        return observers_of(self.plan.due(self.step))

    def wants(self, kind: str) -> bool:
        """Tell whether a relation of this cost is checked at this step."""
        return self.plan.wants(self.step, kind)

    def loaded(self) -> None:
        """Have the programs asked anew about the next step: it is audited now."""
        self._probe.scheduler.ask_anew()

    def new_tape(self) -> Tape:
        """Return a tape that belongs to no step."""
        return self._probe.new_tape(-1)

    @property
    def folder(self) -> Path | None:
        """Where this rank's log is."""
        return self._probe.plan.output / f"rank{self._probe.place.rank}"

    @property
    def continues(self) -> bool:
        """Whether the run goes on with one of an earlier process."""
        return self._probe.plan.on_existing == "continue"

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._probe.step_number

    @property
    def ordinal(self) -> int:
        """How many steps have begun."""
        return self._probe.begun

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._probe.place.world_size


def _is_wrapped(model: Any, *kinds: str) -> bool:
    """Tell whether a model, or what it holds, is of one of these kinds."""
    chunks = chunks_of(model)  # pyright: ignore[reportUnknownVariableType]
    return any(base.__name__ in kinds for chunk in chunks for module in _modules_of(chunk) for base in type(module).__mro__)


def _modules_of(model: Any) -> Iterable[Any]:
    """Return the modules of a model of torch; of any other model it alone."""
    return model.modules() if hasattr(model, "modules") else (model,)


def _script() -> str:
    """Return the script that runs, as a word of a command line; "train.py" for a notebook and a package."""
    script = sys.argv[0]
    return shlex.quote(script) if script.endswith(".py") and not script.endswith("__main__.py") else "train.py"
