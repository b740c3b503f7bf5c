"""Leaves out the updates that a bad batch would spoil, on all ranks or on none (docs/again.md, "Which sample made the spike?").

Before an optimizer moves, each rank looks at its own loss, at the largest loss of a row where `loss_rows` sees it, and at the
gradients. One collective brings the worst of all ranks to each: a number on the device, which the host reads once, together
with the losses. Where that says so, the ranks tell each other why, and each optimizer of this backward pass finds no gradients.

A rank whose tool has stopped goes on answering, as the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainprobe.engine.capture.features.feature import FeatureTap, without_autograd
from trainprobe.engine.capture.features.loss_rows import SLOTS, LossRows, largest_row
from trainprobe.engine.capture.gathering import gathering, largest, ranks
from trainprobe.engine.capture.loss_scaling import LossScalingTap
from trainprobe.engine.capture.optimizer_steps import behind_closure
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.patching.step_hooks import StepListener, leave_out
from trainprobe.engine.core.gathering import may_end_apart
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Finding, Site
from trainprobe.engine.core.words import briefly, counted
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.errors import PlanError, StopTraining
from trainprobe.monitor.alarm_line import AlarmLine
from trainprobe.monitor.program import words_of_row
from trainprobe.monitor.rules.spike import Options

SPIKE, GRADIENT, LOSS = 1, 2, 3  # what speaks against an update, the worse the higher


@dataclass(frozen=True, slots=True)
class Objection:
    """What all ranks know of an update that is left out. kind, row: of the worst rank; the row is -1 where none stands out."""

    kind: int
    rank: int
    row: int
    why: str


class Skipping(Program):
    """See the module text. in_a_row: after so many updates that were left out, a spike is a new level."""

    def __init__(self, in_a_row: int, making: Making) -> None:
        super().__init__("skip", Schedule(), part="the skipping of updates")
        self._in_a_row, self._making = in_a_row, making
        self._listener: StepListener | None = None
        self._replaced: list[Replaced] = []
        self._gather = gathering().gather
        self._run = 0  # updates that were left out, one after the other
        self._steps: list[int] = []  # whose update was left out
        self._verdict: Objection | None = None
        self._used: set[int] = set()  # ids of the optimizers that have asked for the verdict, since the last backward pass
        self._sum: Any = None  # of the losses since the last vote
        self._scale: Any = None  # of a GradScaler
        self._scaled_update = 0  # id of the optimizer that a GradScaler lets step now, or does not

    # ---- events ------------------------------------------------------------------------------------------------------

    def attached(self, probe: EngineProbe) -> None:
        """Know the probe."""
        self.probe = probe
        self._scaling = LossScalingTap(probe.guard, self._scaled, lambda: None)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """Look at each update from now on. Raises PlanError where updates cannot be left out."""
        self._chunks = chunks_of(model)
        refuse(self._chunks, optimizer)
        if self._listener is not None:
            return
        options = Options()
        self._loss = AlarmLine(options.loss_ratio, self.probe.place.world_size)
        self._row = AlarmLine(options.ratio, self.probe.place.world_size)
        self._scaling.begin(None)  # pyright: ignore[reportArgumentType]  (it keeps no tape)
        scaler, autograd = torch.amp.GradScaler, torch.autograd
        self._replaced = [
            Replaced(scaler, "step", self._around_scaler(scaler.step)),
            Replaced(autograd, "backward", self._around_backward(autograd.backward)),
        ]
        self._listener = StepListener(self._update_begins)

    def closing(self) -> None:
        """Say which steps were left out."""
        if self._steps:
            self.probe.at_end(f"The updates of {briefly('step', self._steps)} were left out.")

    def closed(self) -> None:
        """Look no more."""
        if self._listener is not None:
            self._listener.remove()
            self._listener = None
            self._scaling.end()
        for one in reversed(self._replaced):
            one.back()
        self._replaced.clear()

    # ---- what a step brings ------------------------------------------------------------------------------------------

    def _scaled(self, scale: Any) -> None:
        self._scale = scale

    def _around_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not backward.ended:  # type: ignore[attr-defined]
                self.probe.guard.run(attempt, self._take_losses, tensors, otherwise=lambda _: None)
            return original(tensors, *args, **kwargs)

        return backward

    def _take_losses(self, tensors: Any) -> None:
        self._used.clear()
        for loss in tensors if isinstance(tensors, Sequence) else (tensors,):
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                with without_autograd():
                    loss = loss.detach().reshape(()).float()
                    loss = loss if self._scale is None else loss / self._scale.reshape(())
                    self._sum = loss if self._sum is None else self._sum + loss

    # ---- the update --------------------------------------------------------------------------------------------------

    def _around_scaler(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if step.ended or not scaler.is_enabled():  # type: ignore[attr-defined]
                return original(scaler, optimizer, *args, **kwargs)
            self._asks(optimizer, scaled=True)  # here, as the scaler of one rank alone may leave the update out
            self._scaled_update = id(optimizer)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaled_update = 0

        return step

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        def late(closure: Callable[..., Any], *given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._decides(optimizer)
            return result

        return behind_closure(args, kwargs, lambda: self._decides(optimizer), late)

    def _decides(self, optimizer: Any) -> None:
        """Leave out an update that is not to be made."""
        if self._scaled_update != id(optimizer):
            self._asks(optimizer)
        if self._verdict is not None:
            leave_out(optimizer)

    def _asks(self, optimizer: Any, *, scaled: bool = False) -> None:
        """Have the ranks decide once about all updates that follow the same backward passes."""
        if self._used and id(optimizer) not in self._used:
            self._used.add(id(optimizer))
            return
        self._used, self._verdict = {id(optimizer)}, None
        guard = self.probe.guard
        if may_end_apart(*self._chunks) or isinstance(optimizer, torch.optim.LBFGS):
            guard.run(self._not_judged, optimizer)
        elif not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            with without_autograd():
                seen = guard.run(guard.part, self.part, self._evidence, optimizer, scaled)
                guard.keep_on(self._vote, torch.zeros(3) if seen is None else seen)
            guard.run(guard.part, self.part, self._tell)
        self._sum = None

    def _not_judged(self, optimizer: Any) -> None:
        why = (
            "runs its closure several times"
            if isinstance(optimizer, torch.optim.LBFGS)
            else "is within Join, where ranks end apart"
        )
        self.probe.report_once(Finding("skip", "info", f"no update is left out: {type(optimizer).__name__} {why}"))

    def _evidence(self, optimizer: Any, scaled: bool) -> torch.Tensor:
        """Return what speaks against this update, the loss, and the largest loss of a row, on the device; 0 for none."""
        none = torch.zeros(())
        bad = none if scaled else _not_finite(self._gradients(optimizer))
        loss = self._sum if self._sum is not None else none
        rows = self._rows()
        row = torch.stack([flat[:n].max() for n, flat in rows]).max().float() if rows else none
        device = next((t.device for t in (bad, loss, row) if t.device.type != "cpu"), bad.device)
        bad, loss, row = bad.to(device), loss.to(device), row.to(device)
        flags = (
            LOSS * ~(loss.isfinite() & row.isfinite()),
            GRADIENT * bad,
            SPIKE * ((loss > self._loss.line) | (row > self._row.line)),
        )
        return torch.stack((torch.stack([flag.float() for flag in flags]).max(), loss, row))

    def _gradients(self, optimizer: Any) -> list[torch.Tensor]:
        """Return what this process holds of the gradients that belong to the backward passes, each once."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        every = {
            id(p): p.grad for p in (*held, *(p for chunk in self._chunks for p in chunk.parameters())) if p.grad is not None
        }
        here = (getattr(gradient, "_local_tensor", gradient) for gradient in every.values())
        return [g._values() if g.layout == torch.sparse_coo else g for g in here if g.numel()]

    def _rows(self) -> list[tuple[int, torch.Tensor]]:
        """Return the losses of the rows of this step, where the plan has `loss_rows`."""
        tap = self._making.taps.get("features", FeatureTap)
        seen = tap.of(LossRows) if tap is not None else None
        return [(n, numbers.reshape(-1)) for n, numbers in seen.rows] if seen is not None else []

    # ---- all ranks together ------------------------------------------------------------------------------------------

    def _vote(self, seen: torch.Tensor) -> None:
        """Bring the worst of all ranks to each; where something speaks against the update, learn what."""
        worst = largest(seen[0])
        if worst.device != seen.device:
            seen = seen.to(worst.device)
        kind, own, loss, row = torch.cat((worst.view(1), seen)).tolist()  # the host waits here, and nowhere else
        spikes = int(kind) == SPIKE and self._run >= self._in_a_row
        if kind and not spikes:
            self._verdict = self._learn_why(int(kind), int(own), loss, row)
        self._run = self._run + 1 if self._verdict is not None else 0
        self._loss.add(loss, spikes=self._verdict is not None)
        self._row.add(row, spikes=self._verdict is not None)

    def _learn_why(self, kind: int, own: int, loss: float, row: float) -> Objection:
        """Have each rank tell the others what it saw; return the words of the worst. Every rank is here, or none."""
        excess = max(loss / self._loss.usual, row / self._row.usual) if own == SPIKE else 0.0
        number, text = attempt(self._in_words, own, loss, row, otherwise=lambda _: (-1, "it cannot say why"))
        words = np.frombuffer(text.encode().ljust(-(-len(text.encode()) // 8) * 8), dtype=np.uint64)
        head = np.array([own, np.nan_to_num(excess), number], dtype=np.float64).view(np.uint64)
        told = self._gather(np.concatenate((head, words)))
        heads = [tuple(message[:3].view(np.float64)) for message in told]
        rank = max(range(len(told)), key=lambda i: heads[i][:2])
        return Objection(kind, rank, int(heads[rank][2]), told[rank][3:].tobytes().decode().rstrip())

    def _in_words(self, own: int, loss: float, row: float) -> tuple[int, str]:
        """Return the row of this rank that stands out, -1 for none, and what this rank saw."""
        rank = self.probe.place.rank
        number, row_text = self._row_in_words(rank)
        if own == LOSS:
            text = f"the loss of rank {rank} was not finite"
        elif own == GRADIENT:
            text = f"gradients on rank {rank} were not finite, while its loss was"
        elif loss > self._loss.line:
            text = f"the loss of rank {rank} was {loss:.3g}, where {self._loss.usual:.3g} is usual"
        else:
            text = f"a row of rank {rank} had the loss {row:.3g}, where the largest has {self._row.usual:.3g} usually"
        return number, f"{text}; {row_text}" if row_text else text

    def _row_in_words(self, rank: int) -> tuple[int, str]:
        calls: dict[int, dict[str, float]] = {}
        tokens: dict[int, list[int]] = {}
        for i, (n, numbers) in enumerate(self._rows()):
            flat = numbers.cpu().numpy()
            bad = np.flatnonzero(~np.isfinite(flat[:n]))
            if 0 < bad.size < n:
                more = f" and {bad.size - 1} more" if bad.size > 1 else ""
                return int(bad[0]), f"row {bad[0]}{more} of {n} on rank {rank} made it so"
            found = largest_row(n, flat)
            calls[i] = {slot: float(values[0]) for slot, (_, values) in zip(SLOTS, found, strict=False)}
            tokens[i] = [int(number) for number in found[len(SLOTS)][1]] if len(found) > len(SLOTS) else []
        monitor: Any = self._making.made.get("monitor")
        words = words_of_row(calls, tokens, rank, monitor.decode if monitor is not None else None) if calls else ""
        return (int(max(calls.values(), key=lambda call: call[SLOTS[1]])[SLOTS[0]]), words) if words else (-1, "")

    def _tell(self) -> None:
        """Report an update that is left out, and note it in the step. Raises StopTraining where too many would follow."""
        verdict, probe, step = self._verdict, self.probe, self.probe.step_number
        if verdict is None:
            return
        self._steps.append(step)
        site = Site("scalar", "loss", "value") if verdict.kind != GRADIENT else None
        where = f" on all {ranks()} ranks" if ranks() > 1 else ""
        if verdict.kind != SPIKE and self._run > self._in_a_row:
            raise StopTraining(f"{counted(self._run, 'update')} in a row would not be finite{where}, the last: {verdict.why}")
        probe.report(
            Finding("skip", "warning", f"the update was left out{where}: {verdict.why}", step, probe.place, site, next=_NEXT)
        )
        for name, number in (("step_skipped", 1), ("skipped_by_rank", verdict.rank), ("skipped_by_row", verdict.row)):
            if number >= 0:
                probe.note(name, float(number))


_NEXT = "look at this batch; weights, moments and step counters are as before it, and the schedule went on"


def _not_finite(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return, on the device, whether any element is not finite, as 0 or 1. A largest magnitude cannot overflow."""
    foreach: Any = getattr(torch, "_foreach_norm")  # noqa: B009
    on_host = [extreme for g in gradients if g.is_cpu for extreme in g.aminmax()]  # in a tenth of the time of such norms there
    on_device = [g for g in gradients if not g.is_cpu]
    found = [*on_host, *(foreach(on_device, float("inf")) if on_device else ())]
    if not found:
        return torch.zeros(())
    finite = torch.stack([x.to(found[-1].device).float() for x in found]).isfinite()
    return 1.0 - finite.all().float()


def refuse(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raise PlanError where an update of this model or optimizer cannot be left out by taking its gradients away."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
    for one in (getattr(one, "optimizer", one) for one in given):
        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, torch.optim.LBFGS):
            raise PlanError(f"skip: {type(one).__name__} makes its update by itself: {_INSTEAD}")
    for chunk in chunks:
        kinds = {base.__module__.split(".")[0] for base in type(chunk).__mro__} & {"deepspeed", "megatron"}
        held = next((sign for p in chunk.parameters() for sign in ("main_grad", "ds_id") if hasattr(p, sign)), "")
        if kinds or held:
            owner = next(iter(kinds)) if kinds else "Megatron" if held == "main_grad" else "DeepSpeed"
            raise PlanError(f"skip: {owner} makes the updates of {type(chunk).__name__} by itself: {_INSTEAD}")


_INSTEAD = "leave the section out, and use what it has for bad steps (a loss scaler, `check_for_nan_in_loss_and_grad`)"
