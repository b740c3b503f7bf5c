"""Lightning 2.x: `Trainer(callbacks=[ProbeCallback("plan.yaml")])`, for `lightning.pytorch` and for `pytorch_lightning`.

A step is numbered as Lightning numbers it: `trainer.global_step` as it is while the step runs, 0 for the first. It spans all
micro-batches up to the one in which an optimizer steps. Validation is left out, also where it falls between two micro-batches.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.findings import sentence
from trainprobe.engine.core.flat_parameters import handles_of
from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.core.topology import axes_from_mesh, place_from_environment
from trainprobe.errors import MissingExtra
from trainprobe.integrations.deepspeed import engine_of, follow
from trainprobe.integrations.deepspeed_layout import place_of, renaming
from trainprobe.integrations.output_folder import asked_output
from trainprobe.integrations.preflight_steps import FirstStep, of_lightning
from trainprobe.integrations.session import Session
from trainprobe.monitor.audit.facts.updates import Progress
from trainprobe.watching import PlanSource

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


class PlainCallback:
    """Watches a Lightning training. plan: path, dict, Plan or None for the default; `overrides` are plan fields on top.

    preflight: test loss and model before the first update, where optimization is automatic, print what holds, and give every
    bit back; its answer is `callback.preflight.report`.

    The object that is made is a callback of whichever Lightning the program has imported. Raises MissingExtra where none is
    installed, PlanError for a plan that cannot be carried out.
    """

    def __new__(cls, plan: PlanSource = None, **options: Any) -> PlainCallback:
        """Make an object that is a callback of the program's Lightning too."""
        return object.__new__(_callback_class(cls, _namespace()))

    def __init__(self, plan: PlanSource = None, *, preflight: bool = False, **overrides: Any) -> None:
        self.session = Session(plan, **overrides)
        self.preflight = FirstStep(preflight)
        self._made_of = (plan, {"preflight": preflight, **overrides})
        self._number = -1  # of the step that is open
        self._losses = 0
        self._updates = 0
        self._in_batch = False  # a batch that a callback skips begins and never ends
        self._hooks: list[Any] = []

    def __reduce__(self) -> Any:
        """Be copied and pickled as what it was made of: a probe that is at work belongs to its process."""
        return _make_again, (getattr(type(self), "plain_class", type(self)), *self._made_of)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in this process."""
        return self.session.findings

    @property
    def state_key(self) -> str:
        """Tell several callbacks apart in a checkpoint by where they write."""
        return f"ProbeCallback[{asked_output(self.session.asked)}]"

    # ---- a training ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the probe: everything is wrapped, sharded and on its device now."""
        engine = engine_of(trainer)
        self.session.begin(
            _model(trainer, pl_module),
            trainer.optimizers,
            step=trainer.global_step,
            first=0,
            place=_place(trainer) if engine is None else place_of(engine),
            rename=None if engine is None else renaming(engine.module),
            follow=partial(follow, engine=engine),
            progress=lambda: Progress(trainer.current_epoch, max(trainer.max_steps or 0, 0)),
            logs=_logs(trainer),
        )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            self._hooks = [optimizer.register_step_post_hook(self._updated) for optimizer in trainer.optimizers]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write everything; a step that is still open awaited an update that never came."""
        self._end(complete=False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write what was collected of the step that an error cut short."""
        self._end(complete=False, error=exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave nothing behind, however training ended."""
        if stage == "fit":
            self._end(complete=False)

    def _end(self, complete: bool = True, error: BaseException | None = None) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.session.end(complete=complete, error=error)
        self._report_findings()

    # ---- a step --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step, or its next micro-batch, or the one that was begun before and then skipped."""
        if not self.session.is_inside:
            self._number, self._losses, self._updates = trainer.global_step, 0, 0
            self.session.step_begins(self._number)
            self._in_batch = False
        if not self._in_batch:
            self.session.micro_begins()
        self._in_batch = True

        self.preflight.add(batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Test the first update, where that is wanted."""
        if pl_module.automatic_optimization:
            number = [0] if len(inspect.signature(pl_module.training_step).parameters) > 1 else []
            self.preflight.test(partial(of_lightning, pl_module, number), trainer.optimizers, self.session.probe)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Take the loss: the sum of what Lightning differentiates in a step; in manual optimization, each by itself."""
        if pl_module.automatic_optimization:
            self.session.add_loss(loss)
        else:
            self.session.note(f"loss/{self._losses}" if self._losses else "loss", loss)
            self._losses += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step if an optimizer stepped in this batch."""
        self._in_batch = False
        if not self.session.is_inside or trainer.global_step == self._number:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.session.note("loss_scale", getattr(scaler, "_scale", None))
            self.session.note("step_skipped", float(self._updates == 0))
        stop = self.session.step_ends() is not None
        due = getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", True)
        for name, value in self.session.scalars(wait=due).items():
            pl_module.log(name, value, on_step=True, on_epoch=False)
        self._report_findings(trainer)
        if self.session.may_stop and trainer.strategy.reduce_boolean_decision(stop, all=False):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Look away: a step may be open that awaits more micro-batches."""
        if self.session.probe is not None:
            self.session.probe.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Look again."""
        if self.session.probe is not None:
            self.session.probe.resume()

    def _updated(self, *_: Any) -> None:
        self._updates += 1

    # ---- checkpoints and loggers ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the rules remember."""
        return self.session.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what the rules remembered; it is used when training starts."""
        self.session.inherited = state_dict

    def _report_findings(self, trainer: Any = None) -> None:
        for finding in self.session.fresh_findings():
            for logger in trainer.loggers if trainer is not None and trainer.is_global_zero else ():
                add_text = getattr(logger.experiment, "add_text", None)
                if add_text is not None:
                    add_text("trainprobe/findings", sentence(finding), finding.step)


if TYPE_CHECKING:
    ProbeCallback = PlainCallback


def __getattr__(name: str) -> Any:
    """Return `ProbeCallback`: a class of callbacks of the Lightning that is imported, as its LightningCLI wants it."""
    if name != "ProbeCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = next((namespace for namespace in NAMESPACES if namespace in sys.modules), None)
    return PlainCallback if imported is None else _callback_class(PlainCallback, imported)


def _namespace() -> str:
    """Return the Lightning that the program has imported, or else one that is installed."""
    for name in NAMESPACES:
        if name in sys.modules:
            return name
    for name in NAMESPACES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    raise MissingExtra("lightning", "lightning", "the callback for Lightning")


@cache
def _callback_class(cls: type, namespace: str) -> type:
    """Return `cls` as a callback of that Lightning."""
    base = importlib.import_module(namespace).Callback
    name = "ProbeCallback" if cls is PlainCallback else cls.__name__
    return cls if issubclass(cls, base) else type(name, (cls, base), {"__module__": cls.__module__, "plain_class": cls})


def _make_again(cls: type[PlainCallback], plan: PlanSource, overrides: dict[str, Any]) -> PlainCallback:
    return cls(plan, **overrides)


def _model(trainer: Any, pl_module: Any) -> Any:
    """Return what is watched: the module, or the wrapper around it that keeps its parameters (FSDPStrategy)."""
    around = trainer.strategy.model
    return around if len(handles_of([around])) > len(handles_of([pl_module])) else pl_module


def _logs(trainer: Any) -> dict[str, Any]:
    """Return where the trainer's loggers write. On rank 0, as they do: the others would have to ask it for the folder."""
    found: dict[str, Any] = {}
    for logger in trainer.loggers if trainer.is_global_zero else ():
        kinds = {kind.__name__ for kind in type(logger).__mro__}
        if "TensorBoardLogger" in kinds and "://" not in logger.log_dir:
            found.setdefault("tensorboard", logger.log_dir)
        elif "MLFlowLogger" in kinds:
            found.setdefault("mlflow", (logger.experiment, logger.run_id))
    return found


def _place(trainer: Any) -> Place:
    mesh = getattr(trainer.strategy, "device_mesh", None)
    return place_from_environment(axes_from_mesh(mesh) if mesh is not None else None)


def attach_to_script(plan: PlanSource) -> None:
    """Add the callback to every fit of this process that has none; for a Lightning that is imported."""
    for name in NAMESPACES:
        trainer: Any = getattr(sys.modules.get(f"{name}.trainer.trainer"), "Trainer", None)
        if trainer is not None and not hasattr(trainer.fit, "ended"):
            Replaced(trainer, "fit", _fit_with_callback(trainer.fit, plan))


def _fit_with_callback(original: Any, plan: PlanSource) -> Any:
    @wraps(original)
    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, PlainCallback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, PlainCallback(plan))
        return original(trainer, *args, **kwargs)

    return fit
