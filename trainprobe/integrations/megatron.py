"""Megatron-LM and megatron-core: `--probe-plan plan.yaml`, one line at startup, or `attach` for a loop of your own.

    from trainprobe.integrations import megatron

    pretrain(..., extra_args_provider=megatron.add_probe_args)        # Megatron-LM: the flag then watches the run
    megatron.install("plan.yaml")                                     # the same with no flag, anywhere before `pretrain`
    probe = megatron.attach(model_chunks, optimizer, "plan.yaml")     # a loop on megatron.core

A step is one call of a schedule with a backward pass and the optimizer step behind it; `forward_only` schedules (evaluation)
are none. Micro-batches are those of the schedule. Nothing of Megatron is imported before it is there: the order of imports is
free.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.engine.capture.patching.step_hooks import GatheredUpdate
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import MissingExtra
from trainprobe.integrations import announce
from trainprobe.integrations.megatron_layout import bare, held_parameters, parallel_axes, renaming
from trainprobe.integrations.megatron_source import MegatronSource, loss_scaler
from trainprobe.integrations.method_hooks import MethodHooks, hooks_on
from trainprobe.integrations.output_folder import placed
from trainprobe.watching import PlanSource, Probe

TRAINING = "megatron.training.training"
FLAG = "--probe-plan"
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
REPORTED = ("learning_rate", "loss_scale", "grad_norm", "params_norm", "num_zeros_in_grad")


def add_probe_args(parser: Any) -> Any:
    """Add `--probe-plan PLAN` to Megatron's arguments and watch the run if it is given.

    It is an `extra_args_provider` for `pretrain`. PLAN is a path to a plan; the flag alone means the default plan.
    """
    add_flag(parser)
    install(None, only_with_flag=True)
    return parser


def add_flag(parser: Any) -> None:
    """Add `--probe-plan` to an argparse parser, unless it has it."""
    if FLAG not in parser._option_string_actions:
        group = parser.add_argument_group(title="trainprobe")
        group.add_argument(FLAG, nargs="?", const="", default=None, metavar="PLAN", help="watch this run as the plan says")


def install(plan: PlanSource = None, *, only_with_flag: bool = False, **overrides: Any) -> None:
    """Watch the run that `megatron.training.pretrain` starts in this process, however late Megatron is imported.

    plan: as for `trainprobe.Probe`; None: what `--probe-plan` says, else the default plan.
    only_with_flag: watch only if that flag is given.
    """
    imports = ImportWatch()

    def then(training: Any) -> None:
        imports.stop()
        _follow_setup(training, plan, only_with_flag, overrides)

    imports.wait_for(TRAINING, then)


def attach_to_script(plan: PlanSource) -> None:
    """Watch the run of a script that `trainprobe run` started and that has just imported Megatron's trainer."""
    _follow_setup(sys.modules[TRAINING], plan, False, {})


def attach(
    model: Any, optimizer: Any = None, plan: PlanSource = None, *, first_step: int = 0, **overrides: Any
) -> MegatronProbe:
    """Watch a training of `megatron.core` model chunks and return its probe; `probe.close()` takes everything off again.

    model: a model or the list of its chunks, wrapped as they are. optimizer: from `get_megatron_optimizer`, or a torch one.
    first_step: the number of the first step, for a run that is resumed. plan, overrides: as for `trainprobe.Probe`; None is the
    default plan. Attaching twice to one optimizer gives the probe that is there.
    """
    chunks = chunks_of(model)
    there = hooks_on(getattr(optimizer, "step", None), ScheduleHooks)
    if there is not None:
        return there.probe
    _require_megatron()
    models = [bare(chunk) for chunk in chunks]
    axes = parallel_axes(len(chunks))
    place = place_from_environment(axes)
    loaded = placed(load_plan(plan, **overrides), place, resumed=first_step > 0)
    probe = MegatronProbe(loaded, rename=renaming(models), place=place)
    source = MegatronSource(list(held_parameters(models, axes)), optimizer)
    try:
        probe.use_source(source)
        probe.open(chunks if len(chunks) > 1 else chunks[0], optimizer)
        probe.step_number = first_step - 1
        probe.loop_hooks = ScheduleHooks(probe, chunks, optimizer, source)
    except BaseException:
        probe.close()
        raise
    announce(probe)
    return probe


