"""A plain PyTorch loop, watched without a line in it: `torch_loop.attach(model, optimizer, "plan.yaml")`.

A step begins with the first forward of the model in training mode and ends when the optimizers that hold its gradients have
stepped, so it spans all micro-batches that are accumulated; a forward in evaluation mode between two steps belongs to none.
Where one optimizer after the other steps, and where no optimizer of torch.optim makes the update, the step ends before the next
forward (`_Step`). Between two steps one function waits in `torch.nn.Module`, and one hook for the updates of torch.optim.
Where you can edit the loop, `trainprobe.watch` says more plainly what a step is.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.taps.replaced import Replaced
from trainprobe.engine.taps.step_hooks import StepListener, settle
from trainprobe.errors import StopTraining
from trainprobe.integrations.live_modules import LeftOut, model_around, model_of, parameters_of
from trainprobe.integrations.own_updates import Weights
from trainprobe.integrations.session import Session, agreed
from trainprobe.integrations.unedited import called_from
from trainprobe.watching import PlanSource

# training that one of these drives is watched by its own integration
DRIVERS = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer", "deepspeed", "megatron")
LIMIT = 1024  # micro-batches without an update after which a step is no step
OWN_UPDATES = (
    "the weights change and no optimizer of torch.optim makes the update: a step ends where a forward follows a backward and "
    "the weights have changed; gradients, updates and optimizer state cannot be seen"
)
NO_UPDATE = (
    "{} forwards of the model in training mode and no update: nothing more is collected until an optimizer of "
    "torch.optim updates it; if this is no training, call model.eval() or attach to the model that trains"
)
_log = logging.getLogger("trainprobe")


def attach(model: Any, optimizer: Any = None, plan: PlanSource = None, *, first_step: int = 0, **overrides: Any) -> TorchLoop:
    """Watch a loop from now on and return what watches it; `close()` takes everything off again.

    model: a module, wrapped or not. optimizer: one or a list; by default whichever steps. first_step: number of the first
    step, for a run that is resumed. Raises PlanError for a plan that cannot be carried out, at once.
    """
    loop = TorchLoop(Session(plan, **overrides), first_step)
    loop.watch(model, optimizer)
    loop.wait()
    return loop


def attach_to_script(plan: PlanSource) -> TorchLoop:
    """Watch the first model that this process trains by a loop of its own."""
    loop = TorchLoop(Session(plan))
    loop.wait()
    loop.look_for_backwards()
    return loop


@dataclass(slots=True)
class _Step:
    """What a step has seen so far.

    entry: id of the module whose call began it. weights: as they were then, until an optimizer of torch.optim was seen.
    forwards: calls of `entry`. backward: whether a backward has ended since the last forward. stepped: ids of what optimizers
    have stepped. follows: whether each forward is looked at.
    """

    entry: int
    weights: Weights | None
    forwards: int = 0
    backward: bool = False
    stepped: set[int] = field(default_factory=set[int])
    follows: bool = False


class TorchLoop:
    """Begins and ends the steps of a loop; without a model it takes the first one that is trained."""

    def __init__(self, session: Session, first_step: int = 0) -> None:
        self.session = session
        self._number = first_step
        self._model: Any = None
        self._given = False  # the user said which model
        self._owned: set[int] = set()  # ids of the model's modules
        self._parameters: dict[int, Any] = {}
        self._held: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # the model's optimizers → ids of what they step
        self._step: _Step | None = None
        self._within: list[Any] = []  # what is taken off when the step ends
        self._updating: int | None = None  # id of the outermost optimizer that steps now
        self._in_backward = 0
        self._updates = self._own_updates = self._without_model = 0
        self._missed = 0  # updates in a row that came outside any step
        self._no_forwards = False  # of the model are seen: a step then begins where the one before ends
        self._asleep = False
        self._left_out = LeftOut()
        self._scaled = False
        self._gates: list[Replaced] = []
        scaler = torch.amp.GradScaler
        self._always: list[Any] = [
            _Handle(Replaced(scaler, "scale", self._scale(scaler.scale))),
            _Handle(Replaced(scaler, "update", self._update(scaler.update))),
            StepListener(self._update_begins, self._update_ended),
        ]
        atexit.register(self.close)

    @property
    def findings(self) -> Any:
        """What was found so far, in this process."""
        return self.session.findings

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Watch this model, opening the probe at once."""
        self._given = True
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
        self._take(model, given)

    def _take(self, model: Any, optimizers: list[Any]) -> None:
        self._model = model
        self._owned = {id(module) for module in model.modules()}
        self._parameters = {id(p): p for p in model.parameters()}
        optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in optimizers]  # Accelerate wraps the one that steps
        self.session.begin(model, optimizers, step=self._number, first=0, say=_log.warning)
        atexit.unregister(self.close)
        atexit.register(self.close)  # before the session's own, which knows nothing of a step that waits for its end

    def close(self) -> None:
        """Take everything off and write what is pending. Safe to call twice."""
        atexit.unregister(self.close)
        self._open_gates()
        step = self._step
        updated = step is not None and (step.stepped or self._has_own_update(step))
        self._leave_step()
        for handle in self._always:
            handle.remove()
        self._always.clear()
        if updated and self.session.is_inside:
            self.session.step_ends()
        self._say_what_was_missed()
        self.session.end(complete=False)
        settle()

    def look_for_backwards(self) -> None:
        """Count backward passes until a model is known, to say at the end if none was."""
        original = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._without_model += self._model is None
            return original(*args, **kwargs)

        self._always.append(_Handle(Replaced(torch.autograd, "backward", backward)))

    # ---- where a step begins and ends ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Let the next call of the model in training mode begin a step."""
        self._gates += self._gate(lambda module: module.training and self._begins(module))

    def _gate(self, opens: Callable[[Any], bool]) -> list[Replaced]:
        """Ask `opens` at each call of a module whether what collects may have changed."""
        original = torch.nn.Module._call_impl

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if call.ended or torch.compiler.is_compiling() or not opens(module):  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            return module._call_impl(*args, **kwargs)  # which by now is the probe's, where this step is collected

        gates = [Replaced(torch.nn.Module, "_call_impl", call, traced=True)]
        compiled = getattr(self._model, "_compiled_call_impl", None)
        if compiled is not None:  # `model.compile()`: its calls go there instead
            gates.append(Replaced(self._model, "_compiled_call_impl", self._open_and_call(compiled, opens)))
        return gates

    def _open_and_call(self, compiled: Any, opens: Callable[[Any], bool]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not call.ended:  # type: ignore[attr-defined]
                opens(self._model)
            return compiled(*args, **kwargs)

        return call

    def _open_gates(self) -> None:
        for gate in self._gates:
            gate.back()
        self._gates.clear()

    def _begins(self, module: Any) -> bool:
        """Begin a step if this call is the model's; return whether the gate is open now."""
        if self._asleep:
            return False
        if self._model is None:
            if not any(p.requires_grad for p in module.parameters()):
                return False
            if _driven(module):
                self.close()
                return True
            self._take(model_around(module), [])
        if id(module) not in self._owned:
            return False
        self._begin(id(module))
        return True

    def _begin(self, entry: int = 0) -> None:
        self._open_gates()
        self._missed = 0
        weights = None if self._updates else Weights(self._model)
        step = self._step = _Step(entry, weights)
        collected = self.session.step_begins(self._number)
        self._within.append(StepListener(after=self._stepped))  # after the probe's own, which look at the update
        if collected or weights is not None:
            self._within.append(_Handle(Replaced(torch.autograd, "backward", self._backward(torch.autograd.backward))))
        if weights is not None:
            self._watch_forwards(step)

    def _watch_forwards(self, step: _Step) -> None:
        """Within a step, look at each forward of the model whether it belongs to the next one."""
        step.follows = True
        self._within += map(_Handle, self._gate(self._forward))

    def _forward(self, module: Any) -> bool:
        if id(module) not in self._owned or not self._is_over(id(module)):
            return False
        self._step_ends()
        if module.training:
            self._begins(module)
        return True

    def _is_over(self, module: int) -> bool:
        """Return whether the update of this step has been made when a module is called."""
        step = self._step
        if step is None or self._in_backward or self._updating is not None:  # recomputation, or a line search
            return False
        if step.stepped:
            return True
        step.forwards += module == step.entry
        if step.forwards > LIMIT:
            self._give_up()
            return False
        over = self._has_own_update(step)
        step.backward = False
        if over:
            self._own_updates += 1
            if self._own_updates == 1:
                self._print(OWN_UPDATES)
        return over

    def _has_own_update(self, step: _Step) -> bool:
        return step.backward and step.weights is not None and step.weights.changed()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take an update; it ends the step unless other gradients of the model wait for another optimizer."""
        step, held = self._step, self._held.get(optimizer)
        if step is None or not held:
            return
        step.stepped |= held
        if not self._in_backward and not self._waits(step):
            self._step_ends()
        elif not step.follows:
            self._watch_forwards(step)

    def _waits(self, step: _Step) -> bool:
        known = set[int]().union(*self._held.values())
        left = (p for number, p in self._parameters.items() if number not in step.stepped and p.requires_grad)
        return any(id(p) in known or (p.is_leaf and p.grad is not None) for p in left)

    def _step_ends(self) -> None:
        self._leave_step()
        stop = self.session.step_ends()
        self._number += 1
        if self.session.may_stop and agreed(stop is not None, next(self._model.parameters()).device):
            self.close()
            raise stop or StopTraining(f"a rule on another rank wants to stop after step {self._number - 1}")
        if self._no_forwards:
            self._begin()
        else:
            self.wait()

    def _leave_step(self) -> None:
        for handle in self._within:
            handle.remove()
        self._within.clear()
        self._step = None

    def _give_up(self) -> None:
        """Collect nothing until an update is seen: what looked like a step never ends."""
        self._asleep = True
        self._leave_step()
        self._number += 1
        if self.session.probe is not None:
            self.session.step_ends(complete=False)
        self._print(NO_UPDATE.format(LIMIT))

    # ---- updates of torch.optim, within steps and outside ---------------------------------------------------------------

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._updating is None:
            self._updating = id(optimizer)
        if self._model is None or not self._learn(optimizer):
            return
        step = self._step
        if step is not None and step.stepped & self._held[optimizer]:  # a second time: what was waited for did not come
            self._step_ends()
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if callable(closure) and self._step is None and not self._asleep:
            self._begin()  # forward and backward come within this update

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._updating == id(optimizer):
            self._updating = None
        if self._model is None and not self._find_model(optimizer):
            return
        if not self._learn(optimizer):
            self._left_out.saw(optimizer)
            if self._step is not None and self._step.backward and not self._step.stepped:
                self.session.forget_loss()  # the backward passed through this model for the update of another
            return
        self._updates += 1
        if self._asleep:
            self._asleep = False
            self.wait()
        elif self._step is not None:
            self._step.weights = None
        else:
            self._missed += 1
            if self._missed > 1:  # no forward passed the gate: in evaluation mode, or by a call of the model's own
                self._no_forwards = True
                self._begin()

    def _learn(self, optimizer: Any) -> bool:
        """Return whether an optimizer steps parameters of the model."""
        numbers = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if numbers.isdisjoint(self._parameters):
            self._parameters |= parameters_of(self._model) if optimizer not in self._left_out else {}
        own = numbers & self._parameters.keys()
        if own:
            self._held[optimizer] = own
        return bool(own)

    def _find_model(self, optimizer: Any) -> bool:
        """Take the model that an optimizer updates, where no forward has shown one."""
        if called_from(DRIVERS):
            self.close()
            return False
        model = model_of(optimizer)
        if model is not None:
            self._take(model, [optimizer])
        return model is not None

    # ---- what people are told ----------------------------------------------------------------------------------------------

    def _print(self, sentence: str) -> None:
        probe = self.session.probe
        if probe is not None:
            probe.console.line(sentence)

    def _say_what_was_missed(self) -> None:
        probe, left_out = self.session.probe, self._left_out.words()
        if probe is None:
            if self._without_model and self._model is None:
                _log.warning(
                    "trainprobe: %d backward passes were seen and no model: nothing was watched. Hand the model to "
                    "trainprobe.watch or to trainprobe.integrations.torch_loop.attach.",
                    self._without_model,
                )
            return
        if not self._updates:
            seen = f", {self._own_updates} by other means" if self._own_updates else ""
            probe.at_end(f"No update of {type(self._model).__name__} by an optimizer of torch.optim was seen{seen}.")
        if left_out and (not self._given or not self._updates):
            probe.at_end(f"Also trained here and not watched: {left_out}; torch_loop.attach(model) watches one more.")

    # ---- what happens within ----------------------------------------------------------------------------------------------

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not backward.ended and not self._scaled and _is_scalar(tensors):  # type: ignore[attr-defined]
                self.session.add_loss(tensors)
            self._in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._in_backward -= 1
                if self._step is not None:
                    self._step.backward = True

        return backward

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            if not scale.ended and scaler.is_enabled():  # type: ignore[attr-defined]
                self._scaled = True  # what backward is then called on is no loss
                if _is_scalar(outputs):
                    self.session.add_loss(outputs)
                scaled = original(scaler, outputs)
                self.session.note("loss_scale", scaler._scale)
                return scaled
            return original(scaler, outputs)

        return scale

    def _update(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if not update.ended and self.session.is_inside:  # type: ignore[attr-defined]  # no optimizer stepped, or not all
                if self._step is None or not self._step.stepped:
                    self.session.note("step_skipped", 1.0)
                self._step_ends()
            return result

        return update


class _Handle:
    """Takes a replacement off as hooks are taken off."""

    def __init__(self, replaced: Replaced) -> None:
        self.remove = replaced.back


def _is_scalar(x: Any) -> bool:
    with DisableTorchFunction():
        return isinstance(x, torch.Tensor) and x.numel() == 1


def _driven(module: Any) -> bool:
    """Tell whether this is the forward of a framework with an integration of its own: its module, or one that it calls."""
    return type(module).__module__.startswith(DRIVERS) or called_from(DRIVERS)
