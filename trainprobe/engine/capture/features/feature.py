"""Deeper features: numbers worked out from tensors inside chosen modules, on their device, in steps that ask for them.

`torch.nn.Module._call_impl` is replaced while a step is collected, as the module tap does it; each kind of feature is one
file that offers the methods of `FeatureKind`. What is worked out never enters the training: it reads detached tensors, without
a gradient, and draws no random number. Forwards that are run again during backward are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id, _DisableAutocast

from trainprobe.engine.arrays.torch_arrays import reason_without_statistics
from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.containers import tensors_in
from trainprobe.engine.core.guard import Guard, attempt, fault_text
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.tape import Tape

Entry = tuple[str, tuple["FeatureKind", ...]]  # name, features that look at the module
K = TypeVar("K", bound="FeatureKind")


class FeatureKind(Protocol):
    """One kind of feature. every: at each so many collected steps. note: what could not be seen, said once."""

    every: int
    notes: dict[str, None]

    def wants(self, name: str, module: Any) -> bool:
        """Tell whether calls of this module are looked at."""
        ...

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """A step begins in which this kind is due."""
        ...

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Look at what a module is called with; what is returned is given to `after`."""
        ...

    def after(self, name: str, module: Any, before: Any, out: Any) -> None:
        """Look at what a module returned."""
        ...

    def stepping(self) -> None:
        """Look at gradients: an optimizer is about to step."""
        ...

    def sleep(self, asleep: bool) -> None:
        """Take away, or put back, what stands in torch's place: while a probe is paused."""
        ...

    def end(self) -> None:
        """Remove everything."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a feature may ask of the training. chosen: tells whether its section of the plan selects a name. guard: its own.

    parameters: returns id of parameter → recorded name. inside: (name, module) of the calls that are running, outermost first.
    """

    chosen: Callable[[str], bool]
    guard: Guard
    parameters: Callable[[], Mapping[int, str]]
    inside: list[tuple[str, Any]]


