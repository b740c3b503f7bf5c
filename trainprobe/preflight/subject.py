"""The step that is tested: it is run as often as wanted, from one state, and what it computed is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trainprobe.engine.capture.step_gradients import Gradients, apart, differentiate, distance, relative
from trainprobe.engine.capture.step_modes import RANDOM, Quiet, Reordered
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.free_memory import free_memory
from trainprobe.engine.training_guard import TrainingGuard
from trainprobe.errors import UsageError
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.opened import tensors_of
from trainprobe.preflight.tested_parameters import leave_copies, leave_other_losses

Step = Callable[[Any, Any], Any]
_MOST_NODES = 200  # of autograd's graph behind the logits
MARGIN = 32  # times the measured floor
APART = "no rank can run the step alone, and one tests it: leave the sharding out for the preflight, and start one rank"
GRADIENT, LOSS, LOGITS = range(3)  # places in `Subject.floors`
_DROPS = re.compile(r"(alpha|featurealpha|stable)?dropout|drop_?path|stochasticdepth|dropblock")


@dataclass(slots=True)
class Seen:
    """What one run of the step gave.

    loss: its value; unit: of its last place. gradients: parameter → gradient, of those that have one, or what is kept of them;
    gap: their distance from those of the step as it is. logits: the last output with rows through which the loss has a
    gradient; slope: that gradient. names: function of torch → calls; dtypes: function → those of its results; made: elements of
    these. reductions: operation between the logits and the loss → dtype of its result. outputs: (module, its first tensor with
    rows), in order of the calls, where asked for. calls: modules that ran; learns: those that ran with gradients enabled.
    """

    loss: float
    gradients: Gradients = field(default_factory=dict)
    gap: float = 0.0
    unit: float = 0.0
    names: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, set[torch.dtype]] = field(default_factory=dict)
    made: int = 0
    reductions: dict[str, torch.dtype] = field(default_factory=dict)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    learns: set[str] = field(default_factory=set)
    logits: Tensor | None = None
    slope: Tensor | None = None

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return isfinite(self.loss + self.gap) and all(bool(torch.isfinite(g).all()) for g in self.gradients.values())


class Subject:
    """A loss, a model and a batch, with the state that every run begins with."""

    def __init__(self, loss: Step, model: nn.Module, batch: Batch, guard: TrainingGuard) -> None:
        self.loss, self.model, self.batch, self.guard = loss, model, batch, guard
        self.step: Step | None = None
        self.micro_batches, self.optimizers = 1, list[Any]()
        self.names = {id(module): name or "the model" for name, module in model.named_modules()}
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.of_other_losses = 0  # parameters of optimizers that this loss gives nothing to
        self.of_this_loss = list[set[int]]()  # what each of the optimizers holds that step for it
        self.rows_run = Counter[str]()  # property → rows that were run for it
        self.now = "at the start"
        self.base = Seen(0.0)
        self.twice, self.repeats = 0.0, True  # distance of two runs from one state, and whether it is none
        self.order_is_free = False  # whether it was seen that the order of the rows does not matter
        self.draws = ""  # the functions whose random numbers change the step, dropout apart

    def measure(self) -> None:
        """Run the step as it is, and once more from what a checkpoint would bring back."""
        self.base = self.run(kept=dict)
        drawn = self.guard.drawn()
        leave_other_losses(self)
        leave_copies(self)
        if not self.base.finite:
            return
        again = self.run(rewind=False)
        self.twice, self.repeats = again.gap, again.gap == 0 and again.loss == self.base.loss
        if drawn and self.differs(self.run(seed=1)):
            self.draws = ", ".join(sorted(RANDOM & self.base.names.keys())) or "outside of torch's functions"

    @cached_property
    def held(self) -> list[set[int]]:
        """The ids of what each optimizer steps, also where it wraps another one, as Accelerate's does."""
        return [{id(p) for group in o.param_groups for p in group["params"]} for o in self.optimizers]

    @cached_property
    def still(self) -> bool:
        """Whether every gradient is zero, so that nothing that is changed can show."""
        return bool(self.base.gradients) and not any(bool(g.any()) for g in self.base.gradients.values())

    @cached_property
    def floors(self) -> tuple[float, float, float]:
        """What another order of sums changes, relative: gradients, loss, logits. It is run where it is asked for first."""
        again = attempt(lambda: self.run(modes=Reordered()), otherwise=lambda _: None) or self.run(self.batch.reversed())
        one, two = self.base.logits, again.logits
        gap = distance(one, two) if one is not None and two is not None and one.shape == two.shape else 0.0
        return again.gap, relative(self.base.loss, again.loss), gap

    @cached_property
    def other_row(self) -> tuple[Batch, Seen]:
        """The batch with another last row, which is padding and has no targets in time, and its run."""
        other = self.batch.with_other_last()
        if (seen := attempt(self.run, other, otherwise=lambda _: None)) is None:  # shares and marks have bounds
            other = self.batch.with_other_last(larger=False, hidden=False)
            seen = self.run(other)
        return other, seen

    @property
    def eps(self) -> float:
        """The resolution of the coarsest dtype of weights and outputs."""
        kinds = {p.dtype for p in self.parameters.values()} | {x.dtype for x in [self.base.logits] if x is not None}
        return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=1e-7)

    def beyond(self, gap: float, what: int = GRADIENT, times: float = 1.0) -> bool:
        """Tell whether a relative distance is more than rounding: so many times the tolerance, a multiple of the floor.

        what: GRADIENT, LOSS or LOGITS. The floor is at least the resolution of the dtype, and is measured where that is passed.
        """
        margin = MARGIN * times
        return gap > margin * self.eps and gap > margin * self.floors[what]

    def differs(self, seen: Seen) -> bool:
        """Tell whether the gradients or losses of a run differ from those of the base by more than rounding."""
        return self.beyond(relative(self.base.loss, seen.loss), LOSS) or self.beyond(seen.gap)

    def run(
        self,
        batch: Batch | None = None,
        *,
        backward: bool = True,
        rewind: bool | None = True,
        evaluate: bool = False,
        seed: int | None = None,
        modes: AbstractContextManager[Any] | None = None,
        outputs: bool = False,
        wide: bool = False,
        kept: Callable[[Gradients], Gradients] | None = None,
    ) -> Seen:
        """Run the step once and return what it gave.

        rewind: None leaves all state as it is, False the attributes of modules. evaluate: as in evaluation, dropout as it is
        there. outputs: keep those of all modules. wide: of a model in float64, casts to float32 are casts to it. kept: `dict`
        or `sampled`; by default the gradients are compared with those of the step as it is, and freed.
        """
        self.rows_run[self.now] += (batch or self.batch).rows
        if rewind is not None:
            self.guard.rewind(attributes=rewind)
        if evaluate:
            self.model.eval()
        if seed is not None:
            self.guard.reseed(seed)
        self.guard.clear_gradients()
        reductions: dict[str, torch.dtype] = {}
        quiet, watch = Quiet(evaluate, wide), _Watch(self.names, batch or self.batch, outputs)
        with ExitStack() as stack:
            stack.enter_context(_paths_kept(self.model) if not evaluate else nullcontext())
            stack.callback(register_module_forward_hook(watch.returned).remove)
            stack.enter_context(modes or nullcontext())
            stack.enter_context(quiet)
            stack.enter_context(torch.enable_grad() if backward else torch.no_grad())
            loss = scalar_of(self.loss(self.model, (batch or self.batch).tree()))
            if backward:
                if not loss.requires_grad:
                    raise UsageError("the loss has no graph: it depends on no parameter that is trained")
                reductions = watch.behind_the_logits(loss)
                differentiate(loss, self.parameters.values())
        if quiet.ignore_index is not None:
            self.batch.ignored = quiet.ignore_index
        value, gradients = float(loss.detach()), self._taken()
        gap = apart(self.base.gradients, gradients) if backward and kept is None else 0.0
        known = abs(value) * torch.finfo(loss.dtype).eps, dict(quiet.names), quiet.dtypes, quiet.made, reductions
        held = {} if kept is None else kept(gradients)
        return Seen(value, held, gap, *known, watch.outputs, watch.calls, watch.learns, *watch.last())

    def accumulate(self, step: Step, micros: list[Batch]) -> tuple[float | None, dict[str, Tensor]]:
        """Run the micro-batches as the trainer does: the loss that it reports and the gradients that it leaves."""
        self.rows_run[self.now] += self.batch.rows
        self.guard.rewind()
        self.guard.clear_gradients()
        with as_tested(self.model):
            reported = step(self.model, [micro.tree() for micro in micros])
        value = attempt(scalar_of, reported.detach(), otherwise=lambda _: None) if isinstance(reported, Tensor) else reported
        return (None if value is None else float(value)), self._taken()

    def lack(self, needed: float) -> str:
        """Return what so many bytes more on the device are beside those that are free, as text; "" where there is room."""
        free = free_memory(next(iter(self.parameters.values())).device)
        return "" if needed < free else f"would take {needed / 2**30:.3g} GiB, {free / 2**30:.3g} are free"

    def _taken(self) -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        gradients = {name: g if g.layout is torch.strided else g.to_dense() for name, g in grads.items()}
        self.guard.clear_gradients()
        return gradients

    def passes(self, name: str) -> int:
        """Return how often the step was run for a property, forward or forward and backward; micro-batches make one pass."""
        return round(self.rows_run[name] / self.batch.rows)

    def first_difference(
        self, one: Batch | Seen, other: Batch | Seen, same: Callable[[Tensor], Tensor | None] = lambda x: x
    ) -> str:
        """Return the name of the first module whose output differs between two runs. same: what must be equal of an output."""
        a, b = (x if isinstance(x, Seen) else self.run(x, backward=False, outputs=True) for x in (one, other))
        for (name, x), (_, y) in zip(a.outputs, b.outputs, strict=False):
            left, right = (attempt(same, z, otherwise=lambda _: None) for z in (x, y))
            alike = left is not None and right is not None and left.shape == right.shape
            if alike and self.beyond(distance(left, right), LOGITS):
                return name
        return ""


