"""Data that does not go through the model, such as labels that only a loss sees.

Two ways lead to it: the other tensors of a batch that a DataLoader yields, where one of them is an input of the model, and the
targets of torch's own losses, if they are whole numbers. (A target of floats may be what another network has just worked out,
which follows from weights; one that a DataLoader yields is seen the first way.)
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainprobe.config_check.capture.dataset import leaves
from trainprobe.config_check.capture.fingerprints import TensorFingerprints
from trainprobe.config_check.capture.patches import Patches, after, before
from trainprobe.config_check.pack import BESIDE
from trainprobe.engine.core.guard import Guard

Entries = dict[str, dict[str, Any]]
Late = Callable[[], dict[str, Any]]
_KEPT = 8  # batches of loaders: some fetch ahead
_EARLY = 32  # batches that are looked at before there is a model
_TARGETS = ("target", "targets")


class LabelWatch:
    """Takes fingerprints of the batches that loaders yield and of the targets of losses.

    quietly: calls a function unseen by other captures. attached: whether there is a model, and it trains. take: gets the
    late content of a target.
    """

    def __init__(
        self,
        patches: Patches,
        guard: Guard,
        quietly: Callable[..., Any],
        attached: Callable[[], bool],
        take: Callable[[Any], None],
    ) -> None:
        self._patches = patches
        self._guard = guard
        self._quietly = quietly
        self._attached = attached
        self._take = take
        self._recent: deque[Callable[[], Entries]] = deque(maxlen=_KEPT)
        self._early = 0

    def install(self) -> None:
        """Replace the step of a loader's iterator."""
        self._patches.replace(_BaseDataLoaderIter, "__next__", after(self._yielded))

    def functions(self) -> list[tuple[Any, str, Callable[[Any], Any]]]:
        """Return owner, name and wrapper of each loss, to be replaced and put back with the random functions."""
        signatures = {name: inspect.signature(getattr(functional, name)) for name in losses()}
        return [(functional, name, before(functools.partial(self._judged, name, s))) for name, s in signatures.items()]

    def recent(self) -> tuple[Callable[[], Entries], ...]:
        """Return the batches that were yielded last."""
        return tuple(self._recent)

    def _yielded(self, batch: Any, iterator: Any) -> None:
        if self._attached() or self._early < _EARLY:
            self._early += 1
            self._guard.run(self._quietly, self._keep, batch)

    def _keep(self, batch: Any) -> None:
        self._recent.append(fingerprints(leaves({"batch": batch})))

    def _judged(self, name: str, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and self._attached() and torch.is_grad_enabled():
            self._guard.run(self._quietly, self._target, name, signature, args, kwargs)

    def _target(self, name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        for argument in _TARGETS:
            value = given.get(argument)
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex():
                self._take(fingerprints([(f"{name}.{argument}", value)]))


@functools.cache
def losses() -> tuple[str, ...]:
    """Return the names of torch's functions that hold a prediction against a target."""
    found: list[str] = []
    for name, function in vars(functional).items():
        if not inspect.isfunction(function) or name.startswith("_"):
            continue
        if any(argument in inspect.signature(function).parameters for argument in _TARGETS):
            found.append(name)
    return tuple(found)


def fingerprints(named: Iterable[tuple[str, Any]]) -> Callable[[], Entries]:
    """Start the reductions of tensors, and return the function that waits for them (which may be called again)."""
    tensors = TensorFingerprints()
    for name, value in named:
        if isinstance(value, torch.Tensor):
            tensors.add(name, value, samples=True)
    tensors.seal()
    return functools.cache(tensors.content)


def with_labels(inputs: Late, batches: tuple[Callable[[], Entries], ...]) -> Late:
    """Return the content of a micro-step, and beside the model's inputs the rest of the batch that they come from."""

    def content() -> dict[str, Any]:
        given = inputs()
        tensors: Entries = given["tensors"]
        mine = {key for entry in tensors.values() if (key := _key(entry)) is not None}
        shared = [(sum(_key(entry) in mine for entry in batch().values()), number) for number, batch in enumerate(batches)]
        most, number = max(shared, default=(0, 0))
        return {**given, "tensors": tensors | _others(batches[number](), tensors)} if most else given

    return functools.cache(content)


def with_target(before: Late, target: Callable[[], Entries]) -> Late:
    """Return the content of a micro-step with a target of a loss, unless it is known under another name."""

    def content() -> dict[str, Any]:
        given = before()
        tensors: Entries = given["tensors"]
        return {**given, "tensors": tensors | _others(target(), tensors)}

    return functools.cache(content)


def _others(found: Entries, known: Entries) -> Entries:
    """Return the tensors that are none of the known ones; samples only of such as have a row for each sample of these."""
    keys = {_key(entry) for entry in known.values()}
    rows = {entry["shape"][0] for entry in known.values() if entry["shape"]}
    fresh = {name: dict(entry) for name, entry in found.items() if name not in known and _key(entry) not in keys}
    for entry in fresh.values():
        entry[BESIDE] = True
        if not entry["shape"] or entry["shape"][0] not in rows:
            entry.pop("samples", None)
            entry.pop("unpadded", None)
    return fresh


def _key(entry: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what a tensor and its views in other shapes have in common."""
    numel = 1
    for extent in entry["shape"]:
        numel *= extent
    return (entry["checksum"], entry["dtype"], numel) if "checksum" in entry else None