class FeatureTap(Tap):
    """See the module text. names: id of module → recorded name, as it is now.

    `inside` holds (name, module) of the calls that are running, outermost first.
    """

    def __init__(
        self,
        kinds: Sequence[FeatureKind],
        guard: Guard,
        names: Callable[[], Mapping[int, str]],
        inside: list[tuple[str, Any]],
    ) -> None:
        self._kinds = tuple(kinds)
        self._guard = guard
        self._names = names
        self._inside = inside
        self._models: list[Any] = []
        self._table: dict[int, Entry] = {}
        self._known = -1
        self._tape: Tape | None = None
        self._due: tuple[FeatureKind, ...] = ()
        self._collected = -1
        self._thread = 0
        self._replaced: Replaced | None = None
        self._paused = False
        self._left_out: dict[str, None] = {}  # notes of what could not be looked at
        for kind in self._kinds:
            self._guard_of(kind).on_trip(partial(self._drop, kind))

    @property
    def notes(self) -> list[str]:
        """What could not be seen, and why."""
        return [*(note for kind in self._kinds for note in kind.notes), *self._left_out]

    def of(self, kind: type[K]) -> K | None:
        """Return the feature of a class, where the plan asks for it."""
        return next((one for one in self._kinds if isinstance(one, kind)), None)

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Remember whose modules to look at."""
        self._models = chunks_of(model)
        self._known = -1

    def begin(self, tape: Tape) -> None:
        """Let the kinds that are due look at a step."""
        self._tape = tape
        self._collected += 1
        self._thread = get_ident()
        self._inside.clear()
        self._learn()
        due = [k for k in self._kinds if self._collected % k.every == 0 and self._guard_of(k).tripped is None]
        with without_autograd():
            for kind in due:
                self._due += (kind,)
                self._guard_of(kind).within(kind.begin, tape, self._models)
        if self._due:
            self.resume()

    def _guard_of(self, kind: FeatureKind) -> Guard:
        return self._guard.of(part_of_feature(type(kind)))

    def _drop(self, kind: FeatureKind) -> None:
        """Have a kind that has failed look no more, and take away what it has put in."""
        if kind in self._due:
            self._due = tuple(other for other in self._due if other is not kind)
            kind.end()

    def pause(self) -> None:
        """Take no forward calls for a while."""
        if self._replaced is not None and not self._paused:
            self._replaced.back()
            self._paused = True
            for kind in self._due:
                self._guard_of(kind).undo(kind.sleep, True)

    def resume(self) -> None:
        """Take forward calls again."""
        if self._due and (self._replaced is None or self._paused):
            self._paused = False
            if self._replaced is None or not self._replaced.wake():
                self._replaced = Replaced(torch.nn.Module, "_call_impl", self._watched(torch.nn.Module._call_impl), traced=True)
            for kind in self._due:
                self._guard_of(kind).within(kind.sleep, False)

    def stepping(self) -> None:
        """Look at gradients before the first update of a step."""
        if self._tape is not None:
            with without_autograd():
                for kind in self._due:
                    self._spared("the gradients", kind.stepping)

    def end(self, again: bool = False) -> None:
        """Remove everything."""
        self.pause()
        self._replaced = None
        for kind in self._due:
            self._guard_of(kind).undo(kind.end)
        self._due = ()
        self._tape = None

    def _learn(self) -> None:
        names = self._names()
        if len(names) == self._known:
            return
        self._known = len(names)
        self._table.clear()
        for model in self._models:
            for module in model.modules():
                name = names.get(id(module), "")
                if name:
                    kinds = tuple(kind for kind in self._kinds if kind.wants(name, module))
                    self._table[id(module)] = (name, kinds)

    def _watched(self, original: Any) -> Any:
        table, run = self._table, self._run

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            entry = table.get(id(module))
            if entry is None or call.ended:  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            return run(entry, original, module, args, kwargs)

        return call

    def _run(self, entry: Entry, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if (
            self._tape is None
            or torch.compiler.is_compiling()
            or get_ident() != self._thread
            or _current_graph_task_id() != -1  # a forward that is run again
        ):
            return original(module, *args, **kwargs)
        depth = len(self._inside)
        self._inside.append((entry[0], module))
        try:
            before = self._guard.run(self._before, entry, module, args, kwargs) if entry[1] else None
            out = original(module, *args, **kwargs)
            if before is not None:
                self._guard.run(self._after, entry, module, before, out)
            return out
        finally:
            del self._inside[depth:]

    def _before(self, entry: Entry, module: Any, args: Any, kwargs: Any) -> list[tuple[FeatureKind, Any]]:
        with without_autograd():
            kinds = [kind for kind in entry[1] if kind in self._due]
            return [(k, self._spared(entry[0], k.before, entry[0], module, args, kwargs)) for k in kinds]

    def _after(self, entry: Entry, module: Any, before: list[tuple[FeatureKind, Any]], out: Any) -> None:
        with without_autograd():
            for kind, seen in before:
                self._spared(entry[0], kind.after, entry[0], module, seen, out)

    def _spared(self, where: str, look: Callable[..., Any], *args: Any) -> Any:
        """Let one kind look; what it cannot look at costs that value only, and a note."""
        return attempt(look, *args, otherwise=partial(self._leave_out, where, look))

    def _leave_out(self, where: str, look: Any, fault: Exception) -> None:
        self._left_out[f"{type(look.__self__).__name__} left out {where}: {fault_text(fault)}"] = None


def feature_in(file: str) -> type[QuietFeature]:
    """Return the feature that a file of this folder holds."""
    module = importlib.import_module(f"{__package__}.{file}")
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, QuietFeature))
    return next(kind for kind in kinds if kind.__module__ == module.__name__)


def part_of_feature(kind: type) -> str:
    """Return the name that a class of features has as a part of the tool (see `engine.core.guard.Guard.of`)."""
    return f"the feature {kind.__name__}"


class without_autograd:  # noqa: N801 - used like a function
    """Work apart from the training: without gradients, torch-function modes, or a lower precision that autocast would choose.

    Not made by `contextlib`: it is entered some hundred times a step.
    """

    __slots__ = ("_autocast", "_functions", "_gradients")

    def __enter__(self) -> None:
        self._functions, self._autocast = DisableTorchFunction(), _DisableAutocast()
        self._functions.__enter__()
        self._autocast.__enter__()
        self._gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._gradients)
        self._autocast.__exit__(*error)
        self._functions.__exit__(*error)


class QuietFeature:
    """What a kind of feature does where it has nothing to do; `_tape` is the tape of the step, or None.

    Its file holds one such class, whose further arguments are the fields of its section of the plan.
    """

    def __init__(self, around: Surroundings, *, every: int = 1) -> None:
        self.every = every
        self.notes: dict[str, None] = {}
        self._chosen = around.chosen
        self._tape: Tape | None = None
        self._models: Sequence[Any] = ()

    def wants(self, name: str, module: Any) -> bool:
        """Look at no module."""
        return False

    def begin(self, tape: Tape, models: Sequence[Any]) -> None:
        """Remember the tape and whose step it is."""
        self._tape, self._models = tape, models

    def before(self, name: str, module: Any, args: Any, kwargs: Any) -> Any:
        """Look at nothing."""

    def after(self, name: str, module: Any, before: Any, out: Any) -> None:
        """Look at nothing."""

    def stepping(self) -> None:
        """Look at nothing."""

    def sleep(self, asleep: bool) -> None:
        """Nothing stands in torch's place."""

    def end(self) -> None:
        """Let go of the tape."""
        self._tape, self._models = None, ()


def tensors_of(x: Any) -> list[Any]:
    """Return the tensors in nested lists, tuples, dicts and dataclass-like outputs of a model, in order."""
    return tensors_in(x, _is_tensor)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def whole(t: Any) -> bool:
    """Tell whether a tensor's elements are all here, plain and to be read."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and not reason_without_statistics(t) and t.numel() > 0