class _Watch:
    """Sees the outputs of modules while a step runs."""

    def __init__(self, names: dict[int, str], batch: Batch, keep: bool) -> None:
        self._names, self._batch, self._keep, self._over = names, batch, keep, False
        self._last: Tensor | None = None
        self.outputs, self.calls, self.learns = list[tuple[str, Tensor]](), set[str](), set[str]()

    def returned(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._over:
            return
        name = self._names.get(id(module), "")
        self.calls.add(name)
        if torch.is_grad_enabled():
            self.learns.add(name)
        found = _main_tensor(output, self._batch)
        if found is not None and self._keep and name:
            self.outputs.append((name, self._batch.rows_first(found.detach()).clone()))
        with_graph = found is not None and found.requires_grad and not found.is_leaf
        if with_graph or not (torch.is_grad_enabled() or found is None or getattr(self._last, "requires_grad", False)):
            self._last = found  # of a reference model beside the trained one, nothing

    def behind_the_logits(self, loss: Tensor) -> dict[str, torch.dtype]:
        """Return operation → dtype of its result, of those from the logits to the loss; what is called later is not seen."""
        self._over = True  # a checkpointed layer is called again in the backward
        if self._last is None or not self._last.requires_grad:
            return {}
        self._last.retain_grad()
        end, found, open_nodes = self._last.grad_fn, dict[str, torch.dtype](), [loss.grad_fn]
        for _ in range(_MOST_NODES):
            if not open_nodes or (node := open_nodes.pop()) is end:
                break
            if node is not None:
                given, name = getattr(node, "_input_metadata", None), node.name().removesuffix("0").removesuffix("Backward")
                found.setdefault(name, given[0].dtype if given else loss.dtype)
                open_nodes.extend(parent for parent, _ in node.next_functions)
        return found

    def last(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits and the gradient of the loss with respect to them, rows first."""
        logits, slope = (
            (None, None) if self._last is None else (self._last.detach(), self._last.grad if self._last.retains_grad else None)
        )
        turn = self._batch.rows_first
        return None if logits is None else turn(logits), None if slope is None else turn(slope)


def _main_tensor(output: Any, batch: Batch) -> Tensor | None:
    """Return the logits of an output, else its first tensor of numbers with rows."""
    logits = getattr(output, "logits", None)
    fits = (t for t in tensors_of(output if logits is None else logits) if t.is_floating_point() and t.dim() > 1 and t.numel())
    return next((t for t in fits if batch.rows_first(t).shape[0] % batch.rows == 0), None)


@contextmanager
def _paths_kept(model: nn.Module) -> Generator[None]:
    """Let no layer drop elements or paths; beside `Quiet`, which checkpointed layers that are called again do not see."""
    layers = [m for m in model.modules() if _DROPS.match(type(m).__name__.lower()) and m.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


@contextmanager
def as_tested(model: nn.Module) -> Generator[None]:
    """Let a step of a trainer run with gradients and without dropout."""
    with _paths_kept(model), Quiet(), torch.enable_grad():
        yield


def no_shards(model: Any) -> str:
    """Return why a model with parameters that are DTensors, or gathered for a while, cannot be tested, "" where it has none."""
    names = [name for name, p in model.named_parameters() if hasattr(p, "device_mesh")]
    gathers = (name for name, m in model.named_modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__))
    names += [name or "the model" for name in gathers]
    return f"{names[0]} is sharded (FSDP2 or a tensor-parallel layer): {APART}" if names else ""


def scalar_of(result: Any) -> Tensor:
    """Return the loss of what a loss function gave: a tensor of one element, alone or as `loss`. Raises UsageError."""
    if isinstance(result, dict):
        result = result.get("loss", result)
    elif not isinstance(result, Tensor) and isinstance(getattr(result, "loss", None), Tensor):
        result = result.loss
    elif isinstance(result, tuple | list):
        result = next((x for x in result if isinstance(x, Tensor) and x.numel() == 1), result)
    if not isinstance(result, Tensor) or result.numel() != 1:
        what = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise UsageError(f"loss(model, batch) returned {what}: return a scalar tensor, such as loss.mean()")
    return result.reshape(())
