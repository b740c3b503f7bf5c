"""Calls of the model as a whole: what it was called with in training, and whether an evaluation is one.

`torch.nn.Module._call_impl` is replaced while a step is collected and while the model is in evaluation mode, which
`Module.train` tells; at all other times nothing stands in the way of a call. An evaluation is judged by what it leaves
behind, without running anything again: modules below that are still in training mode, and random numbers that were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.capture.audit.copies import Copies
from trainprobe.engine.capture.audit.functional_dropout import DropoutWatch
from trainprobe.engine.capture.audit.observers import let, observer, part_of_observer
from trainprobe.engine.capture.features.feature import tensors_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.random_state import random_fingerprint
from trainprobe.engine.core.facts import Evaluation
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import count_outer_wrappers, logical_name
from trainprobe.engine.core.records import Value
from trainprobe.engine.stats.partials import CHECKSUM, STATS
from trainprobe.engine.tape import Tape

_INSPECTED = 4  # calls that are looked at each time that the model goes into evaluation mode


class ModelCalls:
    """See the module text. `batches` holds what each training call of this step was given, as values on the tape."""

    def __init__(self, guard: Guard) -> None:
        self.batches: list[list[Value]] = []
        self.evaluations: list[Evaluation] = []
        self.bypassed = False
        self.drawn = False
        self.asleep = False  # while the audit itself runs the model
        self.before_first: Callable[[], None] | None = None
        self.on_call: Callable[[Any, Any, Any], None] | None = None  # is told the inner model and the arguments of a call
        self.on_module: Callable[[str, Any, Any, Any], None] | None = (
            None  # … and the name, module, arguments of each call in it
        )
        self.within = 0  # how many of the model's modules are running now
        self.called: dict[int, bool] = {}  # id of each module that ran in training → whether with gradients enabled
        self.looks_for_repeats = False
        self.repeats: list[tuple[int, list[Value]]] = []  # id of a module and the outputs of its forward that ran again
        self._again: set[int] = set()  # ids of modules that were seen to run again in a backward pass
        self._looked_at: frozenset[int] = frozenset()
        self._firsts: dict[int, list[list[Value]]] = {}
        self._guard = guard
        self._roots: dict[int, int] = {}  # id of module → how many wrappers stand around it
        self._names: dict[int, str] = {}
        self._models: list[Any] = []
        self._tape: Tape | None = None
        self._depth = 0
        self._left = 0
        self._replaced: Replaced | None = None
        self._train: Replaced | None = None
        self._inside: list[bool] | None = None
        self._random: list[str] = []
        self._dropped: list[str] = []
        self._path: list[Any] = []  # the modules that are running
        self.copies = observer(guard, Copies, lambda _: Copies())
        self._dropouts = DropoutWatch(lambda: self._guard.run(self._drops))

    def open(self, models: Sequence[Any]) -> None:
        """Learn which modules are the model, inside its wrappers and with them."""
        self._models = list(models)
        self._roots = {id(m): depth for model in models for depth, m in enumerate(unwrapped(model))}
        let(self._guard, self.copies.open, [list(unwrapped(model))[-1] for model in models])
        self._names.clear()
        for model in models:
            outer = count_outer_wrappers(name for name, _ in model.named_modules() if name)
            self._names |= {id(m): logical_name(raw, outer_wrappers=outer) or "root" for raw, m in model.named_modules()}
        if self._train is None:
            self._watch_modes()
        if not all(model.training for model in models):
            self._left = _INSPECTED
            self._install()

    def begin(self, tape: Tape) -> None:
        """Look at the calls of a step."""
        self._tape = tape
        self.batches, self.bypassed, self.drawn = [], False, False
        self.called = {}
        self.repeats, self._firsts = [], {}
        self._looked_at = frozenset(self._again)  # of these every forward of the step is seen, in whatever order they run
        self._depth = self.within = 0
        self._install()

    def end(self) -> None:
        """Look no more, unless the model is being evaluated."""
        self._tape = None
        if not self._left:
            self._uninstall()

    def close(self) -> None:
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

    def take_evaluations(self) -> tuple[Evaluation, ...]:
        """Return the evaluations since the last call."""
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
        original = torch.nn.Module._call_impl
        run = self._call

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if call.ended or torch.compiler.is_compiling():  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            return run(original, module, args, kwargs)

        self._replaced = Replaced(torch.nn.Module, "_call_impl", call, traced=True)

    def _uninstall(self) -> None:
        if self._replaced is not None:
            self._replaced.back()
            self._replaced = None

    def _call(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._inside is not None:
            return self._look_inside(original, module, args, kwargs)
        if module.training and not self.asleep:
            self.called[id(module)] = self.called.get(id(module), False) or torch.is_grad_enabled()
        if self._tape is None or self.asleep or id(module) not in self._names:
            return self._call_root(original, module, args, kwargs)
        if self.on_module is not None and module.training:
            self._guard.run(self.on_module, self._names[id(module)], module, args, kwargs)
        self.within += 1
        try:
            result = self._call_root(original, module, args, kwargs)
        finally:
            self.within -= 1
        if self.looks_for_repeats:
            self._guard.run(self._look_for_repeat, module, result)
        return result

    def _look_for_repeat(self, module: Any, result: Any) -> None:
        """Take the outputs of a forward in a backward pass, and from then on those of that module's first forwards."""
        if self._tape is None:
            return
        key, within = id(module), torch._C._current_graph_task_id() != -1
        if within:
            self._again.add(key)
        if key not in self._looked_at or (within and key not in self._firsts):
            return
        with DisableTorchFunction():
            values = [self._tape.value(t.detach(), STATS | CHECKSUM) for t in tensors_of(result) if t.is_floating_point()]
        if within:
            self.repeats.append((key, values))
        else:
            self._firsts.setdefault(key, []).append(values)

    def repeated(self) -> Iterator[tuple[str, int, list[Value], list[list[Value]]]]:
        """Yield name, order, outputs of a forward that ran again, and those of the module's forwards of this step."""
        order = {key: i for i, key in enumerate(self._firsts)}
        for key, values in self.repeats:
            yield self._names.get(key, ""), order[key], values, self._firsts[key]

    def called_names(self) -> dict[str, bool]:
        """Return name → whether with gradients enabled, of the modules that ran in training."""
        return {self._names[key]: enabled for key, enabled in self.called.items() if key in self._names}

    def _call_root(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        wrappers = self._roots.get(id(module))
        if wrappers is None or self._depth or self.asleep or self._guard.tripped is not None:
            if wrappers is None and not module.training and type(module) in self.copies:
                self._guard.of(part_of_observer(Copies)).run(self.copies.called, module)
            return original(module, *args, **kwargs)
        if not module.training:
            return self._evaluate(original, module, args, kwargs) if self._left else original(module, *args, **kwargs)
        if self._tape is None or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._guard.run(self._take, wrappers, args, kwargs)
        if self.on_call is not None:
            self._guard.run(self.on_call, list(unwrapped(module))[-1], args, kwargs)
        before = self._guard.run(random_fingerprint)
        self._depth += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1
            self.drawn |= before != self._guard.run(random_fingerprint)

    def _take(self, wrappers: int, args: Any, kwargs: Any) -> None:
        assert self._tape is not None
        if not self.batches and self.before_first is not None:
            self.before_first()
        self.bypassed |= wrappers > 0
        with DisableTorchFunction():
            self.batches.append([self._tape.value(t, STATS | CHECKSUM) for t in tensors_of((args, kwargs))])

    def _evaluate(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        self._left -= 1
        live = tuple(self._names.get(id(m), "") for m in module.modules() if m.training)
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
        """Run a call of an evaluation and tell whether it drew random numbers that no module inside it drew."""
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
        return self._names.get(id(module), type(module).__name__)


def unwrapped(model: Any) -> Iterator[Any]:
    """Yield a model and what it wraps, outermost first: a wrapper has one child, called `module` or `_orig_mod`."""
    yield model
    children = dict(model.named_children())
    if len(children) == 1 and next(iter(children)) in ("module", "_orig_mod") and not list(model.parameters(recurse=False)):
        yield from unwrapped(next(iter(children.values())))
