"""The Trainer of Hugging Face transformers: `Trainer(callbacks=[ProbeCallback("plan.yaml")])`.

A step is numbered as the Trainer logs it: `state.global_step` as it is once the step is done, 1 for the first. The Trainer
itself is not handed to callbacks; the loss of each step, and an error in the middle of one, are seen through
`callback.trainer`, which is found at the start of training and may also be set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import TOLD, Finding, Place
from trainprobe.engine.core.topology import axes_from_mesh, place_from_environment
from trainprobe.errors import MissingExtra
from trainprobe.integrations.deepspeed import engine_of, follow
from trainprobe.integrations.deepspeed_layout import place_of, renaming
from trainprobe.integrations.preflight_steps import FirstStep, of_transformers
from trainprobe.integrations.session import Session, agreed
from trainprobe.integrations.trl import follow_rollouts
from trainprobe.monitor.audit.facts.updates import Progress
from trainprobe.watching import PlanSource

try:
    from transformers import TrainerCallback
    from transformers.integrations.integration_utils import TensorBoardCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise MissingExtra("transformers", "transformers", "the callback for the Trainer") from error

_REPORTED = {"loss": "reported/loss", "grad_norm": "reported/grad_norm", "learning_rate": "reported/lr"}


class ProbeCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Watches the training of a Trainer. plan: path, dict, Plan or None for the default; `overrides` are plan fields on top.

    preflight: test loss and model before the first update, print what holds, and give every bit back; its answer is
    `callback.preflight.report`. Raises PlanError for a plan that cannot be carried out. trainer: found by itself.
    """

    def __init__(self, plan: PlanSource = None, *, preflight: bool = False, **overrides: Any) -> None:
        self.session = Session(plan, **overrides)
        self.preflight = FirstStep(preflight)
        self.trainer: Any = None
        self._made_of = (plan, overrides)
        self._step: Replaced | None = None  # the Trainer's training_step, while a step is collected
        self._no_rollouts: Callable[[], None] = lambda: None  # ends what notes the rollouts of a trainer of TRL
        self._awaits_log = False  # the step is done, and what the Trainer reports of it is still to come

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in this process."""
        return self.session.findings

    # ---- a training ----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the probe: the model is wrapped, the optimizer exists, a checkpoint is loaded."""
        self.trainer = _calling_trainer() or self.trainer
        self._stand_before_reporters()
        self._look_for_state(state)
        self._look_away()
        self._awaits_log = False
        optimizer = kwargs.get("optimizer")
        raw = getattr(optimizer, "optimizer", optimizer)
        engine = engine_of(self.trainer)
        self.session.begin(
            self._model(kwargs["model"]),
            [raw] if raw is not None else [],
            step=state.global_step + 1,
            place=_place(self.trainer) if engine is None else place_of(engine),
            rename=None if engine is None else renaming(engine.module),
            follow=partial(follow, engine=engine),
            progress=lambda: Progress(int(state.epoch or 0), max(state.max_steps, 0)),
            logs=_logs(self.trainer),
        )
        monitor = getattr(self.session.probe, "monitor", None)
        if monitor is not None:
            monitor.decode = getattr(kwargs.get("processing_class"), "decode", None)
        self._no_rollouts()
        self._no_rollouts = follow_rollouts(self.trainer, self.session)

    def _model(self, handed: Any) -> Any:
        """Return the model that trains: the Trainer's own, where a library hands callbacks an object around it (SetFit)."""
        if hasattr(handed, "named_parameters") or self.trainer is None:
            return handed
        return self.trainer.callback_handler.model

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write everything."""
        self._step_ends(args, control)
        self._no_rollouts()
        self.session.end()

    # ---- a step --------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step and its first micro-batch; one whose log never came ends before."""
        if self._awaits_log:
            self._step_ends(args, control)
        if not self.session.is_inside:
            collected = self.session.step_begins(state.global_step + 1)
            if self.trainer is None:
                self.session.micro_begins()
            elif collected:
                self._look_away()
                run = self.trainer.training_step
                self._step = Replaced(self.trainer, "training_step", self._training_step(run))

    def _training_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs forward and backward of a micro-batch, with its loss, or what was seen before an error, kept."""

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if training_step.ended:  # type: ignore[attr-defined]
                return original(*args, **kwargs)
            self.session.micro_begins()
            try:
                loss = original(*args, **kwargs)
            except BaseException as error:
                self._look_away()
                self.session.end(complete=False, error=error)
                raise
            self.session.add_loss(loss)
            return loss

        return training_step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the next micro-batch, where no Trainer is known that tells it."""
        if self.trainer is None:
            self.session.micro_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Test the first update, where that is wanted."""
        if self.preflight.waits and (trainer := _calling_trainer()) is not None:
            for batch in _micro_batches():
                self.preflight.add(batch)
            raw = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            self.preflight.test(partial(of_transformers, trainer, trainer.model_wrapped), [raw], self.session.probe)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the loss scale, and whether the update was skipped because of it."""
        optimizer: Any = kwargs.get("optimizer")
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:
            self.session.note("loss_scale", getattr(scaler, "_scale", None))
            self.session.note("step_skipped", float(optimizer.step_was_skipped))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, or wait for what is about to be logged of it and look at nothing else meanwhile."""
        if not control.should_log:
            self._step_ends(args, control)
        elif self.session.is_inside and self.session.probe is not None:
            self._awaits_log = True
            self.session.probe.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take what the Trainer reports of the step, end it, and hand a few scalars to whatever `report_to` names.

        What a program logs by itself in the middle of a step is left alone.
        """
        if self._awaits_log:
            for key, value in (logs or {}).items():
                if key in _REPORTED or (self.session.plan.told and isinstance(value, int | float)):
                    self.session.note(_REPORTED.get(key, f"{TOLD}{key}"), value)
            self._step_ends(args, control)
            if logs is not None:
                logs.update(self.session.scalars())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step that is still waiting for a log, before anything else is run."""
        self._step_ends(args, control)

    def _step_ends(self, args: Any, control: Any) -> None:
        self._awaits_log = False
        if not self.session.is_inside:
            return
        self._look_away()
        stop = self.session.step_ends() is not None
        if self.session.may_stop and agreed(stop, getattr(args, "device", None)):
            control.should_training_stop = True

    def _look_away(self) -> None:
        """Give the Trainer its own training_step back, or the one that the program has put there."""
        if self._step is not None:
            self._step.back()
            self._step = None

    # ---- checkpoints and loggers ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return how to make this callback again and what the rules remember, for `trainer_state.json`."""
        plan = self.session.plan.model_dump(mode="json", exclude_unset=True)
        return {"args": {"plan": plan}, "attributes": {"remembered": self.session.state()}}

    @property
    def remembered(self) -> Any:
        """What the rules remember; setting it lets them go on from there when training starts."""
        return self.session.state()

    @remembered.setter
    def remembered(self, state: Any) -> None:
        self.session.inherited = state

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the rules of this rank remember; the Trainer itself saves those of rank 0."""
        if not state.is_world_process_zero:
            self.session.state()
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, list):  # the Trainer appends at each checkpoint: the newest of each callback are enough
            state.stateful_callbacks[type(self).__name__] = list({_output_of(one): one for one in saved}.values())

    def _look_for_state(self, state: Any) -> None:
        """Take what a checkpoint holds for this callback; one that holds none gets its place, which the Trainer relies on."""
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        entries = saved if isinstance(saved, list) else [saved]
        own = [entry for entry in entries if _output_of(entry) == str(self.session.plan.output)] or entries
        if state.global_step and not self.session.inherited:
            self.session.inherited = own[-1]["attributes"].get("remembered")

    def _stand_before_reporters(self) -> None:
        """Come right behind the Trainer's own flow control, so that what is added to a log reaches those who report it."""
        if self.trainer is not None:
            callbacks = self.trainer.callback_handler.callbacks
            callbacks.remove(self)
            callbacks.insert(1, self)


