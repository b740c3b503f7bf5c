"""The state of torch's random generators: its fingerprint, and putting it back. No number is drawn, no device waited for."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Return the states of the default generators: of the host, and of the current accelerator where one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(states)


def put_back(states: tuple[Any, ...]) -> None:
    """Set the default generators to what `random_state` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


def random_fingerprint() -> int:
    """Return a 32-bit fingerprint of the random state."""
    total = 0
    for state in random_state():
        total = zlib.crc32(memoryview(state.numpy()), total)
    return total


def random_text() -> dict[str, Any]:
    """Return the fingerprint of the random state, and the states themselves as base64 of their zlib-compressed bytes."""
    states = [base64.b64encode(zlib.compress(state.numpy().tobytes(), 1)).decode() for state in random_state()]
    return {"random": random_fingerprint(), "random_states": states}
