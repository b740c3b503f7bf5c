"""A plain PyTorch loop, watched without a line in it: `torch_loop.attach(model, optimizer, "plan.yaml")`.

A step begins with the first forward of the model in training mode and ends when the optimizers that hold its gradients have
stepped, so it spans all micro-batches that are accumulated; a forward in evaluation mode between two steps belongs to none.
Where one optimizer after the other steps, and where no optimizer of torch.optim makes the update, the step ends before the next
forward (`loop_step.Step`). A model whose calls pass torch by, or that trains in evaluation mode, is known by its optimizer: its
steps begin with a forward of any mode that keeps a graph, with a backward, or with the update. Between two steps functions wait
in `torch.nn.Module` and `torch.autograd`, and one hook for the updates of torch.optim. A script's next training is watched from
its fifth update on, in a folder of its own. Where you can edit the loop, `trainprobe.watch` says more plainly what a step is.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.parametrize import ParametrizationList

from trainprobe.engine.capture.gradients import sequence_number
from trainprobe.engine.capture.optimizers import live_optimizers
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.patching.step_hooks import StepListener, settle
from trainprobe.engine.core.gathering import may_end_apart
from trainprobe.engine.core.held_parameters import held_by
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.core.naming import chunks_of, in_training
from trainprobe.engine.core.words import briefly, counted
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.storage.dumps.layout import training_folder
from trainprobe.errors import OutputError, ProbeError, StopTraining
from trainprobe.integrations.auto_attach import EARLIER, called_from
from trainprobe.integrations.left_out import LeftOut
from trainprobe.integrations.live_modules import (
    has_data,
    has_own_parameters,
    model_around,
    model_of,
    parameters_of,
    stepped_together,
)
from trainprobe.integrations.loop_gates import DRIVERS, Handle, backward_gate, driven, in_constructor, module_gates
from trainprobe.integrations.loop_losses import Losses
from trainprobe.integrations.loop_step import LoopStep, may_be_two
from trainprobe.integrations.loop_words import ALL_JOINED, JOINED, NO_MODEL, NO_UPDATE, OWN_UPDATES, SKIPPED, no_update
from trainprobe.integrations.models_beside import ModelsBeside, name_of
from trainprobe.integrations.output_folder import steps_to_go_on_from
from trainprobe.integrations.own_updates import OwnGradients, Weights
from trainprobe.integrations.session import Session, agreed
from trainprobe.watching import PlanSource

LIMIT = 1024  # micro-batches without an update after which a step is no step
TRIALS = 8  # changes of the weights before an optimizer of torch.optim that holds them has stepped, which are no steps
SUCCESSION = 4  # updates of a new optimizer after which the model that it steps is another training


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


class TorchLoop:
    """Begins and ends the steps of a loop; without a model it takes the first one that is trained."""

    def __init__(self, session: Session, first_step: int = 0) -> None:
        self.session = session
        self.session.more = True
        self._given = False  # the user said which model
        self._is_first = True  # or alone, of the models of one loop
        self._trainings = 1
        self._output = session.plan.output
        self._found: list[Any] = []  # in trainings that are over
        self._updating: int | None = None  # id of the outermost optimizer that steps now
        self._gates: list[Replaced] = []
        self._losses = Losses(lambda: self.session, self._add_loss)
        self._forget(first_step)
        self._patches = self._losses.scalers(self._scaler_asked, self._scaler_decided)
        self._listener = StepListener(self._update_begins, self._update_ended)
        atexit.register(self.close)

    def _forget(self, number: int) -> None:
        """Know no model. number: of the next step."""
        self._first = self._number = number
        self._model: Any = None
        self._owned: set[int] = set()  # ids of the model's modules
        self._parameters: dict[int, Any] = {}
        self._held: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # the model's optimizers → ids of what they step
        self._step: LoopStep | None = None
        self._within: list[Any] = []  # what is taken off when the step ends
        self._updates = self._own_updates = self._trials = 0
        self._missed: set[int] = set()  # ids of the optimizers that stepped outside any step since the last one
        self._nodes = 0  # of autograd's graph, from the begin of the last step to its first backward pass
        self._usual = 0  # the smallest number of nodes that were made between two backward passes of a step
        self._unused: dict[int, int] = {}  # step → nodes, of which a backward used none of those of a forward pass before
        self._no_forwards = False  # of the model are seen in training mode
        self._asleep = False
        self._left_out = LeftOut()
        self._beside = ModelsBeside(self._beside_this)

    @property
    def findings(self) -> Any:
        """What was found so far, in this process."""
        others = [*self._found, *self._beside.findings]
        return [*others, *self.session.findings] if others else self.session.findings

    def watches(self, optimizer: Any) -> bool:
        """Tell whether an optimizer steps parameters of the model, as far as its updates have shown."""
        return optimizer in self._held

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Watch this model, opening the probe at once."""
        self._given = True
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
        self._take(model, given, first=0)

    def _take(self, model: Any, optimizers: list[Any], first: int) -> None:
        model = self._model = model if self._given else stepped_together(model)
        self._owned = {id(module) for chunk in chunks_of(model) for module in chunk.modules()}
        self._parameters = parameters_of(model)
        optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in optimizers]  # Accelerate wraps the one that steps
        if not self._number and self._trainings == 1:
            makers = optimizers or (o for o in live_optimizers() if not held_by(o).isdisjoint(self._parameters))
            here = self.session.probe_kind.backend.place()
            self._first = self._number = steps_to_go_on_from(self.session.plan, here, makers)
        self.session.begin(model, optimizers, step=self._number, first=first)
        if self._trainings == 1:
            self._output = self.session.plan.output
        atexit.unregister(self.close)
        atexit.register(self.close)  # before the session's own, which knows nothing of a step that waits for its end

    def _take_found(self, model: Any, optimizers: list[Any]) -> None:
        """Take a model that the loop has shown.

        `trainprobe run` found the folder free, so where it is taken another process of the run has no rank either.
        """
        try:
            self._take(model, optimizers, first=0)
        except OutputError:
            if EARLIER not in os.environ:
                raise
            output = self.session.plan.output / f"process{os.getpid()}"
            say(f"another process of this run has no rank either: this one writes to {output}", severity="warning")
            self.session = Session(load_plan(self.session.plan, output=output))
            self.session.more = True
            self._take(model, optimizers, first=0)
        others = [(o, 0) for o in live_optimizers() if held_by(o).isdisjoint(self._parameters)]
        self._watch_beside(others if self._trainings == 1 else [])

    def close(self) -> None:
        """Take everything off and write what is pending. Safe to call twice."""
        atexit.unregister(self.close)
        self._end_training()
        self._listener.remove()
        self._take_patches_off()
        settle()

    def _end_training(self, goes_over: bool = False) -> None:
        self._open_gates()
        step = self._step
        own = step is not None and not step.stepped and step.has_own_update()
        updated = own or (step is not None and bool(step.stepped))
        self._own_updates += own
        self._leave_step()
        if updated and self.session.is_inside:
            self.session.step_ends()
        elif self._no_forwards or goes_over or self.session.is_of_others or (step is not None and _only_called(step)):
            if step is not None and self._nodes and not goes_over and self._is_alone():  # else other graphs are counted too
                self._say_what_was_skipped(step.made() // self._nodes)
            self.session.drop_step()  # what began it may have been another model's backward, an evaluation, or a generation
        if len(joined := self._joined()) > 1 and self.session.probe is not None:
            self.session.probe.at_end(ALL_JOINED.format(briefly("step", joined)))
        self._report_missed_steps()
        self.session.end(complete=False)
        self._found += self._beside.close()

    def _say_what_was_skipped(self, forwards: int) -> None:
        if forwards > 1 and self.session.probe is not None:
            self.session.probe.at_end(SKIPPED.format(counted(forwards, "forward pass")))

    def _joined(self) -> list[int]:
        """Return the steps that hold forward passes which no backward pass used: of other steps, which the loop skipped."""
        return [step for step, made in self._unused.items() if may_be_two(made, self._usual)]

    def _is_alone(self) -> bool:
        return self._is_first and not self._beside

    def _say_what_was_joined(self) -> None:
        if not self._is_alone():  # the graphs of all models are counted together
            return
        said = bool(self._joined())
        if self._step is not None and self._step.unused:
            self._unused[self._number] = max(len(made) for made in self._step.unused)
        if not said and (joined := self._joined()):
            self._print(JOINED.format(joined[0]))

    def _take_patches_off(self) -> None:
        for patch in self._patches:
            patch.back()
        self._patches.clear()

    def look_for_backwards(self) -> None:
        """Count backward passes until a model is known, to say at the end if none was."""
        self._patches.append(self._losses.before_a_model(lambda: self._model is not None))

    # ---- where a step begins and ends ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Let the next call of the model begin a step: in training mode, or in any mode where it is not seen in that one."""
        if self._no_forwards:
            self._gates += module_gates(self._model, lambda module: torch.is_grad_enabled() and self._begins(module))
            self._gates.append(backward_gate(self._begin))
        else:
            self._gates += module_gates(self._model, lambda module: in_training(module) and self._begins(module))

    def _open_gates(self) -> None:
        for gate in self._gates:
            gate.back()
        self._gates.clear()

    def _begins(self, module: Any) -> bool:
        """Begin a step if this call is the model's; return whether the gate is open now."""
        if self._asleep:
            return False
        if self._model is None:
            trains = any(p.requires_grad and has_data(p) for p in module.parameters()) and has_own_parameters(module)
            if not trains or isinstance(module, ParametrizationList) or in_constructor():  # a layer is parametrized by a call
                return False
            if driven(module):
                self._stand_by()
                return True
            self._take_found(model_around(module), [])
        if id(module) not in self._owned or not has_own_parameters(self._model):
            return False
        self._begin(id(module))
        return True

    def _begin(self, entry: int = 0) -> None:
        self._open_gates()
        self._missed.clear()
        weights = None if self._updates else Weights(self._model)
        step = self._step = LoopStep(entry, weights, None if weights is None else OwnGradients(self._model))
        collected = self.session.step_begins(self._number)
        step.since = sequence_number()  # the probe has looked at leaves, which makes nodes
        self._within.append(StepListener(after=self._stepped))  # after the probe's own, which look at the update
        if collected or weights is not None:
            self._within.append(Handle(self._losses.collecting(self._backward_ended)))
        if weights is not None:
            self._watch_forwards(step)

    def _backward_ended(self) -> None:
        if self._step is not None:
            self._step.backward = True
            self._step.since = sequence_number()
            if self._step.gradients is not None:
                self._step.gradients.left()

    def _add_loss(self, loss: Any) -> None:
        step = self._step
        if step is not None:
            self._nodes = step.made() if not step.backward else self._nodes
            made = step.makes(loss, self._usual)
            self._usual = min(made, self._usual or made)
        if step is not None and step.gradients is not None and step.gradients.are_cleared():
            step.cleared = True
            self.session.losses_begin_again()
        self.session.add_loss(loss)

    def _watch_forwards(self, step: LoopStep) -> None:
        """Within a step, look at each forward of the model whether it belongs to the next one."""
        step.follows = True
        self._within += map(Handle, module_gates(self._model, self._forward))

    def _forward(self, module: Any) -> bool:
        if self._is_outdated(module):
            self._take_again(model_around(module), module)
            return True
        if id(module) not in self._owned:
            return self._left_out.called(module, self._parameters.keys()) and self._is_whole_model(module)
        step = self._step
        if step is None or not self._is_over(step, id(module)):
            return False
        if not step.stepped and self._is_trial():
            self._drop_step()
        else:
            self._own_updates += not step.stepped
            if self._own_updates == 1 and not step.stepped:
                self._print(OWN_UPDATES)
            self._step_ends()
        if in_training(module):
            self._begins(module)
        return True

    def _is_whole_model(self, module: Any) -> bool:
        """Watch a module whose part was taken for the model; return whether it is. Parents in Keras know their parts late."""
        if self._given or self._updates or self._is_held(alone=True):
            return False
        self._take_again(module, module)
        return True

    def _is_outdated(self, module: Any) -> bool:
        """Tell whether the model was taken before it was finished: it was called, and then given other parameters."""
        step = self._step
        if self._given or self._updates or step is None or step.backward or self._losses.in_backward:
            return False
        first = id(module) == step.entry or (id(module) not in self._owned and self._left_out.is_new(module))
        return first and self._parameters.keys() != parameters_of(self._model).keys()

    def _take_again(self, model: Any, called: Any) -> None:
        self._drop_step()
        self.session.end(complete=False)
        self._number, self._own_updates = self._first, 0
        self._found += self._beside.close()
        self._left_out = LeftOut()
        self._take(model, [], first=0)
        self._begin(id(called))

    def _is_over(self, step: LoopStep, module: int) -> bool:
        """Return whether the update of this step has been made when a module is called."""
        if self._losses.in_backward or self._updating is not None:  # recomputation, or a line search
            return False
        tells = step.stepped or step.backward or module == step.entry
        if not tells or not has_own_parameters(self._model):  # walks through the model: not at each call of a layer
            return False
        if step.stepped:
            return True
        step.forwards += module == step.entry
        if step.forwards > LIMIT:
            self._give_up()
            return False
        over = step.has_own_update()
        step.backward = False
        return over

    def _is_trial(self) -> bool:
        """Return whether an optimizer of torch.optim has still to make the first update: what changed the weights was none.

        A program may run forward and backward first, to learn what fits into memory.
        """
        found = not self._own_updates and self._trials < TRIALS and self._is_held()
        self._trials += found
        return found

    def _drop_step(self) -> None:
        self._leave_step()
        self.session.drop_step()
        self.wait()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take an update; it ends the step unless other gradients of the model wait for another optimizer."""
        step, held = self._step, self._held.get(optimizer)
        if step is None or not held:
            return
        step.stepped |= held
        if step.uses_later_losses():
            self.session.only_later_losses()
        if not self._losses.in_backward and not step.waits(self._parameters, self._held.values()):
            self._step_ends()
        elif not step.follows:
            self._watch_forwards(step)

    def _scaler_asked(self, optimizer: Any) -> None:
        """Know whether a GradScaler decides about this step: other models may have scalers, or the same one, too."""
        if self._step is not None and self._learn(optimizer):
            self._step.scaled = True
        elif self._model is not None:
            self._passes_were_of_others()

    def _scaler_decided(self, of_optimizers: bool) -> None:
        """End a step whose GradScaler has let optimizers step, or has not. of_optimizers: it was asked for some at least."""
        if self.session.is_inside and (self._step is None or self._step.scaled or not of_optimizers):
            if self._step is None or not self._step.stepped:
                self.session.note("step_skipped", 1.0)
            self._step_ends()

    def _step_ends(self) -> None:
        self._say_what_was_joined()
        self._leave_step()
        stop = self.session.step_ends()
        self._number += 1
        asks = self.session.may_stop and not may_end_apart(*chunks_of(self._model))
        if asks and agreed(stop is not None, next(iter(self._parameters.values())).device):
            self.close()
            raise stop or StopTraining(f"a rule on another rank wants to stop after step {self._number - 1}")
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
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if self._model is None:
            waited = bool(self._gates)
            self._find_model(optimizer)
            self._no_forwards = waited and self._model is not None and not callable(closure)
        if self._model is None or not self._learn(optimizer):
            return
        step = self._step
        if step is not None and step.stepped & self._held[optimizer]:  # a second time: what was waited for did not come
            self._step_ends()
        self._no_forwards |= id(optimizer) in self._missed  # in evaluation mode, or by a call of the model's own
        if self._step is None and not self._asleep and (self._no_forwards or callable(closure)):
            self._begin()  # with a closure, forward and backward come within this update

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._updating == id(optimizer):
            self._updating = None
        if self._model is None:
            if called_from(DRIVERS):
                self._stand_by()
            return
        if not self._learn(optimizer):
            self._other_updated(optimizer)
            return
        self._updates += 1
        self._watch_beside(self._left_out.optimizers())
        self._left_out.interrupted()
        if self._asleep:
            self._asleep = False
            self.wait()
        elif self._step is not None:
            self._step.weights = None
        else:
            self._missed.add(id(optimizer))

    def _learn(self, optimizer: Any) -> bool:
        """Return whether an optimizer steps parameters of the model."""
        numbers = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if numbers.isdisjoint(self._parameters):
            self._parameters |= parameters_of(self._model) if optimizer not in self._left_out else {}
        own = numbers & self._parameters.keys()
        if own:
            self._held[optimizer] = own
            if len(own) < len(numbers):
                self._left_out.beside(numbers - own)
        return bool(own)

    def _find_model(self, optimizer: Any) -> None:
        """Take the model that an optimizer is about to update, where no forward has shown one."""
        model = None if called_from(DRIVERS) else model_of(optimizer)
        if model is not None and self._trainings == 1:
            self._take_found(model, [optimizer])
        elif model is not None:
            self._watch_another(model, optimizer, 1)

    def _stand_by(self) -> None:
        """Leave a training to the integration of its framework; a loop of the script's own may follow."""
        self._open_gates()
        self._take_patches_off()
        self._losses.backwards = 0
        self._trainings = 2

    # ---- other models -----------------------------------------------------------------------------------------------------

    def _other_updated(self, optimizer: Any) -> None:
        """Take an update of another model: during this training, or in one that has followed it."""
        self._passes_were_of_others()
        if self._beside.holds(optimizer):
            self._left_out.interrupted()
            return
        idle = optimizer not in self._left_out and not self._updates and not self._own_updates and not self._is_held()
        self._left_out.saw(optimizer, begins=self._updates > 0)
        if not self._given and (idle or self._left_out.in_a_row == SUCCESSION):
            self._go_over_to(optimizer, 1 if idle else SUCCESSION)
        elif not self._updates:
            self._watch_beside(self._left_out.optimizers())

    def _passes_were_of_others(self) -> None:
        """Another model was updated, or its scaler decided so: the backward passes so far may have been for that."""
        if self._step is not None and self._step.backward and not self._step.stepped:
            self.session.others_updated()

    def _watch_beside(self, optimizers: list[tuple[Any, int]]) -> None:
        """Watch the models of other optimizers, given with their updates, while this one trains or waits for its first."""
        if not self._given:
            for optimizer in list(self._beside.add(optimizers, self._model)):
                self._left_out.forget(optimizer)

    def _beside_this(self, model: Any, optimizer: Any, number: int) -> TorchLoop | None:
        self._trainings += 1
        self.session.tell_of(name_of(self._model))
        loop = TorchLoop(self._session_of_another(), number)
        loop.session.tell_of(name_of(model))
        loop._is_first = False
        return loop if loop._watch_from(model, optimizer, number, given=True) else None

    def _is_held(self, alone: bool = False) -> bool:
        """Return whether an optimizer of torch.optim holds parameters of the model. alone: and none holds others too."""
        holding = [held for held in map(held_by, live_optimizers()) if not held.isdisjoint(self._parameters)]
        return bool(holding) and not (alone and any(held - self._parameters.keys() for held in holding))

    def _go_over_to(self, optimizer: Any, made: int) -> None:
        """Watch the training that has followed this one, in a folder of its own. made: its updates so far."""
        model = model_of(optimizer)
        if model is None or called_from(DRIVERS):
            return
        self._left_out.forget(optimizer)
        self._end_training(goes_over=True)
        self._found += self.session.findings
        self._trainings += 1
        self._watch_another(model, optimizer, made)

    def _watch_another(self, model: Any, optimizer: Any, number: int) -> None:
        self._forget(number)
        self.session = self._session_of_another()
        self.session.more = True
        self._watch_from(model, optimizer, number)

    def _session_of_another(self) -> Session:
        return Session(load_plan(self.session.plan, output=training_folder(self._output, self._trainings)))

    def _watch_from(self, model: Any, optimizer: Any, number: int, given: bool = False) -> bool:
        """Watch another training from an update on; return whether that can be."""
        self._given = given
        try:
            self._take(model, [optimizer], first=number)
        except ProbeError as error:  # raised where the user starts a training, and not within one
            name = type(chunks_of(model)[0]).__name__
            say(f"the training of {name} that follows is not watched: {error}", severity="warning")
            self.close()
            return False
        self.wait()
        return True

    # ---- what people are told ----------------------------------------------------------------------------------------------

    def _print(self, sentence: str) -> None:
        probe = self.session.probe
        if probe is not None:
            probe.console.line(sentence)

    def _report_missed_steps(self) -> None:
        if self.session.probe is None:
            if self._losses.backwards and self._model is None:
                say(NO_MODEL.format(counted(self._losses.backwards, "backward pass")), severity="warning")
            return
        if not self._updates:
            self.session.probe.at_end(no_update(self._model, self._own_updates))
        for sentence in self._left_out.sentences(trained=not (self._given and self._updates), called=not self._given):
            self.session.probe.at_end(sentence)


def _only_called(step: LoopStep) -> bool:
    """Tell whether nothing came behind the forward of a last step, in a program that no error has ended."""
    return not step.backward and not step.stepped and getattr(sys, "last_value", None) is None
