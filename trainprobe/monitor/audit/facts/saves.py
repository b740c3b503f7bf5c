"""What was saved, and what was loaded since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainprobe.engine.geometry.shards import SavedShard


@dataclass(frozen=True, slots=True)
class Save:
    """What this process held when it saved behind a step."""

    step: int
    """The number of the step."""
    tensors: Mapping[tuple[str, str], int]
    """(Parameter, slot) or (buffer, "buffer") → fingerprint."""
    positions: Mapping[str, int] = field(default_factory=dict[str, int])
    """Class of a scheduler → where it stood."""
    batches: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The first and the last audited steps until then, each with the fingerprints of its data."""
    world: int = 1
    """How many ranks there were."""
    pieces: Mapping[tuple[str, str], SavedShard] = field(default_factory=dict[tuple[str, str], SavedShard])
    """The tensors that were cut."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """"GROUP NAME" → value of the plain numbers of each parameter group."""
    scale: float = 0.0
    """Of the loss scaler that was saved with it; 0 where none was."""
    randoms: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Generator → fingerprints of its state as the first step of the run began, and at the save."""


@dataclass(frozen=True, slots=True)
class Saves:
    """Saves that are to be set against what was loaded."""

    saved: tuple[Save, ...] = ()
    """What was saved last, where something was loaded since."""
    loaded: Mapping[tuple[str, str], SavedShard] | None = None
    """The pieces that were held after a load, before the update; None where nothing was loaded."""
    randoms: Mapping[str, int] = field(default_factory=dict[str, int])
    """Generator → fingerprint of its state at the beginning, of the first step of a run and of one that follows a load."""
    saved_by_ranks: Callable[[], Mapping[int, Sequence[Save]]] = dict
    """Reads, on rank 0, what each rank saved."""
