"""DeepSpeed: `engine = trainprobe.integrations.deepspeed.attach(engine, "plan.yaml")` behind `deepspeed.initialize`.

With no edit at all: `trainprobe run plan.yaml -- torchrun ... train.py` attaches to the first engine of each process.

A step is numbered as DeepSpeed logs it and names its checkpoints: `engine.global_steps` once the step is done, 1 for the first.
It spans all micro-batches up to the call of `engine.step` that updates the model, or one `train_batch` of a pipeline; one that
DeepSpeed skips is a step with the scalar `skipped` 1. Forward passes in evaluation mode or without gradients belong to none.
Only attributes of the engine object are set, besides hooks, and `detach` takes all off again.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

from torch._C import DisableTorchFunction

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import StopTraining, UsageError
from trainprobe.integrations import announce
from trainprobe.integrations.auto_attach import called_from
from trainprobe.integrations.deepspeed_layout import place_of, renaming
from trainprobe.integrations.deepspeed_source import DeepSpeedSource, loss_scale, tensors_of
from trainprobe.integrations.output_folder import placed
from trainprobe.integrations.session import agreed
from trainprobe.watching import PlanSource, Probe

CALLBACKS = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer")  # their integrations find the engine themselves
_PASSES: tuple[str, ...] = ("ForwardPass", "BackwardPass")  # instructions of a pipeline's schedule


def attach(engine: Any, plan: PlanSource = None, **overrides: Any) -> Any:
    """Watch the training of an engine and return the engine; attaching again changes nothing.

    engine: what `deepspeed.initialize` returns first. plan, overrides: as for `trainprobe.Probe`; None is the default plan. A
    checkpoint may be loaded before or after. Raises UsageError for anything but an engine, PlanError for a plan that cannot be
    carried out, OutputError when the output cannot be written.
    """
    _require_engine(engine)
    if probe_of(engine) is not None:
        return engine
    place = place_of(engine)
    loaded = placed(load_plan(plan, **overrides), place, resumed=bool(engine.global_steps))
    probe = Probe(loaded, place=place, rename=renaming(engine.module))
    try:
        probe.open(engine.module, engine.basic_optimizer)
        loop_hooks = EngineHooks(probe, engine)
        loop_hooks.go_on_from_checkpoint()
        loop_hooks.follow_update()
        loop_hooks.follow_steps()
    except BaseException:
        probe.close()
        raise
    atexit.register(probe.close)
    announce(probe)
    return engine


def attach_to_script(plan: PlanSource) -> None:
    """Attach to the first engine that a script makes, which `trainprobe run` started and which has just imported DeepSpeed."""
    module = sys.modules["deepspeed"]
    run = module.initialize

    @functools.wraps(run)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        if not initialize.ended and is_engine(made[0]) and not called_from(CALLBACKS):  # type: ignore[attr-defined]
            replaced.back()
            attach(made[0], plan)
        return made

    replaced = Replaced(module, "initialize", initialize)


def detach(engine: Any) -> None:
    """Take everything off the engine and write what is pending. Safe to call at any time; `engine.destroy()` does it too."""
    loop_hooks = _loop_hooks_of(engine)
    if loop_hooks is not None:
        atexit.unregister(loop_hooks.probe.close)
        loop_hooks.end()
        loop_hooks.probe.close()


def probe_of(engine: Any) -> Probe | None:
    """Return the probe that watches an engine, or None."""
    loop_hooks = _loop_hooks_of(engine)
    return None if loop_hooks is None else loop_hooks.probe


def engine_of(trainer: Any) -> Any:
    """Return the DeepSpeed engine of a Trainer of Lightning or of Hugging Face, or None where DeepSpeed does not run.

    For Hugging Face it is there from `on_train_begin` on.
    """
    if "deepspeed" not in sys.modules:
        return None
    accelerator = getattr(trainer, "accelerator", None)
    wrapped = getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)
    strategy = getattr(trainer, "strategy", None)
    candidates = (wrapped, getattr(strategy, "model", None), getattr(trainer, "model_wrapped", None))
    return next((engine for engine in candidates if is_engine(engine)), None)


def follow(probe: Probe | None, engine: Any) -> EngineHooks | None:
    """Let an open probe, to which a callback tells the steps, take what DeepSpeed holds; None where there is no engine.

    The callback calls `end()` of what is returned when training ends.
    """
    if probe is None or engine is None or _loop_hooks_of(engine) is not None:
        return None
    loop_hooks = EngineHooks(probe, engine)
    loop_hooks.follow_update()
    return loop_hooks


class EngineHooks:
    """Stands around the methods of one engine and tells a probe what happens.

    `follow_update` tells where gradients and the update are, `follow_steps` also tells when a step begins and ends.
    """

    def __init__(self, probe: Probe, engine: Any) -> None:
        self.probe = probe
        self.engine = engine
        self.source = DeepSpeedSource(engine, lambda: probe.taps.naming.parameter_names)
        self._ends: list[Callable[[], Any]] = []
        self._inside = False
        self._micro = 0
        self._loss: Any = None
        self._passes: dict[str, int] = {}
        monitor = probe.monitor_plan
        self._gradients = monitor.gradients if monitor is not None and monitor.gradients.on else None
        asked_for = self._gradients is not None and self._gradients.unclipped
        self._unclipped = asked_for or probe.audit is not None
        self._per_micro = self._gradients is not None and self._gradients.per_micro
        managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
        self._pipeline = hasattr(type(engine), "train_batch")
        self._each_micro = (
            self._per_micro or self._pipeline or not managed
        )  # else it is not known in time which one is the last
        self._may_stop = monitor is not None and any("stop" in rule.actions for rule in monitor.rules.values())

    def around(self, name: str, listener: Callable[..., Any]) -> None:
        """Call listener(run, …) instead of the engine's method from now on, until `end`."""
        run = getattr(self.engine, name)
        probe = self.probe

        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if probe.closed or probe.guard.tripped is not None:
                return run(*args, **kwargs)
            return listener(run, *args, **kwargs)

        watched.loop_hooks = self  # type: ignore[attr-defined]
        self._ends.append(Replaced(self.engine, name, watched).back)

    def end(self) -> None:
        """Take everything off; a step that is under way ends as cut short."""
        while self._ends:
            self._ends.pop()()
        self._finish_step(complete=False)

    # ---- the update ----------------------------------------------------------------------------------------------

    def follow_update(self) -> None:
        """Tell from now on what this process holds before and after updates, and what DeepSpeed reports of them."""
        self.probe.use_source(self.source)
        self.around("_take_model_step", self._update)
        optimizer = self.engine.basic_optimizer
        if hasattr(optimizer, "register_step_pre_hook"):
            self._ends.append(optimizer.register_step_pre_hook(self._optimizer_steps).remove)
        if self._gradients is not None and self._gradients.unreduced:
            for p in self.source.parameters:
                if p.requires_grad:
                    self._ends.append(p.register_hook(functools.partial(self._gradient_arrives, p)).remove)

    def _update(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if self.probe.tape is None:
            return run(*args, **kwargs)
        engine, source = self.engine, self.source
        skipped, scale = engine.skipped_steps, loss_scale(engine)
        clips = engine.gradient_clipping() > 0
        self._note(**source.scalars(), **({"loss_scale": scale} if engine.fp16_enabled() else {}))
        source.before_clipping = scale == 1 and not clips  # nothing is done to gradients from here on; overflow destroys them
        if source.before_clipping:
            self._look("before_step")
        else:
            if self._unclipped:
                self._look("unclipped")
            self._look_at(frozenset())
        out = self._run_inside(run, *args, **kwargs)
        self._look("after_step")
        norm = engine.get_global_grad_norm()
        self._note(skipped=float(engine.skipped_steps > skipped), **({} if norm is None else {"grad_norm": norm}))
        return out

    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look at gradients as they are taken: of one group of parameters after the other."""
        held = tensors_of(optimizer)
        if held and not self.source.before_clipping:
            self._look_at(held)

    def _look_at(self, stepping: frozenset[int]) -> None:
        """Look at gradients and state that stand for these tensors of the optimizer; at none: at all values."""
        self.source.stepping = stepping
        self._look("before_step")
        self.source.stepping = None

    def _gradient_arrives(self, p: Any, gradient: Any) -> None:
        """Look at what goes into a reduction: each micro-batch by itself under ZeRO 2 and 3, else what has added up."""
        engine = self.engine
        if self.probe.tape is None or not (self._each_micro or engine.is_gradient_accumulation_boundary()):
            return
        import torch

        with torch.no_grad(), DisableTorchFunction():
            adds = p.grad is not None and not engine.zero_optimization_partition_gradients()
            self.source.arriving = (p, p.grad + gradient if adds else gradient.detach())
        self.source.micro = self.probe.tape.micro if self._per_micro else 0
        self._look("unreduced")
        self.source.arriving = None

    def _look(self, moment: str) -> None:
        """Look at the parameters; collectives and fused kernels write without a trace, so no tensor is taken for unchanged."""
        if self.probe.tape is not None:
            self.probe.tape.forget_all()
            self.probe.moment(moment)

    def _note(self, **values: Any) -> None:
        for name, value in values.items():
            self.probe.note(name, value.detach() if hasattr(value, "detach") else value)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def follow_steps(self) -> None:
        """Tell from now on when steps and micro-batches begin and end, and keep the rules' memory with checkpoints."""
        if self._pipeline:
            self.around("train_batch", self._train_batch)
            self._count_instructions()
        else:
            self.around("forward", self._forward)
            self.around("backward", self._backward)
            self.around("_backward_epilogue", self._backward_ends)
            self.around("step", self._step)
        self.around("save_checkpoint", self._save)
        self.around("load_checkpoint", self._load)
        self.around("destroy", self._destroy)

    def _forward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self.engine.module.training and torch.is_grad_enabled():
            self._begin_step()
            self.probe.moment("micro", self._micro)
            return self._run_inside(run, *args, **kwargs)
        self.probe.pause()
        try:
            return run(*args, **kwargs)
        finally:
            self.probe.resume()

    def _backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin_step()
        loss = self._run_inside(run, *args, **kwargs)
        if self.probe.tape is not None:
            self.probe.guard.run(self._add_loss, loss)
        return loss

    def _backward_ends(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the micro-batches; under ZeRO a program may call `loss.backward()` too."""
        out = run(*args, **kwargs)
        self._micro += 1
        return out

    def _step(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.engine.global_steps
        out = self._run_inside(run, *args, **kwargs)
        if self.engine.global_steps != before:
            self._finish_step()
        return out

    def _train_batch(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Take one call of the pipeline as a step; its loss is the mean over all micro-batches and ranks."""
        self._begin_step()
        loss = self._run_inside(run, *args, **kwargs)
        if self.probe.tape is not None:
            self.probe.guard.run(self._add_loss, loss)
        self._finish_step()
        return loss

    def _count_instructions(self) -> None:
        """Number the micro-batches of a pipeline, whose schedule calls what a table of the class says."""
        engine, table = self.engine, self.engine._INSTRUCTION_MAP
        counted = {kind: self._counting(kind.__name__, run) for kind, run in table.items() if kind.__name__ in _PASSES}
        engine._INSTRUCTION_MAP = {**table, **counted}
        self._ends.append(lambda: vars(engine).pop("_INSTRUCTION_MAP", None))

    def _counting(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                self.probe.moment("micro", self._passes[kind])
                self._passes[kind] += 1
            return run(engine, *args, **kwargs)

        return counted

    def _begin_step(self) -> None:
        if not self._inside:
            self._inside, self._micro, self._loss, self._passes = True, 0, None, dict.fromkeys(_PASSES, 0)
            self.probe.begin_step(self.engine.global_steps + 1)

    def _finish_step(self, *, complete: bool = True) -> None:
        """End the step. Raises StopTraining, on all ranks at the same step, when a rule of one wants that."""
        if not self._inside:
            return
        self._inside = False
        stop = None
        try:
            self.probe.end_step(complete=complete)
        except StopTraining as wish:
            stop = wish
        if complete and self._may_stop and agreed(stop is not None, self.engine.device):
            raise stop or StopTraining("a rule wants the training to stop; another rank says which")

    def _run_inside(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            self._finish_step(complete=False)
            raise

    def _add_loss(self, loss: Any) -> None:
        """Add a micro-batch's share, which DeepSpeed has divided by their number: the loss of this process's step."""
        if hasattr(loss, "detach"):
            with DisableTorchFunction():
                share = loss.detach()
                self._loss = share if self._loss is None else self._loss + share
                self.probe.note("loss", self._loss)

    # ---- checkpoints and the end -------------------------------------------------------------------------------------

    def _save(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if self.probe.monitor is not None:
            self.probe.guard.run(self.probe.monitor.keep, self.engine.global_steps)
        return run(*args, **kwargs)

    def _load(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        self.go_on_from_checkpoint()
        return out

    def go_on_from_checkpoint(self) -> None:
        """Let the rules go on from the checkpoint that the engine has loaded, if it has."""
        if self.probe.monitor is not None and self.engine.global_steps:
            self.probe.guard.run(self.probe.monitor.go_on_from, self.engine.global_steps)

    def _destroy(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        detach(self.engine)
        return run(*args, **kwargs)


def _loop_hooks_of(engine: Any) -> EngineHooks | None:
    loop_hooks = getattr(vars(engine).get("_take_model_step"), "loop_hooks", None)
    return loop_hooks if isinstance(loop_hooks, EngineHooks) and not loop_hooks.probe.closed else None


def is_engine(engine: Any) -> bool:
    """Tell whether this is an engine of DeepSpeed."""
    return all(hasattr(type(engine), name) for name in ("_take_model_step", "is_gradient_accumulation_boundary"))


def _require_engine(engine: Any) -> None:
    if not is_engine(engine):
        raise UsageError(
            f"attach was given a {type(engine).__name__}: give it the engine, the first that deepspeed.initialize(...) returns"
        )
