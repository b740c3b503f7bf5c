"""What a pack is: one zip of JSON members that says what decided a run's numbers.

Layout, format version 1:

    manifest.json                            {"format", "version", "created", "tool", "world_size", "ranks", "micro_steps",
                                              "complete", "captures", "notes", "members": {name: {"sha256", "bytes"}}}
    rank{r}/environment.json                 one file a capture …
    rank{r}/packages.json
    rank{r}/hyperparameters.json
    rank{r}/dataset/micro{n}.json            … and one a micro-step for what changes while training
    rank{r}/weights/micro{n}.json
    rank{r}/randomness.json

A static pack, made from the command line, has no micro-steps. Numbers that JSON has no word for are written as the texts
"nan", "inf" and "-inf".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = "trainprobe-config-check"
VERSION = 1
MANIFEST = "manifest.json"
CAPTURES = ("environment", "packages", "hyperparameters", "dataset", "weights", "randomness")
BY_MICRO_STEP = ("dataset", "weights")
BESIDE = "beside"  # in the entry of a tensor of data that did not go through the model
# "flags_at" of randomness.json: where torch's switches were read; packs without it were written before there were two places
AT_MODEL, AT_FIRST_LAYER = "model", "first layer"


@dataclass(frozen=True, slots=True)
class RankPack:
    """What one rank captured.

    single: capture name → its content. by_micro: "dataset" and "weights" → micro-step number → content.
    """

    rank: int
    single: Mapping[str, Any] = field(default_factory=dict[str, Any])
    by_micro: Mapping[str, Mapping[int, Any]] = field(default_factory=dict[str, Mapping[int, Any]])

    def has(self, capture: str) -> bool:
        """Tell whether this capture is there and holds something."""
        return bool(self.by_micro.get(capture)) if capture in BY_MICRO_STEP else capture in self.single


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that was read: where it came from, and what each rank captured.

    complete: False for a run that was killed. captures: what was meant to be captured. notes: what could not be, and why.
    origin: "trainprobe", or the name of the tool whose pack it is.
    """

    path: str
    ranks: Mapping[int, RankPack]
    world_size: int = 1
    complete: bool = True
    captures: tuple[str, ...] = CAPTURES
    micro_steps: int = 0
    notes: tuple[str, ...] = ()
    origin: str = "trainprobe"

    def has(self, capture: str) -> bool:
        """Tell whether any rank holds this capture."""
        return any(rank.has(capture) for rank in self.ranks.values())

    def missing_ranks(self) -> list[int]:
        """Return the ranks of the job that the pack does not hold."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]


def member_name(rank: int, capture: str, micro: int | None = None) -> str:
    """Return the name inside the zip of one capture of one rank."""
    return f"rank{rank}/{capture}.json" if micro is None else f"rank{rank}/{capture}/micro{micro}.json"
