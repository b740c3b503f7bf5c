"""Waits for the first update of a script: then the batch, the model and the loss are known, and nothing is trained yet."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainprobe.engine.capture.optimizers import live_optimizers
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.step_gradients import differentiate
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.state_guard import has_memory
from trainprobe.errors import UsageError
from trainprobe.integrations.loop_tape import Micro, Tape
from trainprobe.integrations.preflight_steps import Found, running_step
from trainprobe.preflight.batches import TELL
from trainprobe.preflight.training import Training, mean_over_ranks

_FEW = 16  # numbers of an optimizer that has no parameter of a model


class _Engine:
    """Autograd's engine, which Megatron calls by itself.

    seen: is given the tensors of each backward before that runs, and whether it keeps the graph. ran: is called behind it.
    """

    def __init__(self, engine: Any, seen: Callable[[Any, bool], None], ran: Callable[[], None]) -> None:
        self._engine, self._seen, self._ran = engine, seen, ran

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad"):
            return self._engine.run_backward(tensors, *args, **kwargs)
        self._seen(tensors, bool(args[1:2] and args[1]))
        out = self._engine.run_backward(tensors, *args, **kwargs)
        self._ran()
        return out


class FirstUpdate:
    """Calls `ends(learnt)` before an optimizer steps for the first time, behind its backward passes.

    micros: what was seen. learnt: returns the training and the optimizers. It raises UsageError where the loss cannot be made
    again.
    """

    def __init__(self, ends: Callable[[Callable[[], tuple[Training, list[Any]]]], None]) -> None:
        self._ends = ends
        self._tape = Tape()
        self.micros: list[Micro | Exception] = []
        self._found: list[Found] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # two of the weights as they were at the first backward
        self._trained: dict[int, nn.Module] = {}  # the models that were called before a backward pass
        self._filled = False  # whether the last one has left gradients
        self._over = False

    def __enter__(self) -> FirstUpdate:
        engine: Any = _Engine(torch.autograd.Variable._execution_engine, self._backward, self._ran)
        self._replaced = Replaced(torch.autograd.Variable, "_execution_engine", engine)
        self._hook = register_optimizer_step_pre_hook(self._steps)
        self._call = nn.modules.module.register_module_forward_pre_hook(self._called)
        self._tape.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._over:
            return
        self._over = True
        self._tape.__exit__(*exc)
        self._call.remove()
        self._hook.remove()
        self._replaced.back()

    def _called(self, module: Any, args: Any) -> None:
        if _current_graph_task_id() != -1:  # a backward pass runs it again, as with checkpointed activations
            return
        if not self._over and any(has_memory(p) and not torch.equal(p.detach(), value) for p, value in self._before):
            self._end(None)  # the loop itself, or another optimizer, has updated weights since the first backward
        if self._over or not torch.is_grad_enabled() or (found := running_step()) is None:
            return
        if not self._found or self._found[-1].call != found.call or len(self._found) == len(self.micros):
            self._found.append(found)

    def _backward(self, tensors: Any, again: bool) -> None:
        """See the loss of a backward pass. again: its graph is kept, so that another loss may depend on the same calls."""
        loss = next(iter(tensors), None)
        if self._over or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if self._filled and not self._is_filled():
            self.micros.clear()  # what earlier passes left was cleared: they were for something else than the update
            self._found.clear()
        self._trained.update((id(module), module) for module in self._tape.modules)
        if not self._before:
            trained = [p for module in self._tape.modules for p in module.parameters() if p.requires_grad]
            self._before = [(p, p.detach().clone()) for p in (*trained[:1], *trained[-1:])]
        self.micros.append(attempt(self._tape.micro, loss, otherwise=lambda fault: fault))
        del self._found[len(self.micros) :]
        if not again:
            self._tape.forget()

    def _ran(self) -> None:
        self._filled = not self._over and self._is_filled()

    def _is_filled(self) -> bool:
        """Tell whether a weight of the models has a gradient in its `grad`; DeepSpeed and Megatron keep theirs elsewhere."""
        return any(p.grad is not None and bool(p.grad.any()) for module in self._trained.values() for p in module.parameters())

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._over:
            return None
        closure = next((a for a in (*args, *kwargs.values()) if callable(a)), None)
        if closure is None:
            self._end(optimizer)
            return None

        def and_end() -> Any:
            result = closure()
            self._end(optimizer)
            return result

        def ending(x: Any) -> Any:
            return and_end if x is closure else x

        return tuple(map(ending, args)), {name: ending(x) for name, x in kwargs.items()}

    def _end(self, optimizer: Any) -> None:
        held = [] if optimizer is None else [p.grad for group in optimizer.param_groups for p in group["params"]]
        if self._over or not (self.micros or any(g is not None and bool(g.any()) for g in held)):
            return  # as where an optimizer only makes its state
        if optimizer is not None and self._is_beside(optimizer):
            for learnt in (self.micros, self._found, self._before):
                learnt.clear()
            return
        self.__exit__(None, None, None)
        self._ends(lambda: self._learnt(optimizer))

    def _is_beside(self, optimizer: Any) -> bool:
        """Tell whether an optimizer steps a few numbers beside the models, as the temperature of SAC, and none of theirs."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        models = {id(p) for module in self._trained.values() for p in module.parameters()}
        return bool(models) and sum(p.numel() for p in held) <= _FEW and models.isdisjoint(map(id, held))

    def _learnt(self, optimizer: Any) -> tuple[Training, list[Any]]:
        training = self._training(optimizer)
        return training, _holders(training, optimizer)

    def _training(self, optimizer: Any) -> Training:
        if self._found:
            return self._found[0].make([found.batch for found in self._found])
        micros = [micro for micro in self.micros if isinstance(micro, Micro)]
        if not micros:
            unseen = UsageError(f"no backward was seen before the first update: {TELL}")
            raise next((fault for fault in self.micros if isinstance(fault, Exception)), unseen)
        return _of_loop([micro if optimizer is None else micro.checked() for micro in micros])


