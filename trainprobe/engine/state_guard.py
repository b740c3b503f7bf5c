"""Gives back what running a model again may change: parameters, buffers, gradients, attributes, random states.

    with StateGuard([model]):
        ...  # run the model as often as you like, or fail

Afterwards every tensor is the same object with the same bits and the same version counter, so that a graph which saved it can
still be used. Where nothing was written, nothing is written back.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunction

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.guard import all_of

_REGISTERED = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, OrderedDict, list, set)


class StateGuard:
    """See the module text; also usable for more than one run, with `put_back` between them.

    models: modules. generators: further `torch.Generator`s that the training draws from. parameters: False where parameters and
    their gradients are known to stay as they are, and need no copies. on_host: copies lie in the memory of the host. Not kept:
    optimizers, and what attributes of modules refer to other than tensors, generators and the entries of lists, sets and
    dictionaries (hooks of modules are such entries).
    """

    def __init__(
        self, models: Sequence[Any], generators: Iterable[Any] = (), parameters: bool = True, on_host: bool = False
    ) -> None:
        self._modules = list(dict.fromkeys(module for model in models for module in model.modules()))
        self._generators = list(generators)
        self._parameters, self._on_host = parameters, on_host

    def __enter__(self) -> StateGuard:
        with torch.no_grad(), DisableTorchFunction():
            self._attributes = [(m, dict(vars(m)), _entries_of(m)) for m in self._modules]
            held = self._held()
            self._tensors = [(t, t.data, self._copied(t), t._version) for t in held.values()]
            self._grads = [(t, t.grad, t.requires_grad) for t in held.values() if t.is_leaf]
            known = [x for m in self._modules for x in vars(m).values() if isinstance(x, torch.Generator)]
            every = {id(g): g for g in (*self._generators, *known)}
            self._random = random_states(), [(g, g.get_state()) for g in every.values()]
        return self

    def put_back(self) -> None:
        """Give back everything, as it was when the block began."""
        all_of((self.put_attributes, self.put_tensors, self.put_gradients, self.put_random))

    def put_attributes(self, all_attributes: bool = True) -> None:
        """Give back what modules register, their modes, and all other attributes if these are wanted."""
        for module, attributes, entries in self._attributes:
            if all_attributes:
                _put_attributes(module, attributes)
            for name, kept in entries.items():
                if all_attributes or name in _REGISTERED:
                    _put_entries(vars(module)[name], kept)
            if "training" in attributes:  # a compiled module asks the module in it
                vars(module)["training"] = attributes["training"]

    def put_tensors(self) -> None:
        """Give back the bits of parameters, buffers and gradients, and which of them are trained."""
        with torch.no_grad(), DisableTorchFunction():
            for t, *kept in self._tensors:
                if has_memory(t):  # else its shard is what counts
                    _put_tensor(t, *kept)
            for t, _, trained in self._grads:
                if t.requires_grad is not trained:
                    t.requires_grad_(trained)

    def put_gradients(self) -> None:
        """Give each leaf the gradient that it had."""
        for t, grad, _ in self._grads:
            if t.grad is not grad:
                t.grad = grad

    def put_random(self) -> None:
        """Give back the states of all generators."""
        states, generators = self._random
        put_random_states(states)
        for generator, state in generators:
            generator.set_state(state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.put_back()

    def _copied(self, t: Any) -> Any:
        return t.detach().to("cpu", copy=True) if self._on_host else t.detach().clone()

    def copies(self) -> dict[int, Any]:
        """Return id → the copy of each tensor that is kept, as it was when the block began."""
        return {id(t): copy for t, _, copy, _ in self._tensors}

    def bytes(self) -> int:
        """Return how much memory the copies take that the block needs, in bytes."""
        return sum(t.numel() * t.element_size() for t in self._held().values())

    def _held(self) -> dict[int, Any]:
        """Return id → tensor of all tensors that are kept."""
        tensors = {id(t): t for m in self._modules for t in _tensors_of(m)}
        if not self._parameters:
            return {key: t for key, t in tensors.items() if not isinstance(t, torch.nn.Parameter)}
        return tensors | {id(t.grad): t.grad for t in tensors.values() if t.is_leaf and t.grad is not None}


def random_states() -> tuple[Any, ...]:
    """Return the states of all default generators: Python, NumPy, torch on the host and on each accelerator in use."""
    with without_dispatch():
        on_devices = [(device, device.get_rng_state_all()) for device in _devices()]
        return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_devices


def put_random_states(states: tuple[Any, ...]) -> None:
    """Set all default generators to what `random_states` returned."""
    python, numpy, host, on_devices = states
    random.setstate(python)
    np.random.set_state(numpy)
    with without_dispatch():
        torch.set_rng_state(host)
        for device, held in on_devices:
            device.set_rng_state_all(held)


def _devices() -> list[Any]:
    """Return the modules of the accelerators that are in use, such as `torch.cuda`."""
    found = [getattr(torch, name, None) for name in ("cuda", "npu", "xpu")]
    return [device for device in found if device is not None and device.is_available() and device.is_initialized()]


def _tensors_of(module: Any) -> Iterable[Any]:
    """Return the parameters and buffers of a module, and tensors that are plain attributes."""
    every = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return (t for t in every if isinstance(t, torch.Tensor) and has_memory(t))


def has_memory(t: Any) -> bool:
    """Tell whether a tensor has its memory. FSDP frees that of a gathered weight between its uses; to read it would crash."""
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided
    return not plain or not t.numel() or t.untyped_storage().nbytes() > 0


def _put_attributes(module: Any, attributes: dict[str, Any]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in attributes]:
        del now[name]
    for name, value in attributes.items():
        if now.get(name, module) is not value:
            now[name] = value


def _entries_of(module: Any) -> dict[str, Any]:
    """Return attribute → its entries, for those that are lists, sets or dictionaries."""
    return {name: value.copy() for name, value in vars(module).items() if type(value) in _CONTAINERS}


def _put_entries(held: Any, entries: Any) -> None:
    """Give a container the same objects in the same order."""
    if isinstance(held, set):
        same = held == entries
    else:
        now, then = ([*x, *(x.values() if isinstance(x, dict) else ())] for x in (held, entries))
        same = len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
    if not same:
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(entries)


def _put_tensor(t: Any, data: Any, copy: Any, version: int) -> None:
    here = copy.to(t.device)
    if t.layout is not torch.strided:  # a sparse gradient, to which others were added in place
        if t._version == version:
            return
        t.detach().copy_(here)
    else:
        same_memory = t.data_ptr() == data.data_ptr() and t.shape == data.shape and t.dtype == data.dtype
        if same_memory and t._version == version and _same_bits(t, here):
            return
        if not same_memory or t.device != data.device:
            t.data = data
        if not _same_bits(t, here):
            t.detach().copy_(here)
    set_counter: Any = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore
    try:
        set_counter((t,), (version,))
    except TypeError:  # of earlier releases of torch
        set_counter(t, version)


def _same_bits(a: Any, b: Any) -> bool:
    """Tell whether two tensors of the same shape and dtype hold the same bits, NaN and signed zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(bits_of(a), bits_of(b))


def bits_of(t: Any) -> Any:
    """Return a tensor's bits as whole numbers of the same size; complex numbers as pairs."""
    if not t.is_floating_point() and not t.is_complex():
        return t
    t = t.detach()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
