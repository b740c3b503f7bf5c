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
from trainprobe.engine.capture.patching.step_hooks import GatheredUpdate
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import UsageError
from trainprobe.integrations import announce
from trainprobe.integrations.auto_attach import called_from
from trainprobe.integrations.deepspeed_layout import place_of, renaming
from trainprobe.integrations.deepspeed_source import DeepSpeedSource, loss_scale, tensors_of
from trainprobe.integrations.method_hooks import MethodHooks, hooks_on
from trainprobe.integrations.output_folder import placed
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


class EngineHooks(MethodHooks):
    """Stands around the methods of one engine and tells a probe what happens.

    `follow_update` tells where gradients and the update are, `follow_steps` also tells when a step begins and ends.
    """

    def __init__(self, probe: Probe, engine: Any) -> None:
        super().__init__(probe, engine.device)
        self.engine = engine
        self.source = DeepSpeedSource(engine, lambda: probe.taps.naming.parameter_names)
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

    # ---- the update ----------------------------------------------------------------------------------------------

    def follow_update(self) -> None:
        """Tell from now on what this process holds before and after updates, and what DeepSpeed reports of them."""
        self.probe.use_source(self.source)
        self._whole = GatheredUpdate(self.source.parameters)
        self.around(self.engine, "_take_model_step", self._update)
        optimizer = self.engine.basic_optimizer
        if hasattr(optimizer, "register_step_pre_hook"):
            self._ends.append(optimizer.register_step_pre_hook(self._optimizer_steps).remove)
        if self._gradients is not None and self._gradients.unreduced:
            for p in self.source.parameters:
                if p.requires_grad:
                    self._ends.append(p.register_hook(functools.partial(self._gradient_arrives, p)).remove)

    def _update(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        with self._whole:
            return self._seen_update(run, *args, **kwargs)

    def _seen_update(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        if self.probe.tape is None:
            return run(*args, **kwargs)
        engine, source = self.engine, self.source
        skipped, scale = engine.skipped_steps, loss_scale(engine)
        clips = engine.gradient_clipping() > 0
        self._note(**source.scalars(), **({"loss_scale": scale} if engine.fp16_enabled() else {}))
        source.before_clipping = scale == 1 and not clips  # nothing is done to gradients from here on; overflow destroys them
        if source.before_clipping:
            self.look("before_step")
        else:
            if self._unclipped:
                self.look("unclipped")
            self._look_at(frozenset())
        out = self.run_inside(run, *args, **kwargs)
        self.look("after_step")
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
        self.look("before_step")
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
        self.look("unreduced")
        self.source.arriving = None

    def _note(self, **values: Any) -> None:
        for name, value in values.items():
            self.probe.note(name, value.detach() if hasattr(value, "detach") else value)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def follow_steps(self) -> None:
        """Tell from now on when steps and micro-batches begin and end, and keep the rules' memory with checkpoints."""
        if self._pipeline:
            self.around(self.engine, "train_batch", self._train_batch)
            self._count_instructions()
        else:
            self.around(self.engine, "forward", self._forward)
            self.around(self.engine, "backward", self._backward)
            self.around(self.engine, "_backward_epilogue", self._backward_ends)
            self.around(self.engine, "step", self._step)
        self.around(self.engine, "save_checkpoint", self._save)
        self.around(self.engine, "load_checkpoint", self._load)
        self.around(self.engine, "destroy", self._destroy)

    def _forward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self.engine.module.training and torch.is_grad_enabled():
            self._begin_step()
            self.probe.moment("micro", self._micro)
            return self.run_inside(run, *args, **kwargs)
        self.probe.pause()
        try:
            return run(*args, **kwargs)
        finally:
            self.probe.resume()

    def _backward(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin_step()
        loss = self.run_inside(run, *args, **kwargs)
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
        out = self.run_inside(run, *args, **kwargs)
        if self.engine.global_steps != before:
            self.finish_step()
        return out

    def _train_batch(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Take one call of the pipeline as a step; its loss is the mean over all micro-batches and ranks."""
        self._begin_step()
        loss = self.run_inside(run, *args, **kwargs)
        if self.probe.tape is not None:
            self.probe.guard.run(self._add_loss, loss)
        self.finish_step()
        return loss

    def _count_instructions(self) -> None:
        """Number the micro-batches of a pipeline, whose schedule calls what a table of the class says."""
        engine, table = self.engine, self.engine._INSTRUCTION_MAP
        counted = {kind: self._counting(kind.__name__, run) for kind, run in table.items() if kind.__name__ in _PASSES}
        engine._INSTRUCTION_MAP = {**table, **counted}
        self._ends.append(lambda: vars(engine).pop("_INSTRUCTION_MAP", None))

    def _counting(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self.probe.moment("micro", self._passes[kind])
                self._passes[kind] += 1
            return run(engine, *args, **kwargs)

        return counted

    def _begin_step(self) -> None:
        if not self.inside:
            self.inside, self._micro, self._loss, self._passes = True, 0, None, dict.fromkeys(_PASSES, 0)
            self.probe.begin_step(self.engine.global_steps + 1)

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
    return hooks_on(vars(engine).get("_take_model_step"), EngineHooks)


def is_engine(engine: Any) -> bool:
    """Tell whether this is an engine of DeepSpeed."""
    return all(hasattr(type(engine), name) for name in ("_take_model_step", "is_gradient_accumulation_boundary"))


def _require_engine(engine: Any) -> None:
    if not is_engine(engine):
        raise UsageError(
            f"attach was given a {type(engine).__name__}: give it the engine, the first that deepspeed.initialize(...) returns"
        )