def _output_of(entry: Any) -> Any:
    return entry["attributes"].get("remembered", {}).get("output")


def _calling_trainer() -> Any:
    """Return the Trainer that called back, or None: it is found a few frames up, because callbacks do not get it."""
    frame = sys._getframe(2)
    for _ in range(6):
        caller = frame.f_locals.get("self")
        if hasattr(caller, "callback_handler") and hasattr(caller, "training_step"):
            return caller
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _micro_batches() -> list[Any]:
    """Return the micro-batches of the update that the Trainer is about to make."""
    frame = sys._getframe(2)
    while frame is not None and "batch_samples" not in frame.f_locals:
        frame = frame.f_back
    return [] if frame is None else frame.f_locals["batch_samples"]


def _logs(trainer: Any) -> dict[str, Any]:
    """Return where the Trainer's reporters write; those of W&B, MLflow and Trackio open the run that their clients know."""
    callbacks = trainer.callback_handler.callbacks if trainer is not None else []
    folders = [
        callback.tb_writer.log_dir if callback.tb_writer else callback.logging_dir  # none between two trainings
        for callback in callbacks
        if isinstance(callback, TensorBoardCallback)
    ]
    return {"tensorboard": folders[0]} if any(folders) else {}


def _place(trainer: Any) -> Place:
    mesh = getattr(getattr(trainer, "accelerator", None), "torch_device_mesh", None)
    return place_from_environment(axes_from_mesh(mesh) if mesh is not None else None)


def attach_to_script(plan: PlanSource) -> None:
    """Add the callback to every Trainer of this process that trains without one."""
    from transformers.trainer import Trainer

    if not hasattr(Trainer.train, "ended"):
        Replaced(Trainer, "train", _train_with_callback(Trainer.train, plan))


def _train_with_callback(original: Any, plan: PlanSource) -> Any:
    @wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, ProbeCallback) for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(ProbeCallback(plan))
        return original(trainer, *args, **kwargs)

    return train
