"""MindSpore and MindFormers: `callbacks=[ProbeCallback("plan.yaml")]`, for a Model and for both trainers of MindFormers.

A step has the framework's own number, 1 for the first: `cur_step_num` of a Model and of the classic Trainer, after a restart on
top of the steps that the framework says were done; `global_step` after the step of the PyNative Trainer. In a configuration
file of MindFormers the line is `callbacks: [{type: ProbeCallback, plan: plan.yaml}]`; the script that starts the training
imports this module, before or after MindFormers. PyTorch is not needed.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

try:
    import mindspore
    from mindspore.nn import Optimizer
    from mindspore.train import Callback, Model
except ImportError as missing:  # pragma: no cover
    from trainprobe.errors import MissingExtra

    raise MissingExtra("mindspore", "mindspore", "the callback for MindSpore and MindFormers") from missing

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.engine.capture.mindspore.cells import is_graph_mode
from trainprobe.engine.capture.mindspore.tensor_hooks import wait
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import Finding, Place
from trainprobe.errors import StopTraining
from trainprobe.integrations.mindspore_place import declared_place, place_of_process
from trainprobe.integrations.mindspore_probe import MindSporeProbe, agreed, number_of
from trainprobe.integrations.session import Session
from trainprobe.watching import PlanSource

NOTHING_WATCHED = (
    "nothing was watched: under MindSpore `trainprobe run` watches Model.train and the trainers of MindFormers. In a loop that "
    "is written out, write `with trainprobe.watch(net, optimizer) as probe:` and `with probe.step():` (docs/mindspore.md)"
)
REGISTRY = "mindformers.tools.register.register"
NEW_CALLBACKS = "mindformers.pynative.callback.callback"
NEW_TRAINER = "mindformers.pynative.trainer.trainer"
# cells that stand around a model and hold it, and under which name
AROUND = ("_backbone", "network", "network_with_loss", "micro_cell")
WRAPPERS = frozenset(
    ("WithLossCell", "_VirtualDatasetCell", "GradAccumulationCell", "PipelineCell", "MicroBatchInterleaved", "_DataWrapper")
)


class MindSporeSession(Session):
    """A session whose probes are MindSpore's."""

    probe_kind = MindSporeProbe