def _inner(optimizers: list[Any]) -> set[int]:
    """Return the ids of the optimizers that another one steps, as K-FAC and Lookahead do."""
    return {id(x) for o in optimizers for x in vars(o).values() if isinstance(x, torch.optim.Optimizer)}


def _holders(training: Training, first: Any) -> list[Any]:
    """Return the optimizer that steps and all others that hold parameters of a model; what wraps one of them is not counted.

    None of DeepSpeed and Megatron where they hold copies of the parameters.
    """
    ours, found = {id(p) for p in training.model.parameters()}, [] if first is None else [first]
    if first is not None and training.copied and ours.isdisjoint(id(p) for g in first.param_groups for p in g["params"]):
        found = []
    gc.collect()
    inner = _inner(every := live_optimizers())
    for optimizer in every:
        groups = optimizer.param_groups
        if (
            id(optimizer) not in inner
            and all(groups is not other.param_groups for other in found)
            and any(id(p) in ours for g in groups for p in g["params"])
        ):
            found.append(optimizer)
    return found


def _together(modules: list[nn.Module]) -> nn.ModuleDict:
    """Return the outermost modules of a loop as one, each under the name of its class."""
    found: dict[str, nn.Module] = {}
    for module in modules:
        name = type(module).__name__
        found[f"{name}_{len(found)}" if name in found or hasattr(nn.ModuleDict, name) else name] = module
    return nn.ModuleDict(found)


def _of_loop(micros: list[Micro]) -> Training:
    first, count = micros[0], len(micros)
    several = count > 1
    modules, wrappers = first.modules, [call.wrapper for call in first.calls if call.wrapper is not None]

    def loss(model: Any, batch: Any) -> Tensor:
        return first.replay(batch) if several or first.scale == 1.0 else first.replay(batch) * first.scale

    model = modules[0] if len(modules) == 1 else _together(modules)

    def step(model: Any, parts: list[Any]) -> None:
        for part in parts:
            differentiate(first.replay(part) * first.scale, [p for p in model.parameters() if p.requires_grad])

    def together(parts: list[Any]) -> None:
        for part in parts:
            (first.replay(part, wrapped=True) * first.scale).backward()

    of_torch = all(isinstance(x, nn.parallel.DistributedDataParallel) for x in wrappers)
    shared = None if not wrappers else together if of_torch else mean_over_ranks(model, partial(step, model))
    batches = [micro.batch for micro in micros]
    return Training(loss, step if several else None, model, batches, shared, copied=not of_torch, scored=first.scored)
