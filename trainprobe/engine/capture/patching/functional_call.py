"""Modules that run for a while with other parameters than their own, as `torch.func.functional_call` has them do."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import stateless

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard

Lookup = Callable[[Any, Any], Any]


def follow(known: dict[int, Any], lookup: Lookup, guard: Guard) -> Replaced:
    """Have what is known of modules name the parameters that they run with, until this is taken back.

    known: id of module → what is known of it. lookup: given that and the module, returns what holds now, None if unchanged.
    """
    below: Any = stateless._reparametrize_module  # pyright: ignore[reportPrivateUsage]

    @contextmanager
    def reparametrize(module: Any, *args: Any, **kwargs: Any) -> Generator[None]:
        with below(module, *args, **kwargs):
            before = {} if reparametrize.ended else guard.run(_exchange, known, lookup, module) or {}  # type: ignore[attr-defined]
            try:
                yield
            finally:
                known.update((key, info) for key, info in before.items() if key in known)

    return Replaced(stateless, "_reparametrize_module", reparametrize, traced=True)


def _exchange(known: dict[int, Any], lookup: Lookup, module: Any) -> dict[int, Any]:
    """Update what is known of a module and everything inside it; return the previous knowledge of those that differ."""
    before: dict[int, Any] = {}
    for each in module.modules():
        info = known.get(id(each))
        now = None if info is None else lookup(info, each)
        if now is not None:
            before[id(each)], known[id(each)] = info, now
    return before
