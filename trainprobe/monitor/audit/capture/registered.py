"""What modules hold in addition to their registered parts, and what is registered twice. Reads no device."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

_STANDARD = frozenset(vars(torch.nn.Module()))
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def unwrapped(model: Any) -> Iterator[Any]:
    """Yield a model and what it wraps, outermost first: a wrapper has one child, called `module` or `_orig_mod`."""
    yield model
    children = dict(model.named_children())
    if len(children) == 1 and next(iter(children)) in ("module", "_orig_mod") and not list(model.parameters(recurse=False)):
        yield from unwrapped(next(iter(children.values())))


def hidden_parameters(models: Sequence[Any], known: Collection[int]) -> tuple[str, ...]:
    """Return the parameters with a gradient that modules keep in plain lists, tuples and dicts; torch's own modules may.

    known: ids of all others.
    """
    found: dict[int, str] = {}
    for model in models:
        for path, module in model.named_modules():
            for key, value in vars(module).items() if not type(module).__module__.startswith("torch.") else ():
                if key not in _STANDARD and isinstance(value, list | tuple | dict):
                    start = f"{path}.{key}" if path else key
                    found |= {id(p): name for name, p in _within(start, value) if id(p) not in known and p.grad is not None}
    return tuple(found.values())


def repeated_hooks(models: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return (parameter or module, function) of each hook that is registered there more than once.

    A hook of a module that returns nothing is left out: what it does (setting a flag, as `enable_input_require_grads` of
    transformers does, which PEFT and trainers each call) may well be done twice. One that returns something replaces a value.
    """
    found: dict[tuple[str, str], None] = {}
    for model in models:
        for owners, attributes in ((model.named_parameters(), _OF_PARAMETERS), (model.named_modules(), _OF_MODULES)):
            for name, owner in owners:
                for attribute in attributes:
                    hooks = getattr(owner, attribute, None)
                    acting = [hook for hook in (hooks or {}).values() if attributes is _OF_PARAMETERS or _returns(hook)]
                    found |= {(name or "root", hook): None for hook in _repeated(acting)}
    return tuple(found)


def saved_buffers(models: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name within the innermost model, and the value, of each buffer that its state dict holds."""
    for model in (list(unwrapped(model))[-1] for model in models):
        passing = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)


def _within(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters in a list or dict, and in the modules there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, torch.nn.Parameter):
            yield f"{path}.{key}", item
        elif isinstance(item, torch.nn.Module):
            yield from ((f"{path}.{key}.{name}", p) for name, p in item.named_parameters())


def _repeated(hooks: list[Any]) -> Iterator[str]:
    for i, hook in enumerate(hooks):
        if any(_same(hook, other) for other in hooks[:i]):
            yield str(getattr(hook, "__qualname__", type(hook).__name__))


def _returns(hook: Any) -> bool:
    """Tell whether a function returns anything but None; True where its code cannot be read."""
    code = getattr(hook, "__code__", None)
    if code is None:
        return True
    lines = list(dis.get_instructions(code))
    returned = [(before, line) for before, line in pairwise(lines) if line.opname.startswith("RETURN_")]
    return any((line if line.opname == "RETURN_CONST" else before).argval is not None for before, line in returned)


def _same(a: Any, b: Any) -> bool:
    """Tell whether two functions are one, or were made by the same lines over the same objects."""
    if a is b or a == b:
        return True
    code = getattr(a, "__code__", None)
    if code is None or code is not getattr(b, "__code__", None) or a.__defaults__ != b.__defaults__:
        return False
    return all(_content(x) is _content(y) for x, y in zip(a.__closure__ or (), b.__closure__ or (), strict=True))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put in yet
        return None
