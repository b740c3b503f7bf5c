"""A plain PyTorch loop, watched without a line in it: `torch_loop.attach(model, optimizer, "plan.yaml")`.

A step begins with the first forward of the model in training mode and ends when the optimizer has stepped, so it spans all
micro-batches that are accumulated; a forward in evaluation mode between two steps belongs to none. Between a step's end and
the next one's beginning a single function waits in `torch.nn.Module`. Where you can edit the loop, `trainprobe.watch` says
more plainly what a step is.
"""

from __future__ import annotations

import atexit
import logging
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.taps.replaced import Replaced
from trainprobe.engine.taps.step_hooks import StepListener, settle
from trainprobe.errors import StopTraining
from trainprobe.integrations.session import Session, agreed
from trainprobe.integrations.unedited import called_from
from trainprobe.watching import PlanSource

# training that one of these drives is watched by its own integration
DRIVERS = ("lightning.pytorch", "pytorch_lightning", "transformers.trainer", "deepspeed", "megatron")
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


def attach_to_script(plan: PlanSource) -> None:
    """Watch the first model that this process trains by a loop of its own."""
    TorchLoop(Session(plan)).wait()


class TorchLoop:
    """Begins and ends the steps of a loop; without a model it takes the first one that is trained."""

    def __init__(self, session: Session, first_step: int = 0) -> None:
        self.session = session
        self._number = first_step
        self._model: Any = None
        self._owned: set[int] = set()  # ids of the model's modules
        self._parameters: set[int] = set()
        self._within: list[Any] = []  # what is taken off when the step ends
        self._scaled = False
        self._gates: list[Replaced] = []
        scaler = torch.amp.GradScaler
        self._always = [
            Replaced(scaler, "scale", self._scale(scaler.scale)),
            Replaced(scaler, "update", self._update(scaler.update)),
        ]
        atexit.register(self.close)

    @property
    def findings(self) -> Any:
        """What was found so far, in this process."""
        return self.session.findings

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Watch this model, opening the probe at once."""
        self._model = model
        self._owned = {id(module) for module in model.modules()}
        self._parameters = {id(p) for p in model.parameters()}
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
        optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in given]  # Accelerate wraps the one that steps
        self.session.begin(model, optimizers, step=self._number, first=0, say=_log.warning)

    def close(self) -> None:
        """Take everything off and write what is pending. Safe to call twice."""
        atexit.unregister(self.close)
        self._open_gates()
        self._leave_step()
        for replaced in self._always:
            replaced.back()
        self.session.end(complete=False)
        settle()

    # ---- where a step begins and ends ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Let the next call of the model in training mode begin a step."""
        original = torch.nn.Module._call_impl

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if call.ended or torch.compiler.is_compiling() or not module.training or not self._begins(module):  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            return module._call_impl(*args, **kwargs)  # which by now is the probe's, where this step is collected

        self._gates.append(Replaced(torch.nn.Module, "_call_impl", call, traced=True))
        compiled = getattr(self._model, "_compiled_call_impl", None)
        if compiled is not None:  # `model.compile()`: its calls go there instead
            self._gates.append(Replaced(self._model, "_compiled_call_impl", self._begin_and_call(compiled)))

    def _begin_and_call(self, compiled: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not call.ended and self._model.training:  # type: ignore[attr-defined]
                self._begins(self._model)
            return compiled(*args, **kwargs)

        return call

    def _open_gates(self) -> None:
        for gate in self._gates:
            gate.back()
        self._gates.clear()

    def _begins(self, module: Any) -> bool:
        """Begin a step if this call is the model's; return whether the gate is open now."""
        if self._model is None:
            if not any(p.requires_grad for p in module.parameters()):
                return False
            if _driven(module):
                self.close()
                return True
            self.watch(module)
        if id(module) not in self._owned:
            return False
        self._open_gates()
        collected = self.session.step_begins(self._number)
        self._within.append(StepListener(after=self._stepped))  # after the probe's own, which look at the update
        if collected:
            self._within.append(_Handle(Replaced(torch.autograd, "backward", self._backward(torch.autograd.backward))))
        return True

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._step_ends()

    def _step_ends(self) -> None:
        self._leave_step()
        stop = self.session.step_ends()
        self._number += 1
        if self.session.may_stop and agreed(stop is not None, next(self._model.parameters()).device):
            self.close()
            raise stop or StopTraining(f"a rule on another rank wants to stop after step {self._number - 1}")
        self.wait()

    def _leave_step(self) -> None:
        for handle in self._within:
            handle.remove()
        self._within.clear()

    # ---- what happens within ----------------------------------------------------------------------------------------------

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not backward.ended and not self._scaled and _is_scalar(tensors):  # type: ignore[attr-defined]
                self.session.add_loss(tensors)
            return original(tensors, *args, **kwargs)

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
            if not update.ended and self.session.is_inside:  # type: ignore[attr-defined]  # the optimizer did not step
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
