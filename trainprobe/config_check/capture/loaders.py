"""The data loaders of a program, as they were made, and whether a captured step can have drawn from them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from trainprobe.config_check.capture.patches import Patches, after, before
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.config_check.capture.setting_files import IDLE_LOADER, source
from trainprobe.engine.core.guard import Guard

_PLAIN = ("batch_size", "drop_last", "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
LOADER_SETTINGS = (
    *(*_PLAIN, "shuffle", "sampler", "batch_sampler", "generator", "worker_init_fn", "collate_fn", "dataset", "samples"),
)
_MOST = 16  # loaders that are kept


class LoaderCapture:
    """Sees every DataLoader that is made, and which of them are iterated."""

    def __init__(self, patches: Patches, guard: Guard) -> None:
        self._patches = patches
        self._guard = guard
        self._found: list[dict[str, Any]] = []
        self._idle: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # not iterated → its number
        self._used: set[int] = set()

    def install(self) -> None:
        """Replace the constructor, and what begins to iterate."""
        self._patches.replace(DataLoader, "__init__", after(self._made))
        self._patches.replace(DataLoader, "__iter__", before(lambda loader: self._guard.run(self._use, loader)))

    def _made(self, _: None, loader: Any, /, *args: Any, **kwargs: Any) -> None:
        if len(self._found) < _MOST:
            self._guard.run(self._take, loader)

    def _take(self, loader: Any) -> None:
        self._idle[loader] = len(self._found)
        self._found.append(loader_values(loader))
        if type(loader).__iter__ is not DataLoader.__iter__:  # it may iterate without DataLoader's own
            self._use(loader)

    def _use(self, loader: Any) -> None:
        number = self._idle.pop(loader, None)
        if number is not None:
            self._used.add(number)

    def sources(self) -> list[dict[str, Any]]:
        """Return one source of settings a loader; those that were never iterated are of a kind of their own."""
        return [
            source("loader" if number in self._used else IDLE_LOADER, str(number), values)
            for number, values in enumerate(self._found)
        ]


def loader_values(loader: Any) -> dict[str, Any]:
    """Return the settings of a loader that decide what a batch holds, and the classes of what it draws from."""
    sampler, generator = loader.sampler, loader.generator
    return {
        **{name: plain(getattr(loader, name)) for name in _PLAIN if hasattr(loader, name)},
        "shuffle": isinstance(sampler, RandomSampler),
        "sampler": type(sampler).__name__,
        "batch_sampler": type(loader.batch_sampler).__name__,
        "generator": f"seed {generator.initial_seed()}" if isinstance(generator, torch.Generator) else "torch's own",
        "worker_init_fn": plain(loader.worker_init_fn),
        "collate_fn": plain(loader.collate_fn),
        "dataset": type(loader.dataset).__name__,
        "samples": _length(loader.dataset),
    }


def _length(dataset: Any) -> int | None:
    """Return the number of samples, None where a dataset does not know it."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None