class MegatronProbe(Probe):
    """A probe on a Megatron training. loop_hooks: what calls its verbs."""

    loop_hooks: ScheduleHooks | None = None

    def close(self) -> None:
        """Take everything off, write what is pending, and say what never came."""
        loop_hooks, self.loop_hooks = self.loop_hooks, None
        if loop_hooks is not None:
            loop_hooks.end()
        super().close()


class ScheduleHooks(MethodHooks):
    """Stands around the schedules, the reductions and the optimizer of one training and tells its probe what happens."""

    def __init__(self, probe: Probe, chunks: Sequence[Any], optimizer: Any, source: MegatronSource) -> None:
        from megatron.core.pipeline_parallel import schedules

        super().__init__(probe, next((held.parameter.device for held in source.held), None))
        self.source = source
        self.optimizer = optimizer
        self._whole = GatheredUpdate(held.parameter for held in source.held)
        self.trainer_reports = False  # megatron.training tells when a step begins, and reports at its end
        self._micro_of = inspect.signature(schedules.forward_step)
        for name in SCHEDULES:
            self.around(schedules, name, self._schedule)
        self.around(schedules, "forward_step", self._micro_batch)
        if hasattr(optimizer, "prepare_grads"):
            self.around(optimizer, "prepare_grads", self._prepare_gradients)
            self.around(optimizer, "step_with_ready_grads", self._update)
            self.around(optimizer, "step", self._optimizer_step)
        elif optimizer is not None:
            self.around(optimizer, "step", self._torch_step)
        monitor = probe.monitor_plan
        audited = probe.audit is not None
        self._unclipped = probe.judges and (audited or monitor is None or monitor.gradients.unclipped)
        gradients = monitor.gradients if monitor is not None else None
        if gradients is not None and gradients.on and gradients.unreduced:
            self._watch_reductions(chunks)

    # ---- steps -------------------------------------------------------------------------------------------------

    def start_step(self, number: int | None = None) -> None:
        """Begin a step, unless one is under way: gradients may be gathered over several schedules."""
        if self.inside:
            return
        self.inside, self.updated = True, False
        scaler = loss_scaler(self.optimizer)
        if self.probe.begin_step(number) and scaler is not None:
            self.source.loss_scale = float(scaler.scale)  # at the border of a step, where Megatron reads it for its log
            self.probe.note("loss_scale", self.source.loss_scale)

    def _schedule(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only", False):
            return run(*args, **kwargs)
        self.start_step()
        self.probe.note("micro_batches", kwargs.get("num_microbatches", 1))
        reported = self.run_inside(run, *args, **kwargs)
        if self.probe.tape is not None and not self.trainer_reports:
            self.probe.guard.run(self._note_losses, reported)
        return reported

    def _micro_batch(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if self.probe.tape is not None:
            bound = self.probe.guard.run(self._micro_of.bind_partial, *args, **kwargs)
            index = bound.arguments.get("current_microbatch") if bound is not None else None
            if index is not None:
                self.probe.moment("micro", index)
        return run(*args, **kwargs)

    def _note_losses(self, reported: Any) -> None:
        """Note what the loss function reported, over this process's micro-batches: means, or sums with a token count."""
        import torch

        rows = [row for row in reported or () if isinstance(row, Mapping)]
        for name in rows[0] if rows else ():
            values = [torch.stack(list(v)) if isinstance(v, tuple | list) else v for v in (row[name] for row in rows)]
            if not all(torch.is_tensor(v) and v.numel() in (1, 2) for v in values):
                continue
            with torch.no_grad():
                stacked = torch.stack([v.detach().float().reshape(-1) for v in values])
                mean = stacked.mean() if stacked.shape[1] == 1 else stacked[:, 0].sum() / stacked[:, 1].sum()
            self.probe.note(name, mean)

    # ---- gradients and the optimizer ---------------------------------------------------------------------------

    def _watch_reductions(self, chunks: Sequence[Any]) -> None:
        held = {id(h.parameter): h for h in self.source.held}
        for chunk in chunks:
            for group in [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]:
                mine = tuple(held[id(p)] for bucket in group.buckets for p in bucket.params_list if id(p) in held)
                self.around(group, "start_grad_sync", functools.partial(self._reduction, mine))

    def _reduction(self, mine: tuple[Any, ...], run: Any, *args: Any, **kwargs: Any) -> Any:
        self.source.reducing = mine
        self.look("unreduced")
        return run(*args, **kwargs)

    def _prepare_gradients(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        overflow = run(*args, **kwargs)
        if overflow:
            self.look("before_step")  # the step is skipped: these are the gradients that made it so
            self.look("after_step")
        elif self._unclipped and (getattr(self.optimizer.config, "clip_grad", 0.0) or 0.0) > 0:
            self.look("unclipped")
        return overflow

    def _update(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.look("before_step")
        with nullcontext() if self.source.values_lag else self._whole:
            done = run(*args, **kwargs)
        self.look("after_step")
        return done

    def _optimizer_step(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.run_inside(run, *args, **kwargs)
        done, norm, zeros = result
        for name, value in (("step_skipped", 0.0 if done else 1.0), ("grad_norm", norm), ("num_zeros_in_grad", zeros)):
            if value is not None:
                self.probe.note(name, value)
        self._updated()
        return result

    def _torch_step(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.run_inside(self._update, run, *args, **kwargs)
        self._updated()
        return result

    def _updated(self) -> None:
        self.updated = True
        if not self.trainer_reports:
            self.finish_step()


# ---- megatron.training ---------------------------------------------------------------------------------------------------


def _follow_setup(training: Any, plan: PlanSource, only_with_flag: bool, overrides: Mapping[str, Any]) -> None:
    """Attach when Megatron has built model and optimizer: by then whoever replaces its functions has done so."""
    run = training.setup_model_and_optimizer
    if getattr(run, "watched_by_trainprobe", False):
        return

    @functools.wraps(run)
    def setup(*args: Any, **kwargs: Any) -> Any:
        built = run(*args, **kwargs)
        chosen = plan if plan is not None else getattr(training.get_args(), FLAG[2:].replace("-", "_"), None)
        if not (only_with_flag and chosen is None):
            follow_training(training, built[0], built[1], chosen or None, **overrides)
        return built

    setup.watched_by_trainprobe = True  # type: ignore[attr-defined]
    training.setup_model_and_optimizer = setup


def follow_training(training: Any, model: Any, optimizer: Any, plan: PlanSource, **overrides: Any) -> MegatronProbe:
    """Watch the loop of `megatron.training.training`, whose steps are numbered as in its log, from 1."""
    if getattr(training.get_args(), "iteration", 0):
        plan, overrides = placed(load_plan(plan, **overrides), place_from_environment(), resumed=True), {}
    probe = attach(model, optimizer, plan, **overrides)
    loop_hooks = probe.loop_hooks
    if loop_hooks is None or loop_hooks.trainer_reports:
        return probe
    loop_hooks.trainer_reports = True
    log = inspect.signature(training.training_log)

    def train_step(run: Any, *args: Any, **kwargs: Any) -> Any:
        loop_hooks.finish_step(complete=loop_hooks.updated)  # one that was never reported
        loop_hooks.start_step(training.get_args().curr_iteration + 1)
        return loop_hooks.run_inside(run, *args, **kwargs)

    def training_log(run: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        probe.guard.run(_note_report, probe, log.bind(*args, **kwargs).arguments)
        loop_hooks.finish_step()
        return out

    def train(run: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            probe.close()

    loop_hooks.around(training, "train_step", train_step)
    loop_hooks.around(training, "training_log", training_log)
    loop_hooks.around(training, "train", train)
    _keep_memories(training, probe, loop_hooks)
    return probe


def _note_report(probe: Probe, report: Mapping[str, Any]) -> None:
    """Note what the trainer's log was handed. Values that are not there yet (a reduction under way) are left out."""
    reported = {f"reported_{name}": report[name] for name in REPORTED if report.get(name) is not None}
    for name, value in [*(report.get("loss_dict") or {}).items(), *reported.items()]:
        if isinstance(value, int | float) or (hasattr(value, "numel") and value.numel() == 1):
            probe.note(name, value)


def _keep_memories(training: Any, probe: Probe, loop_hooks: ScheduleHooks) -> None:
    """Write the memory of the rules next to the output with each checkpoint; a resumed run continues from it."""
    monitor, resumed = probe.monitor, getattr(training.get_args(), "iteration", 0)
    if monitor is None:
        return

    def save_checkpoint(run: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        probe.guard.run(monitor.keep, iteration)
        return run(iteration, *args, **kwargs)

    if resumed:
        probe.guard.run(monitor.go_on_from, resumed)
    loop_hooks.around(training, "save_checkpoint", save_checkpoint)


def _require_megatron() -> None:
    import importlib.util

    if "megatron.core" not in sys.modules and importlib.util.find_spec("megatron.core") is None:
        raise MissingExtra("megatron", "megatron-core", "a probe on a Megatron training")
