"""Calls of the model as a whole: what it was called with in training, and whether an evaluation is one.

`torch.nn.Module._call_impl` is replaced while a step is collected and while the model is in evaluation mode, which
`Module.train` tells; at all other times nothing stands in the way of a call. An evaluation is judged by what it leaves
behind, without running anything again: modules below that are still in training mode, and random numbers that were drawn.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.patching import module_calls
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.random_state import random_fingerprint
from trainprobe.engine.core.containers import children
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.naming import count_outer_wrappers, in_training, logical_name
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.functional_dropout import DropoutWatch
from trainprobe.monitor.audit.capture.registered import unwrapped
from trainprobe.monitor.audit.capture.values import joined_of
from trainprobe.monitor.audit.facts.calls import Evaluation, TrainingCalls
from trainprobe.monitor.audit.observers import Audited, Observer

_OF_MODULES = ("module_called", "module_returned")
_INSPECTED = 4  # calls that are looked at each time that the model goes into evaluation mode


class ModelCalls(Observer):
    """Tells the other observers of the calls of the model and its modules.

    batches: what each training call of this step was given, as values on the tape. fingerprints: of them, once the step has
    crossed to the host. within: how many of the model's modules are running now.
    """

    essential = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self.batches: list[list[Value]] = []
        self._others = 0  # how many of them came before another model was updated
        self._resting: list[list[Value]] = []  # the same of calls in evaluation mode, of a model that trains so
        self.evaluations: list[Evaluation] = []
        self.bypassed = False
        self.drawn = False
        self.fingerprints: tuple[int, ...] = ()
        self.within = 0
        self.called: dict[int, bool] = {}  # id of each module that ran in training → whether with gradients enabled
        self._asked: dict[int, bool] = {}  # the same of each that ran in the step, in any mode
        self._roots: dict[int, int] = {}  # id of module → how many wrappers stand around it
        self.names: dict[int, str] = {}  # id of each module of the model → its name
        self._tape: Tape | None = None
        self._reports = dict.fromkeys(_OF_MODULES, False)  # whether any observer hears of these events in this step
        self._depth = 0
        self._left = 0
        self._replaced: Replaced | None = None
        self._train: Replaced | None = None
        self._inside: list[bool] | None = None
        self._random: list[str] = []
        self._dropped: list[str] = []
        self._path: list[Any] = []  # the modules that are running
        self._dropouts = DropoutWatch(lambda: self._guard.run(self._drops))

    def start(self) -> None:
        """Learn which modules are the model, inside its wrappers and with them."""
        models = self._audited.models
        self._roots = {id(m): depth for model in models for depth, m in enumerate(unwrapped(model))}
        self.names.clear()
        for model in models:
            outer = count_outer_wrappers(name for name, _ in model.named_modules() if name)
            self.names |= {id(m): logical_name(raw, outer_wrappers=outer) or "root" for raw, m in model.named_modules()}
        if self._train is None:
            self._watch_modes()
        if not all(map(in_training, models)):
            self._left = _INSPECTED
            self._install()

    def begin(self) -> None:
        """Look at the calls of a step."""
        self._tape = self._audited.tape
        self._reports = {event: self._audited.observers.hears(event) for event in _OF_MODULES}
        self.batches, self._resting, self.bypassed, self.drawn = [], [], False, False
        self.called, self._asked = {}, {}
        self._depth = self.within = self._others = 0
        self._install()

    def end(self) -> None:
        """Look no more, unless the model is being evaluated."""
        self._tape = None
        if not self._left:
            self._uninstall()

    def others_updated(self) -> None:
        """See that another model was updated."""
        self._others = len(self.batches)

    def was_of_others(self) -> None:
        """Forget what the model was called with for that update."""
        del self.batches[: self._others]

    def stop(self) -> None:
        """Put everything back."""
        self._tape, self._left = None, 0
        self._uninstall()
        if self._train is not None:
            self._train.back()
            self._train = None

    @property
    def runs(self) -> bool:
        """Whether the model runs in training, in a step that is looked at."""
        return self._depth > 0

    def facts(self, step_data: StepData) -> TrainingCalls:
        """Return what the model was called with in the step, and the evaluations since the last one."""
        self.batches = self.batches or self._resting
        self.fingerprints = tuple(joined_of(step_data, values) for values in self.batches)
        return TrainingCalls(
            self.fingerprints,
            any("int" in v.dtype for values in self.batches for v in values),
            tuple(_tokens(values) for values in self.batches),
            self.bypassed,
            {self.names[key]: enabled for key, enabled in self.called.items() if key in self.names},
            self.drawn,
            self._take_evaluations(),
            frozenset(self.names[key] for key, enabled in self._asked.items() if key in self.names and not enabled),
        )

    def late(self) -> TrainingCalls | None:
        """Return the evaluations since the last call, if there were any."""
        taken = self._take_evaluations()
        return TrainingCalls(evaluations=taken) if taken else None

    def _take_evaluations(self) -> tuple[Evaluation, ...]:
        taken, self.evaluations = tuple(self.evaluations), []
        return taken

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _watch_modes(self) -> None:
        original = torch.nn.Module.train
        roots, switched, guard = self._roots_now, self._switched, self._guard

        def train(module: Any, mode: bool = True) -> Any:
            if id(module) in roots() and not train.ended:  # type: ignore[attr-defined]
                guard.run(switched, mode)
            return original(module, mode)

        self._train = Replaced(torch.nn.Module, "train", train)

    def _roots_now(self) -> dict[int, int]:
        return self._roots

    def _switched(self, training: bool) -> None:
        if training:
            self._left = 0
            if self._tape is None:
                self._uninstall()
        elif not self._left:
            self._left = _INSPECTED
            self._install()

    def _install(self) -> None:
        if self._replaced is not None:
            return
        self._replaced = module_calls.through(self._call)

    def _uninstall(self) -> None:
        if self._replaced is not None:
            self._replaced.back()
            self._replaced = None

    def _call(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._inside is not None:
            return self._look_inside(original, module, args, kwargs)
        if not self._audited.asleep and in_training(module):
            self.called[id(module)] = self.called.get(id(module), False) or torch.is_grad_enabled()
        if self._tape is not None:
            self._asked[id(module)] = self._asked.get(id(module), False) or torch.is_grad_enabled()
        if self._tape is None or self._audited.asleep or id(module) not in self.names:
            return self._call_root(original, module, args, kwargs)
        if self._reports["module_called"] and in_training(module):
            self._guard.run(self._audited.notify, "module_called", self.names[id(module)], module, args, kwargs)
        self.within += 1
        try:
            result = self._call_root(original, module, args, kwargs)
        finally:
            self.within -= 1
        if self._reports["module_returned"]:
            self._guard.run(self._audited.notify, "module_returned", module, result)
        return result

    def _call_root(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        wrappers = self._roots.get(id(module))
        if wrappers is None or self._depth or self._audited.asleep or self._guard.tripped is not None:
            if wrappers is None and not in_training(module):
                self._guard.run(self._audited.notify, "other_called", module)
            return original(module, *args, **kwargs)
        if not in_training(module):
            return self._rest(original, module, args, kwargs)
        if self._tape is None or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._guard.run(self._take, module, wrappers, args, kwargs)
        before = self._guard.run(random_fingerprint)
        self._depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            self.drawn |= before != self._guard.run(random_fingerprint)

    def _rest(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Run a call in evaluation mode: an evaluation, or a model that trains so."""
        keeps_graph = self._tape is not None and torch.is_grad_enabled()
        if keeps_graph:
            self._guard.run(self._take_inputs, self._resting, args, kwargs)
        if self._left:
            return self._evaluate(original, module, args, kwargs)
        self._depth += keeps_graph
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= keeps_graph

    def _take_inputs(self, batches: list[list[Value]], args: Any, kwargs: Any) -> None:
        assert self._tape is not None
        with DisableTorchFunction():
            batches.append([self._tape.value(t, STATS | CHECKSUM) for t in tensors_of((args, kwargs))])

    def _take(self, module: Any, wrappers: int, args: Any, kwargs: Any) -> None:
        assert self._tape is not None
        if not self.batches:
            self._audited.notify("first_forward")
        self.bypassed |= wrappers > 0
        self._take_inputs(self.batches, args, kwargs)
        if self._audited.observers.hears("model_called"):
            inner = list(unwrapped(module))[-1]
            self._audited.notify("model_called", inner, named_arguments(inner, args, kwargs))

    def _evaluate(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        self._left -= 1
        live = tuple(self.names.get(id(m), "") for m in module.modules() if in_training(m))
        self._inside, self._random, self._dropped, self._path = [], [], [], []
        self._dropouts.start()
        try:
            return self._look_inside(original, module, args, kwargs)
        finally:
            self._dropouts.stop()
            self._inside = None
            self.evaluations.append(Evaluation(live, tuple(self._random), tuple(self._dropped)))
            if not self._left and self._tape is None:
                self._uninstall()

    def _look_inside(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Run a call of an evaluation; tell whether it drew random numbers that no module inside it drew."""
        stack = self._inside
        assert stack is not None
        before = self._guard.run(random_fingerprint)
        stack.append(False)
        self._path.append(module)
        try:
            return original(module, *args, **kwargs)
        finally:
            inner = stack.pop()
            self._path.pop()
            drew = before != self._guard.run(random_fingerprint)
            if drew and not inner:
                self._random.append(self._name(module))
            if drew and stack:
                stack[-1] = True

    def _drops(self) -> None:
        if self._path:
            self._dropped.append(self._name(self._path[-1]))

    def _name(self, module: Any) -> str:
        return self.names.get(id(module), type(module).__name__)


def named_arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by their names, in their order, and keyword dicts that are handed on as they are.

    model: without its wrappers.
    """
    try:
        named = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        named = {str(i): x for i, x in enumerate(args)} | dict(kwargs)
    flat: dict[str, Any] = {}
    for name, x in named.items():
        inside = attempt(children, x, otherwise=lambda _: None) if issubclass(type(x), dict | tuple) else None
        flat |= {name: x} if inside is None else dict(inside)
    return flat


def _tokens(values: Sequence[Value]) -> int:
    return next((prod(v.shape) for v in values if "int" in v.dtype), 0)
