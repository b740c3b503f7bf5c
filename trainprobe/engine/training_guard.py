"""What a preflight gives back besides a model's state: optimizers, autocast, the default dtype and the mode of gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from trainprobe.engine.core.guard import all_of
from trainprobe.engine.state_guard import StateGuard, put_random_states, random_states


class TrainingGuard(StateGuard):
    """The state of a model and its optimizers. `rewind` goes back to it and may be called often.

    Also kept are the buffers of modules that are called within the block and are none of the model's, such as the centre of a
    loss: as they are when one is called first. What wraps the model is left alone: its modules are kept as they were before.
    compiles: not these, as torch compiles otherwise where calls are listened to.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any] = (), compiles: bool = False) -> None:
        super().__init__([model], on_host=True)
        self._parameters_of_model = list(model.parameters())
        self._optimizers = [(o, _copied(o.state_dict()), dict(o.__dict__)) for o in optimizers]
        self._groups = [[dict(group) for group in o.param_groups] for o in optimizers]
        self._entries = [{p: dict(held) for p, held in o.state.items()} for o in optimizers]
        self._gathered = [(held, _kept(held)) for o in optimizers for held in vars(o).values() if _is_gathered(o, held)]
        self._modes = _modes()
        self._known = {id(module) for module in self._modules}
        self._beside: list[StateGuard] = []
        self._compiles, self._hook = compiles, None

    def __enter__(self) -> TrainingGuard:
        super().__enter__()
        self.clear_gradients()
        self._hook = None if self._compiles else register_module_forward_pre_hook(self._called)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        super().__exit__(*error)

    def _called(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._known:
            return
        inside = {id(inner) for inner in module.modules()}
        if inside.isdisjoint(self._known):
            self._beside.append(StateGuard([module], parameters=False, on_host=True).__enter__())
        self._known |= inside

    def rewind(self, attributes: bool = True) -> None:
        """Set everything but the gradients to what it was. attributes: what is no tensor of the model's state too.

        Without attributes also the generators that modules hold stay as they are: no checkpoint has them.
        """
        for guard in (self, *self._beside):
            guard.put_tensors()
            guard.put_attributes(attributes)
        self._put_gathered()
        self.put_random() if attributes else put_random_states(self._random[0])
        _set_modes(self._modes)

    def put_back(self) -> None:
        """Set everything to what it was, gradients and optimizers too."""
        beside = [guard.put_back for guard in self._beside]
        ours = (super().put_back, *beside, self._put_optimizers, self._put_gathered, self.put_random)
        all_of((*ours, lambda: _set_modes(self._modes)))

    def gradients(self) -> dict[int, Tensor]:
        """Return id of a parameter → the gradient that it had when the block began."""
        return {id(t): grad for t, grad, _ in self._grads if grad is not None}

    def drawn(self) -> bool:
        """Return whether random numbers were drawn since the last rewind."""
        states, generators = self._random
        return not _same([random_states(), [g.get_state() for g, _ in generators]], [states, [s for _, s in generators]])

    def reseed(self, seed: int) -> None:
        """Seed every generator that is known."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for generator, _ in self._random[1]:
            generator.manual_seed(seed)

    def clear_gradients(self) -> None:
        """Give every parameter no gradient; those of the user wait for `put_back`."""
        for parameter in self._parameters_of_model:
            parameter.grad = None

    def _put_gathered(self) -> None:
        for held, kept in self._gathered:
            held.clear()
            for key, (value, bits) in kept.items():
                held[key] = value
                if isinstance(value, Tensor):
                    value.data.copy_(bits)

    def _put_optimizers(self) -> None:
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


def _is_gathered(optimizer: Any, held: Any) -> bool:
    """Tell whether an optimizer gathers tensors in a dictionary of its own from hooks on modules, as K-FAC does."""
    return type(held) is dict and held is not optimizer.state and held is not optimizer.defaults


def _kept(held: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (value, _copied(value)) for key, value in held.items()}


def _copied(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, tree)


def _same(a: Any, b: Any) -> bool:
    """Return whether two nests of random states are equal."""
    if isinstance(a, Tensor | np.ndarray):
        return bool((a == b).all())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or a == b


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
