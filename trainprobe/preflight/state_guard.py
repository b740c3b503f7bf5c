"""What a preflight gives back: weights, buffers, gradients, flags, attributes, random states, optimizers, autocast."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainprobe.engine.core.guard import all_of

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class StateGuard:
    """Remembers the state of a training when it is made. `rewind` goes back to it and may be called often.

    Copies of the weights lie in the memory of the host.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> None:
        self._modules = list(dict.fromkeys(model.modules()))
        self._registered = [{name: dict(module.__dict__[name]) for name in _REGISTRIES} for module in self._modules]
        self._attributes = [
            {name: value for name, value in module.__dict__.items() if name not in _REGISTRIES} for module in self._modules
        ]
        self._own = [g for held in self._attributes for g in held.values() if isinstance(g, torch.Generator)]
        self._own_states = [generator.get_state() for generator in self._own]
        self._parameters = list(dict.fromkeys(model.parameters()))
        self._gradients = [(p, p.grad, _bits(p.grad), p.requires_grad) for p in self._parameters]
        buffers = dict.fromkeys(model.buffers())
        self._tensors = [(t, t.data, _bits(t)) for t in (*self._parameters, *buffers)]
        self._optimizers = [(o, _copied(o.state_dict()), dict(o.__dict__)) for o in optimizers]
        self._groups = [[dict(group) for group in o.param_groups] for o in optimizers]
        self._entries = [{p: dict(held) for p, held in o.state.items()} for o in optimizers]
        self._random = _random_states()
        self._modes = _modes()

    def rewind(self, attributes: bool = True) -> None:
        """Set everything but the gradients to what it was. attributes: those that are no tensor of the model's state too."""
        with torch.no_grad():
            for tensor, data, bits in self._tensors:
                if tensor.data.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                    tensor.data = data
                tensor.data.copy_(bits)
        for module, registered in zip(self._modules, self._registered, strict=True):
            for name, held in registered.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(held)
        for module, held in zip(self._modules, self._attributes, strict=True):
            if attributes:
                for name in [name for name in module.__dict__ if name not in held and name not in _REGISTRIES]:
                    del module.__dict__[name]
                module.__dict__.update(held)
            module.training = held["training"]
        for parameter, *_, wanted in self._gradients:
            parameter.requires_grad_(wanted)
        _set_random_states(self._random)
        if attributes:
            self.rewind_random()
        _set_modes(self._modes)

    def restore(self) -> None:
        """Set everything to what it was, gradients and optimizers too."""
        all_of((self.rewind, self._restore_gradients, self._restore_optimizers, lambda: _set_random_states(self._random)))

    def rewind_random(self) -> None:
        """Set the random states to what they were."""
        _set_random_states(self._random)
        for generator, state in zip(self._own, self._own_states, strict=True):
            generator.set_state(state)

    def drawn(self) -> bool:
        """Return whether random numbers were drawn since the last rewind."""
        own = [g.get_state() for g in self._own]
        return not _same([_random_states(), own], [self._random, self._own_states])

    def reseed(self, seed: int) -> None:
        """Seed every generator that is known."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for generator in self._own:
            generator.manual_seed(seed)

    def clear_gradients(self) -> None:
        """Give every parameter no gradient; those of the user wait for `restore`."""
        for parameter in self._parameters:
            parameter.grad = None

    def _restore_gradients(self) -> None:
        for parameter, gradient, bits, _ in self._gradients:
            parameter.grad = gradient
            if gradient is not None and bits is not None:
                gradient.data.copy_(bits)

    def _restore_optimizers(self) -> None:
        for (optimizer, kept, attributes), groups, entries in zip(self._optimizers, self._groups, self._entries, strict=True):
            optimizer.__dict__.clear()
            optimizer.__dict__.update(attributes)
            for group, held in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(held)
            states = list(kept["state"].values())
            optimizer.state.clear()
            for (parameter, held), bits in zip(entries.items(), states, strict=True):
                for name, value in held.items():
                    if isinstance(value, Tensor):
                        value.data.copy_(bits[name])
                optimizer.state[parameter] = held


@contextmanager
def kept(model: nn.Module, optimizers: Sequence[Any] = ()) -> Generator[StateGuard]:
    """Give back what a training had before the block, whatever happens in it."""
    guard = StateGuard(model, optimizers)
    try:
        guard.clear_gradients()
        yield guard
    finally:
        guard.restore()


def _bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, tree)


def _devices() -> list[Any]:
    """Return the modules of the accelerators that are in use, such as `torch.cuda`."""
    found = [getattr(torch, name, None) for name in ("cuda", "npu", "xpu")]
    return [device for device in found if device is not None and device.is_available() and device.is_initialized()]


def _random_states() -> tuple[Any, ...]:
    on_devices = [(device, device.get_rng_state_all()) for device in _devices()]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_devices


def _same(a: Any, b: Any) -> bool:
    """Return whether two nests of random states are equal."""
    if isinstance(a, Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b


def _set_random_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, on_devices = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    for device, held in on_devices:
        device.set_rng_state_all(held)


def _modes() -> dict[str, Any]:
    kinds = [kind for kind in ("cpu", "cuda", "npu", "xpu") if kind == "cpu" or getattr(torch, kind, None) is not None]
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds if _casts(kind)}
    return {"autocast": autocast, "grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}


def _casts(kind: str) -> bool:
    return torch.amp.autocast_mode.is_autocast_available(kind)


def _set_modes(modes: dict[str, Any]) -> None:
    for kind, (enabled, dtype) in modes["autocast"].items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_grad_enabled(modes["grad"])
    torch.set_default_dtype(modes["dtype"])
