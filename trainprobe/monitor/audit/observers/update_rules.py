"""What an optimizer's rule gives for the state that it is about to step, worked out in float64 and set against what it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.library import Deferred
from trainprobe.engine.core.records import StepData
from trainprobe.engine.core.sources import is_partial
from trainprobe.monitor.audit.facts.updates import Rerun, Reruns
from trainprobe.monitor.audit.observers import Audited, Observer

_ELEMENTS = 1 << 20  # elements that are run again in one step; parameters take turns
_ULPS = 8  # roundings, each of at most half a unit in the last place, that one element goes through
_REL = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the change, for a state of that dtype; 0.1 for shorter ones
State = Mapping[str, Tensor]
Rule = Callable[[Tensor, Tensor, State, Mapping[str, Any]], tuple[Tensor, Tensor]]


def adam(p: Tensor, g: Tensor, state: State, group: Mapping[str, Any], decoupled: bool = False) -> tuple[Tensor, Tensor]:
    """Return a parameter after one step of torch's Adam, or with `decoupled` AdamW, and the terms of its change, each taken as
    positive: where they nearly cancel, their rounding is most of what is left. All tensors float64.

    Sources: Kingma and Ba (2015), algorithm 1; Loshchilov and Hutter (2019), algorithm 2; AMSGrad by Reddi et al. (2018).
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    g, terms = -g if group["maximize"] else g, g.abs()
    if decay and not decoupled:
        g, terms = g + decay * p, terms + decay * p.abs()
    elif decay:
        p = p * (1 - lr * decay)
    zero = torch.zeros_like(p)
    t = float(state.get("step", 0)) + 1
    first = state.get("exp_avg", zero)
    m, terms = beta1 * first + (1 - beta1) * g, beta1 * first.abs() + (1 - beta1) * terms
    v = beta2 * state.get("exp_avg_sq", zero) + (1 - beta2) * g * g
    if group.get("amsgrad"):
        v = torch.maximum(v, state.get("max_exp_avg_sq", zero))
    rate = lr / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + float(group["eps"]))
    return p - rate * m, rate * terms


def adamw(p: Tensor, g: Tensor, state: State, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a parameter after one step of torch's AdamW, and the terms of its change as `adam` does."""
    return adam(p, g, state, group, decoupled=True)


def sgd(p: Tensor, g: Tensor, state: State, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a parameter after one step of torch's SGD with momentum (Sutskever et al., 2013), and the terms of its change as
    `adam` does.
    """
    lr, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
    terms = g.abs() + decay * p.abs()
    g = (-g if group["maximize"] else g) + decay * p
    if momentum:
        there, fresh = state.get("momentum_buffer"), 1 - float(group["dampening"])
        buffer = g if there is None else momentum * there + fresh * g
        gathered = terms if there is None else momentum * there.abs() + fresh * terms
        g = g + momentum * buffer if group["nesterov"] else buffer
        terms = terms + momentum * gathered if group["nesterov"] else gathered
    return p - lr * g, lr * terms


def rule_of(optimizer: Any, group: Mapping[str, Any]) -> Rule | None:
    """Return the rule of one of torch's own optimizers, however it is carried out (foreach, fused, capturable); else None."""
    if getattr(optimizer, "grad_scale", None) is not None:
        return None  # a scaler has left the gradients multiplied
    kind = type(optimizer)
    if kind is torch.optim.Adam:
        return adamw if group.get("decoupled_weight_decay") else adam
    return {torch.optim.AdamW: adamw, torch.optim.SGD: sgd}.get(kind)


class UpdateRerun(Observer):
    """Runs updates again; numbers stay on the device until the step is drained."""

    only_when_due = True

    def __init__(self, guard: Guard, audited: Audited) -> None:
        super().__init__(guard, audited)
        self._turn = 0

    def forget(self) -> None:
        """Forget the last step."""
        self._expected: list[tuple[str, Any, Tensor, Tensor, Tensor]] = []
        self._pending: list[tuple[str, Any, Deferred]] = []

    def steps(self, optimizer: Any) -> None:
        """Work out what the parameters will be; as many as the limit allows, each in its turn."""
        names, left = self._audited.names(), _ELEMENTS
        stepped = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        start = self._turn % len(stepped) if stepped else 0
        with torch.no_grad(), DisableTorchFunction():
            for p, group in stepped[start:] + stepped[:start]:
                rule = rule_of(optimizer, group)
                if rule is None or p.is_complex() or p.grad.is_sparse or is_partial(p.grad) or left <= 0:
                    break
                held, grad = _local(p), _local(p.grad)
                state = {key: _local(t).double() for key, t in optimizer.state.get(p, {}).items() if torch.is_tensor(t)}
                was = held.double()
                shortest = max((t.dtype for t in (held, grad)), key=lambda kind: torch.finfo(kind).eps)
                expected, terms = rule(was, grad.double(), state, group)
                floor = _ULPS * torch.finfo(held.dtype).eps * expected.abs() + _ULPS * torch.finfo(shortest).eps * terms
                floor += _REL.get(shortest, 0.1) * (expected - was).abs() + 1e-30
                self._expected.append((names.get(id(p), ""), p, was, expected, floor))
                left -= held.numel()
                self._turn += 1

    def stepped(self) -> None:
        """Compare with what the parameters are now: the largest error as a part of the noise floor, and both norms."""
        tape = self._audited.tape
        with torch.no_grad(), DisableTorchFunction():
            for name, p, was, expected, floor in self._expected:
                held = _local(p)
                error, change = (held.double() - expected).abs(), expected - was
                if error.numel() and tape is not None:
                    worst, at = (error / floor).reshape(-1).max(0)
                    numbers = [at.double(), worst, (held.double() - was).norm(), change.norm(), *_rounded(held, was, change)]
                    self._pending.append((name, held, tape.defer(torch.stack(numbers))))
        self._expected = []

    def facts(self, step_data: StepData) -> Reruns:
        """Return what was found."""
        pending, self._pending = self._pending, []
        found: list[Rerun] = []
        for name, p, row in pending:
            if row.numbers is not None:
                at, *numbers = row.numbers.tolist()
                found.append(Rerun(name or self._piece(p, int(at)), *numbers))
        return Reruns(tuple(found))

    def _piece(self, p: Tensor, at: int) -> str:
        """Name the parameter that holds an element of a flat buffer."""
        return self._audited.states.at_address(p.data_ptr() + at * p.element_size()) if p.is_contiguous() else ""


def _rounded(held: Tensor, was: Tensor, change: Tensor) -> list[Tensor]:
    """Return the sum of |change| over all elements, and over those that did not move, of weights of 16 bits; else nothing."""
    if held.element_size() != 2:
        return []
    sizes = change.abs()
    return [sizes.sum(), sizes.where(held.double() == was, 0.0).sum()]


def _local(t: Any) -> Tensor:
    """Return what this process holds of a tensor."""
    held = getattr(t, "_local_tensor", t)
    return held.detach()
