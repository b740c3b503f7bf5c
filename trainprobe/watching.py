"""The probe that a PyTorch user meets: `Probe(plan)` and `watch(model, optimizer, plan=...)`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainprobe.compiled import native
from trainprobe.engine.core.flat_parameters import FLAT
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.position import BETWEEN, Position
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.engine.core.unmatched import Unmatched, names_not_there
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.selection import Names
from trainprobe.engine.probe import Probe as EngineProbe
from trainprobe.engine.probe import Program
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_NAMES
from trainprobe.engine.storage.trail import Trail
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps import AUDIT, part_of
from trainprobe.errors import MissingExtra, PlanError, StopTraining, UsageError

if TYPE_CHECKING:
    from trainprobe.build import Parts
    from trainprobe.engine.core.gathering import Gathering
    from trainprobe.engine.core.sources import Source
    from trainprobe.engine.plan.control import ControlFile
    from trainprobe.monitor.audit.audit import Audit
    from trainprobe.monitor.black_box.box import BlackBox
    from trainprobe.monitor.watcher import Watcher
    from trainprobe.op_probe import OpProbe

PlanSource = Plan | Mapping[str, Any] | str | os.PathLike[str] | None
_DATA_PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
NO_MODULE = ": give watch, or the callback, the module that trains"
MONITORED = ("activations", "activation_gradients", "parameters", "gradients", "optimizer_state", "update")  # by name


class Probe(EngineProbe):
    """A probe for PyTorch, composed from a plan.

    plan: a Plan, a path to a YAML or JSON file, a dict, or None for the defaults; `overrides` are plan fields on top.
    rename: turns a module's name within this process into its global one (layer and expert numbers). place: where this
    process stands, from an integration that knows; by default learned from torch.distributed or the environment.
    Raises PlanError for a plan that cannot be carried out and MissingExtra when torch is not installed.
    """

    framework = "pytorch"

    def __init__(
        self, plan: PlanSource = None, *, rename: Rename | None = None, place: Place | None = None, **overrides: Any
    ) -> None:
        from trainprobe.monitor.chosen_calls import chosen_calls
        from trainprobe.monitor.watcher import Watcher

        loaded = load_plan(plan, **overrides)
        guard = Guard(loaded.on_error, apart=self._apart)
        stacks = Stacks() if loaded.stacks else None
        self.parts, programs = self._compose(loaded, guard, stacks, rename)
        self._writer: Any = None
        self._dumps = 0
        super().__init__(
            loaded,
            programs,
            self._tapes(loaded),
            guard,
            lambda: place or self._where(),
            self._open_writer,
            stacks=stacks,
            framework=self.framework,
            notes=[self.parts.notes],
            rests=getattr(self.parts, "rests", None),
        )
        unscale = getattr(self.parts.states, "unscale", None)  # before anything is judged or written
        self.watchers += [lambda step_data: unscale(step_data) or ()] if unscale is not None else []
        self._watcher: Watcher | None = None
        if self.parts.monitor is not None:
            self._choose = chosen_calls(self.parts.monitor)
            self.watchers.append(lambda step_data: self._choose(step_data) if self._choose is not None else ())
            self._watcher = Watcher(self.parts.monitor.rules)
            self._watcher.count, self._watcher.part = self._count, self.guard.part
            self.watchers.append(self._watcher)
            self.deciders.append(self._decide)

        if self.parts.monitor is not None and not self.parts.monitor.actions.console:
            self.console.silent = frozenset(self.parts.monitor.rules)
        self._place_told = place is not None
        self._audit = self._make_audit()
        self._control: ControlFile | None = None
        self._box: BlackBox | None = None
        self._position: Position | None = None
        self._dumped_after = False
        self._said_closed = False
        if self.plan.op_check:
            self.companions.append(self._judge_operators(rename, place))
        if self.plan.black_box:
            self._fill_box()

    def _spared(self, name: str, watch: Callable[[StepData], Sequence[Finding]]) -> Callable[[StepData], Sequence[Finding]]:
        """Return a watcher whose fault costs the others nothing."""
        return lambda step_data: self.guard.part(name, watch, step_data) or ()

    def _judge_operators(self, rename: Rename | None, place: Place | None) -> OpProbe:
        """Return the probe that judges operators in this one's steps."""
        if self.framework != "pytorch":
            raise PlanError("op_check: operators of PyTorch alone are judged: leave the section out")
        from trainprobe.op_probe import beside

        return beside(self, rename, place)

    def _compose(self, plan: Plan, guard: Guard, stacks: Stacks | None, rename: Rename | None) -> tuple[Parts, list[Program]]:
        """Return the taps that the plan asks for and the programs that run them."""
        _require_torch()
        from trainprobe.build import compose

        return compose(plan, guard, stacks, rename)

    def _tapes(self, plan: Plan) -> Callable[[int], Tape]:
        """Return what makes the tape of a step."""
        from trainprobe.engine.arrays.torch_library import TorchLibrary

        histogram = plan.histogram
        edges = histogram if histogram is None or isinstance(histogram, str) else histogram.boundaries()
        library = TorchLibrary(native=plan.native, edges=edges, quantiles=plan.quantiles)
        arena = native.Arena(SAFETENSORS_NAMES, self._gather) if native is not None else None
        return lambda number: Tape(library, self._keep, plan.reuse, arena, self._trail(number))

    def _apart(self) -> AbstractContextManager[Any]:
        """Return a context in which the modes of the program do not see what the tool computes."""
        from trainprobe.engine.arrays.torch_apart import apart

        return apart(within_transforms=True)

    def _where(self) -> Place:
        """Learn where this process stands."""
        return place_from_environment()

    def _gathering(self) -> Gathering:
        """Return what brings a few numbers of every rank to every rank."""
        from trainprobe.engine.taps.gathering import gathering

        return gathering()

    def _make_audit(self) -> Audit | None:
        """Compose the audit of a plan that asks for one."""
        parts, tap = self.parts, self.parts.audit
        if parts.audit_plan is None or tap is None:
            return None

        def due(relation: str) -> bool:
            return parts.audit_plan is not None and relation in parts.audit_plan.due(self.step_number)

        def costs(kind: str) -> bool:
            return parts.audit_plan is not None and parts.audit_plan.wants(self.step_number, kind)

        from trainprobe.monitor.audit.audit import Audit
        from trainprobe.monitor.audit.undeclared import Undeclared

        tap.fingerprints = lambda: tap.saves.awaits or costs("fingerprints")
        tap.keeps_saves = parts.audit_plan.interval("saved_and_loaded") > 0
        tap.folder = lambda: self.plan.output / f"rank{self.place.rank}"
        tap.goes_on = lambda: self.plan.on_existing == "continue"
        tap.world = tap.saves.world = lambda: self.place.world_size
        tap.step = lambda: self.step_number
        tap.saves.loaded = lambda: self._scheduled.clear()  # the next step is audited now
        tap.new_tape = lambda: self._new_tape(-1)
        tap.ordinal = lambda: self.begun
        tap.reruns = lambda: due("update_rule")
        tap.repeats = lambda: due("recomputed_forward")
        tap.reduces = lambda: due("reduced_gradients")
        tap.compares_rows = lambda: due("equal_rows")
        tap.sampled = lambda: costs("rerun")
        self.guard.of(AUDIT).on_trip(tap.close)
        audit = Audit(parts.audit_plan, tap.take, self._gathering().gather)
        audit.everyone = tap.saves.everyone
        audit.count, audit.part = self._count, self.guard.part
        self.watchers += [self._spared(AUDIT, audit), Undeclared(audit, tap.has_declared_loss, self.at_end)]
        return audit

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
        from trainprobe.monitor.chosen_calls import chosen_calls

        self._run_programs(change(self.parts, plan, self.guard))
        self.plan = plan
        if self._watcher is not None and self.parts.monitor is not None:
            self._watcher.change(self.parts.monitor.rules)
            self._choose = chosen_calls(self.parts.monitor)
        if self._audit is not None and self.parts.audit_plan is not None:
            self._audit.plan = self.parts.audit_plan

    def begin_step(self, number: int | None = None) -> bool:
        """Begin a step; see `engine.probe.Probe.begin_step`. A rank whose probe has stopped still looks with the others."""
        step = self.step_number + 1 if number is None else number
        if self.closed and not self._said_closed:
            self._said_closed = True
            self.console.line(f"step {step} begins after the probe was closed: it and later steps are not recorded")
        if self._control is not None and not self.closed:
            self.guard.keep_on(self._look_at_control, self._control, step)
        if self._position is not None:
            self.guard.run(self._position.begins, step)
        return super().begin_step(number)

    def _look_at_control(self, control: ControlFile, step: int) -> None:
        try:
            told = control.look(step)
            if told is not None and self.guard.tripped is None:
                self.change(**told)
                self._tell(Finding("plan", "info", f"control.yaml changed the plan from step {step} on", step=step))
        except PlanError as error:
            self._tell(Finding("plan", "warning", f"control.yaml cannot be used, the plan stays: {error}", step=step))

    def declare_loss(self, loss: Callable[[Any], Any]) -> None:
        """Declare what this rank's loss of the whole step is, for the audit: `loss(model)` returns a scalar tensor.

        It is called now and then, with a stand-in for the model inside its wrappers, before the update; the gradient of its
        mean over the data-parallel ranks must be the one that is applied. Declare it anew for each step, before the update,
        as it holds the step's data.
        """
        if self.parts.audit is not None:
            self.parts.audit.declared.loss = loss

    def open(self, model: Any, optimizer: Any = None, place: Place | None = None) -> Probe:
        """Learn the names of `model`, a module or a list of chunks.

        Raises PlanError when a pattern of the plan matches nothing in it, OutputError when the output cannot be written.
        """
        super().open(model, optimizer, place)
        return self

    def _open(self, model: Any, optimizer: Any, place: Place | None) -> None:
        self._place = place or self._place
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
        if self._audit is not None:
            told = self._place_told or place is not None
            self._audit.certain = frozenset({"dp", "cp"}) if told or _wrapped(model, "DistributedDataParallel") else frozenset()
            self._audit.assumed = not told and not _wrapped(model, *_DATA_PARALLEL)
        if self._audit is not None and not all(map(self.plan.wants_rank, range(self.place.world_size))):
            self._audit.gather = None  # some ranks do not collect: they would never answer
        named: Any = next(iter(model), model) if isinstance(model, list | tuple) else model
        for finding in names_not_there(self._unmatched(), type(named).__name__, self.place):
            self._tell_once(finding)

    def _open_console(self) -> None:
        """Let one rank alone print what all ranks share."""
        ranks, rank = range(self.place.world_size), self.place.rank
        self.console.speaks = rank == next(filter(self.plan.wants_rank, ranks), 0)
        if self.place.world_size > 1 and self._recorder is not None:
            self.console.markers = self.plan.output / ".printed"
            if self.console.speaks:
                shutil.rmtree(self.console.markers, ignore_errors=True)  # of an earlier run

    def watches_own_loop(self) -> None:
        """Learn that the loop is the user's own: what a trainer does by itself is then the user's doing."""
        if self._audit is not None:
            self._audit.own_loop = True

    def tell_once(self, finding: Finding) -> None:
        """Report a finding, unless one with this message was reported before."""
        self._tell_once(finding)

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

    def _open_writer(self, place: Place) -> Any:
        from trainprobe.engine.storage.writer import open_writer
        from trainprobe.monitor.actions import Alerts
        from trainprobe.monitor.watcher import resume_state

        monitor = self.parts.monitor
        alerts = {"alerts": Alerts(monitor.rules, monitor.actions)} if monitor is not None else {}
        self._box = self._make_box(place)
        boxes = {"black_box": self._box} if self._box is not None else {}
        plan = self.plan
        if self.parts.dumps_when_asked and "dump" not in plan.sinks:
            plan = plan.model_copy(update={"sinks": (*plan.sinks, "dump")})
        try:
            self._writer = open_writer(plan, place, self.findings.append, {**alerts, **boxes})
        except BaseException:
            if self._box is not None:
                self._box.close()
            raise
        if self._watcher is not None and self.plan.on_existing == "continue":
            self.report(resume_state(self._watcher, self._state_file(place)))
        return self._writer

    def close(self) -> None:
        """Write everything that is pending, and what the rules remember, so that a run that is continued is judged as one."""
        opened, ended = self._recorder is not None, self.closed
        self._close_audit()
        super().close()
        if opened and self._watcher is not None:
            self.guard.run(self._save_state, self._watcher)
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
        )
        line = end_line(run, self.findings)
        self.console.line(" ".join((f"{line}.", *self.sentences)) if self.sentences else line)

    def end_step(self, *, complete: bool = True) -> StepData | None:
        """End the step; see `engine.probe.Probe.end_step`. A rank whose probe has stopped still answers the others' audit."""
        try:
            return super().end_step(complete=complete)
        finally:
            if self._position is not None:
                self._position.is_in(BETWEEN)
            silent = self.guard.tripped is not None or self.guard.leaves_out(AUDIT)
            if self._audit is not None and silent and complete:
                self.guard.keep_on(self._audit.answer_for_stopped, self.step_number, self.place)

    def _only_collects(self) -> bool:
        stepping = self.parts.stepping
        return self.plan.level == "off" and stepping is not None and getattr(stepping, "waits", False)

    def _close_audit(self) -> None:
        """Judge what came after the last audited step, and leave nothing behind."""
        if self._audit is None or self.parts.audit is None or self.closed:
            return
        guard = self.guard.of(AUDIT)
        facts = guard.run(self.parts.audit.late_evaluations)
        if facts is not None:
            for finding in guard.run(self._audit.late, facts, self.step_number, self.place) or ():
                self._tell(finding)
        guard.run(self.parts.audit.close)

    def _save_state(self, watcher: Watcher) -> None:
        from trainprobe.monitor.watcher import keep_state

        self.report(keep_state(watcher, self._state_file(self.place)))

    def _state_file(self, place: Place) -> Path:
        return self.plan.output / f"rank{place.rank}" / "monitor_state.json"

    def __exit__(self, *error: object) -> None:
        """Close; an error that ends the training has the black box written out."""
        if error and isinstance(error[1], BaseException):
            self.interrupted(error[1])
        super().__exit__(*error)

    def interrupted(self, error: BaseException) -> None:
        """Have the black box written out when the probe is closed, because this error ends the training."""
        if self._box is not None:
            self._box.interrupted(f"{type(error).__name__} ended the training after step {self.step_number}")

    def _make_box(self, place: Place) -> BlackBox | None:
        """Open the black box of a plan that asks for one."""
        if not self.plan.black_box:
            return None
        from trainprobe.monitor.black_box.box import BlackBox
        from trainprobe.monitor.black_box.plan import validate

        plan = validate(self.plan.black_box)
        detail = self.plan.base_detail
        wanted = detail.statistics if detail.wants_statistics else ()
        about = {"framework": self.framework, "level": self.plan.level, "task": self.plan.task, "wanted": wanted}
        return BlackBox(plan, self.plan.output, place, self._position, about)

    def _fill_box(self) -> None:
        """Have each step remembered, and told where in it the training is."""
        self.watchers.append(self._spared("the black box", self._remember))
        self.deciders.append(self._dump_after)
        self.guard.on_trip(lambda: self._box.unfollow() if self._box is not None else None)
        self._position = Position()
        tell = getattr(self.parts, "tell", None)  # another framework's parts may not know how
        if tell is not None:
            tell(self._position)

    def _trail(self, step: int) -> Trail | None:
        """Return what the tape of a step is to tell; nothing of a tape that is for no step."""
        return self._box.follow(step) if self._box is not None and step >= 0 else None

    def _remember(self, step_data: StepData) -> list[Finding]:
        """Keep with a step what its collected step does not hold: batch ids and the random state."""
        if self._box is not None:
            audited = self._audit.last if self._audit is not None else None
            facts = audited.facts if audited is not None and audited.step == step_data.step else None
            batches = list(facts.batches) if facts is not None else list(step_data.batches)
            self._box.hold(step_data, {"batches": batches, **self._random_state()})
        return []

    def _random_state(self) -> Mapping[str, Any]:
        """Return the random state as text, for the black box."""
        from trainprobe.engine.taps.random_state import random_text

        return random_text()

    def _dump_after(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        """Have the step after a grave finding collected in full, once."""
        box = self._box
        if box is None or self._dumped_after or not any(map(box.grave, found)):
            return 0, None
        self._dumped_after = True
        return box.plan.dump_steps, None

    def _decide(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        from trainprobe.monitor.actions import decide

        monitor = self.parts.monitor
        assert monitor is not None
        decision, self._dumps = decide(found, monitor.rules, monitor.actions, self._dumps)
        return decision.dump_steps, decision.stop

    def _keep(self, key: str, t: Any, value: Any, cut: int) -> None:
        from trainprobe.engine.arrays.torch_arrays import copy_out

        index = self.parts.cuts[cut - 1].index(tuple(t.shape)) if cut else None
        self._writer.submit_tensor(self.step_number, key, copy_out(t if index is None else t[index]))

    def _gather(self, piece: Any) -> None:
        self._writer.submit_piece(self.step_number, piece)


def _merged(was: Any, value: Any) -> Any:
    """Lay the keys of a section over those that it has; a section that was `true` had none."""
    if not isinstance(value, Mapping):
        return value
    under = was if isinstance(was, Mapping) else {}
    return {**under, **{key: _merged(under.get(key), inner) for key, inner in value.items()}}


def _wrapped(model: Any, *kinds: str) -> bool:
    """Tell whether a model, or what it holds, is of one of these kinds."""
    bases = (base.__name__ for chunk in _chunks(model) for module in _modules_of(chunk) for base in type(module).__mro__)
    return any(name in kinds for name in bases)


def _chunks(model: Any) -> Sequence[Any]:
    return model if isinstance(model, list | tuple) else [model]  # pyright: ignore[reportUnknownVariableType]


def _modules_of(model: Any) -> Iterable[Any]:
    """Return the modules of a model of torch; of any other model it alone."""
    return model.modules() if hasattr(model, "modules") else (model,)


def _require_torch() -> None:
    if "torch" not in sys.modules:
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", "torch", "a probe on a PyTorch training")


@contextmanager
def watch(model: Any, optimizer: Any = None, plan: PlanSource = None, **overrides: Any) -> Generator[Probe]:
    """Watch a plain training loop.

        with trainprobe.watch(model, optimizer, plan="plan.yaml") as probe:
            for batch in data:
                with probe.step():
                    loss = model(batch); probe.note("loss", loss)
                    loss.backward(); optimizer.step(); optimizer.zero_grad()

    plan: path, dict, Plan or None; `overrides` are plan fields. Everything is written when the block ends. Warnings and errors
    are printed when they happen, and one line when the block ends, unless the plan says `console: false`.
    """
    from trainprobe.integrations.loop_checks import LoopChecks, wrong_optimizers

    with Probe(plan, **overrides) as probe:
        probe.open(model, optimizer)
        probe.watches_own_loop()
        for finding in probe.guard.run(lambda *given: list(wrong_optimizers(*given)), model, optimizer) or ():
            probe.tell_once(finding)
        del optimizer  # one that the training replaces is not kept
        checks = LoopChecks(model, probe.guard)
        try:
            yield probe
            judged = probe.parts.monitor is not None or probe.parts.audit_plan is not None
            if (sentence := probe.guard.run(checks.sentence, probe.begun, judged)) and probe.plan.level != "debug":
                probe.at_end(sentence)
        finally:
            checks.close()
