"""Which part of which parameter lies where in ZeRO's flat buffers: pure geometry.

Stages 1 and 2: each rank owns a slice of a group's concatenated parameters; `param_slice_mappings` gives the parts of
parameters in it, and the slices follow each other in rank order. Stage 3: each rank owns ⌈numel / ranks⌉ elements of every
parameter, one parameter after the other, in sub-groups. (Layout as DeepSpeed's own `zero_to_fp32.py` reads it.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from trainprobe.ckpt_compare.formats.plain_torch import clean
from trainprobe.ckpt_compare.optimizer_names import is_array, scalar
from trainprobe.ckpt_compare.pieces import Piece, Problem, Source, flat_pieces, window
from trainprobe.engine.geometry.rectangles import Point

_EXPERT_NUMBER = re.compile(r"deepspeed_experts\.(\d+)\.")
RankContent = tuple[int, str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements start … of one parameter (flattened), held by one rank. local_experts: experts that this rank counts."""

    name: str
    slot: str
    shape: Point
    start: int
    source: Source
    where: str
    rank: int = 0
    local_experts: int = 1

    def pieces(self) -> Iterator[Piece]:
        """Yield the rectangles that the elements fill; padding behind the last element is left out."""
        count = min(self.source.shape[0], prod(self.shape) - self.start)
        if count > 0:
            yield from flat_pieces(self.shape, self.start, window(self.source, (slice(0, count),)), self.where)


def fragments(
    ranks: Sequence[RankContent], shapes: Sequence[Mapping[str, Point]], world: int, steps: set[float], problems: list[Problem]
) -> Iterator[Fragment]:
    """Yield every fragment of master weights and optimizer states that the ranks' optimizer files hold.

    ranks: (data-parallel rank, file name, optimizer_state_dict) in rank order. shapes: one dict a parameter group.
    """
    if any("fp32_flat_groups" in content for _, _, content in ranks):
        yield from _stage3(ranks, shapes, world, steps)
        return
    known = {name: shape for group in shapes for name, shape in group.items()}
    ahead: dict[tuple[Any, ...], int] = {}
    for rank, file, content in ranks:
        mappings = content.get("param_slice_mappings")
        if mappings is None:
            problems.append(
                Problem(file, "holds no param_slice_mappings (DeepSpeed before 0.7): its flat buffers cannot be read")
            )
            continue
        buffers = list(_group_buffers(content, steps))
        experts = len({m[1] for group in mappings for n in group if (m := _EXPERT_NUMBER.search(n))})
        for g, group in enumerate(mappings):
            for raw, address in group.items():
                name = clean(raw)
                owner = (name, rank % max(1, world // _copies(name, content, g, world)))
                start = ahead.get(owner, 0)
                ahead[owner] = start + int(address["numel"])
                if name not in known:
                    problems.append(Problem(file, f"{name} has no shape in the model file"))
                    continue
                for slot, buffer in buffers[g].items():
                    part = window(buffer, (slice(address["start"], address["start"] + address["numel"]),))
                    yield Fragment(name, slot, known[name], start, part, f"{file}: {name} ({slot})", rank, experts)


def _copies(name: str, content: Mapping[str, Any], group: int, world: int) -> int:
    """Return over how many ranks a group is shared out; experts are shared out over the ranks that hold the same ones only."""
    counts = content.get("partition_count")
    if _EXPERT_NUMBER.search(name) is None or not isinstance(counts, (list, tuple)):
        return world
    return max(1, int(counts[group]))


def _group_buffers(content: Mapping[str, Any], steps: set[float]) -> Iterator[dict[str, Source]]:
    """Yield slot → flat buffer for each parameter group of stages 1 and 2."""
    base = content.get("base_optimizer_state") or {}
    states: Any = base.get("state", base) if isinstance(base, Mapping) else base
    masters = content.get("single_partition_of_fp32_groups") or content.get("fp32_groups_flat_partition") or []
    for g, master in enumerate(masters):
        found: dict[str, Source] = {"master": master}
        held = states[g] if isinstance(states, (list, tuple)) else (states.get(g) or states.get(str(g)) or {})
        for slot, value in held.items():
            if slot == "step":
                steps.add(scalar(value))
            elif is_array(value) and len(value.shape) == 1:
                found[slot] = value
        yield found


def _stage3(
    ranks: Sequence[RankContent], shapes: Sequence[Mapping[str, Point]], world: int, steps: set[float]
) -> Iterator[Fragment]:
    """Walk the parameters in order and take this rank's equal share of each from its sub-groups."""
    for rank, file, content in ranks:
        inner = content.get("optimizer_state_dict") or {}
        states: Mapping[Any, Any] = inner.get("state") or {}
        buffers: list[dict[str, Source]] = []
        for g, master in enumerate(content["fp32_flat_groups"]):
            held = states.get(g) or states.get(str(g)) or {}
            steps.update(scalar(v) for k, v in held.items() if k == "step")
            buffers.append({"master": master, **{k: v for k, v in held.items() if k != "step" and is_array(v)}})
        sub, at = 0, 0
        for name, shape in (item for group in shapes for item in group.items()):
            share = -(-prod(shape) // world)
            while sub < len(buffers) and at >= buffers[sub]["master"].shape[0]:
                sub, at = sub + 1, 0
            if sub >= len(buffers):
                return
            count = min(share, prod(shape) - rank * share)
            for slot, buffer in buffers[sub].items() if count > 0 else ():
                part = window(buffer, (slice(at, at + count),))
                yield Fragment(name, slot, shape, rank * share, part, f"{file}: {name} ({slot})", rank)
            at += share
