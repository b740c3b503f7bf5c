"""`Probe(plan)`: what a plan asks for, composed for one framework; `engine.probe.EngineProbe` with a few more verbs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainprobe.engine.at_start.door import is_off
from trainprobe.engine.capture import StatesTap, Tap, part_of
from trainprobe.engine.capture.saved import SavedTap
from trainprobe.engine.compiled import require
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename, chunks_of
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.core.unmatched import Unmatched, names_not_there
from trainprobe.engine.geometry.shards import ShardOf, shards_declared_over
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Making, Schedule
from trainprobe.engine.taps import Taps
from trainprobe.errors import UsageError
from trainprobe.run.backend import Backend
from trainprobe.run.composition import (
    changed_plan,
    compose,
    follow_control_file,
    programs_of,
)
from trainprobe.run.torch_backend import TorchBackend

if TYPE_CHECKING:
    from trainprobe.engine.core.sources import Source
    from trainprobe.engine.plan.control import ControlFile
    from trainprobe.engine.storage.writer import Writer
    from trainprobe.monitor.audit.program import AuditProgram
    from trainprobe.monitor.plan import MonitorPlan
    from trainprobe.monitor.program import MonitorProgram

# the plan of a run that is switched off by TRAINPROBE=off
_NOTHING: dict[str, Any] = {"record": "nothing", "monitor": False, "audit": False, "sinks": (), "told": False, "console": False}
PlanSource = Plan | Mapping[str, Any] | str | os.PathLike[str] | None


class Probe(EngineProbe):
    """A probe for PyTorch, composed from a plan.

    plan: a Plan, a path to a YAML or JSON file, a dict, or None for the defaults; `overrides` are plan fields on top.
    rename: turns a module's name within this process into its global one (layer and expert numbers). place: where this
    process stands, by default learned from torch.distributed or the environment. shard_of: returns which part of the whole a
    plain parameter is, by default what the parameter declares (see declared_shard). parameter_names: id of parameter → name
    over all processes, where `rename` does not tell it.
    Raises PlanError for a plan that cannot be carried out, MissingExtra when torch is not installed, and MissingCompiledPart
    when the package was installed without its compiled part.
    """

    backend: Backend = TorchBackend()

    def __init__(
        self,
        plan: PlanSource = None,
        *,
        rename: Rename | None = None,
        place: Place | None = None,
        shard_of: ShardOf | None = None,
        parameter_names: Mapping[int, str] | None = None,
        **overrides: Any,
    ) -> None:
        require()
        backend = self.backend
        loaded = load_plan(plan, backend.name, **overrides)
        if is_off():
            loaded = load_plan(None, backend.name, output=loaded.output, **_NOTHING)
        guard = Guard(loaded.on_error, without_dispatch=backend.without_dispatch)
        stacks = Stacks() if loaded.stacks else None
        self.taps = backend.taps(loaded, guard, stacks, rename)
        schedules = compose(loaded, self.taps)
        self._by_name = programs_of(Making(loaded, self.taps, schedules, backend, self._compose, rename))
        self._place_given, self._shard_of, self._parameter_names = place is not None, shard_of, parameter_names or {}
        self._control: ControlFile | None = None
        self._end_reported = False
        super().__init__(
            loaded,
            list(self._by_name.values()),
            backend.tapes(loaded, self._keep, self._keep_chunk, self.journal),
            guard,
            lambda: place or backend.place(),
            self._make_writer,
            stacks=stacks,
            framework=backend.name,
            notes=[self.taps.notes],
            pauses=self.taps.pauses,
        )

    def _compose(self, plan: Plan, guard: Guard, rename: Rename | None) -> tuple[Taps, dict[str, Schedule]]:
        taps = self.backend.taps(plan, guard, Stacks() if plan.stacks else None, rename)
        return taps, compose(plan, taps)

    @property
    def monitor(self) -> MonitorProgram | None:
        """The monitor, where the plan has one."""
        return self.program("monitor")

    @property
    def monitor_plan(self) -> MonitorPlan | None:
        """The `monitor` section of the plan as it is now, where the plan has one."""
        return self.monitor.plan if self.monitor is not None else None

    @property
    def audit(self) -> AuditProgram | None:
        """The audit, where the plan has one."""
        return self.program("audit")

    def program(self, name: str) -> Any:
        """Return the program that carries out this section of the plan; None where the plan has no such section."""
        return self._by_name.get(name)

    # ---- the life of a run ---------------------------------------------------------------------------------------

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        self._place = place or self._place
        if self._place is None and not self._place_given:
            self._place = self.backend.place_by_model(model)
        if self.plan.control is not None and self._control is None:  # first: all ranks look together, also one that has stopped
            from trainprobe.engine.plan.control import ControlFile

            self._control = ControlFile(self.plan.output, self.plan.control, self.place.rank, self.backend.gathering().gather)
        why = self.backend.not_a_model(model)
        if why:
            self.guard.trip(UsageError(why))
            return
        states = self.taps.get("states", StatesTap)
        if states is not None:
            states.shard_of = self._shard_of or shards_declared_over(self.place.axes)
            states.named = self._parameter_names
        super()._open(model, optimizer, place)
        self._open_console()
        for program in self.programs.at("opened"):
            self.guard.of(program.part).set_up(program.opened, model, optimizer, self._place_given or place is not None)
        first: Any = next(iter(chunks_of(model)), model)
        for finding in names_not_there(self._unmatched(), type(first).__name__, self.place):
            self.report_once(finding)

    def _unmatched(self) -> Iterator[Unmatched]:
        """Yield what the programs select, each with its patterns that match nothing in the model."""
        naming = self.taps.naming
        modules, parameters = [info.name for info in naming.known.values()], list(naming.parameter_names.values())
        for program in self.programs.at("unmatched"):
            yield from program.unmatched(modules, parameters)

    def _open_console(self) -> None:
        """Let one rank alone print what all ranks share."""
        ranks, rank = range(self.place.world_size), self.place.rank
        self.console.speaks = rank == next(filter(self.plan.wants_rank, ranks), 0)
        if self.place.world_size > 1 and self.writer is not None:
            self.console.markers = self.plan.output / ".printed"
            if self.console.speaks:
                shutil.rmtree(self.console.markers, ignore_errors=True)  # of an earlier run

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step; see `EngineProbe.begin_step`. A rank whose probe has stopped still looks with the others."""
        step = self.step_number + 1 if number is None else number
        if self.closed and not self._end_reported:
            self._end_reported = True
            self.console.line(f"step {step} begins after the probe was closed: it and later steps are not recorded")
        if self._control is not None and not self.closed:
            stopped = self.guard.tripped is not None
            self.guard.keep_on(follow_control_file, self._control, step, self.change, self.report, stopped)
        return super().begin_step(number)

    def close(self) -> None:
        """Write everything that is pending, and print the line that ends the run."""
        ended = self.closed
        super().close()
        if not ended and self.console.speaks and (self.begun or self.sentences):
            self.guard.keep_on(self._print_end)

    def _repr_html_(self) -> str:
        """Return how many steps were watched so far and what was found, for a notebook."""
        from trainprobe.engine.core.findings import findings_for_notebook
        from trainprobe.monitor.findings import causes

        return findings_for_notebook(f"{self._end_line()}.", causes(self.findings))

    def _print_end(self) -> None:
        """Print the line that ends the run."""
        line = self._end_line()
        self.console.line(" ".join((f"{line}.", *self.sentences)) if self.sentences else line)

    def _end_line(self) -> str:
        from trainprobe.monitor.findings import RunSummary, end_line

        run = RunSummary(
            steps=self.begun,
            collected=self.collected,
            cut_short=self.cut_short,
            first_step=self.first_step or 0,
            place=self.place,
            output=self.plan.output,
            judged=self.judges,
            written=any(sink in self.plan.sinks for sink in ("parquet", "jsonl", "dump", "csv")),
            stopped=self.guard.tripped is not None,
            left_out=tuple(name for name in self.guard.parts if self.guard.leaves_out(name)),
            recorded=self.recorded,
        )
        return end_line(run, self.findings)

    # ---- further verbs -------------------------------------------------------------------------------------------

    def change(self, **fields: Any) -> None:
        """Change the plan from the next step on; every rank calls it between the same two steps.

        fields: plan fields; of `monitor` and `audit` those that are named, the others stay. What can be changed: `step`,
        of the monitor all but `actions`, of the audit `every` and `relations`. From outside the program the file `control.yaml`
        does the same (see `Plan.control`). Raises PlanError, and changes nothing, for anything else.
        """
        plan = changed_plan(self.plan, fields, self.programs)
        self.settle()  # steps that have ended are judged by the plan that they ran under
        for name, schedule in compose(plan, self.taps).items():
            self._by_name[name].changed(plan, schedule)
        self.scheduler.follow()
        self.plan = plan

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Declare what this rank's loss of the whole step is, for the audit: `loss(model)` returns a scalar tensor.

        It is called now and then, with a stand-in for the model inside its wrappers, before the update; the gradient of its
        mean over the data-parallel ranks must be the one that is applied. Declare it anew for each step, before the update,
        as it holds the step's data.
        """
        if self.audit is not None:
            self.audit.declare_loss(loss)

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value under a name, at any level, while a step is collected; its gradients too unless told otherwise."""
        saved = self.taps.get("saved", SavedTap)
        if self.tape is not None and saved is not None:
            self.guard.of(part_of(SavedTap)).run(saved.save, value, name, save_backward)

    def use_source(self, source: Source) -> None:
        """Take parameters, gradients and optimizer state from `source`; its integration then tells the moments itself."""
        for moment, listener in self.taps.use_source(source).items():
            self.on(moment, listener)

    def watches_own_loop(self) -> None:
        """Learn that the loop is the user's own: what a trainer does by itself is then the user's doing."""
        if self.audit is not None:
            self.audit.audit.own_loop = True

    @property
    def judges(self) -> bool:
        """Whether the plan has a monitor or an audit."""
        return self.monitor is not None or self.audit is not None

    # ---- what is written -----------------------------------------------------------------------------------------

    def _make_writer(self, place: Place) -> Writer:
        from trainprobe.engine.storage.safe_files import private_folder
        from trainprobe.engine.storage.writer import open_writer

        plan = self.plan
        if self.taps.dumps_when_asked and "dump" not in plan.sinks:
            plan = plan.model_copy(update={"sinks": (*plan.sinks, "dump")})
        more: dict[str, Any] = {}
        try:
            with suppress(OSError):  # told below
                private_folder(plan.output)  # before anything makes it by the way
            for program in self.programs.at("sinks"):
                more |= program.sinks(place)
            return open_writer(plan, place, self.findings.append, more)
        except BaseException:
            for sink in more.values():
                sink.close()
            raise

    def _keep(self, key: str, t: Any, value: Any, cut: int) -> None:
        copied = self.backend.copy(t, self.taps.cuts[cut - 1] if cut else None)
        self._store()
        if self.writer is not None:
            self.writer.submit_tensor(self.step_number, key, copied)

    def _keep_chunk(self, chunk: Any) -> None:
        self._store()
        if self.writer is not None:
            self.writer.submit_chunk(self.step_number, chunk)

    def _only_collects(self) -> bool:
        return self.plan.level == "off" and getattr(self.taps.get("stepping", Tap), "waits", False)
