"""Fingerprints of every tensor that a micro-step hands to the model, whole and sample by sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from trainprobe.config_check.capture.fingerprints import TensorFingerprints

_DEEPEST = 8


def capture_inputs(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], step: int, tokens: int = 0
) -> Callable[[], dict[str, Any]]:
    """Start the reductions and return the function that waits for them: {"step", "tensors", "scalars"}.

    call: what is called, for the names of its positional arguments. tokens: so many first elements of each integer tensor
    are stored as they are.
    """
    tensors = TensorFingerprints()
    scalars: dict[str, Any] = {}
    for name, value in leaves(named_arguments(call, args, kwargs)):
        if isinstance(value, torch.Tensor):
            tensors.add(name, value, samples=True, tokens=tokens)
        elif isinstance(value, bool | int | float | str) or value is None:
            scalars[name] = value
    tensors.seal()
    return lambda: {"step": step, "tensors": tensors.content(), "scalars": scalars}


def named_arguments(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; positional ones take the name in the signature where it has one."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
        by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (ValueError, TypeError):
        schema = getattr(call, "schema", None)  # of TorchScript
        by_place = [] if schema is None else [a.name for a in schema.arguments[1:]]
    named = {by_place[i] if i < len(by_place) else f"args.{i}": value for i, value in enumerate(args)}
    return named | dict(kwargs)


def leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and leaves of nested mappings, lists, tuples and dataclass-like batches."""
    if isinstance(value, Mapping) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEEPEST and len(value) <= 1000:
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{index}" if name else str(index), depth + 1)
    else:
        yield name, value


def signature_of(model: Any) -> Callable[..., Any]:
    """Return the `forward` whose arguments have names: that of the model inside wrappers which only take *args."""
    for _ in range(8):
        forward = getattr(model, "forward", model)
        try:
            kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
        except (ValueError, TypeError):
            return forward
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inspect.Parameter.VAR_POSITIONAL not in kinds or inner is None:
            return forward
        model = inner
    return getattr(model, "forward", model)
