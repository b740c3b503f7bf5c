"""The probe that a PyTorch user meets: `Probe(plan)` and `watch(model, optimizer, plan=...)`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainprobe.compiled import recording, require
from trainprobe.composition import TapMaker, compose
from trainprobe.engine.capture import part_of
from trainprobe.engine.core.flat_parameters import FLAT
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.position import Position
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.core.topology import axes_of_parameters, place_from_environment
from trainprobe.engine.core.unmatched import Unmatched, names_not_there
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.probe import Probe as EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_NAMES
from trainprobe.engine.tape import Tape
from trainprobe.errors import MissingExtra, PlanError, UsageError

if TYPE_CHECKING:
    from trainprobe.engine.core.gathering import Gathering
    from trainprobe.engine.core.sources import Source
    from trainprobe.engine.plan.control import ControlFile
    from trainprobe.engine.storage.writer import Writer
    from trainprobe.monitor.audit.program import AuditProgram
    from trainprobe.monitor.black_box.program import BlackBoxProgram
    from trainprobe.monitor.program import MonitorProgram

PlanSource = Plan | Mapping[str, Any] | str | os.PathLike[str] | None
NO_MODULE = ": give watch, or the callback, the module that trains"
MONITORED = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update")  # by name


class Probe(EngineProbe):
    """A probe for PyTorch, composed from a plan.

    plan: a Plan, a path to a YAML or JSON file, a dict, or None for the defaults; `overrides` are plan fields on top.
    rename: turns a module's name within this process into its global one (layer and expert numbers). place: where this
    process stands, from an integration that knows; by default learned from torch.distributed or the environment.
    Raises PlanError for a plan that cannot be carried out, MissingExtra when torch is not installed, and MissingCompiledPart
    when the package was installed without its compiled part.
    """

    framework = "pytorch"

    def __init__(
        self, plan: PlanSource = None, *, rename: Rename | None = None, place: Place | None = None, **overrides: Any
    ) -> None:
        require()
        loaded = load_plan(plan, self.framework, **overrides)
        guard = Guard(loaded.on_error, without_dispatch=self._without_dispatch)
        stacks = Stacks() if loaded.stacks else None
        self.parts: Any
        self.parts, schedules = compose(loaded, self._taps(loaded, guard, stacks, rename))
        self.monitor, self.audit, self.black_box = self._programs_of(loaded, schedules)
        self._place_told = place is not None
        self._control: ControlFile | None = None
        self._said_closed = False
        asked = (self.monitor, self.audit, self.black_box, self._config_check(loaded), self._op_check(loaded, rename))
        super().__init__(
            loaded,
            [Program("dump", schedules["dump"]), *(program for program in asked if program is not None)],
            self._tapes(loaded),
            guard,
            lambda: place or self._where(),
            self._make_writer,
            stacks=stacks,
            framework=self.framework,
            notes=[self.parts.notes],
            pauses=self.parts.pauses,
        )
        if self.black_box is not None:
            self._follow(self.black_box.position)

    def _config_check(self, plan: Plan) -> Program | None:
        """Return what captures the settings of the run, where the plan asks for it."""
        if not plan.config_check:
            return None
        from trainprobe.config_check.program import ConfigCheckProgram

        return ConfigCheckProgram(plan.config_check, plan.output, plan.on_error)

    def _op_check(self, plan: Plan, rename: Rename | None) -> Program | None:
        """Return what judges operators as the steps end, where the plan asks for it."""
        if not plan.op_check:
            return None
        from trainprobe.op_probe import OpCheckProgram

        return OpCheckProgram(plan, rename)

    def _programs_of(
        self, plan: Plan, schedules: Mapping[str, Schedule]
    ) -> tuple[MonitorProgram | None, AuditProgram | None, BlackBoxProgram | None]:
        """Make the programs that a plan asks for beside the dump."""
        monitor = audit = box = None
        parts = self.parts
        if "monitor" in schedules and parts.monitor is not None:
            from trainprobe.monitor.program import MonitorProgram

            monitor = MonitorProgram(parts.monitor, schedules["monitor"])
        if "audit" in schedules and parts.audit_plan is not None:
            from trainprobe.monitor.audit.program import AuditProgram

            audit = AuditProgram(parts.audit_plan, parts.audit, schedules["audit"], self._gathering().gather)
        if plan.black_box:
            from trainprobe.monitor.black_box.plan import validate
            from trainprobe.monitor.black_box.program import BlackBoxProgram

            detail = plan.base_detail
            wanted = detail.statistics if detail.wants_statistics else ()
            about = {"framework": self.framework, "level": plan.level, "task": plan.task, "wanted": wanted}
            box = BlackBoxProgram(validate(plan.black_box), about, self._not_recorded)
        return monitor, audit, box

    def _taps(self, plan: Plan, guard: Guard, stacks: Stacks | None, rename: Rename | None) -> TapMaker:
        """Return what makes the taps that the plan asks for."""
        _require_torch()
        from trainprobe.build import TorchTaps

        return TorchTaps(guard, stacks, rename)

    def _tapes(self, plan: Plan) -> Callable[[int], Tape]:
        """Return what makes the tape of a step."""
        from trainprobe.engine.arrays.torch_library import TorchLibrary

        histogram = plan.histogram
        edges = histogram if histogram is None or isinstance(histogram, str) else histogram.boundaries()
        library = TorchLibrary(native=plan.native, edges=edges, quantiles=plan.quantiles)
        arena = recording.Arena(SAFETENSORS_NAMES, self._gather)
        return lambda number: Tape(library, self._keep, plan.reuse, arena, self.journal(number))

    def _without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context in which the modes of the program do not see what the tool computes."""
        from trainprobe.engine.arrays.without_dispatch import without_dispatch

        return without_dispatch(within_transforms=True)

    def _where(self) -> Place:
        """Learn where this process stands."""
        return place_from_environment()

    def _gathering(self) -> Gathering:
        """Return what brings a few numbers of every rank to every rank."""
        from trainprobe.engine.capture.gathering import gathering

        return gathering()

    def change(self, **fields: Any) -> None:
        """Change the plan from the next step on; every rank calls it between the same two steps.

        fields: plan fields; of `monitor` and `audit` those that are named, the others stay. What can be changed: `step`,
        of the monitor all but `actions`, of the audit `every` and `relations`. From outside the program the file `control.yaml`
        does the same (see `Plan.control`). Raises PlanError, and changes nothing, for anything else.
        """
        merged = {name: _merged(getattr(self.plan, name), value) for name, value in fields.items()}
        plan = load_plan(self.plan, **merged)
        fixed = [name for name in fields if name not in ("step", "monitor", "audit")]
        if fixed:
            raise PlanError(f"{fixed[0]}: while a run goes on, only step, monitor and audit can change")
        from trainprobe.build import change

        schedules = change(self.parts, plan, self.guard)
        self.programs[0].schedule = schedules["dump"]
        if self.monitor is not None and self.parts.monitor is not None:
            self.monitor.change(self.parts.monitor, schedules["monitor"])
        if self.audit is not None and self.parts.audit_plan is not None:
            self.audit.change(self.parts.audit_plan, schedules["audit"])
        self.scheduler.follow()
        self.plan = plan

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step; see `engine.probe.Probe.begin_step`. A rank whose probe has stopped still looks with the others."""
        step = self.step_number + 1 if number is None else number
        if self.closed and not self._said_closed:
            self._said_closed = True
            self.console.line(f"step {step} begins after the probe was closed: it and later steps are not recorded")
        if self._control is not None and not self.closed:
            self.guard.keep_on(self._look_at_control, self._control, step)
        return super().begin_step(number)

    def _look_at_control(self, control: ControlFile, step: int) -> None:
        try:
            changes = control.look(step)
            if changes is not None and self.guard.tripped is None:
                self.change(**changes)
                self.report(Finding("plan", "info", f"control.yaml changed the plan from step {step} on", step=step))
        except PlanError as error:
            self.report(Finding("plan", "warning", f"control.yaml cannot be used, the plan stays: {error}", step=step))

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Declare what this rank's loss of the whole step is, for the audit: `loss(model)` returns a scalar tensor.

        It is called now and then, with a stand-in for the model inside its wrappers, before the update; the gradient of its
        mean over the data-parallel ranks must be the one that is applied. Declare it anew for each step, before the update,
        as it holds the step's data.
        """
        if self.audit is not None and self.audit.tap.declared is not None:
            self.audit.tap.declared.loss = loss

    def open(self, model: Any, optimizer: Any = None, place: Place | None = None) -> Probe:
        """Learn the names of `model`, a module or a list of chunks.

        Raises PlanError when a pattern of the plan matches nothing in it, OutputError when the output cannot be written.
        """
        super().open(model, optimizer, place)
        return self

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        self._place = place or self._place
        if self._place is None and not self._place_told:
            self._place = self._learned_place(model)
        if self.plan.control is not None and self._control is None:  # first: all ranks look together, also one that has stopped
            from trainprobe.engine.plan.control import ControlFile

            self._control = ControlFile(self.plan.output, self.plan.control, self.place.rank, self._gathering().gather)
        odd = (
            next((m for m in _chunks(model) if not hasattr(m, "named_modules")), None) if self.framework == "pytorch" else None
        )
        if odd is not None:
            self.guard.trip(UsageError(f"the model that was given is a {type(odd).__name__} and no torch.nn.Module{NO_MODULE}"))
            return
        super()._open(model, optimizer, place)
        self._open_console()
        for program in self._at("opened"):
            declared = self._place_told or place is not None
            self.guard.of(program.part).set_up(program.opened, model, optimizer, declared)
        named: Any = next(iter(model), model) if isinstance(model, list | tuple) else model
        for finding in names_not_there(self._unmatched(), type(named).__name__, self.place):
            self.reporter.report_once(finding)

    def _learned_place(self, model: Any) -> Place | None:
        """Return where this process stands by the meshes of the model's parameters; None where it is alone."""
        found = self._where()
        if found.world_size == 1 or self.framework != "pytorch":
            return None
        parameters = (p for chunk in _chunks(model) if hasattr(chunk, "parameters") for p in chunk.parameters())
        return replace(found, axes=axes_of_parameters(parameters, found))

    def _open_console(self) -> None:
        """Let one rank alone print what all ranks share."""
        ranks, rank = range(self.place.world_size), self.place.rank
        self.console.speaks = rank == next(filter(self.plan.wants_rank, ranks), 0)
        if self.place.world_size > 1 and self.writer is not None:
            self.console.markers = self.plan.output / ".printed"
            if self.console.speaks:
                shutil.rmtree(self.console.markers, ignore_errors=True)  # of an earlier run

    def watches_own_loop(self) -> None:
        """Learn that the loop is the user's own: what a trainer does by itself is then the user's doing."""
        if self.audit is not None:
            self.audit.audit.own_loop = True

    def report_once(self, finding: Finding) -> None:
        """Report a finding, unless one with this message was reported before."""
        self.reporter.report_once(finding)

    def _unmatched(self) -> Iterator[Unmatched]:
        modules = [info.name for info in self.parts.naming.known.values()]
        parameters = list(self.parts.naming.parameter_names.values())
        if self.plan.level in ("L0", "mix"):
            for field, names in (("modules", modules), ("parameters", parameters)):
                yield Unmatched(field, self.plan.unmatched(names, field), must=True)
        monitor = self.parts.monitor
        flat = any(name.endswith(FLAT) for name in parameters)  # the monitor names what they are made of
        for kind in MONITORED if monitor is not None else ():
            collect = getattr(monitor, kind)
            of_modules = kind.startswith("activation")
            if collect.on and (of_modules or not flat):
                names = modules if of_modules else parameters
                yield Unmatched(f"monitor.{kind}.names", Names(collect.names).unmatched(names), must=False)

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value under a name, at any level, while a step is collected; its gradients too unless told otherwise."""
        if self.tape is not None:
            self.guard.of(part_of(type(self.parts.saved))).run(self.parts.saved.save, value, name, save_backward)

    def use_source(self, source: Source) -> None:
        """Take parameters, gradients and optimizer state from `source`; its integration then tells the moments itself."""
        states = self.parts.states
        if states is not None:
            states.source = source
            for moment in ("before_step", "after_step", "unreduced", "unclipped"):
                self.on(moment, partial(states.moment, moment))

    def _make_writer(self, place: Place) -> Writer:
        from trainprobe.engine.storage.writer import open_writer

        plan = self.plan
        if self.parts.dumps_when_asked and "dump" not in plan.sinks:
            plan = plan.model_copy(update={"sinks": (*plan.sinks, "dump")})
        more: dict[str, Any] = {}
        try:
            for program in self._at("sinks"):
                more |= program.sinks(place)
            return open_writer(plan, place, self.findings.append, more)
        except BaseException:
            for sink in more.values():
                sink.close()
            raise

    def close(self) -> None:
        """Write everything that is pending, and print the line that ends the run."""
        ended = self.closed
        super().close()
        if not ended and self.console.speaks and (self.begun or self.sentences):
            self._print_end()

    def _print_end(self) -> None:
        """Print the line that ends the run."""
        from trainprobe.monitor.end_line import Run, end_line

        run = Run(
            steps=self.begun,
            collected=self.collected,
            first_step=self._first_step or 0,
            place=self.place,
            output=self.plan.output,
            judged=self.parts.monitor is not None or self.parts.audit_plan is not None,
            written=any(sink in self.plan.sinks for sink in ("parquet", "jsonl", "dump", "csv")),
            stopped=self.guard.tripped is not None,
            left_out=tuple(name for name in self.guard.parts if self.guard.leaves_out(name)),
        )
        line = end_line(run, self.findings)
        self.console.line(" ".join((f"{line}.", *self.sentences)) if self.sentences else line)

    def _only_collects(self) -> bool:
        stepping = self.parts.stepping
        return self.plan.level == "off" and stepping is not None and getattr(stepping, "waits", False)

    def __exit__(self, *error: object) -> None:
        """Close; an error that ends the training has the black box written out."""
        if error and isinstance(error[1], BaseException):
            self.interrupted(error[1])
        super().__exit__(*error)

    def _judge(self, step_data: StepData) -> list[Finding]:
        unscale = getattr(self.parts.states, "unscale", None)  # before anything is judged or written
        if unscale is not None:
            unscale(step_data)
        return super()._judge(step_data)

    def _follow(self, position: Position) -> None:
        """Have the taps tell where in a step the training is."""
        self.parts.tell(position)

    def _not_recorded(self, step_data: StepData) -> Mapping[str, Any]:
        """Return for the black box what the record of a step lacks: its batches, and the random state."""
        audited = self.audit.audit.last if self.audit is not None else None
        facts = audited.facts if audited is not None and audited.step == step_data.step else None
        batches = list(facts.batches) if facts is not None else list(step_data.batches)
        return {"batches": batches, **self._random_state()}

    def _random_state(self) -> Mapping[str, Any]:
        """Return the random state as text."""
        from trainprobe.engine.capture.random_state import random_text

        return random_text()

    def _keep(self, key: str, t: Any, value: Any, cut: int) -> None:
        from trainprobe.engine.arrays.torch_arrays import copy_out

        index = self.parts.cuts[cut - 1].index(tuple(t.shape)) if cut else None
        self._submit(key, copy_out(t if index is None else t[index]))

    def _submit(self, key: str, copied: Any) -> None:
        if self.writer is not None:
            self.writer.submit_tensor(self.step_number, key, copied)

    def _gather(self, chunk: Any) -> None:
        if self.writer is not None:
            self.writer.submit_chunk(self.step_number, chunk)


def _merged(was: Any, value: Any) -> Any:
    """Lay the keys of a section over those that it has; a section that was `true` had none."""
    if not isinstance(value, Mapping):
        return value
    under = was if isinstance(was, Mapping) else {}
    return {**under, **{key: _merged(under.get(key), inner) for key, inner in value.items()}}


def _chunks(model: Any) -> Sequence[Any]:
    return model if isinstance(model, list | tuple) else [model]  # pyright: ignore[reportUnknownVariableType]


def _require_torch() -> None:
    if "torch" not in sys.modules:
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", "torch", "a probe on a PyTorch training")


def probe_class(model: Any) -> type[Probe]:
    """Return the class of the probe for a model: that of MindSpore for its cells, else that of PyTorch."""
    cell = getattr(getattr(sys.modules.get("mindspore"), "nn", None), "Cell", None)
    if cell is None or not any(isinstance(chunk, cell) for chunk in _chunks(model)):
        return Probe
    from trainprobe.integrations.mindspore_probe import MindSporeProbe

    return MindSporeProbe


@contextmanager
def watch(model: Any, optimizer: Any = None, plan: PlanSource = None, **overrides: Any) -> Generator[Probe]:
    """Watch a plain training loop of PyTorch, or of MindSpore where `model` is a cell.

        with trainprobe.watch(model, optimizer, plan="plan.yaml") as probe:
            for batch in data:
                with probe.step():
                    loss = model(batch); probe.note("loss", loss)
                    loss.backward(); optimizer.step(); optimizer.zero_grad()

    plan: path, dict, Plan or None; `overrides` are plan fields. Everything is written when the block ends. Warnings and errors
    are printed when they happen, and one line when the block ends, unless the plan says `console: false`.
    """
    with probe_class(model)(plan, **overrides) as probe:
        probe.open(model, optimizer)
        probe.watches_own_loop()
        if probe.framework != "pytorch":
            yield probe
            return
        from trainprobe.integrations.loop_checks import LoopChecks, wrong_optimizers

        for finding in probe.guard.run(lambda *given: list(wrong_optimizers(*given)), model, optimizer) or ():
            probe.report_once(finding)
        del optimizer  # one that the training replaces is not kept
        checks = LoopChecks(model, probe.guard)
        try:
            yield probe
            judged = probe.parts.monitor is not None or probe.parts.audit_plan is not None
            if (sentence := probe.guard.run(checks.sentence, probe.begun, judged)) and probe.plan.level != "debug":
                probe.at_end(sentence)
        finally:
            checks.close()
