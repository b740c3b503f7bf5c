"""The state of torch's random generators: its fingerprint, and putting it back. No number is drawn, no device waited for."""

from __future__ import annotations

import base64
import random
import zlib
from typing import Any

import numpy as np
import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch


def random_state() -> tuple[Any, ...]:
    """Return the states of the default generators: of the host, and of the current accelerator where one is in use."""
    with without_dispatch():  # within a transform of `torch.func` the state would be a tensor without memory
        states = [torch.get_rng_state()]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        return tuple(states)


def put_back(states: tuple[Any, ...]) -> None:
    """Set the default generators to what `random_state` returned."""
    with without_dispatch():
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1])


def random_fingerprint() -> int:
    """Return a 32-bit fingerprint of the random state."""
    total = 0
    for state in _bytes():
        total = zlib.crc32(state, total)
    return total


def random_fingerprints() -> dict[str, int]:
    """Return generator → fingerprint of its state: those of "torch", "numpy" (the global one) and "python"."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = zlib.crc32(repr((kind, rest)).encode(), zlib.crc32(np.asarray(keys).tobytes()))
    return {"torch": random_fingerprint(), "numpy": numpy, "python": zlib.crc32(repr(random.getstate()).encode())}


def generator_state(name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Return the state of the generator that an operator is about to draw from, None where it draws nothing or not on the host.

    name, args, kwargs: those of the call.
    """
    named = kwargs or {}
    api = name.rpartition(".")[2]
    place = {"scaled_dot_product_attention": ("dropout_p", 4, 0.0), "dropout": ("p", 1, 0.5)}.get(api)
    if place is not None and not _given(args, named, *place):
        return None
    if "dropout" in api and api != "multi_head_attention_forward" and not _given(args, named, "training", 2, True):
        return None
    with without_dispatch():
        own = named.get("generator") or next((x for x in args if isinstance(x, torch.Generator)), None)
        if own is not None:
            return own.get_state() if own.device.type == "cpu" else None
        first = next((x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)), None)
        device = first.device if first is not None else torch.device(named.get("device") or torch.get_default_device())
        return torch.get_rng_state() if device.type == "cpu" else None


def _given(args: tuple[Any, ...], named: dict[str, Any], key: str, place: int, default: Any) -> Any:
    return named.get(key, args[place] if len(args) > place else default)


def _bytes() -> list[memoryview]:
    states = random_state()
    with without_dispatch():
        return [memoryview(state.numpy()) for state in states]


def random_text() -> dict[str, Any]:
    """Return the fingerprint of the random state, and the states themselves as base64 of their zlib-compressed bytes."""
    states = [base64.b64encode(zlib.compress(state, 1)).decode() for state in _bytes()]
    return {"random": random_fingerprint(), "random_states": states}