class ProbeCallback(Callback):  # pyright: ignore[reportUntypedBaseClass]
    """Watches a training of MindSpore. plan: path, dict, Plan or None for the default; `overrides` are plan fields on top.

    axes: parallel axis → (index of this rank, size), for a training that is parallel by groups of its own; what MindFormers
    and MindSpore are configured with is known. Raises PlanError for a plan that cannot be carried out.
    """

    def __init__(self, plan: PlanSource = None, *, axes: Mapping[str, tuple[int, int]] | None = None, **overrides: Any) -> None:
        self._made_of = (plan, overrides if axes is None else {"axes": axes, **overrides})
        self._axes = axes
        self.session = MindSporeSession(dict(plan) if isinstance(plan, Mapping) else plan, **overrides)
        self._checkpoints: tuple[str, ...] = ()  # the latest of each callback that writes them
        self._done = 0  # steps of the run that this training resumes
        self._waits = False  # training has begun and its first epoch has not
        know_mindformers()

    def __reduce__(self) -> Any:
        """Be copied and pickled as what it was made of: a probe that is at work belongs to its process."""
        return _make_again, (type(self), *self._made_of)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in this process."""
        return self.session.findings

    def save(self, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value of the step under a name, at any level: a tensor, number, text, or nested lists, tuples and dicts.

        Call it in a cell's `construct`, in PyNative mode. Gradients of its tensors are recorded too unless told otherwise.
        """
        if self.session.probe is not None:
            self.session.probe.save(value, name, save_backward)

    # ---- a training: of a Model with (run_context), of the PyNative Trainer with (args, state, model=…, optimizer=…) ----

    def on_train_begin(self, *context: Any, **about: Any) -> None:
        """Open the probe: parameters and optimizer state are there now. A Model tells where it resumes with its first epoch."""
        self._waits = len(context) == 1
        if not self._waits:
            self._begin(about.get("model"), about.get("optimizer"), int(context[1].global_step) + 1)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Open the probe of a Model."""
        if not self._waits:
            return
        self._waits = False
        p = run_context.original_args()
        self._done = steps_done(p)
        step_cell = _step_cell(p.train_network)
        optimizer = p.optimizer if p.optimizer is not None else getattr(step_cell, "optimizer", None)
        self._begin(_model(p.network, step_cell), optimizer, self._done + int(p.cur_step_num) + 1, p.train_network)

    def on_train_end(self, *context: Any, **about: Any) -> None:
        """Write everything."""
        if len(context) == 1:
            self._keep_with_checkpoints(context[0].original_args())
        self._end()

    def __exit__(self, *error: object) -> None:
        """After an error, leave nothing behind; what was collected of the step is written. An evaluation comes here too."""
        if len(error) > 1 and isinstance(error[1], BaseException):
            self._end(complete=False, error=error[1])

    def _begin(self, model: Any, optimizer: Any, step: int, training_cell: Any = None) -> None:
        if isinstance(model, list | tuple) and len(model) == 1:
            model = model[0]
        optimizers = [] if optimizer is None else [optimizer]
        self.session.begin(model, optimizers, step=step, place=self._place(model), write_line=_print_line)
        probe = self.session.probe
        if not isinstance(probe, MindSporeProbe):
            return
        probe.train_with(training_cell)
        line = "; ".join(probe.hidden_by_a_graph())
        if line and probe.place.rank == 0:
            _print_line(f"trainprobe: {line}")

    def _place(self, model: Any) -> Place | None:
        """Return where this process stands, if it was told or is configured."""
        here = place_of_process()
        return declared_place(model) if self._axes is None else Place(here.rank, here.world_size, dict(self._axes))

    def _end(self, complete: bool = True, error: BaseException | None = None) -> None:
        self.session.end(complete=complete, error=error)

    # ---- a step of a Model ----------------------------------------------------------------------------------------

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin a step."""
        p = run_context.original_args()
        self._keep_with_checkpoints(p)
        self._step_begins(self._done + int(p.cur_step_num))

    def on_train_step_end(self, run_context: Any) -> None:
        """Take what the framework reports and end the step."""
        p = run_context.original_args()
        if not self.session.is_inside:
            return
        if self._step_ends(reported(p.get("net_outputs"), _step_cell(p.train_network))) is not None:
            run_context.request_stop()

    def _keep_with_checkpoints(self, p: Any) -> None:
        """Keep what the rules remember where a checkpoint was written after the last step, by whatever callback writes them."""
        latest = tuple(str(getattr(callback, "latest_ckpt_file_name", "")) for callback in p.list_callback)
        if any(latest) and latest != self._checkpoints:
            self.session.keep()
        self._checkpoints = latest

    # ---- a step of the PyNative Trainer -----------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, **about: Any) -> None:
        """Begin a step."""
        self._step_begins(int(state.global_step) + 1)

    def on_step_end(self, args: Any, state: Any, **about: Any) -> None:
        """Take what the framework reports and end the step. Raises StopTraining when a rule wants the training to end."""
        if not self.session.is_inside:
            return
        scalars: dict[str, Any] = {name: about.get(key) for name, key in (("loss", "loss"), ("grad_norm", "grad_norm"))}
        if "grad_norm" in about:  # 1.9.0 leaves an update out when a gradient is not finite, and then reports no norm
            scalars["step_skipped"] = float(about["grad_norm"] is None)
        stop = self._step_ends(scalars)
        if stop is not None:
            raise stop

    def _step_begins(self, number: int) -> None:
        if self.session.step_begins(number) and is_graph_mode():
            self._moment("before_step")

    def _step_ends(self, scalars: Mapping[str, Any]) -> StopTraining | None:
        probe = self.session.probe
        if probe is not None and probe.tape is not None:
            wait()  # what went wrong in the step is raised here, as the training's error
            probe.guard.run(self._note, scalars)
            if is_graph_mode():
                self._moment("after_step")
        stop = self.session.step_ends()
        if self.session.may_stop and agreed(stop is not None) and stop is None:
            return StopTraining("a rule stopped the training on another rank")
        return stop

    def on_eval_step_begin(self, run_context: Any) -> None:
        """Let the audit see in which mode the cells are that are evaluated."""
        probe = self.session.probe
        if isinstance(probe, MindSporeProbe) and probe.audit is not None:
            probe.guard.run(probe.audit.tap.evaluates)

    def _note(self, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            self.session.note(name, number_of(value))

    def _moment(self, name: str) -> None:
        if self.session.probe is not None:
            self.session.probe.moment(name)

    # ---- what the PyNative Trainer also calls -----------------------------------------------------------------------

    def on_begin(self, args: Any, state: Any, **about: Any) -> None:
        """Nothing begins yet."""

    def on_end(self, args: Any, state: Any, **about: Any) -> None:
        """Everything is written."""

    def on_epoch_begin(self, args: Any, state: Any, **about: Any) -> None:
        """Nothing depends on epochs."""

    def on_epoch_end(self, args: Any, state: Any, **about: Any) -> None:
        """Nothing depends on epochs."""


def reported(outputs: Any, step_cell: Any) -> dict[str, Any]:
    """Return scalar → what the framework reports of a step: the outputs of the cell that trains.

    MindFormers reports (loss, overflow, loss scale, learning rate, global norm, …), a loss-scaling cell of MindSpore the first
    three, any other the loss alone. An update that was left out because of an overflow is `step_skipped` 1.
    """
    if not isinstance(outputs, tuple | list):
        return {"loss": outputs}
    names = ("loss",)
    if isinstance(step_cell, mindspore.nn.TrainOneStepWithLossScaleCell):
        names = ("loss", "step_skipped", "loss_scale", "lr", "grad_norm")
    return dict(zip(names, outputs, strict=False))


def steps_done(p: Any) -> int:
    """Return how many steps were done before: what MindFormers tells its own callbacks, or whole epochs of a Model."""
    for callback in p.list_callback:
        initial = getattr(callback, "initial_step", None)
        if isinstance(initial, int) and initial > 0:
            return initial
    return (int(p.cur_epoch_num) - 1) * int(p.batch_num)


def _step_cell(network: Any) -> Any:
    """Return the cell that trains, which holds the optimizer, inside what data sinking may put around it."""
    inner = network
    for _ in range(8):
        if inner is None or hasattr(inner, "optimizer"):
            return inner
        inner = getattr(inner, "network", None)
    return network


def _model(network: Any, step_cell: Any) -> Any:
    """Return the model itself, without the cells that put a loss, micro-batches or an optimizer around it."""
    inner = network if network is not None and not hasattr(network, "optimizer") else getattr(step_cell, "network", network)
    while type(inner).__name__ in WRAPPERS:
        held = next((getattr(inner, name) for name in AROUND if getattr(inner, name, None) is not None), None)
        if held is None:
            break
        inner = held
    return inner


def _make_again(cls: type[ProbeCallback], plan: PlanSource, overrides: dict[str, Any]) -> ProbeCallback:
    return cls(plan, **overrides)


def _print_line(line: str) -> None:
    if "mindformers" in sys.modules:
        importlib.import_module("mindformers.tools.logger").logger.warning(line)
    else:
        sys.stderr.write(line + "\n")


# ---- MindFormers' registry, and programs that know nothing of the probe -------------------------------------------------


def know_mindformers() -> None:
    """Make the callback known to MindFormers, if that is imported: to its registry and to its PyNative Trainer."""
    registry, callbacks = sys.modules.get(REGISTRY), sys.modules.get(NEW_CALLBACKS)
    if registry is not None and hasattr(registry, "MindFormerRegister"):
        kind = registry.MindFormerModuleType.CALLBACK
        if not registry.MindFormerRegister.is_exist(kind, "ProbeCallback"):
            registry.MindFormerRegister.register_cls(ProbeCallback, kind)
    if callbacks is not None and hasattr(callbacks, "TrainerCallback"):
        callbacks.TrainerCallback.register(ProbeCallback)


def attach_to_script(plan: PlanSource) -> None:
    """Add the callback to every training of this process that has none."""
    if not hasattr(Model.train, "ended"):
        Replaced(Model, "train", _train_with_callback(Model.train, plan))
        Replaced(Optimizer, "__init__", _then_ask_at_exit(Optimizer.__init__))
    trainer: Any = getattr(sys.modules.get(NEW_TRAINER), "Trainer", None)
    if trainer is not None and not hasattr(trainer.train, "ended"):
        Replaced(trainer, "train", _train_pynative_with_callback(trainer.train, plan))


def _then_ask_at_exit(made: Any) -> Any:
    @wraps(made)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        atexit.unregister(_warn_if_nothing_was_watched)
        atexit.register(_warn_if_nothing_was_watched)

    return init


def _warn_if_nothing_was_watched() -> None:
    if not MindSporeProbe.has_watched:
        _print_line(f"trainprobe: {NOTHING_WATCHED}")


def _train_with_callback(original: Any, plan: PlanSource) -> Any:
    @wraps(original)
    def train(model: Any, epoch: Any, train_dataset: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> Any:
        given: Sequence[Any] = callbacks if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
        if not any(isinstance(callback, ProbeCallback) for callback in given):
            given = [ProbeCallback(plan), *given]
        return original(model, epoch, train_dataset, list(given), *args, **kwargs)

    return train


def _train_pynative_with_callback(original: Any, plan: PlanSource) -> Any:
    @wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(callback, ProbeCallback) for callback in trainer.callback_handler.callbacks):
            trainer.callback_handler.add_callback(ProbeCallback(plan))
        return original(trainer, *args, **kwargs)

    return train


def _wait_for_mindformers() -> None:
    """Make the callback known as soon as MindFormers is imported, if it is not yet."""
    for module in (REGISTRY, NEW_CALLBACKS):
        if module in sys.modules:
            know_mindformers()
        else:
            ImportWatch().wait_for(module, lambda imported: know_mindformers())


_wait_for_mindformers()
