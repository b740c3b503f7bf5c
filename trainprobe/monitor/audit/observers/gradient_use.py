"""What becomes of the gradients of a step: which parameters get one, which update uses it, and which are thrown away.

Nothing is read from a device here: objects and version counters tell, and the losses go to the tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, strided
from torch._C import DisableTorchFunction
from torch.multiprocessing.reductions import StorageWeakRef

from trainprobe.engine.capture.optimizers import parameters_of
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.records import StepData, Value
from trainprobe.engine.stats.partials import STATS
from trainprobe.engine.tape import Tape
from trainprobe.monitor.audit.capture.values import mean_of, norm_of
from trainprobe.monitor.audit.facts.gradients import UsedGradients
from trainprobe.monitor.audit.observers import Audited, Observer
from trainprobe.monitor.audit.observers.backward_starts import BackwardStarts, owned

_STEADY = 3  # audited steps in a row after which an optimizer is expected to step
_NEVER = 8  # after so many, an optimizer that has left no trace of a step is reported


class GradientUse(Observer):
    """Follows gradients from `begin` to the end of a step.

    No pass counts as discarded where the update is given other tensors than the last pass left, such as buffers in which the
    program has added them up.
    """

    needs = (BackwardStarts,)

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._names = audited.names
        self._steady: dict[int, int] = {}  # id of an optimizer → audited steps in a row in which it stepped
        self._rested: dict[int, tuple[tuple[int, int], int]] = {}  # … → its trace, and audited steps in a row that left it so

    def forget(self) -> None:
        """Forget the last step."""
        self.twice: dict[str, None] = {}
        self.reached: set[str] = set()
        self.unreached: dict[str, None] = {}
        self.removed: dict[str, None] = {}
        self.discarded = 0
        self.closure = False
        self.in_turns = self.climbs = False
        self.roots: list[Value] | None = []
        self._used: dict[int, tuple[Any, int]] = {}
        self._stepped: set[int] = set()
        self._updating = False
        self._dropped: list[tuple[Any, int]] = []  # parameters whose gradients were cleared unused, and their versions
        self._lost = 0
        self._left: dict[int, int] = {}  # id of a parameter → address of the gradient that the last pass left
        self._by_pass: list[dict[int, tuple[StorageWeakRef, int]]] = []  # the same of each pass, as memory and its version
        self.overwritten: dict[str, None] = {}
        self._written = 0  # how often parameters had been written to when the last backward pass began
        self._versions: dict[int, int] = {}  # the same of each trainable parameter
        self._moved = False  # an optimizer has stepped since
        self._older: dict[str, tuple[Any, int, Value]] = {}  # gradients that were there when a pass began at other weights
        self.mixed: dict[str, Value] = {}

    def before_update(self, tape: Tape, optimizer: Any) -> None:
        """See what an optimizer is about to use."""
        self._updating = True
        self._stepped.add(id(optimizer))
        self._dropped = []
        names = self._names()
        for p in (p for p in parameters_of(optimizer) if id(p) in names and p.requires_grad):
            name, grad = names[id(p)], p.grad
            if grad is None and p.numel() == 0:
                continue  # other ranks hold it (FSDP1)
            if grad is None:
                (self.removed if id(p) in self._left else self.unreached)[name] = None
                continue
            self.reached.add(name)
            if self._left.get(id(p), (at := _address(grad))) != at:
                self.discarded = 0
            if len(self._by_pass) > 1 and self._is_of_earlier_pass(id(p), grad):
                self.overwritten[name] = None
            mark = (grad, int(grad._version))
            older = self._older.get(name)
            if older is not None and older[0] is grad and older[1] < mark[1]:
                self.mixed[name] = older[2]
            known = self._used.get(id(p))
            if known is not None and known[0] is grad and known[1] == mark[1]:
                self.twice[name] = None
            self._used[id(p)] = mark

    def stepped(self) -> None:
        """The update is over."""
        self._updating = False
        self._moved = True

    def backward_begins(self, root: Any) -> None:
        """Take the number that a backward pass begins from. Another pass after a clearing: what was cleared is lost."""
        tape, models = self._audited.tape, self._audited.models
        if tape is None or not self._audited.plain:
            return
        self.closure |= self._updating
        self.in_turns |= self._moved and self.roots != []
        self.climbs |= not (self._moved or self._updating) and self.roots != [] and _writes(models) != self._written
        if root is None:
            self.roots = None
        elif self.roots is not None:
            with DisableTorchFunction():
                self.roots.append(tape.value(root.detach(), STATS))
        if self._dropped and all(p._version == version for p, version in self._dropped):
            self.discarded += self._lost
        self._dropped = []
        self._written = _writes(models)
        if not self._updating:
            self._look_for_older(tape, models)

    def backward_ends(self) -> None:
        """Take down which gradients there are."""
        held = [p for model in self._audited.models for p in model.parameters() if p.is_leaf and p.grad is not None]
        self._left = {id(p): _address(p.grad) for p in held}
        plain = ((id(p), p.grad) for p in held if self._left[id(p)])
        self._by_pass.append({key: (StorageWeakRef(g.untyped_storage()), int(g._version)) for key, g in plain})

    def _is_of_earlier_pass(self, key: int, grad: Any) -> bool:
        """Tell whether a gradient is what an earlier pass left, as it was, though the last one left another."""
        marks = [left[key] for left in self._by_pass if key in left]
        if len(marks) < 2 or not _address(grad):
            return False
        *earlier, last = marks
        memory = StorageWeakRef(grad.untyped_storage())
        there = (of_pass for of_pass in earlier if not of_pass[0].expired())
        return last[0] != memory and any(ref == memory and version == grad._version for ref, version in there)

    def _look_for_older(self, tape: Tape, models: Sequence[Any]) -> None:
        """Take down the gradients that are there although the weights were written since the pass before began."""
        trained = [p for p in parameters_in(models) if p.requires_grad and p.is_leaf and not p.is_inference()]
        known, self._versions = self._versions, {id(p): int(p._version) for p in trained}
        written = sum(known.get(key, version) != version for key, version in self._versions.items())
        moved, self._moved = self._moved, False
        if not known or not (moved or 2 * written > len(trained)):
            return
        names = self._names()
        with DisableTorchFunction():
            for p in (p for p in trained if p.grad is not None and id(p) in names):
                self._older[names[id(p)]] = p.grad, int(p.grad._version), tape.value(p.grad, STATS)

    def cleared(self, owner: Any) -> None:
        """See gradients cleared: what is gone unused counts no more as unused."""
        starts = self._audited.of(BackwardStarts)
        if self._audited.plain and self._all_gone(owner, self._audited.models, starts.unused):
            starts.unused = 0

    def _all_gone(self, owner: Any, models: Sequence[Any], unused: int) -> bool:
        """See gradients cleared of an optimizer or module. Return whether all are gone and no update used them.

        unused: how many backward passes there were since the last update.
        """
        if self._updating or not unused:
            return False
        if _writes(models) != self._written:
            return True  # what came was used: by a step that no optimizer of torch makes (SAM climbs first)
        own = {id(p) for p in owned(owner)}
        held = [p for p in parameters_in(models) if p.requires_grad and p.is_leaf and p.grad is not None]
        if not held or any(id(p) not in own for p in held):
            return False  # some stay: it belongs to another loss
        self._dropped, self._lost = [(p, int(p._version)) for p in held], unused
        return True

    def facts(self, step_data: StepData) -> UsedGradients:
        """Return what became of the gradients."""
        optimizers = self._audited.optimizers
        found = UsedGradients(
            twice=tuple(self.twice),
            reached=frozenset(self.reached),
            unreached=tuple(self.unreached),
            removed=tuple(self.removed),
            idle=self.idle(optimizers),
            never=self.never(optimizers),
            discarded=self.discarded,
            closure=self.closure,
            in_turns=self.in_turns,
            climbs=self.climbs,
            overwritten=tuple(self.overwritten),
            differentiated=tuple(mean_of(step_data, value) for value in self.roots or ()),
            mixed={
                name: older
                for name, value in self.mixed.items()
                if value.row >= 0 and (older := norm_of(step_data, value)) != 0
            },
        )
        self.forget()
        return found

    def idle(self, optimizers: Sequence[Any]) -> tuple[str, ...]:
        """Return the parameters of optimizers that stepped at each audited step before, and not in this one as others did."""
        names, out = self._names(), dict[str, None]()
        for optimizer in optimizers:
            steady = self._steady.get(id(optimizer), 0)
            if id(optimizer) in self._stepped:
                self._steady[id(optimizer)] = steady + 1 if steady >= 0 else -1
            elif self._stepped:
                if steady >= _STEADY:
                    out |= {names[id(p)]: None for p in parameters_of(optimizer) if id(p) in names}
                self._steady[id(optimizer)] = -1
        return tuple(out)

    def never(self, optimizers: Sequence[Any]) -> tuple[str, ...]:
        """Return the parameters of optimizers that have left no trace of a step, in as many audited steps, though they could.

        A step leaves state, or raises the version counters of what it writes to: also one at a step that is not audited.
        """
        names, out = self._names(), dict[str, None]()
        for optimizer in optimizers if self._stepped else ():
            held = [p for p in parameters_of(optimizer) if id(p) in names and p.requires_grad]
            trace = sum(int(p._version) for p in held), len(optimizer.state)
            before, count = self._rested.get(id(optimizer), (trace, 0))
            waits = id(optimizer) not in self._stepped and before == trace and any(p.grad is not None for p in held)
            count = count + 1 if waits and count >= 0 else -1 if id(optimizer) in self._stepped else 0
            self._rested[id(optimizer)] = trace, count
            if count == _NEVER:
                out |= {names[id(p)]: None for p in held}
        return tuple(out)


def _writes(models: Sequence[Any]) -> int:
    """Return how often the parameters have been written to, by their version counters."""
    return sum(int(p._version) for p in parameters_in(models) if not p.is_inference())


def _address(tensor: Any) -> int:
    """Return where a tensor lies; 0 for one that does not lie in one place."""
    return int(tensor.data_ptr()) if type(tensor) is Tensor and tensor.layout is strided else 0
