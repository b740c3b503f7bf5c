"""A sample of each weight as one update leaves it and as the next finds it, at every step, audited or not.

The sample is a few elements of each parameter that an optimizer steps: two small copies on the parameter's device. Where they
lie on an accelerator, whether they are equal is kept there until the next audited step brings it with its other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainprobe.engine.arrays.without_dispatch import in_a_transform, without_dispatch
from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.patching.step_hooks import GatheredUpdate, StepListener
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.apart_on_purpose import why_not_compared
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.relations.written_between_steps import RestingWeights, Write

ELEMENTS = 4  # of a parameter
ENOUGH = 8  # gaps between updates in which a weight was at rest, before a write is no habit of the program
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TAKEN_BACK = 0.1  # the largest e of such a write, as ascent steps to sharp minima make it
_KEPT = 256  # comparisons on a device that may wait for an audited step


@dataclass(slots=True)
class _Gap:
    """What the time between two updates did.

    steps: those of the two. told: both are audited, so that another relation looks at all, or an optimizer stepped that does so
    seldom. changed: by sampled element, and then whether it is zero now; empty where nothing changed. brought: the
    same on its way to the host.
    """

    steps: tuple[int, int]
    told: bool
    names: Sequence[str]
    counts: Sequence[int]
    changed: torch.Tensor
    brought: Deferred | None = None


class _Left(NamedTuple):
    """What an update has left. audited: whether its step is."""

    step: int
    audited: bool
    parameters: list[Any]
    sample: torch.Tensor


class WeightSamples(Observer):
    """Listens to every update of an optimizer of torch.optim between `start` and `stop`.

    Where a framework updates partitions, what it gathers of them is sampled: a copy that one rank writes lives one step.
    """

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._listener: StepListener | None = None
        self._load: Replaced | None = None
        self._left: dict[int, _Left] = {}  # id of optimizer → what its last update has left
        self._stepped: dict[int, set[int]] = {}  # the same → ids of the optimizers that stepped since
        self._beside: dict[int, set[int]] = {}  # the same → ids of those that stepped in any gap between its updates
        self._gaps: list[_Gap] = []
        self._quiet: dict[str, int] = {}  # name → gaps without a write, -1 once there was one
        self._writes: list[Write] = []
        self._tape: Tape | None = None

    def start(self) -> None:
        """Begin to listen."""
        if self._listener is None:
            self._listener = StepListener(self._before, self._after, gathered=True)
            self._load = Replaced(torch.nn.Module, "load_state_dict", self._loading(torch.nn.Module.load_state_dict))

    def begin(self) -> None:
        """Learn which tape brings what waits on a device."""
        self._tape = self._audited.tape

    def end(self) -> None:
        """Have the comparisons that wait on a device brought with the other numbers of the step."""
        if self._tape is not None:
            for gap in self._gaps:
                gap.brought = self._tape.defer(gap.changed)
        self._tape = None

    def stop(self) -> None:
        """Listen no more, and hold no parameter."""
        if self._listener is not None and self._load is not None:
            self._listener.remove()
            self._load.back()
        self._listener = self._load = None
        self._left.clear()

    def facts(self, step_data: StepData) -> RestingWeights:
        """Return the writes since the last audited step."""
        return self._found()

    def late(self) -> RestingWeights | None:
        """Return those after the last audited step."""
        found = self._found()
        return found if found.writes else None

    def _found(self) -> RestingWeights:
        self._settle()
        found, self._writes = self._writes, []
        return RestingWeights(tuple(found))

    def _loading(self, original: Any) -> Any:
        def load_state_dict(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._left.clear()  # what is loaded is no write
            return original(module, *args, **kwargs)

        return load_state_dict

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard.run(self._compare, optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard.run(self._take, optimizer)

    def _take(self, optimizer: Any) -> None:
        """Sample what an update has left: of no optimizer whose weights others write."""
        self._left.pop(id(optimizer), None)
        for others in self._stepped.values():
            others.add(id(optimizer))
        self._stepped[id(optimizer)] = set()
        own = {id(p) for p in parameters_of(optimizer)} if self._left else set[int]()
        for other, left in list(self._left.items()):  # one parameter, two optimizers: each writes between
            if not own.isdisjoint(map(id, left.parameters)):
                del self._left[other]
        free = any("train_mode" in group for group in optimizer.param_groups)  # schedule-free: turned into others, and back
        whole = self._audited.plain or isinstance(optimizer, GatheredUpdate)
        if whole and not free and not in_a_transform():
            names = self._audited.names()
            held = [p for p in parameters_of(optimizer) if id(p) in names and _can_be_sampled(p)]
            sample = _sampled(held)
            if sample is not None:
                self._left[id(optimizer)] = _Left(self._audited.run.step, self._audited.tape is not None, held, sample)

    def _compare(self, optimizer: Any) -> None:
        left, others = self._left.pop(id(optimizer), None), self._stepped.get(id(optimizer), set[int]())
        known = self._beside.setdefault(id(optimizer), set())
        seldom = not others <= known  # an outer optimizer, as of DiLoCo: its program hands on what it made
        known |= others
        now = None if left is None else _sampled(left.parameters)
        if left is None or now is None:
            return
        held, was = left.parameters, left.sample
        if was.shape != now.shape or was.device != now.device:
            return
        with without_dispatch(), torch.no_grad():
            same = was.is_cpu and torch.equal(was, now)
            changed = torch.zeros(0, dtype=torch.bool) if same else torch.cat([self._differ(was, now), now == 0])
        names = self._audited.names()
        named = [names.get(id(p), "") for p in held]
        told = left.audited and self._audited.tape is not None
        counts = [min(ELEMENTS, p.numel()) for p in held]
        gap = _Gap((left.step, self._audited.run.step), told or seldom, named, counts, changed)
        self._gaps.append(gap)
        if was.is_cpu or len(self._gaps) > _KEPT:
            self._settle()

    def _differ(self, was: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Tell which elements differ; of plain weights by more than a write leaves that was taken back (w + e - e)."""
        differ = (was != now) & ~(was.isnan() & now.isnan())
        if not self._audited.plain:
            return differ
        most = 4 * torch.finfo(was.dtype).eps * torch.maximum(was.abs(), now.abs()).clamp(min=_TAKEN_BACK)
        return differ & ~((was - now).abs() <= most)

    def _settle(self) -> None:
        """Count the gaps in which a weight was at rest; a first write behind enough of them is told."""
        for gap in self._gaps:
            known = None if gap.brought is None else gap.brought.numbers
            changed = (gap.changed if known is None else known).tolist()
            at, behind = 0, sum(gap.counts)
            written: list[str] = []
            zero = 0
            for name, count in zip(gap.names, gap.counts, strict=True):
                moved = any(changed[at : at + count])
                zero += moved and all(changed[behind + at : behind + at + count])
                at += count
                quiet = self._quiet.get(name, 0)
                if moved and quiet >= 0:
                    written += [name] if quiet >= ENOUGH else []
                self._quiet[name] = -1 if moved or quiet < 0 else quiet + 1
            if written and not gap.told:
                merged = 2 * zero == len(written) > 0
                self._writes.append(Write(*gap.steps, tuple(written), len(gap.names), merged, self._are_copies()))
        self._gaps.clear()

    def _are_copies(self) -> bool:
        if not self._audited.plain:
            return True  # a framework gathers them
        models = self._audited.models
        wrapped = any(type(model).__name__ == "DistributedDataParallel" for model in models)
        return wrapped and not why_not_compared(models, self._audited.optimizers)


def _can_be_sampled(p: Any) -> bool:
    return type(p) in _PLAIN and p.is_floating_point() and p.numel() > 0 and p.layout is torch.strided and not p.is_meta


def _sampled(parameters: Sequence[Any]) -> torch.Tensor | None:
    """Return elements of each parameter, one behind the other; None where they cannot be read as they lie."""
    if not parameters or len({p.device for p in parameters}) > 1:
        return None
    with without_dispatch(), torch.no_grad():
        try:
            taken = [p.as_strided((min(ELEMENTS, n := p.numel()),), (max(1, n // ELEMENTS),)) for p in parameters]
        except RuntimeError:  # the memory was given back, or is no longer dense
            return None
        return torch.cat(taken)
