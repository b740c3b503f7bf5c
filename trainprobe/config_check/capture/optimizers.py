"""Optimizers and schedulers as they really are when they first step: class, settings, and which parameter in which group."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from trainprobe.config_check.capture.patches import Patches, after
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.setting_files import ASTRAY, flat, source
from trainprobe.engine.capture.optimizers import optimizer_of, updates_the_same
from trainprobe.engine.core.guard import Guard

_NOT_SETTINGS = frozenset({"params", "param_names"})
_MOST_STEPS = 1000  # learning rates that are kept
_VOLATILE = frozenset({"_step_count", "_initial_step", "_is_initial", "_get_lr_called_within_step", "verbose"})


class OptimizerWatch:
    """Sees every torch optimizer of the process when it first steps, and every scheduler that is made."""

    def __init__(self, patches: Patches, guard: Guard) -> None:
        self.steps = 0
        self._patches = patches
        self._guard = guard
        self._seen: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
        self._rates: dict[int, list[list[float]]] = {}
        self._schedulers: list[weakref.ref[Any]] = []
        self._names: dict[int, str] = {}
        self._handle: Any = None

    def install(self) -> None:
        """Hook the step of all optimizers, and the making of schedulers."""
        self._handle = register_optimizer_step_pre_hook(self._step)
        self._patches.replace(lr_scheduler.LRScheduler, "__init__", after(self._scheduler_made))

    def remove(self) -> None:
        """Take the hook away; the patch goes with all others."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def name_parameters(self, names: dict[int, str]) -> None:
        """Tell the names of parameters by their id."""
        self._names |= names

    def add(self, optimizer: Any) -> None:
        """Take down an optimizer that has not stepped yet."""
        inner = getattr(optimizer, "optimizer", None)
        real = optimizer if isinstance(optimizer, Optimizer) else inner
        if isinstance(real, Optimizer) and id(real) not in self._seen:
            self._seen[id(real)] = (weakref.ref(real), self._values(real))

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard.run(self._take, optimizer)

    def _take(self, optimizer: Any) -> None:
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = (weakref.ref(optimizer), {})
        if id(optimizer) not in self._rates:  # the first step: now the values are those that are used
            self._seen[id(optimizer)] = (self._seen[id(optimizer)][0], self._values(optimizer))
        rates = self._rates.setdefault(id(optimizer), [])
        if len(rates) < _MOST_STEPS:
            rates.append([plain(group.get("lr")) for group in optimizer.param_groups])
        self.steps = max(self.steps, len(rates))

    def _scheduler_made(self, _: None, scheduler: Any, /, *args: Any, **kwargs: Any) -> None:
        if not any(ref() is scheduler for ref in self._schedulers):
            self._schedulers.append(weakref.ref(scheduler))

    def _values(self, optimizer: Any) -> dict[str, Any]:
        groups = {
            f"group{i}": {
                **{k: plain(v) for k, v in group.items() if k not in _NOT_SETTINGS},
                "parameters": [self._name(p, group, j) for j, p in enumerate(group["params"])],
            }
            for i, group in enumerate(optimizer.param_groups)
        }
        return {"class": type(optimizer).__name__, **groups}

    def _name(self, parameter: Any, group: Any, index: int) -> str:
        named = group.get("param_names")
        if named and index < len(named):
            return str(named[index])
        return self._names.get(id(parameter)) or f"tensor{list(parameter.shape)}"

    def sources(self) -> list[dict[str, Any]]:
        """Return one source of settings an optimizer, and one a scheduler."""
        found: list[dict[str, Any]] = []
        for index, (key, (_, values)) in enumerate(self._seen.items()):
            rates = self._rates.get(key, [])
            found.append(source("optimizer", str(index), {**flat(values), "lr_by_step": rates}))
        alive = [scheduler for ref in self._schedulers if (scheduler := ref()) is not None]
        for index, scheduler in enumerate(alive):
            astray = {} if self._reaches(scheduler) else {ASTRAY: True}
            found.append(source("scheduler", str(index), flat(_scheduler_values(scheduler) | astray)))
        return found

    def _reaches(self, scheduler: Any) -> bool:
        """Return whether nothing shows that a scheduler moves an optimizer which another one steps in place of."""
        own = optimizer_of(scheduler)
        stepped = [optimizer for key, (ref, _) in self._seen.items() if key in self._rates and (optimizer := ref()) is not None]
        return any(one is own for one in stepped) or not any(updates_the_same(one, own) for one in stepped)


def _scheduler_values(scheduler: Any) -> dict[str, Any]:
    kept = {k: v for k, v in vars(scheduler).items() if k not in _VOLATILE and k not in {"optimizer", "last_epoch", "_last_lr"}}
    values = {k: plain(v) for k, v in kept.items() if not k.startswith("__")}
    for index, function in enumerate(kept.get("lr_lambdas") or ()):
        values |= {f"lr_lambdas.{index}.{name}": value for name, value in _closed_over(function).items()}
    return {"class": type(scheduler).__name__, **values}


def _closed_over(function: Any) -> dict[str, Any]:
    """Return the numbers that a function takes from the one around it, as `lambda step: step / warmup_steps` does."""
    cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found: dict[str, Any] = {}
    for name, cell in zip(names, cells, strict=False):
        with contextlib.suppress(ValueError):  # a cell that nothing was put into yet
            if isinstance(cell.cell_contents, int | float):
                found[name] = cell.cell_contents
    return found
